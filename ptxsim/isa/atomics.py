"""atom and red (PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red").

The lanes of a warp act one after the other, in their order; at once where no two share an address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, Addresses, bandwidth, granules, lanes, locate, space_of
from ptxsim.isa.operands import Read, Write, items_of, read, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, translates
from ptxsim.ptx.nodes import WIDTHS, Imm, Instruction, Operand
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.memory import BadAccess
from ptxsim.state.registers import LANES, Mask
from ptxsim.units.reduction import DTYPES, reduce
from ptxsim.watch.findings import Fault, Finding
from ptxsim.watch.shadow import NOBODY

Bits = NDArray[Any]
"""Unsigned [lanes, count]: what registers hold."""
Change = Callable[[Bits, list[Bits]], Bits]
"""From what is in memory and the operands b (and c) to what will be."""

OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")

# --- what the instruction says ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Update:
    operation: str
    kind: str
    count: int
    """Values at each address."""
    space: str

    @property
    def bytes(self) -> int:
        return WIDTHS[self.kind] // 8


@translates("atom", "red")
def atomic(instruction: Instruction, form: Form) -> Step | Act:
    """atom d, [a], b {, c} {, policy}; red [a], b {, policy}."""
    operands, operation = list(instruction.operands), form.one_of(*OPERATIONS)
    result = operands.pop(0) if instruction.name == "atom" else None
    sources = operands[1 : 3 if operation == "cas" else 2]
    what = _Update(operation, form.type, len(items_of(sources[0])), space_of(instruction))
    where, gets = locate(operands[0]), [_reads(s, what) for s in sources]
    puts = [write(r, _register_type(what)) for r in items_of(result)] if result else []
    access = _Atomic(instruction, what)

    def step(warp: Warp, mask: Mask) -> None:
        given = [_bits([lanes(get(warp), mask) for get in values], what) for values in gets]
        warp.acting = mask
        before = access.update(warp, lanes(where(warp), mask), given)
        _put(puts, before, what, warp, mask)

    return _as_act(instruction, what, step, sources[0])


def _as_act(instruction: Instruction, form: _Update, step: Step, source: Operand) -> Step | Act:
    """Other warps get their turn where they may take part. What polls (cas, exch, adding 0) does not count
    as a signal, or a loop around it would never be seen to hang."""
    ordered = bool({"acquire", "release", "acq_rel"} & set(instruction.modifiers))
    if form.space == "shared" and not ordered:
        return step

    def run(warp: Warp, mask: Mask) -> None:
        step(warp, mask)

    polls = form.operation in ("cas", "exch") or (isinstance(source, Imm) and source.value == 0)
    return Act(run, signals=not polls)


def _register_type(form: _Update) -> str:
    return form.kind if form.kind in ("f32", "f64") else f"b{WIDTHS[form.kind]}"


def _reads(operand: Operand, form: _Update) -> list[Read]:
    return [read(item, _register_type(form)) for item in items_of(operand)]


def _bits(values: list[Any], form: _Update) -> Bits:
    """Unsigned [lanes, count] of values [lanes] (or, of 128 bits, one [lanes, 2])."""
    if form.kind == "b128":
        return values[0]
    return np.stack(values, axis=1).view(f"u{form.bytes}")


def _put(puts: list[Write], values: Bits, form: _Update, warp: Warp, mask: Mask) -> None:
    dtype = {"f32": np.float32, "f64": np.float64}.get(form.kind, values.dtype)
    for i, put in enumerate(puts):
        mine = values if form.kind == "b128" else values[:, i].view(dtype)
        if mask is not None:
            spread = np.zeros((LANES, *mine.shape[1:]), mine.dtype)
            spread[mask] = mine
            mine = spread
        put(warp, mine, mask)


# --- memory -------------------------------------------------------------------------------------------------


class _Atomic(Accessor):
    """Reads, changes and writes back."""

    def __init__(self, instruction: Instruction, form: _Update) -> None:
        super().__init__(instruction, form.space)
        self.form = form
        self.size, self.count = (8, 2) if form.kind == "b128" else (form.bytes, form.count)
        self.changes = {flush: _change(form, flush) for flush in (False, True)}
        self.overwrites = form.operation == "exch"

    def update(self, warp: Warp, addresses: Addresses, given: list[Bits]) -> Bits:
        """Change what lies at `addresses` [lanes]; returns what each lane found there."""
        found = np.empty((len(addresses), self.count), f"u{self.size}")
        parts = self._parts(warp, addresses)
        self.observe(warp, parts)
        for space, offsets, some in parts:
            where = np.arange(len(addresses)) if some is None else some
            if space == "local" or (isinstance(space, Cta) and self.form.count > 1):
                text = (
                    f"{warp} uses {self.instruction.opcode} on {space} memory" if space == "local" else None
                )
                text = text or f"{warp} uses vectors on shared memory"
                raise Fault(Finding("misuse", text, self.instruction))
            memory = space.shared if isinstance(space, Cta) else warp.cta.launch.memory
            mine = given if len(where) == len(addresses) else [values[where] for values in given]
            try:
                found[where] = self._serially(warp, memory, offsets, mine, isinstance(space, Cta))
            except BadAccess as bad:
                raise self._fault(warp, bad) from None
            if isinstance(space, Cta):
                self._watch_update(warp, space, offsets)
            else:
                self._watch_globally(warp, offsets)
            self.tell(warp, space, offsets, updates=True)
        return found

    def _serially(self, warp: Warp, memory: Any, offsets: Addresses, given: list[Bits], shared: bool) -> Bits:
        # Current hardware flushes subnormal f32 sums to zero in global memory, and not in shared memory.
        change = self.changes[not shared]
        places, place = (offsets, None) if len(offsets) == 1 else np.unique(offsets, return_inverse=True)
        content = memory.load(places, self.size, self.count)
        before = content if place is None or len(places) < len(offsets) else content[place]
        if place is None:
            after = change(content, given)
        elif len(places) == len(offsets):
            after = np.empty_like(content)
            after[place] = change(before, given)
        else:
            after, before = content.copy(), np.empty((len(offsets), self.count), content.dtype)
            for turn in _turns(place):
                at = place[turn]
                before[turn] = after[at]
                after[at] = change(before[turn], [values[turn] for values in given])
        if shared or (after != content).any():
            memory.store(places, after)
            warp.cta.cluster.units.landings += not shared
        return before

    def _watch_update(self, warp: Warp, cta: Cta, offsets: Addresses) -> None:
        """For the shadow it is a write that agrees with other updates, though not with plain accesses."""
        order, clock = cta.cluster.order, cta.cluster.order.clocks[warp.agent]
        number = order.warp_access(warp.agent, self.instruction, reduces=True)
        width = self.size * self.count
        where = granules(offsets, width, cta.launch.granule)
        cta.cluster.shared[self.instruction.line] += bandwidth(offsets, width)
        unwritten = where[cta.shadow.writer[where] == NOBODY]
        if len(unwritten) and not self.overwrites:
            order.report(
                "uninitialised",
                f"updates what nobody wrote: {cta.shadow.describe(int(unwritten[0]))}",
                number,
            )
        cta.shadow.write(number, where, clock)

    def _watch_globally(self, warp: Warp, offsets: Addresses) -> None:
        order, written = warp.cta.cluster.order, warp.cta.launch.written
        number = order.warp_access(warp.agent, self.instruction, reduces=True)
        where = granules(offsets, self.size * self.count, written.granule)
        written.write(order, number, where, order.clocks[warp.agent], lambda: np.ones(len(where), np.bool_))


def _turns(place: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Lanes, in turns in which no place occurs twice; those of one place in the order of the lanes."""
    order = np.argsort(place, kind="stable")
    sorted_places = place[order]
    starts = np.flatnonzero(np.r_[True, sorted_places[1:] != sorted_places[:-1]])
    position = np.arange(len(place)) - np.repeat(starts, np.diff(np.r_[starts, len(place)]))
    for turn in range(int(position.max()) + 1):
        yield order[position == turn]


