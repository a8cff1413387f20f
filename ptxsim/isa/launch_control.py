"""clusterlaunchcontrol.*: a block takes over the work of a cluster that has not started (PTX ISA,
"clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel").

The answer is 16 bytes that only query_cancel may read; here four words: whether a cluster was cancelled, and
the index of its first CTA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, locate
from ptxsim.isa.asynchronous import Errand, submit
from ptxsim.isa.mbarriers import barrier_at, cta_and_offset
from ptxsim.isa.operands import items_of, read, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, translates
from ptxsim.ptx.nodes import Discard, Instruction, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.registers import POISON, Mask, lanes_of
from ptxsim.state.window import RANK_SHIFT
from ptxsim.watch.findings import Fault, Finding

ANSWER = 16
"""Bytes."""

UNDEFINED = int.from_bytes([POISON] * 4, "little")
"""The index of a CTA where no cluster was cancelled: the PTX ISA leaves it undefined."""

AXES = {"get_first_ctaid::x": 1, "get_first_ctaid::y": 2, "get_first_ctaid::z": 3}
"""Words of an answer."""


def _answer(warp: Warp) -> NDArray[np.uint8]:
    cancel = warp.cta.launch.cancel
    assert cancel is not None
    index = cancel()
    words = (0, 0, 0, 0) if index is None else (1, *index)
    return np.array(words, np.uint32).view(np.uint8)


@translates("clusterlaunchcontrol.try_cancel")
def try_cancel(instruction: Instruction, form: Form) -> Act:
    """[answer], [mbarrier]: both in this CTA, or with multicast at the same places in each of its cluster."""
    access, everywhere = Accessor(instruction, "shared"), instruction.has("multicast::cluster::all")
    target, barrier = (locate(operand) for operand in instruction.operands)

    def run(warp: Warp, mask: Mask) -> None:
        cluster = warp.cta.cluster
        for lane in lanes_of(mask):
            if cluster.refused:
                text = f"{warp} asks for a cluster after it has seen that none is left"
                raise Fault(Finding("launch control", text, instruction))
            _, offset = cta_and_offset(access, warp, int(target(warp)[lane]))
            if offset % ANSWER:
                text = f"{warp} wants an answer at {offset:#x}, which is no multiple of {ANSWER}"
                raise Fault(Finding("misaligned", text, instruction))
            ctas = cluster.ctas if everywhere else [warp.cta]
            _, place = cta_and_offset(access, warp, int(barrier(warp)[lane]))
            barriers = [barrier_at(access, warp, cta.rank << RANK_SHIFT | place) for cta in ctas]
            errand = Errand.alone(warp, f"a request of {warp} to cancel a cluster", instruction)

            def land(
                ctas: Any = ctas, barriers: Any = barriers, errand: Errand = errand, offset: int = offset
            ) -> None:
                image = _answer(warp)
                for cta, told in zip(ctas, barriers, strict=True):
                    cta.shared.window(offset, ANSWER)[:] = image
                    errand.writes(cta, offset, ANSWER)
                    told.learn(errand.load)
                    told.deliver(ANSWER)

            for told in barriers:
                errand.signals(warp, told)
            submit(warp, instruction, land, tuple(barriers))

    return Act(run, signals=True)


@translates("clusterlaunchcontrol.query_cancel")
def query_cancel(instruction: Instruction, form: Form) -> Step:
    answer = read(instruction.operands[-1], "b128")

    def words(warp: Warp) -> NDArray[np.uint32]:
        return np.ascontiguousarray(answer(warp)).view(np.uint32)

    if instruction.has("is_canceled"):
        put = write(instruction.operands[0], "pred")

        def cancelled(warp: Warp, mask: Mask) -> None:
            found = words(warp)[:, 0] != 0
            if not found[lanes_of(mask)].all():
                warp.cta.cluster.refused = True
            put(warp, found, mask)

        return cancelled
    axis = next((AXES[name] for name in AXES if instruction.has(name)), 1)
    items = items_of(instruction.operands[0])
    wanted = [(item, place) for place, item in enumerate(items, axis) if not isinstance(item, Discard)]
    puts = [(write(item, "u32"), place) for item, place in wanted]
    results = [(item.file, item.index) for item, _ in wanted if isinstance(item, Reg)]

    def index(warp: Warp, mask: Mask) -> None:
        found = words(warp).copy()
        refused = found[:, 0] == 0
        found[refused] = UNDEFINED
        for put, place in puts:
            put(warp, found[:, place] if place < 4 else 0, mask)
        _mark(warp, results, refused, mask, instruction)

    return index


def _mark(
    warp: Warp, results: list[tuple[int, int]], refused: NDArray[np.bool_], mask: Mask, by: Instruction
) -> None:
    """Note in which lanes the results of a query are undefined (run/undefined.py follows them)."""
    for key in results:
        kept = warp.undefined.get(key, (np.zeros_like(refused), by))[0]
        lanes = refused.copy() if mask is None else np.where(mask, refused, kept)
        if lanes.any():
            warp.undefined[key] = lanes, by
        else:
            warp.undefined.pop(key, None)
