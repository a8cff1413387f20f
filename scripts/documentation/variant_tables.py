"""Texts that are written from the files of variants: tables of docs/variants.md, and names for type checkers.

    python scripts/documentation/variant_tables.py

rewrites docs/variants.md and fa4flex/variants/__init__.py after a file was added to fa4flex/variants.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from fa4flex import variants
from fa4flex.primitives.base import Family
from fa4flex.variants._cases import Sizes, role_of

ROOT = Path(__file__).resolve().parents[2]
PAGE, PACKAGE = ROOT / "docs" / "variants.md", Path(str(variants.__file__))
TABLES = {
    "Masks": "| name | allowed(q, kv) | source |",
    "Score mods": "| name | score' | source |",
    "Output functions": "| name | out' | source |",
    "Normalisers": "| name | weight | source |",
    "Neither of these": "| name | what it gives | source |",
}
"""Headings of the page, and heads of their tables."""
HEADINGS = {
    "mask": "Masks", "score_mod": "Score mods", "output_mod": "Output functions", "normalizer": "Normalisers",
}  # fmt: skip

POSITION = re.compile(r",? *(with )?p = q \+ \(kv_len - q_len\)")
MOST_SHOWN = 2
"""Parameters that a table shows with their defaults; of more, those without one."""


class Stated(NamedTuple):
    """Statement of a variant's docstring; `formula` in words where it takes several lines."""

    formula: str
    source: str


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"fa4flex.variants.{name}")


def stated(module: ModuleType) -> Stated:
    title, *rest = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    formula = next((part for part in rest if part.startswith("    ")), "")
    lines = [line for line in POSITION.sub("", formula).split("\n") if line.strip()]
    words = len(lines) != 1 or not isinstance(getattr(variants, _name(module)), Family)
    said = title.partition(": ")[2].removesuffix(".") if words else f"`{_in_one_line(lines[0])}`"
    return Stated(said, " ".join(rest[-1].removeprefix("Source: ").split()).removesuffix("."))


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _in_one_line(formula: str) -> str:
    return re.sub(",? {3,}", "; ", formula.strip()).removeprefix("allowed(q, kv) = ")


def called(name: str) -> str:
    """The variant with its parameters, as a table shows it."""
    family = getattr(variants, name)
    given = inspect.signature(family).parameters.values()
    required = [p.name for p in given if p.default is p.empty]
    if len(given) > MOST_SHOWN:
        return f"{name}({', '.join([*required, '...'])})"
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given]
    return f"{name}({', '.join(shown)})" if shown else name


def heading_of(name: str) -> str:
    if not isinstance(getattr(variants, name), Family):
        return "Neither of these"
    drawn = module_of(name).CASES[0].draw(Sizes())
    return HEADINGS[role_of(drawn.compose(*drawn.learned))]


def table(heading: str) -> Iterator[str]:
    """Lines of the table under a heading of the page."""
    yield from (TABLES[heading], "|---|---|---|")
    for name in variants.__all__:
        if heading_of(name) == heading:
            formula, source = (text.replace("|", r"\|") for text in stated(module_of(name)))
            yield f"| `{called(name)}` | {formula} | {source} |"


def page() -> str:
    """docs/variants.md with its tables as files state them."""
    text = PAGE.read_text()
    for heading in TABLES:
        pattern = rf"(?<=^## {heading}\n\n)(\|.*\n)+"
        rows = "\n".join(table(heading)) + "\n"
        text = re.sub(pattern, lambda _, rows=rows: rows, text, flags=re.MULTILINE)
    return text


def package() -> str:
    """fa4flex/variants/__init__.py with an import of each variant for type checkers."""
    text = PACKAGE.read_text()
    block = next(
        node for node in ast.parse(text).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )  # fmt: skip
    lines = text.split("\n")
    lines[block.lineno : block.end_lineno] = [
        f"    from fa4flex.variants.{name} import {name} as {name}" for name in variants.__all__
    ]
    return "\n".join(lines)


def written() -> dict[Path, str]:
    """Files, and what they hold where they are up to date."""
    return {PAGE: page(), PACKAGE: package()}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