# --- arithmetic ---------------------------------------------------------------------------------------------


def _change(form: _Update, flush: bool) -> Change:
    """`flush`: whether subnormal f32 become zero."""
    operation, kind = form.operation, form.kind
    if operation == "cas":
        return _compare_and_swap
    if operation == "exch":
        return lambda old, given: given[0]
    if kind == "f32":
        return lambda old, given: _add_f32(old, given[0], flush)
    kind = kind.removesuffix("x2")
    if operation == "add":
        kind = kind.replace("s", "u")
    dtype = DTYPES[kind]
    return lambda old, given: reduce(operation, kind, old.view(dtype), given[0].view(dtype)).view(old.dtype)


def _compare_and_swap(old: Bits, given: list[Bits]) -> Bits:
    expected, new = given
    return np.where((old == expected).all(axis=1, keepdims=True), new, old)


def _add_f32(old: Bits, given: Bits, flush: bool) -> Bits:
    def flushed(bits: Bits) -> Bits:
        return np.where(bits & 0x7F800000 == 0, bits & 0x80000000, bits).astype(np.uint32) if flush else bits

    total = flushed(old).view(np.float32) + flushed(given).view(np.float32)
    return np.where(np.isnan(total), np.uint32(0x7FFFFFFF), flushed(total.view(np.uint32)))
