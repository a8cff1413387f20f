"""Functions of a generated module: which values each computes, and their lines."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fa4flex.codegen.emit.nodes import COLLECT, LOADS, RATES, SCALE, Rate, axes, is_leaf, keeps, rate, repeats
from fa4flex.codegen.emit.printer import REDUCTIONS, Printer
from fa4flex.codegen.expr import Expr, slot_of, walk
from fa4flex.errors import Origin

COMMENT_COLUMN, LEAST_CODE, WIDTH = 48, 16, 118

Line = tuple[str, Origin | None]
Span = tuple[Expr | None, Expr | None]
Provided = Mapping[str, Sequence[Expr]]
"""Values that a function finds in `at`, by the rate at which they were computed, or \"folds\"."""


# --- where to cut ---------------------------------------------------------------------------------------


def cut(roots: Iterable[Expr], here: Rate, folds: Sequence[Expr] = ()) -> dict[Rate, list[Expr]]:
    """Values from slower rates that `roots`, computed at rate `here`, need: the largest subexpressions that
    cost. `folds` are computed between the slower rates and the roots."""
    needed: dict[Rate, list[Expr]] = {level: [] for level in RATES}
    pending = [(root, here) for root in roots]
    seen: set[tuple[Expr, Rate]] = set()
    while pending:
        node, level = pending.pop(0)
        mine = rate(node)
        hoisted = RATES.index(mine) < RATES.index(level) and not is_leaf(node) and not axes(node)
        hoisted = hoisted and (mine != "pair" or (keeps(node) and not any(x in folds for x in walk(node))))
        if hoisted and node not in needed[mine]:
            needed[mine].append(node)
        level = mine if hoisted else "element" if node in folds else level
        if (node, level) not in seen and not is_leaf(node):
            seen.add((node, level))
            pending += [(arg, level) for arg in node.args]
    return needed


def folds_in(root: Expr) -> list[Expr]:
    """The long sums, and their like, that change with each pair but need no score; the inner ones first."""
    return [x for x in walk(root) if x.op == "reduce" and repeats(x) and rate(x) == "pair" and not axes(x)]


# --- lines ----------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """The body of one function. `loop`: the axes whose indices it finds in `at`."""

    printer: Printer
    came: Mapping[Expr, Origin | None]
    here: Rate
    given: Mapping[Expr, str]
    loop: Sequence[str] = ()
    lines: list[Line] = field(default_factory=list)
    used: set[Expr] = field(default_factory=set)
    slots: dict[str, str] = field(default_factory=dict)
    _text: dict[Expr, str] = field(default_factory=dict)
    _users: dict[Expr, int] = field(default_factory=dict)

    def results(self, roots: Sequence[Expr], named: Mapping[Expr, str]) -> list[str]:
        """Lines that compute `roots`, and their texts; `named` are names that values must have."""
        for node in self._inside(roots):
            for arg in node.args:
                self._users[arg] = self._users.get(arg, 0) + 1
        for root in roots:
            self._users[root] = self._users.get(root, 0) + 2  # a result is never written into another line
        self._compute(roots, named, "    ", frozenset(self.loop))
        return [self._shown(root) for root in roots]

    def _inside(self, roots: Iterable[Expr]) -> list[Expr]:
        """The nodes computed here, arguments first."""

        def needed(xs: Iterable[Expr]) -> list[Expr]:
            return [x for x in xs if x not in self.given and not is_leaf(x)]

        return list(walk(*needed(roots), into=lambda node: needed(node.args)))

    def _compute(
        self, roots: Iterable[Expr], named: Mapping[Expr, str], indent: str, bound: frozenset[str]
    ) -> None:
        for node in self._inside(roots):
            # What varies with the axis of a loop that is not open yet is written when the loop is.
            if node in self._text or not axes(node) <= bound:
                continue
            if node.op == "reduce":
                text = self._loop(node, named, indent, bound)
            else:
                text = self._operation(node)
            if node.op == "element_of":
                self._text[node] = text
                continue
            if (
                node.op == "mul"
                and self._users[node] == 1
                and node not in named
                and self._into_sum(node, roots)
            ):
                self._text[node] = text
                continue
            self._text[node] = named.get(node) or self.printer.names.fresh(self.printer.base_name(node))
            self.lines.append((f"{indent}{self._text[node]} = {text}", self.came.get(node)))

    def _into_sum(self, node: Expr, roots: Iterable[Expr]) -> bool:
        """True if a product's one user is a sum: a multiply-add is one operation, and one line."""
        users = [user for user in self._inside(roots) if node in user.args]
        return all(user.op in ("add", "sub") for user in users) and bool(users)

    def _shown(self, node: Expr) -> str:
        if node in self.given:
            self.used.add(node)
            return self.given[node]
        if node in self._text:
            return self._text[node]
        self._note_slot(node)
        return self.printer.leaf(node)

    def _operation(self, node: Expr) -> str:
        self._note_slot(node)
        return self.printer.operation(node, self._shown, self.here != "uniform")

    def _note_slot(self, node: Expr) -> None:
        """Captured values, and indices of loops around a function, are named at its top."""
        names = self.printer.names
        if node.op == "scalar" and node is not SCALE:
            self.slots[names.number(node.value)] = f"at.scalars[{node.value}]"
        elif node.op in (*LOADS, "search", "wrapped", "confined"):
            slot = slot_of(node)
            self.slots[names.tensor(slot)] = f"at.operands[{slot}]"
        elif node.op == "sym" and node.value in self.loop:
            self.slots[names.axis(node.value)] = f"at.loop[{self.loop.index(node.value)}]"

    def _loop(self, node: Expr, named: Mapping[Expr, str], indent: str, bound: frozenset[str]) -> str:
        """A list of the terms, or a function of the index; returns the text that folds it."""
        how, axis, extent = node.value
        index, inner, origin = self.printer.names.axis(axis), indent + "    ", self.came.get(node)
        if repeats(node):
            term = self.printer.names.fresh("term")
            self.lines.append((f"{indent}def {term}({index}):", origin))
            self._compute(node.args, named, inner, bound | {axis})
            self.lines.append((f"{inner}return {self._shown(node.args[0])}", None))
            folded = self.printer.fold(node, term)
        else:
            terms = self.printer.names.fresh("terms")
            self.lines.append((f"{indent}{terms} = []", origin))
            self.lines.append((f"{indent}for {index} in range({extent}):", None))
            self._compute(node.args, named, inner, bound | {axis})
            self._append(inner, terms, self._shown(node.args[0]))
            folded = f"tuple({terms})" if how == COLLECT else self.printer.call(REDUCTIONS[how], terms)
        # Another loop may run over an axis of the same name, and computes what varies with it anew.
        self._text = {known: text for known, text in self._text.items() if axis not in known.free}
        return folded

    def _append(self, indent: str, terms: str, value: str) -> None:
        """A term that the line above computes is written into the call."""
        origin = None
        last, above = self.lines[-1]
        if last.startswith(f"{indent}{value} = "):
            self.lines.pop()
            value, origin = last.removeprefix(f"{indent}{value} = "), above
        self.lines.append((f"{indent}{terms}.append({value})", origin))


