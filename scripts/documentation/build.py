"""The documentation site: guides, gallery, API reference and notebooks as HTML.

    python scripts/documentation                  into build/documentation/html
    python scripts/documentation --quick          notebooks are shown without running them

Sources are staged in the places that they have in the repository, so that links between pages hold as they
are; gallery, reference and notebooks are written beside them. Warnings of Sphinx are errors, and every link
and anchor within the site must lead somewhere.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gallery
import links
import notebooks
import reference

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/notes/*.md", "tests/README.md", "ptxsim/README.md",
)  # fmt: skip
NOT_HERE = "<!-- not on the site -->"
"""End of lines of README that do not belong on the site."""

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def main() -> int:
    """Build the site; 0 if it is complete, 1 if Sphinx warns or a link is broken."""
    parser = argparse.ArgumentParser(
        "python scripts/documentation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "documentation")
    parser.add_argument("--quick", action="store_true", help="notebooks are shown without running them")
    given = parser.parse_args()
    source, html = given.out / "source", given.out / "html"
    stage(source, run_notebooks=not given.quick)
    shutil.rmtree(html, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-c", str(HERE)]
    status = subprocess.run([*command, "-b", "html", str(source), str(html)], check=False).returncode
    for picture in (source / "gallery").glob("*.png"):  # in figures of HTML, which Sphinx does not look into
        shutil.copy(picture, html / "gallery")
    broken = list(links.broken(html))
    print("\n".join([*broken, f"{len(list(html.rglob('*.html')))} pages in {html}"]))
    return 1 if status or broken else 0


def stage(source: Path, run_notebooks: bool) -> None:
    """Write all sources of the site to the folder `source`, which is emptied first."""
    shutil.rmtree(source, ignore_errors=True)
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            _copy(page, source)
    (source / "index.md").write_text(_index())
    with (source / "docs" / "variants.md").open("a") as page:
        page.write("\n## Pictures\n\nOf each: [the gallery](../gallery/index.md).\n")
    gallery.write(source / "gallery")
    reference.write(source / "reference")
    notebooks.write(ROOT / "examples", source / "examples", run_notebooks)
    for linked in set(_linked(source)):
        if not (source / linked).exists():
            _copy(ROOT / linked, source)


def _index() -> str:
    """The start page: README without what is about the site, with some pictures, and the contents."""
    lines = (ROOT / "README.md").read_text().replace(".ipynb)", ".md)").splitlines()  # notebooks are pages
    title, _, tagline, *rest = (line for line in lines if not line.endswith(NOT_HERE))
    head = [title, "", tagline, "", gallery.row("gallery/"), ""]
    return "\n".join([*head, *rest, "", (HERE / "contents.md").read_text()])


def _copy(path: Path, source: Path) -> None:
    target = source / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def _linked(source: Path) -> Iterator[Path]:
    """Files of the repository that staged pages link to, which the site offers as downloads."""
    for page in source.rglob("*.md"):
        for target in LINK.findall(page.read_text()):
            path = (ROOT / page.relative_to(source).parent / target).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                yield path.relative_to(ROOT)
