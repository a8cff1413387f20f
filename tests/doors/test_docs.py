"""Every python block in README.md and docs/*.md runs; the blocks of a file share one namespace."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ptxsim" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        # Blank lines in front keep the line numbers of the page in a traceback.
        exec(compile("\n" * line + match[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


def section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return re.split(r"^#+ ", text.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_elementwise_function_is_documented() -> None:
    from fa4flex.codegen.trace.elementwise import ELEMENTWISE

    operators = {"rsub", "rdiv", "rfloordiv", "rmod", "rpow"}
    listed = section("tracing.md", "Elementwise functions").strip().split("\n\n")[1]
    assert re.findall(r"`(\w+)`", listed) == sorted(ELEMENTWISE.keys() - operators)


def test_every_field_of_an_operation_is_documented() -> None:
    from fa4flex.codegen.ops import Operation

    rows = re.findall(r"^\| (`.*?) \|", section("tracing.md", "How an operation is added"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(Operation._fields)


def test_no_docstring_begins_with_a_preposition_or_a_question_word() -> None:
    """A reader who knows the field takes "Of a CTA." for a piece of a sentence, and looks for the noun that
    names a thing in front."""
    words = "Of|That|As|By|What|Whether|How|Where|Which|Who|When|Why"
    found = []
    folders = ("fa4flex", "ptxsim", "scripts", "benchmarks", "examples", "tests")
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            text = node.value.value
            if isinstance(text, str) and re.match(rf"\s*({words})\b", text):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text.strip().splitlines()[0]}")
    assert not found, "\n".join(found)
