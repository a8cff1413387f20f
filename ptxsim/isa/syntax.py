"""Matching of an instruction with the rows of its opcode (grammar.py).

A row is parsed when the first instruction of its name is met, and the rows that an opcode fits are kept: a
kernel has thousands of instructions and a hundred opcodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ptxsim.ptx.nodes import (
    WIDTHS,
    Address,
    Discard,
    Imm,
    Negated,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    Vector,
)

FLOATS8 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "ue8m0")
TYPES = {*WIDTHS, "tf32", "s2f6x2", "u16x2", "s16x2", "b1024", *FLOATS8, *(f"{name}x2" for name in FLOATS8)}
"""Modifiers that are types."""
SPACES = dict.fromkeys(("shared", "shared::cta", "shared::cluster"), "shared") | {"local": "local"}
SPACES |= dict.fromkeys(("global", "param", "param::entry", "const"), "global")
"""State spaces by their modifiers: parameters and constants lie in global memory here."""


@dataclass(frozen=True)
class Form:
    """Modifiers of an instruction: what its row knows of them."""

    flags: frozenset[str]
    """All that are no types."""
    types: tuple[str, ...]
    """Types in the order written."""
    named: Mapping[str, str]
    """The modifier by the name of its set, "" where it is not there."""

    @property
    def type(self) -> str:
        """The last type."""
        return self.types[-1]

    def one_of(self, *choices: str) -> str:
        """The first of these that is present, or ""."""
        return next((flag for flag in choices if flag in self.flags), "")


@dataclass(frozen=True)
class Group:
    """Modifiers of which an opcode has one, or if not `required` perhaps none. `name` is their set's."""

    tokens: tuple[str, ...]
    required: bool
    name: str = ""

    @cached_property
    def order(self) -> str:
        """Name of the order that the group keeps in rows whose modifiers are free."""
        if self.tokens[0] in TYPES:
            return "types"
        return "spaces" if self.tokens[0] in SPACES else ""


Fits = Callable[[Operand], bool]


@dataclass(frozen=True)
class Place:
    """One operand: `kinds` of which it fits any, and how many values it has if it is a vector."""

    kinds: tuple[tuple[Fits, str], ...]
    """Operands that fit; of vectors a number, or the set whose modifier ends in it with a factor ("x*2")."""
    optional: bool = False
    only_with: str = ""
    """The set one of whose modifiers has to be there for the operand."""

    def fits(self, operand: Operand, form: Form) -> bool:
        for fits, count in self.kinds:
            if fits(operand) and (not count or _counts(operand, count, form)):
                return True
        return False


@dataclass(frozen=True)
class Row:
    """A legal form. `text` is how the table has it."""

    text: str
    free: bool
    groups: tuple[Group, ...]
    places: tuple[Place, ...]
    refused: str = ""

    def match(self, parts: Sequence[str], head: int) -> Form | None:
        """The form of an opcode whose first `head` parts are the name of the row's translator."""
        found = self._freely(parts, head) if self.free else self._in_order(parts)
        if found is None:
            return None
        types = tuple(part for part in parts if part in TYPES)
        flags = frozenset(part for part in parts[1:] if part not in TYPES)
        return Form(flags, types, {g.name: found.get(i, "") for i, g in enumerate(self.groups) if g.name})

    def begins(self, name: Sequence[str]) -> bool:
        """True if opcodes of the row begin with these parts, none of which can be left out."""
        first = self.groups[: len(name)]
        return len(first) == len(name) and all(g.required and n in g.tokens for g, n in zip(first, name))

    def _in_order(self, parts: Sequence[str]) -> dict[int, str] | None:
        at, found = 0, {}
        for index, group in enumerate(self.groups):
            if at < len(parts) and parts[at] in group.tokens:
                found[index] = parts[at]
                at += 1
            elif group.required:
                return None
        return found if at == len(parts) else None

    def _freely(self, parts: Sequence[str], head: int) -> dict[int, str] | None:
        found = dict(enumerate(parts[:head]))
        last: dict[str, int] = {}
        for part in parts[head:]:
            for index in range(head, len(self.groups)):
                group = self.groups[index]
                if part in group.tokens and index not in found and index >= last.get(group.order, 0):
                    break
            else:
                return None
            if group.order:
                last[group.order] = index
            found[index] = part
        return found if all(i in found or not g.required for i, g in enumerate(self.groups)) else None

    def choices(self, form: Form) -> list[list[Place]]:
        """Operands that an instruction of this form may have."""
        each = []
        for place in self.places:
            there = not place.only_with or bool(form.named[place.only_with])
            each.append(([place],) if there and not place.optional else ([place], []) if there else ([],))
        return [[place for some in chosen for place in some] for chosen in product(*each)]


@dataclass(frozen=True)
class Fitting:
    """A row whose modifiers an opcode has, and the operands that it may have."""

    row: Row
    form: Form
    choices: list[list[Place]]

    def takes(self, operands: Sequence[Operand]) -> bool:
        """True if the operands fit, those left out that may be."""
        form = self.form
        for places in self.choices:
            if len(places) == len(operands):
                for place, operand in zip(places, operands):
                    if not place.fits(operand, form):
                        break
                else:
                    return True
        return False


# --- operands -----------------------------------------------------------------------------------------------


def _is_value(operand: Operand) -> bool:
    return isinstance(operand, Imm | Symbol | Special) or (isinstance(operand, Reg) and operand.file > 1)


def _is_result(operand: Operand) -> bool:
    return isinstance(operand, Discard) or (isinstance(operand, Reg) and operand.file > 1)


