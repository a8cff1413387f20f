"""Links of a built site: those that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Targets, anchors and embedded files of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))
        if tag == "a" and (target := given.get("href")):
            self.targets.append(target)
        if tag == "link" and given.get("rel") == "stylesheet":
            self.loaded.append(given.get("href") or "")
        if tag in ("img", "script", "iframe", "source") and (source := given.get("src")):
            self.loaded.append(source)


def broken(html: Path) -> Iterator[str]:
    """One line for each link, picture or script of a site under `html` that is not there, and for each that a
    browser would load from elsewhere."""
    pages = {path: Page(path.read_text()) for path in sorted(html.rglob("*.html"))}
    for path, page in pages.items():
        place = path.relative_to(html)
        yield from (f"{place}: loads {source}" for source in page.loaded if urlsplit(source).netloc)
        for target in dict.fromkeys([*page.targets, *page.loaded]):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file():
                yield f"{place}: no file {target}"
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
                yield f"{place}: no anchor {target}"
