"""Values that the PTX ISA leaves undefined, followed from register to register until something depends on
one ("clusterlaunchcontrol.query_cancel": the first CTA of a cluster that was not cancelled).

To compute with such a value, to select another one or to move it is no mistake. A use is: a branch or a guard
that it decides, an address, what a barrier or an asynchronous operation is given, a value that is handed to
other lanes or stored. `and` with false and `or` with true do not depend on it.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.operands import read
from ptxsim.ptx.nodes import Address, Instruction, Operand, Vector
from ptxsim.run.program import Block, Program, acting, registers_of
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.watch.findings import Finding

Lanes = NDArray[np.bool_]
NONE = np.zeros(LANES, np.bool_)
STORES = frozenset(("st", "red", "atom", "stmatrix"))
HANDED = frozenset(("shfl", "vote", "match", "redux", "activemask", "elect", "movmatrix"))
IDLE = {"and": False, "or": True}
"""Operands with which a predicate is the same whatever the other one is."""


class UndefinedWatch:
    def __init__(self, program: Program) -> None:
        makers = [i for i, one in enumerate(program.kernel.body) if one.has("query_cancel")]
        self._making = {
            start for start, block in program.blocks.items() if any(start <= i < block.stop for i in makers)
        }
        self.needed = bool(makers)

    def concerns(self, warp: Warp, block: Block) -> bool:
        """True if a block makes undefined values or touches some."""
        if block.start in self._making:
            return True
        return bool(warp.undefined) and not warp.undefined.keys().isdisjoint(_touched(block))

    def steps(self, warp: Warp, block: Block, mask: Mask) -> None:
        """Execute the block's steps one by one, and follow what is undefined."""
        added = len(block.steps) - len(block.body) + (block.jump is not None)
        for step, _ in block.steps[:added]:
            step(warp, mask)
        for instruction, (step, guard) in zip(block.body, block.steps[added:]):
            lanes, any = acting(warp, guard, mask)
            self._guarded(warp, instruction, mask)
            if any:
                before = self._depends(warp, instruction, lanes) if warp.undefined else NONE
                step(warp, lanes)
                _follow(warp, instruction, lanes, before)
        if block.jump is not None:
            self._guarded(warp, block.body[-1], mask)

    def act(self, warp: Warp, block: Block, mask: Mask) -> None:
        """Before a barrier or an asynchronous operation: all that it is given has to be defined."""
        instruction = block.body[0]
        self._guarded(warp, instruction, mask)
        self._use(warp, instruction, mask, instruction.operands, "gives an operation")

    def _guarded(self, warp: Warp, instruction: Instruction, mask: Mask) -> None:
        if instruction.guard is not None:
            self._use(warp, instruction, mask, (instruction.guard,), "decides by")

    def _depends(self, warp: Warp, instruction: Instruction, mask: Mask) -> Lanes:
        """Lanes whose result is undefined. Uses are reported."""
        for operand in instruction.operands:
            if isinstance(operand, Address):
                self._use(warp, instruction, mask, (operand,), "takes as an address")
        if instruction.name in STORES:
            self._use(warp, instruction, mask, instruction.operands[1:], "stores")
        if instruction.name in HANDED:
            self._use(warp, instruction, mask, instruction.operands[1:], "hands to other lanes")
        sources = instruction.operands[1:]
        if instruction.name == "selp":
            first, second, chosen = sources
            picks = read(chosen, "pred")(warp)
            one, other = _undefined(warp, first), _undefined(warp, second)
            return np.where(picks, one, other) | _undefined(warp, chosen)
        if instruction.name in IDLE and instruction.has("pred"):
            first, second = sources
            found = NONE
            for this, that in ((first, second), (second, first)):
                settled = (read(that, "pred")(warp) == IDLE[instruction.name]) & ~_undefined(warp, that)
                found = found | _undefined(warp, this) & ~settled
            return found
        return np.logical_or.reduce([NONE, *(_undefined(warp, operand) for operand in sources)])

    def _use(
        self, warp: Warp, instruction: Instruction, mask: Mask, operands: tuple[Operand, ...], what: str
    ) -> None:
        keys = [key for operand in operands for key in registers_of(operand) if key in warp.undefined]
        for key in keys:
            lanes, origin = warp.undefined[key]
            if not (lanes if mask is None else lanes & mask).any():
                continue
            text = f"{warp} {what} the first CTA of a cluster that was not cancelled, which is undefined"
            warp.cta.launch.findings.add(Finding("launch control", text, instruction, origin))
            warp.undefined.clear()  # all that follows from this one would be told again
            return


def _touched(block: Block) -> set[tuple[int, int]]:
    guards = {(1, i.guard.index) for i in block.body if i.guard is not None}
    return guards | block.touched


def _undefined(warp: Warp, operand: Operand) -> Lanes:
    found = [warp.undefined[key][0] for key in registers_of(operand) if key in warp.undefined]
    return np.logical_or.reduce([NONE, *found])


def _follow(warp: Warp, instruction: Instruction, mask: Mask, lanes: Lanes) -> None:
    """Marks what an instruction has written as undefined in these lanes, and defined in others that took
    part."""
    if not instruction.operands or isinstance(instruction.operands[0], Address) or not warp.undefined:
        return
    if instruction.name == "clusterlaunchcontrol":
        return  # its translator says what is undefined
    origin = next(iter(warp.undefined.values()))[1]
    result = instruction.operands[0]
    items = result.items if isinstance(result, Vector) else (result,)
    for key in chain.from_iterable(registers_of(item) for item in items):
        kept = warp.undefined.get(key, (NONE, origin))[0]
        now = lanes.copy() if mask is None else np.where(mask, lanes, kept)
        if now.any():
            warp.undefined[key] = now, origin
        else:
            warp.undefined.pop(key, None)
