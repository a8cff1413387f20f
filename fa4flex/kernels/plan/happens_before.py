"""Steps of a pipeline's run, their happens-before order, and proof that memory is used in that order.

Two steps are ordered where a chain of hand-overs leads from one to the other: then every timing of the chip
keeps their order. Each step knows all steps before it, as the bits of an integer. A use of memory that
another, unordered one could harm is a fault even where this run had them in a good order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fa4flex.kernels.plan.errors import PlanError

if TYPE_CHECKING:
    import networkx

WARPS = 4
"""Number of warps of a warpgroup, and of the parts of memory of which each warp touches its own rows."""

Kind = Literal["read", "write", "update", "touch"]
"""An update makes a new content of the one before; a touch leaves it what it is."""


@dataclass(frozen=True)
class Step:
    """`who` did `what`, as this `warp` of a role; `past` has a bit for each step that came before, of which
    `after` are the last."""

    who: str
    what: str
    past: int
    after: tuple[int, ...]
    warp: int | None = None

    def __str__(self) -> str:
        return f"{self.who} {self.what}".strip()


@dataclass(frozen=True)
class Known:
    """Steps that someone knows to have happened: all in `bits`, of which `latest` are the last."""

    bits: int = 0
    latest: tuple[int, ...] = ()

    def __or__(self, other: Known) -> Known:
        return self if not other.bits else Known(self.bits | other.bits, self.latest + other.latest)

    def includes(self, other: Known) -> bool:
        return not other.bits & ~self.bits


@dataclass
class Lifetime:
    """Lifetime of one content of memory, by numbers of steps: its writes in order, then its reads."""

    writes: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


@dataclass
class Trace:
    """All steps, and when each content lived: by name and number of the use."""

    steps: list[Step] = field(default_factory=list)
    lifetimes: dict[tuple[str, int], Lifetime] = field(default_factory=lambda: defaultdict(Lifetime))

    def add(self, who: str, what: str, known: Known, warp: int | None = None) -> Known:
        """A step that comes after all of `known`; returns what is known after it."""
        number = len(self.steps)
        self.steps.append(Step(who, what, known.bits, tuple(dict.fromkeys(known.latest)), warp))
        return Known(known.bits | 1 << number, (number,))

    def before(self, first: int, second: int) -> bool:
        return bool(self.steps[second].past >> first & 1)

    @property
    def graph(self) -> networkx.DiGraph:
        """Steps, and what each directly comes after."""
        import networkx

        graph = networkx.DiGraph()
        for number, step in enumerate(self.steps):
            graph.add_node(number, who=step.who, what=step.what)
            graph.add_edges_from((before, number) for before in step.after)
        return graph


@dataclass
class _Use:
    step: int
    verb: str


@dataclass
class _Cell:
    """One part of one stage. `content` is the number of its use, None where another's bytes lie over it."""

    name: str
    content: int | None = None
    was_read: bool = True
    writer: _Use | None = None
    readers: list[_Use] = field(default_factory=list)


Place = tuple[str, int]
"""A name and a stage."""


