"""tcgen05.cp: from shared to tensor memory (PTX ISA, "tcgen05.cp").

Copies stand in the same queue as tcgen05.mma: they end in the order in which both were issued, and
tcgen05.commit tells of them.
"""

from __future__ import annotations

import numpy as np

from fa4flex.simulator.isa.access import locate
from fa4flex.simulator.isa.asynchronous import Errand, submit
from fa4flex.simulator.isa.operands import read
from fa4flex.simulator.isa.table import Act, Unmodelled, translates
from fa4flex.simulator.isa.tcgen05 import granules, matrix_unit, must_be_allocated
from fa4flex.simulator.ptx.nodes import Instruction
from fa4flex.simulator.state.cta import Warp
from fa4flex.simulator.state.registers import Mask, lanes_of
from fa4flex.simulator.units import descriptors, tensor

SHAPES = {"128x256b", "128x128b", "4x256b", "64x128b", "32x128b"}
REPEATS = {"warpx4", "warpx2::02_13", "warpx2::01_23"}
WORD = np.dtype(np.uint32)


@translates("tcgen05.cp")
def cp(instruction: Instruction) -> Act:
    """[tensor address], matrix descriptor. With .cta_group::2, and with a decompression, it is not
    modelled."""
    shapes = [m for m in instruction.modifiers if m in SHAPES]
    repeats = [m for m in instruction.modifiers if m in REPEATS]
    extra = set(instruction.modifiers) - SHAPES - REPEATS - {"cp", "cta_group::1"}
    if extra or len(shapes) != 1 or len(repeats) > 1 or len(instruction.operands) != 2:
        raise Unmodelled(instruction, f"modifiers {sorted(extra)}" if extra else "")
    copy = tensor.copy(shapes[0], repeats[0] if repeats else None)
    target, source = locate(instruction.operands[0], instruction), read(instruction.operands[1], "u64")

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            address, bits = int(target(warp)[lane]), int(source(warp)[lane])
            errand = Errand.in_queue(warp, matrix_unit(warp), f"a tcgen05.cp of {warp}", instruction)

            def land(address: int = address, bits: int = bits, errand: Errand = errand) -> None:
                _land(warp, copy, address, bits, errand, instruction)

            submit(warp, instruction, land, (), matrix_unit(warp))

    return Act(run)


def _land(
    warp: Warp, copy: tensor.Copy, address: int, bits: int, errand: Errand, instruction: Instruction
) -> None:
    cta, where = warp.cta, descriptors.decode_tcgen05(bits)
    regions = copy.regions(address)
    must_be_allocated(cta, regions, "tcgen05.cp", instruction)
    words = descriptors.operand(where, "K", copy.rows, copy.columns, WORD, cta.shared.data)
    chunks = descriptors.touched(where, "K", copy.rows, copy.columns, WORD.itemsize)
    errand.reads_chunks(cta, chunks, copy.rows * copy.columns * WORD.itemsize)
    cta.tensor_shadow.write(errand.number, granules(regions), errand.clock)
    copy.store(cta.tensor, address, words)
