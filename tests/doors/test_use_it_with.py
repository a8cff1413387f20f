"""docs/use_it_with.md: each block runs alone, where all that it imports is installed."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "use_it_with.md"
BLOCK = re.compile(r"^## (.*?)$|^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, int, str]]:
    """(heading, line, code) of each block of the page."""
    text, heading, found = PAGE.read_text(), "", []
    for match in BLOCK.finditer(text):
        if match[1]:
            heading = match[1]
        else:
            found.append((heading, text[: match.start(2)].count("\n"), match[2]))
    return found


def packages(code: str) -> set[str]:
    """Packages that a block imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize(("heading", "line", "code"), blocks(), ids=[heading for heading, *_ in blocks()])
def test_blocks_run(
    heading: str, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = sorted(name for name in packages(code) if importlib.util.find_spec(name) is None)
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * line + code, str(PAGE), "exec"), {"__name__": heading})


def test_blocks_are_found_with_what_they_import() -> None:
    """Each library has a section, and a block is never skipped for a package that it does not need."""
    needed = {heading: packages(code) - {"fa4flex", "torch"} for heading, _, code in blocks()}
    assert needed == {
        "Hugging Face transformers": {"transformers"},
        "PEFT": {"peft", "transformers"},
        "Trainer of transformers": {"accelerate", "transformers"},
        "accelerate": {"accelerate"},
        "Lightning": {"lightning"},
        "torchtitan": {"torchtitan"},
        "diffusers": {"diffusers"},
        "timm": {"timm"},
        "vLLM and SGLang": set(),
        "Megatron-style code": set(),
    }
