"""Registers that asynchronous instructions are still using (PTX ISA, "wgmma.fence", "wgmma.wait_group",
"tcgen05.wait").

A warpgroup's accumulators and the parts of A that lie in registers must not be touched until
wgmma.wait_group says so, and registers that were written must pass wgmma.fence before wgmma uses them. What
tcgen05.ld loads must not be touched until tcgen05.wait::ld says so.
"""

from __future__ import annotations

from ptxsim.isa.tcgen05_load import fetch, loaded
from ptxsim.ptx.nodes import Instruction
from ptxsim.run.program import Block, Program, RegisterKey, registers_of
from ptxsim.state.cta import Warp
from ptxsim.watch.findings import Finding

Loading = dict[RegisterKey, Instruction]
Use = tuple[Instruction | None, Instruction | None, Loading]
"""Users of a register that is being loaded, and the load; or what is being loaded after a block."""


class RegisterWatch:
    def __init__(self, program: Program) -> None:
        self._body = program.kernel.body
        self._wgmma = any(i.name == "wgmma" for i in self._body)
        self._uses: dict[tuple[int, frozenset[RegisterKey]], Use] = {}
        self._waits = any(i.parts[:2] == ("tcgen05", "wait::ld") for i in self._body)
        self.needed = self._wgmma or any(i.parts[:2] == ("tcgen05", "ld") for i in self._body)

    def check(self, warp: Warp, block: Block) -> None:
        """Before a warp executes a block."""
        if warp.loading and not warp.loading.keys().isdisjoint(block.touched):
            self._loading(warp, block)
        if not self._wgmma or block.act is not None:
            return
        warp.unfenced |= block.computed
        busy = warp.busy
        if not busy or busy.keys().isdisjoint(block.touched):
            return
        key = next(k for k in block.touched if k in busy)
        text = f"{warp} uses a register before wgmma.wait_group says that wgmma is done with it"
        warp.cta.launch.findings.add(Finding("race", text, self._culprit(block, key), busy[key]))

    def _loading(self, warp: Warp, block: Block) -> None:
        """A block touches what tcgen05.ld is loading: moving it on is but another name for it, which is being
        loaded as well then."""
        fetch(warp)
        key = block.start, frozenset(warp.loading)
        found = self._uses.get(key)
        if found is None:
            found = self._uses[key] = self._first_use(block, warp.loading)
        user, load, warp.loading = found[0], found[1], dict(found[2])
        if user is not None:
            text = f"{warp} uses a register before tcgen05.wait::ld says that it is loaded"
            kind = "missing wait" if self._waits else "no waits"
            warp.cta.launch.findings.add(Finding(kind, text, user, load))
            loaded(warp, user)

    def _first_use(self, block: Block, loading: Loading) -> Use:
        now = dict(loading)
        for instruction in block.body:
            result, *sources = [registers_of(o) for o in instruction.operands] or [[]]
            source = next((now[k] for keys in sources for k in keys if k in now), None)
            if instruction.name != "mov":
                load = source or next((now[k] for k in result if k in now), None)
                if load is not None:
                    return instruction, load, {}
                continue
            for k in result:
                now.pop(k, None)
                if source is not None:
                    now[k] = source
        return None, None, now

    def left(self, warp: Warp) -> None:
        """A warp exits."""
        if warp.busy:
            text = f"{warp} exits while wgmma is still writing its registers"
            warp.cta.launch.findings.add(Finding("unfinished", text, next(iter(warp.busy.values()))))

    def _culprit(self, block: Block, key: tuple[int, int]) -> Instruction:
        for instruction in self._body[block.start : block.stop]:
            if any(key in registers_of(o) for o in instruction.operands):
                return instruction
        return self._body[block.start]
