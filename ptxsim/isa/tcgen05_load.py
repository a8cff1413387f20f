"""tcgen05.ld: from tensor memory to registers (PTX ISA, "tcgen05.ld", "tcgen05.wait").

A load is over when tcgen05.wait::ld says so. An instruction that uses a register before is a finding, or a
remark in a kernel that has no such wait at all; it gets the right value all the same, since hardware holds it
back, and from then on the loads count as waited for, so that one finding does not draw others after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxsim.isa.access import locate
from ptxsim.isa.operands import items_of, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Wait, translates
from ptxsim.isa.tcgen05 import (
    cells_of,
    place_checked,
    register_rows,
    transfer_of,
)
from ptxsim.ptx.nodes import Instruction, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.operation import Operation
from ptxsim.state.registers import Mask

LOADS = "loads from tensor memory"


@dataclass
class Loads:
    """Those that a warp has not waited for. They are one agent, whose epochs end with its waits."""

    agent: int
    pending: list[Operation]


def loads_of(warp: Warp) -> Loads:
    found = warp.started.get(LOADS)
    if found is None:
        found = warp.started[LOADS] = Loads(warp.cta.cluster.order.agent(f"{LOADS} of {warp}"), [])
    return found


@translates("tcgen05.ld")
def ld(instruction: Instruction, form: Form) -> Act:
    table, rows = transfer_of(instruction, form), register_rows(instruction.operands[0])
    operands = items_of(instruction.operands[0])
    targets = [write(o, "u32") for o in operands]
    where = locate(instruction.operands[1])
    held = {(o.file, o.index): instruction for o in operands if isinstance(o, Reg)}

    def run(warp: Warp, mask: Mask) -> None:
        start = place_checked(warp, table, int(where(warp)[0]), instruction)
        cta, loads = warp.cta, loads_of(warp)
        units, order = cta.cluster.units, cta.cluster.order
        number = order.queued(warp.agent, loads.agent, f"a tcgen05.ld of {warp}", instruction)
        clock = order.clocks[warp.agent]
        known = clock if units.eager else clock.copy()
        # A mask may be the predicate's own register.
        acting = None if mask is None else mask.copy()

        def land() -> None:
            cta.tensor_shadow.read(number, cells_of(table, start)[1], known)
            found = table.load(cta.tensor, start)
            if acting is None and rows is not None:
                warp.tables["u32"][rows] = found
                return
            for put, values in zip(targets, found, strict=True):
                put(warp, values, acting)

        warp.loading.update(held)
        operation = Operation(instruction, land, (), (LOADS, warp.agent))
        operation.signals = (operation,)
        loads.pending.append(operation)
        units.submit(operation)

    return Act(run)


@translates("tcgen05.wait::ld")
def wait_ld(instruction: Instruction, form: Form) -> Act:
    def run(warp: Warp, mask: Mask) -> Wait | None:
        pending = loads_of(warp).pending
        if pending and not pending[-1].landed:
            last = pending[-1]
            return Wait(lambda: last.landed, f"{len(pending)} {LOADS}", last)
        loaded(warp, instruction)
        return None

    return Act(run)


def fetch(warp: Warp) -> None:
    """Lands the warp's loads, whose results are needed now."""
    pending = loads_of(warp).pending
    if pending:
        warp.cta.cluster.units.land(pending[-1])


def loaded(warp: Warp, instruction: Instruction) -> None:
    """All loads of the warp are over, as it learns by an instruction."""
    loads, cluster = loads_of(warp), warp.cta.cluster
    if loads.pending:
        fetch(warp)
        cluster.order.ended(warp.agent, loads.agent, instruction.line)
        loads.pending.clear()
        warp.loading.clear()