class Memory:
    """Places, each in parts, with who used them last."""

    def __init__(
        self,
        trace: Trace,
        overlaps: Iterable[tuple[str, str]],
        by_warp: Iterable[str],
        said: Callable[[str, int | None], str],
        staged: Iterable[str] = (),
    ) -> None:
        """`said`: the words for a name and the number of its use. Names that are `staged` share bytes stage
        by stage."""
        self.trace, self.said = trace, said
        self.staged = set(staged)
        self.by_warp = set(by_warp)
        self.over: dict[str, list[str]] = defaultdict(list)
        for a, b in overlaps:
            self.over[a].append(b)
            self.over[b].append(a)
        self.cells: dict[Place, list[_Cell]] = {}
        self.named: dict[str, list[list[_Cell]]] = defaultdict(list)
        """The same, by name: one entry per stage."""

    def use(
        self, step: int, kind: Kind, verb: str, place: Place, number: int | None, warp: int | None = None
    ) -> None:
        """`number` None uses whatever is there: it is neither compared nor said to be read."""
        name = place[0]
        parts = range(WARPS if name in self.by_warp else 1)
        for part in parts if warp is None or len(parts) == 1 else (warp,):
            cell = self._cells(place)[part]
            touched = [cell, *self._under(place, part, len(parts))]
            for other in touched:
                self._require_ordered(step, kind, verb, name, other, number)
            if kind != "write":
                self._read(step, kind, verb, name, cell, number)
            if kind == "touch":
                cell.writer, cell.readers = _Use(step, verb), []
            elif kind != "read":
                self._write(step, verb, cell, touched, number)
        if number is not None:
            lifetime = self.trace.lifetimes[name, number]
            (lifetime.reads if kind == "read" else lifetime.writes).append(step)

    def _under(self, place: Place, part: int, parts: int) -> list[_Cell]:
        """Cells that share bytes with a part: the same one where there are as many, else all of it."""
        name, stage = place
        results = [
            cells
            for over in self.over[name]
            for cells in ([self._cells((over, stage))] if {name, over} <= self.staged else self.named[over])
        ]
        return [cell for cells in results for cell in (cells if len(cells) != parts else (cells[part],))]

    def require_read(self) -> None:
        for cells in self.cells.values():
            for cell in cells:
                self._require_read(cell, "at the end")

    def _cells(self, place: Place) -> list[_Cell]:
        if place not in self.cells:
            parts = WARPS if place[0] in self.by_warp else 1
            self.cells[place] = [_Cell(place[0]) for _ in range(parts)]
            self.named[place[0]].append(self.cells[place])
        return self.cells[place]

    def _require_ordered(
        self, step: int, kind: Kind, verb: str, name: str, cell: _Cell, number: int | None
    ) -> None:
        """Checks that what reads comes after the last write, and what writes after that and all reads of
        it."""
        past = self.trace.steps[step].past
        earlier = [cell.writer] if cell.writer else []
        for use in earlier + (cell.readers if kind != "read" else []):
            if past >> use.step & 1:
                continue
            who, other = self.trace.steps[step].who, self.trace.steps[use.step]
            early = " before it is there:" if kind == "read" and cell.content == number else " while"
            it = "it" if cell.name == name else cell.name
            what = (
                f"{who} {_does(verb)} {self.said(name, number)}{early} {other.who} may still {use.verb} {it}"
            )
            raise PlanError(what, "a hand-over that orders the two", "signal, and wait for the signal")

    def _read(self, step: int, kind: Kind, verb: str, name: str, cell: _Cell, number: int | None) -> None:
        wanted = number if number is None or kind != "update" else number - 1
        if wanted is not None and cell.content != wanted:
            result = self.said(name, cell.content)
            if cell.content is None:
                result = "nothing yet" if cell.writer is None else "what was written over it"
            raise PlanError(
                f"{self.trace.steps[step].who} {_does(verb)} {self.said(name, wanted)} before it is there, or"
                f" after: there is {result}",
                "what was written for it",
                "wait until it is there, and hand it on only when it is read",
            )
        cell.was_read = cell.was_read or (wanted is not None and kind != "touch")
        cell.readers.append(_Use(step, verb))

    def _write(self, step: int, verb: str, cell: _Cell, touched: list[_Cell], number: int | None) -> None:
        for other in touched:
            self._require_read(other, f"when {self.trace.steps[step].who} {_does(verb)} there")
            other.content, other.was_read = None, True
        cell.content, cell.was_read = number, number is None
        cell.writer, cell.readers = _Use(step, verb), []

    def _require_read(self, cell: _Cell, when: str) -> None:
        if not cell.was_read:
            raise PlanError(
                f"nobody has read {self.said(cell.name, cell.content)} {when}",
                "every content to be read",
                "read it before it is handed back",
            )


def _does(verb: str) -> str:
    return {"multiply": "multiplies", "add to": "adds to"}.get(verb, f"{verb}s")
