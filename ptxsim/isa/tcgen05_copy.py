"""tcgen05.cp: from shared to tensor memory (PTX ISA, "tcgen05.cp", "Optional Decompression").

Copies stand in the same queue as tcgen05.mma: they end in the order in which both were issued, and
tcgen05.commit tells of them. For a pair of CTAs, each copies from its own shared memory.
"""

from __future__ import annotations

import numpy as np

from ptxsim.isa.access import locate
from ptxsim.isa.asynchronous import Errand, submit
from ptxsim.isa.operands import read
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, translates
from ptxsim.isa.tcgen05 import granules, must_be_allocated
from ptxsim.isa.tcgen05_mma import matrix_unit, pair_of
from ptxsim.ptx.nodes import Instruction
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.registers import Mask, lanes_of
from ptxsim.units import descriptors, packing, tensor

SHAPES = ("128x256b", "128x128b", "4x256b", "64x128b", "32x128b")
REPEATS = ("warpx4", "warpx2::02_13", "warpx2::01_23")
UNPACKED = {"b4x16_p64": 4, "b6x16_p32": 6}
"""Bits of the elements that a copy decompresses to bytes."""
WORD = np.dtype(np.uint32)


@translates("tcgen05.cp")
def cp(instruction: Instruction, form: Form) -> Act:
    """[tensor address], matrix descriptor."""
    copy = tensor.copy(form.one_of(*SHAPES), form.one_of(*REPEATS) or None)
    bits, group = UNPACKED.get(form.one_of(*UNPACKED), 0), int(form.named["cg"][-1])
    target, source = locate(instruction.operands[0]), read(instruction.operands[1], "u64")

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            # A scale factor's address has a byte in its top bits.
            address, where = int(target(warp)[lane]) & 0x3FFFFFFF, int(source(warp)[lane])
            errand = Errand.in_queue(warp, matrix_unit(warp), f"a tcgen05.cp of {warp}", instruction)

            def land(address: int = address, where: int = where, errand: Errand = errand) -> None:
                for cta in pair_of(warp, group):
                    words = _source(cta, copy, where, errand)
                    if bits:
                        words = packing.spread(words.view(np.uint8), bits).view(WORD)
                    _store(cta, copy, address, words, errand, instruction)

            submit(warp, instruction, land, (), matrix_unit(warp))

    return Act(run)


def _source(cta: Cta, copy: tensor.Copy, bits: int, errand: Errand) -> tensor.Cells:
    where = descriptors.decode_tcgen05(bits)
    words = descriptors.operand(where, "K", copy.rows, copy.columns, WORD, cta.shared.data)
    chunks = descriptors.touched(where, "K", copy.rows, copy.columns, WORD.itemsize)
    errand.reads_chunks(cta, chunks, copy.rows * copy.columns * WORD.itemsize)
    return words


def _store(
    cta: Cta, copy: tensor.Copy, address: int, words: tensor.Cells, errand: Errand, instruction: Instruction
) -> None:
    regions = copy.regions(address)
    must_be_allocated(cta, regions, "tcgen05.cp", instruction)
    cta.tensor_shadow.write(errand.number, granules(regions), errand.clock)
    copy.store(cta.tensor, address, words)
