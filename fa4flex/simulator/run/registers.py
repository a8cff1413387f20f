"""Registers that wgmma is still using (PTX ISA, "wgmma.fence", "wgmma.wait_group").

A warpgroup's accumulators and the parts of A that lie in registers must not be touched until
wgmma.wait_group says so, and registers that were written must pass wgmma.fence before wgmma uses them.
"""

from __future__ import annotations

from fa4flex.simulator.ptx.nodes import Instruction
from fa4flex.simulator.run.program import Block, Program
from fa4flex.simulator.state.warp import Warp
from fa4flex.simulator.watch.findings import Finding


class RegisterWatch:
    def __init__(self, program: Program) -> None:
        self._body = program.kernel.body
        self._needed = any(i.name == "wgmma" for i in self._body)

    def check(self, warp: Warp, block: Block) -> None:
        """Before a warp executes a block of plain instructions."""
        if not self._needed:
            return
        warp.unfenced |= block.computed
        busy = warp.busy
        if not busy or busy.keys().isdisjoint(block.touched):
            return
        key = next(k for k in block.touched if k in busy)
        text = f"{warp} uses a register before wgmma.wait_group says that wgmma is done with it"
        warp.cta.launch.findings.add(Finding("race", text, self._culprit(block, key), busy[key]))

    def left(self, warp: Warp) -> None:
        """A warp exits."""
        if warp.busy:
            text = f"{warp} exits while wgmma is still writing its registers"
            warp.cta.launch.findings.add(Finding("unfinished", text, next(iter(warp.busy.values()))))

    def _culprit(self, block: Block, key: tuple[int, int]) -> Instruction:
        from fa4flex.simulator.run.program import _registers

        for instruction in self._body[block.start : block.stop]:
            if any(key in _registers(o) for o in instruction.operands):
                return instruction
        return self._body[block.start]
