"""The documentation site builds without a warning or a broken link, and shows all that is public."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "documentation"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder. Notebooks are not run: test_notebooks.py does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(SCRIPTS), "--quick", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    guides = [*(ROOT / "docs").rglob("*.md"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    missing = [page for page in guides if not (site / page.relative_to(ROOT)).with_suffix(".html").exists()]
    assert not missing


@pytest.mark.slow
def test_every_public_name_is_described(site: Path) -> None:
    listed = (ROOT / "tests" / "golden" / "test_public_names.txt").read_text().splitlines()
    described = {
        name
        for page in (site / "reference").glob("*.html")
        for name in re.findall(r'id="([\w.]+)"', page.read_text())
    }
    modules = {path.stem for path in (site / "reference").glob("*.html")}
    missing = {line.partition("(")[0] for line in listed} - described - modules
    assert not missing, sorted(missing)


@pytest.mark.slow
def test_every_variant_is_pictured(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = module("gallery", monkeypatch)
    drawn = gallery.PICTURES.keys()
    pictures = {path.stem: path.stat().st_size for path in (site / "gallery").glob("*.png")}
    assert drawn <= pictures.keys() and min(pictures.values()) > 1000


@pytest.mark.slow
def test_the_start_page_has_pictures_and_nothing_about_itself(site: Path) -> None:
    page = (site / "index.html").read_text()
    for name in re.findall(r'<img alt="[^"]*" loading="lazy" src="([^"]+)"', page):
        assert (site / name).stat().st_size > 1000
    assert page.count('src="gallery/') == 4
    text = re.sub(r"<[^>]+>", "", page)
    assert "make docs" not in text and text.index("attn.explain(512)") < text.index("make test")


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = '<h1 id="title"></h1><a href="index.html#there">'
    page = (
        '<a id="there" href="other.html#title"><a href="https://example.org"><a href="other.html#gone">'
        '<a href="absent.html"><img src="absent.png"><script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "other.html").write_text(other)
    assert sorted(module("links", monkeypatch).broken(tmp_path)) == [
        "index.html: loads https://example.org/x.js",
        "index.html: no anchor other.html#gone",
        "index.html: no file absent.html",
        "index.html: no file absent.png",
    ]


def test_docstrings_become_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    markdown = module("reference", monkeypatch).markdown
    assert markdown("A call of f(x_1, *rest) with `a * b`.") == r"A call of f(x\_1, \*rest) with `a * b`."
    assert markdown("q      a tensor [B, H],\n       or none\nk, v   the same") == (
        "- `q`: a tensor \\[B, H\\],\n  or none\n- `k, v`: the same"
    )
    assert markdown("As in\n\n    x = 1\n\n    y = x") == "As in\n\n```python\nx = 1\n\ny = x\n```"
    assert markdown("A formula:\n    x = y where z") == "A formula:\n\n```text\nx = y where z\n```"
