"""A tiny machine to execute single instructions on, without PTX text and without a scheduler."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ptxsim.isa import atomics, cpasync, matrices, memory, system, warpwide
from ptxsim.isa.table import Act, Wait, translate
from ptxsim.ptx.nodes import Address, Imm, Instruction, Operand, Reg, Vector
from ptxsim.state.cta import Cluster, Grid, Warp
from ptxsim.state.memory import HostMemory
from ptxsim.state.registers import LANES, Mask
from ptxsim.watch.findings import Findings
from ptxsim.watch.launches import Dependence

TRANSLATORS = (atomics, cpasync, matrices, memory, system, warpwide)
"""Imported because that is what registers them."""
REGISTERS = {1: 8, 16: 32, 32: 64, 64: 32, 128: 8}


def machine(
    threads: int = 32,
    ctas: int = 1,
    shared: int = 4096,
    registers: dict[int, int] | None = None,
    granule: int = 4,
) -> Cluster:
    """One cluster of `ctas` CTAs of `threads`, each with `shared` bytes of poisoned shared memory."""
    findings = Findings()
    launch = Grid(
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        cluster=(ctas, 1, 1),
        shared_bytes=shared,
        static_bytes=0,
        granule=granule,
        symbols={},
        shared_symbols={"buffer": 256},
        local_symbols={},
        registers=registers or REGISTERS,
        local_bytes=16,
        memory=HostMemory(),
        findings=findings,
        arch="sm_100a",
        dependence=Dependence(findings, 4),
    )
    assert prod(launch.cluster) == ctas
    return Cluster(launch, 0, [(rank, 0, 0) for rank in range(ctas)])


def reg(type: str, index: int) -> Reg:
    return Reg(f"%{type}_{index}", type, index)


def at(base: Reg | Imm, offset: int = 0) -> Address:
    return Address(base, offset)


def vector(type: str, *indices: int) -> Vector:
    return Vector(tuple(reg(type, i) for i in indices))


def instruction(opcode: str, *operands: Operand, line: int = 1) -> Instruction:
    return Instruction(opcode, operands, line)


def execute(warp: Warp, opcode: str, *operands: Operand, mask: Mask = None, line: int = 1) -> Wait | None:
    """Translate and execute once. What an Act waits for is returned."""
    made = translate(instruction(opcode, *operands, line=line))
    lanes = mask if mask is not None or warp.whole else warp.live.copy()
    with np.errstate(all="ignore"):
        if isinstance(made, Act):
            return made.run(warp, lanes)
        made(warp, lanes)
    return None


def some_lanes() -> Any:
    """bool [32], neither empty nor full."""
    lanes = np.random.rand(LANES) < 0.6
    lanes[np.random.randint(LANES)] = True
    lanes[np.random.choice(np.flatnonzero(lanes)) - 1] = False
    if not lanes.any():
        lanes[0] = True
    return lanes


def written(cluster: Cluster, rank: int = 0) -> None:
    """All shared memory of a CTA counts as written by nobody in particular, long ago."""
    cta = cluster.ctas[rank]
    warp = cta.warps[0]
    number = cluster.order.warp_access(warp.agent, instruction("st.shared.b32"))
    cta.shadow.writer[:] = number
    for other in cluster.warps:
        cluster.order.acquire(other.agent, cluster.order.clocks[warp.agent])
    cluster.order.release(warp.agent)


def kinds(cluster: Cluster) -> list[str]:
    """Kinds of all findings, in order."""
    return [finding.kind for finding in cluster.launch.findings]
