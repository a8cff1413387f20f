"""Every python block in README.md and docs/*.md runs; the blocks of a file share one namespace.

Those of docs/use_it_with.md, which need other libraries, have a test of their own.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ptxsim" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize(
    "page", [x for x in PAGES if x.stem != "use_it_with"], ids=lambda page: f"{page.parent.name}/{page.name}"
)
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


# --- names of files -----------------------------------------------------------------------------------------

NAMED = re.compile(r"(?<![\w/.*<>{}-])((?:[\w.-]+/)*[\w-]+\.py|(?:[\w.-]+/)*kernels/[\w/]+)(?![\w*-])")
ELSEWHERE = {
    "test_flex_attention.py", "test_flex_decoding.py", "test/inductor/test_flex_attention.py",  # PyTorch's
    "flash_fwd_sm100.py", "my_mods.py", "path/to/file.py", "path/to/mods.py", "a.py",
}  # fmt: skip
"""Files of other projects, and those that stand for a reader's own."""


def test_files_that_are_named_exist() -> None:
    """Names are paths, or the ends of paths, in pages, docstrings and comments."""
    paths = files_of_the_project()
    ends = {end for path in paths for end in ends_of(path)} | ELSEWHERE
    found = []
    for path in (ROOT / x for x in paths if x.endswith((".py", ".md"))):
        place = path.relative_to(ROOT)
        for line, text in prose_of(path):
            found += [
                f"{place}:{line}: {x}" for x in NAMED.findall(text) if x.removeprefix("../") not in ends
            ]
    assert not found, "\n".join(found)


def files_of_the_project() -> list[str]:
    folders = ("fa4flex", "ptxsim", "tests", "scripts", "benchmarks", "examples", "docs")
    found = [x for folder in folders for x in (ROOT / folder).rglob("*") if x.suffix in (".py", ".md")]
    return [str(x.relative_to(ROOT)) for x in (*found, *ROOT.glob("*.md"))]


def ends_of(path: str) -> set[str]:
    """Ends of a path, of its folders and of its name without a suffix; folders with and without a slash."""
    found = set()
    for whole in (path, path.removesuffix(".py"), *map(str, Path(path).parents)):
        parts = whole.split("/")
        found |= {"/".join(parts[first:]) for first in range(len(parts))}
    return found | {f"{x}/" for x in found}


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Lines of a page; of a module its comments and docstrings, by the line on which each begins."""
    text = path.read_text()
    if path.suffix == ".md":
        return list(enumerate(text.splitlines(), 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(x.start[0], x.string) for x in tokens if x.type == tokenize.COMMENT]
    expressions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Expr)]
    constants = [(x.lineno, x.value.value) for x in expressions if isinstance(x.value, ast.Constant)]
    return comments + [(line, x) for line, x in constants if isinstance(x, str)]


def test_a_name_that_is_gone_is_noticed() -> None:
    ends = ends_of("fa4flex/kernels/common/softmax.py")
    assert {"softmax.py", "common/softmax.py", "kernels/common", "kernels/common/"} <= ends
    assert NAMED.findall("see `kernels/common/shares.py`, small/convert.py (kernels/bwd_sm100_pair).") == [
        "kernels/common/shares.py", "small/convert.py", "kernels/bwd_sm100_pair",
    ]  # fmt: skip
