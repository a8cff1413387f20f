"""ld and st, of all state spaces and widths (PTX ISA, "Data Movement and Conversion Instructions: ld,
st")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, Locate, lanes, locate, space_of
from ptxsim.isa.operands import items_of, read, view_of, write
from ptxsim.isa.shared import quick_load, quick_store, register_rows
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, Wait, translates
from ptxsim.ptx.nodes import WIDTHS, Address, Instruction, Operand, Reg, Symbol
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask


@translates("ld", "ldu")
def ld(instruction: Instruction, form: Form) -> Step | Act:
    space, size = space_of(instruction), WIDTHS[form.type] // 8
    targets = items_of(instruction.operands[0])
    where = locate(instruction.operands[1])
    access = Accessor(instruction, space)
    # A register wider than the value takes it sign- or zero-extended, whatever its own type.
    signed, each = form.type.startswith("s"), 1
    if size == 16:
        size, each = 8, 2
        sets = [_put_wide(t) for t in targets]
    else:
        sets = [_put(t, size, signed) for t in targets]
    count = each * len(targets)

    load = _load(access, where, size, count, _constant(instruction))
    place = register_rows(targets, size)

    def step(warp: Warp, mask: Mask) -> None:
        values = load(warp, mask)
        if mask is None and place is not None:
            warp.tables[place[0]][place[1]] = values.T
            return
        for i, put in enumerate(sets):
            put(warp, values[:, i * each : (i + 1) * each], mask)

    if instruction.has("acquire") and space != "shared":
        polls = _Polls(
            instruction, where, lambda warp, mask: load(warp, mask).tobytes(), access, size * count
        )
        return Act(polls.act(step))
    if access.strength.strong:
        return Act(step)
    return quick_load(instruction, targets, size, count, step) if space == "shared" else step


@dataclass(frozen=True)
class _Polls:
    """An acquiring load. A loop around it waits for another thread: where it would find once more what it
    found last time, it is held until that changes, and where nothing else can happen it finds the same once.
    `look` are the bytes that it loads, `width` how many of them are at each address."""

    instruction: Instruction
    where: Locate
    look: Callable[[Warp, Mask], bytes]
    access: Accessor
    width: int

    def act(self, step: Step) -> Callable[[Warp, Mask], Wait | None]:
        line, what = self.instruction.line, f"what {self.instruction} reads to change"

        def run(warp: Warp, mask: Mask) -> Wait | None:
            at = lanes(self.where(warp), mask)
            found = at.tobytes(), self.look(warp, mask)
            if warp.polled.get(line) == found and not warp.gives_up:
                return Wait(self._changed(warp, mask, at, found[1]), what, limited=True)
            warp.gives_up = False
            warp.polled[line] = found
            step(warp, mask)
            return None

        return run

    def _changed(self, warp: Warp, mask: Mask, at: NDArray[np.int64], found: bytes) -> Callable[[], bool]:
        """Condition that other bytes are there than were found. Global memory is looked at as it is, in a
        tenth of the time of a load: all that wait are asked before each turn. Who wrote it is looked at by
        the load that follows."""
        watched = self.access.in_global_memory(warp, at, self.width)
        if watched is None:
            return lambda: self.look(warp, mask) != found
        before = [(piece, piece.tobytes()) for piece in watched]
        return lambda: any(piece.tobytes() != content for piece, content in before)


def _constant(instruction: Instruction) -> bool:
    """True if it loads what is the same for all threads of a launch: a kernel parameter by its name."""
    address = instruction.operands[1]
    base = address.base if isinstance(address, Address) else address
    return instruction.has("param") and isinstance(base, Symbol)


def _load(
    access: Accessor, where: Locate, size: int, count: int, constant: bool
) -> Callable[[Warp, Mask], NDArray[Any]]:
    """Unsigned [lanes, count]; constants are loaded once in a launch."""
    if not constant:

        def load_lanes(warp: Warp, mask: Mask) -> NDArray[Any]:
            warp.acting = mask
            return access.load(warp, lanes(where(warp), mask), size, count)

        return load_lanes

    def load(warp: Warp, mask: Mask) -> NDArray[Any]:
        known = warp.cta.launch.constants
        values = known.get(access)
        if values is None:
            values = known[access] = access.load(warp, where(warp), size, count)
        return lanes(values, mask)

    return load


@translates("st")
def st(instruction: Instruction, form: Form) -> Step | Act:
    space, size = space_of(instruction), WIDTHS[form.type] // 8
    where = locate(instruction.operands[0])
    sources = items_of(instruction.operands[1])
    count = len(sources)
    access = Accessor(instruction, space)
    if size == 16:
        wide = [read(s, "b128") for s in sources]

        def step_wide(warp: Warp, mask: Mask) -> None:
            warp.acting = mask
            access.store(
                warp, lanes(where(warp), mask), np.concatenate([lanes(g(warp), mask) for g in wide], 1)
            )

        return step_wide
    gets = [read(s, _register_type(s, size)) for s in sources]
    dtype, place = np.dtype(f"u{size}"), register_rows(sources, size)

    def step(warp: Warp, mask: Mask) -> None:
        if mask is None and place is not None:
            warp.acting = None
            access.store(warp, where(warp), warp.tables[place[0]][place[1]].T)
            return
        values = np.empty((LANES, count), dtype)
        for i, get in enumerate(gets):
            values[:, i] = get(warp)
        warp.acting = mask
        access.store(warp, lanes(where(warp), mask), lanes(values, mask))

    if access.strength.strong:
        return Act(step)
    return quick_store(instruction, sources, size, count, step) if space == "shared" else step


def _register_type(operand: Operand, size: int) -> str:
    """Type as which a register of at least `size` bytes is read; its low bytes are what is stored."""
    return f"u{max(operand.file, 16)}" if isinstance(operand, Reg) else f"u{max(8 * size, 16)}"


def _put(operand: Operand, size: int, signed: bool):  # type: ignore[no-untyped-def]
    if not isinstance(operand, Reg):
        put_nothing = write(operand, "u32")
        return lambda warp, values, mask: put_nothing(warp, 0, mask)
    kind = f"{'s' if signed else 'u'}{operand.file}"
    put, loaded = write(operand, kind), np.dtype(f"{'i' if signed else 'u'}{size}")
    spread = np.zeros(LANES, loaded)
    assert view_of(kind) == kind

    def set(warp: Warp, values: NDArray[Any], mask: Mask) -> None:
        if mask is None:
            put(warp, values[:, 0].view(loaded), mask)
        else:
            spread[mask] = values[:, 0].view(loaded)
            put(warp, spread, mask)

    return set


def _put_wide(operand: Operand):  # type: ignore[no-untyped-def]
    put = write(operand, "b128")

    def set(warp: Warp, values: NDArray[Any], mask: Mask) -> None:
        spread = np.zeros((LANES, 2), np.uint64)
        spread[slice(None) if mask is None else mask] = values
        put(warp, spread, mask)

    return set
