"""Instructions towards the system: hints that change no value, register budgets, traps, addresses of other
CTAs (PTX ISA, "Data Movement and Conversion Instructions: prefetch, applypriority, discard, createpolicy,
mapa, getctarank", "Miscellaneous Instructions: nanosleep, setmaxnreg, trap, brkpt", "griddepcontrol").
"""

from __future__ import annotations

from ptxsim.isa.operands import read, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, Unmodelled, translates
from ptxsim.ptx.nodes import Imm, Instruction
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.state.window import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from ptxsim.watch.findings import Fault, Finding

FEWEST_REGISTERS, MOST_REGISTERS, REGISTER_STEP = 24, 256, 8
REGISTER_FILE = 1 << 16
"""Registers of 32 bits of a multiprocessor."""


@translates("prefetch", "prefetchu", "applypriority", "discard", "cp.async.bulk.prefetch")
def hint(instruction: Instruction, form: Form) -> Step:
    """Without effect: there are no caches."""
    return _nothing


@translates("griddepcontrol")
def griddepcontrol(instruction: Instruction, form: Form) -> Step:
    """Launches run one after another; what that hides, watch/launches.py finds."""
    (what,) = instruction.modifiers

    def step(warp: Warp, mask: Mask) -> None:
        cluster, dependence = warp.cta.cluster, warp.cta.launch.dependence
        place = (cluster.number, warp.cta.rank)
        if what == "wait":
            dependence.wait(cluster.order, warp.agent, place, instruction.line)
        else:
            dependence.launch(cluster.order, warp.agent, place)

    return step


@translates("createpolicy")
def createpolicy(instruction: Instruction, form: Form) -> Step:
    """A cache policy is opaque, and nothing that takes one looks at it: 0."""
    d = write(instruction.operands[0], "b64")
    return lambda warp, mask: d(warp, 0, mask)


@translates("setmaxnreg")
def setmaxnreg(instruction: Instruction, form: Form) -> Step:
    """Checked only: a multiple of 8 between 24 and 256, and not too many in all warps of a CTA, or of as many
    CTAs as a multiprocessor has room for. Warps that do not ask are not counted: how many they have is not in
    the PTX."""
    count = instruction.operands[0]
    if (
        not isinstance(count, Imm)
        or count.value % REGISTER_STEP
        or not FEWEST_REGISTERS <= count.value <= MOST_REGISTERS
    ):
        allowed = f"a multiple of 8 from {FEWEST_REGISTERS} to {MOST_REGISTERS}"
        raise Unmodelled(instruction, f"the register count must be {allowed}")
    wanted = int(count.value)

    def step(warp: Warp, mask: Mask) -> None:
        warp.registers_each = wanted
        total = LANES * sum(other.registers_each for other in warp.cta.warps)
        resident, most, of = warp.cta.launch.resident, REGISTER_FILE, "a multiprocessor has"
        if resident > 1:
            threads = LANES * len(warp.cta.warps)
            most = REGISTER_FILE // (resident * threads) // REGISTER_STEP * REGISTER_STEP * threads
            of = f"one of {resident} that share a multiprocessor has"
        if total > most:
            text = f"CTA {warp.cta.rank} asks for {total} registers in all; {of} {most}"
            warp.cta.launch.findings.add(Finding("registers", text, instruction))

    return step


@translates("pmevent")
def pmevent(instruction: Instruction, form: Form) -> Step:
    """Nobody counts performance events here."""
    return _nothing


@translates("nanosleep")
def nanosleep(instruction: Instruction, form: Form) -> Act:
    """Others get their turn; how long it takes is nobody's business."""
    return Act(_nothing)


@translates("trap", "brkpt")
def trap(instruction: Instruction, form: Form) -> Step:
    def step(warp: Warp, mask: Mask) -> None:
        raise Fault(Finding("trap", f"{warp} executes {instruction.name}", instruction))

    return step


@translates("mapa")
def mapa(instruction: Instruction, form: Form) -> Step:
    """d, a, b: the address in CTA b of the cluster that corresponds to `a`."""
    kind = form.type
    d, a, b = instruction.operands
    put, address, rank = write(d, kind), read(a, kind), read(b, "u32")
    offset = _kept(kind)

    def step(warp: Warp, mask: Mask) -> None:
        kept = address(warp) & offset
        put(warp, kept | rank(warp).astype(kept.dtype) << RANK_SHIFT, mask)

    return step


@translates("getctarank")
def getctarank(instruction: Instruction, form: Form) -> Step:
    kind = form.type
    d, a = instruction.operands
    put, address = write(d, "u32"), read(a, kind)
    plain = SHARED_WINDOW - 1 if kind == "u64" else 2**32 - 1
    return lambda warp, mask: put(warp, (address(warp) & plain) >> RANK_SHIFT, mask)


def _kept(kind: str) -> int:
    """The bits of an address that all CTAs share: the offset and, in 64 bits, what makes it generic."""
    return OFFSET_MASK if kind == "u32" else OFFSET_MASK | SHARED_WINDOW


def _nothing(warp: Warp, mask: Mask) -> None:
    return None