def _is_register(operand: Operand) -> bool:
    return isinstance(operand, Reg) and operand.file > 1


def _is_predicate(operand: Operand) -> bool:
    return isinstance(operand, Reg) and operand.file == 1


def _is_truth(operand: Operand) -> bool:
    return isinstance(operand, Negated | Imm) or _is_predicate(operand)


def _is_predicate_result(operand: Operand) -> bool:
    return isinstance(operand, Discard) or _is_predicate(operand)


def _is_address(operand: Operand) -> bool:
    return isinstance(operand, Address) and not operand.coords


def _is_tile(operand: Operand) -> bool:
    return isinstance(operand, Address) and bool(operand.coords)


def _pairs(one: Fits, both: bool) -> Fits:
    def fits(operand: Operand) -> bool:
        if isinstance(operand, Pair):
            return one(operand.first) and _is_predicate_result(operand.second)
        return not both and one(operand)

    return fits


def _vectors(one: Fits) -> Fits:
    return lambda operand: all(map(one, operand.items if isinstance(operand, Vector) else (operand,)))


def _numbers(text: str) -> Fits:
    values = {int(number) for number in text.split("|")}
    return lambda operand: isinstance(operand, Imm) and operand.value in values


def _wide(file: int) -> Fits:
    return lambda operand: _is_value(operand) and (not isinstance(operand, Reg) or operand.file == file)


KINDS: dict[str, Fits] = {
    "d": _is_result,
    "r": _is_register,
    "p": _is_predicate_result,
    "pred": _is_truth,
    "a": _is_value,
    "imm": lambda operand: isinstance(operand, Imm),
    "[a]": _is_address,
    "[a, {}]": _is_tile,
    "{d}": _vectors(_is_result),
    "{r}": lambda operand: isinstance(operand, Vector) and all(map(_is_register, operand.items)),
    "{a}": _vectors(_is_value),
    "{s}": _vectors(lambda operand: isinstance(operand, Imm) or _is_register(operand)),
    "d|p": _pairs(_is_result, True),
    "d[|p]": _pairs(_is_result, False),
    "p|q": _pairs(_is_predicate_result, True),
    "p[|q]": _pairs(_is_predicate_result, False),
    "b32": _wide(32),
    "b64": _wide(64),
    "policy": lambda operand: isinstance(operand, Reg) and operand.file == 64,
}


def _counts(operand: Operand, count: str, form: Form) -> bool:
    """True if a vector has the number of values that its row asks for."""
    name, _, times = count.partition("*")
    if name.isdigit():
        wanted = int(name)
    else:
        modifier = form.named[name]
        wanted = int(modifier.lstrip("xv") or 1) * int(times or 1) if modifier else 1
    return (len(operand.items) if isinstance(operand, Vector) else 1) == wanted


_KIND = re.compile(
    r"(?P<what>\[a, \{\}\]|\[a\]|\{[dras]\}|[dp]\[?\|[pq]\]?|[a-z]+\d*|\d+(?:\|\d+)*)(?P<count>.*)"
)


def _place(text: str) -> Place:
    bare, optional = text.removesuffix("?"), text.endswith("?")
    kinds, only_with = [], ""
    for one in bare.split("/"):
        match = _KIND.fullmatch(one)
        assert match is not None, text
        what, count = match["what"], match["count"].removeprefix("@")
        fits = _numbers(what) if what[0].isdigit() else KINDS[what]
        if match["count"][:1] == "@" and what[0] != "{":
            only_with, count = count, ""
        kinds.append((fits, count))
    return Place(tuple(kinds), optional, only_with)


# --- rows ---------------------------------------------------------------------------------------------------

_PIECE = re.compile(r"\[(?P<maybe>\.[^\]]+)\]|\.?\((?P<choice>[^)]+)\)|\.?<(?P<set>\w+)>|\.?(?P<word>[\w:]+)")


def rows(text: str) -> Iterator[str]:
    """Rows of a text; a line that is indented goes on with the one before."""
    yield from re.sub(r"\n {4}(?=\[?\.)", "", text).replace("\n    ", "  ").strip().split("\n")


def parsed(text: str, sets: Mapping[str, str]) -> Iterator[Row]:
    """A row of the table; several where several modifiers may only be left out together."""
    line, _, refused = text.partition("  ! ")
    opcode, _, operands = line.lstrip("*").partition("  ")
    places = tuple(map(_place, re.split(r", (?!\{\}\])", operands.strip()))) if operands else ()
    for groups in _alternatives(opcode, sets):
        yield Row(text, text.startswith("*"), groups, places, refused)


def _alternatives(opcode: str, sets: Mapping[str, str]) -> Iterator[tuple[Group, ...]]:
    pieces: list[tuple[tuple[Group, ...], ...]] = []
    for match in _PIECE.finditer(opcode):
        inner = match["maybe"]
        if inner is None:
            pieces.append(((_group(match, sets, True),),))
            continue
        inside = list(_PIECE.finditer(inner)) if "|" not in inner else [_PIECE.match(f"({inner[1:]})")]
        if len(inside) == 1:
            pieces.append(((_group(inside[0], sets, False),),))
        else:
            pieces.append(((), tuple(_group(piece, sets, True) for piece in inside)))
    for chosen in product(*pieces):
        yield tuple(group for some in chosen for group in some)


def _group(match: re.Match[str] | None, sets: Mapping[str, str], required: bool) -> Group:
    assert match is not None
    if match["set"]:
        return Group(tuple(sets[match["set"]].split()), required, match["set"])
    return Group(tuple((match["choice"] or match["word"]).split("|")), required)
