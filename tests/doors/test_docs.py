"""Every python block in README.md and docs/*.md runs; the blocks of a file share one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        # Blank lines in front keep the line numbers of the page in a traceback.
        exec(compile("\n" * line + match[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


def test_every_variant_is_documented() -> None:
    from fa4flex import variants

    page = (ROOT / "docs" / "variants.md").read_text()
    assert not [name for name in variants.__all__ if f"`{name}" not in page]
