"""Many instructions of one kind, executed as one: d[i] = f(a[i], ...) for all i, with a numpy call for each
operation instead of one for each instruction.

Kernels are unrolled: a softmax has a hundred exponentials in a row, none of which needs another's result.
run/plan.py finds them; here is what they must say of themselves, and how they are executed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim.isa.operands import Array, view_of
from ptxsim.ptx.nodes import Instruction, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.registers import PACKED, Mask, Registers

Function = Callable[..., Any]
Gather = Callable[[Registers], Array]
Place = tuple[str, int]
"""Type as which a register is read or written, and its index in the table of that type."""


@dataclass(frozen=True, eq=False)
class Elementwise:
    """An instruction that reads and writes registers only, every lane by itself.

    `step` executes it alone. Instructions with the same `key` have the same `function` of their `sources`,
    arrays [n, elements], for any n; a source that is the same for all has n = 1. Sources are registers or
    literals, whose 32 values are given.
    """

    step: Callable[[Warp, Mask], None]
    key: Hashable
    function: Function
    results: tuple[Place, ...]
    """If there are several, the function gives as many arrays."""
    sources: tuple[Place | Array, ...]

    def __call__(self, warp: Warp, mask: Mask) -> None:
        self.step(warp, mask)


def kind_of(ins: Instruction, *more: Hashable) -> Hashable:
    """A key by opcode and the kinds of the operands."""
    return (ins.opcode, *more, *(o.file if isinstance(o, Reg) else 0 for o in ins.operands))


def place_of(operand: Reg, type: str) -> Place:
    return (type if type in PACKED else view_of(type)), operand.index


def together(members: Sequence[Elementwise]) -> Callable[[Warp, Mask], None]:
    """Executes instructions of one key, none of which reads or writes what another one writes, for all 32
    lanes."""
    first = members[0]
    function, type = first.function, first.results[0][0]
    rows = rows_of([m.results[0][1] for m in members])
    gathers = [_gather([m.sources[i] for m in members]) for i in range(len(first.sources))]
    if len(first.results) > 1:
        return _several_results(members, gathers)
    if len(gathers) == 1:
        (one,) = gathers

        def of_one(warp: Warp, mask: Mask) -> None:
            warp.table(type)[rows] = function(one(warp))

        return of_one
    if len(gathers) == 2:
        left, right = gathers

        def of_two(warp: Warp, mask: Mask) -> None:
            warp.table(type)[rows] = function(left(warp), right(warp))

        return of_two

    def of_several(warp: Warp, mask: Mask) -> None:
        warp.table(type)[rows] = function(*[gather(warp) for gather in gathers])

    return of_several


def _several_results(members: Sequence[Elementwise], gathers: list[Gather]) -> Callable[[Warp, Mask], None]:
    function = members[0].function
    places = [
        (type, rows_of([m.results[i][1] for m in members])) for i, (type, _) in enumerate(members[0].results)
    ]

    def run(warp: Warp, mask: Mask) -> None:
        values = function(*[gather(warp) for gather in gathers])
        for (type, rows), value in zip(places, values):
            warp.table(type)[rows] = value

    return run


def _gather(sources: Sequence[Place | Array]) -> Gather:
    """Reader of one operand of all members: [n, elements], or [1, elements] where it is the same for all."""
    if isinstance(sources[0], np.ndarray):
        values = np.stack(list(sources))
        constant = values[:1] if (values.view(np.uint8) == values[:1].view(np.uint8)).all() else values
        return lambda warp: constant
    type = sources[0][0]
    indices = [int(source[1]) for source in sources]
    rows = slice(indices[0], indices[0] + 1) if len(set(indices)) == 1 else rows_of(indices)
    if isinstance(rows, slice):
        return lambda warp: warp.table(type)[rows]
    return lambda warp: warp.table(type).take(rows, 0)


def rows_of(indices: Sequence[int]) -> Any:
    """Rows of a table: a slice where they are evenly spaced, which needs no copy."""
    steps = set(np.diff(indices).tolist())
    if len(steps) == 1 and (step := steps.pop()) > 0:
        return slice(indices[0], indices[-1] + 1, step)
    return np.array(indices, np.intp)