def with_comments(lines: Iterable[Line], columns: int | None = None) -> list[str]:
    """Each line with `# file:line: the user's code`; the code where the line differs from the one above, in
    so many columns, or in what a line of WIDTH leaves."""
    printed, before = [], None
    for text, origin in lines:
        if origin is None:
            printed.append(text)
            continue
        shown = f"# {os.path.basename(origin.file)}:{origin.line}"
        room = columns or WIDTH - max(len(text), COMMENT_COLUMN) - len(shown) - 4
        if origin != before and origin.text and room >= LEAST_CODE:
            shown += f": {textwrap.shorten(origin.text, room, placeholder=' ...')}"
        before = origin
        printed.append(f"{text:<{COMMENT_COLUMN}}  {shown}")
    return printed


@dataclass(frozen=True)
class Function:
    """`def name(at)` at a rate, for a hook; `roots` are its results; `loop` the axes of a loop around it;
    `folds`: how many of the hook's folds it finds in `at`, None for all."""

    name: str
    here: Rate
    roots: tuple[Expr, ...]
    hook: str = ""
    returns: Literal["tuple", "one", "spans"] = "tuple"
    loop: tuple[str, ...] = ()
    folds: int | None = None

    def text(
        self,
        printer: Printer,
        came: Mapping[Expr, Origin | None],
        provided: Provided,
        named: Mapping[Expr, str],
        spans: Sequence[Span] = (),
    ) -> list[str]:
        arguments = {x: named[x] for values in provided.values() for x in values}
        writer = Writer(printer, came, self.here, arguments, self.loop)
        results = writer.results(self.roots, named)
        if self.returns == "tuple":
            result = _tupled(results)
        elif self.returns == "spans":
            shown = dict(zip(self.roots, results, strict=True))
            result = _tupled([f"({shown.get(lo)}, {shown.get(hi)})" for lo, hi in spans])  # type: ignore[arg-type]
        else:
            result = printer.typed(self.roots[0]) if self.roots[0].op == "const" else results[0]
        lines: list[Line] = [(f"def {self.name}(at):", None)]
        for level, values in provided.items():
            if any(x in writer.used for x in values):
                names = [named[x] if x in writer.used else "_" for x in values]
                lines.append((f"    {_tupled(names)} = at.{level}", None))
        lines += [(f"    {name} = {place}", None) for name, place in writer.slots.items()]
        return with_comments(_returned([*lines, *writer.lines, (f"    return {result}", None)]))


def _tupled(results: Sequence[str]) -> str:
    return f"({results[0]},)" if len(results) == 1 else ", ".join(results)


def _returned(lines: list[Line]) -> list[Line]:
    """`y = ...; return y` as `return ...`."""
    if len(lines) < 3:
        return lines
    (last, origin), (final, _) = lines[-2], lines[-1]
    name, _, value = last.strip().partition(" = ")
    if final == f"    return {name}" and last.startswith("    ") and not last.startswith("     "):
        return [*lines[:-2], (f"    return {value}", origin)]
    return lines
