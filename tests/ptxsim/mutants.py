"""Kernels with one synchronisation less: what a simulator that is worth its time must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from ptxsim.ptx.nodes import Address, Imm, Instruction, Operand, Reg
from ptxsim.run.launch import Result
from ptxsim.run.program import Program
from ptxsim.run.scheduler import Scheduler
from ptxsim.state.cta import Warp
from ptxsim.watch.findings import REMARKS, Fault, Finding, Findings

REMOVED = (
    "mbarrier.arrive",
    "fence.proxy.async",
    "fence.mbarrier_init",
    "tcgen05.commit",
    "tcgen05.wait",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "bar.sync",
    "bar.arrive",
    "barrier.sync",
    "barrier.arrive",
    "barrier.cluster",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
)

WRITES = ("st.global", "st.shared")
EXCHANGES = ("shfl.sync", "vote.sync", "match.any", "match.all", "redux.sync", "bar.warp.sync")
ALL_LANES = (Imm(-1), Imm(0xFFFFFFFF))


@dataclass(frozen=True)
class Mutant:
    """`change` says what was done to the instruction at `index`."""

    index: int
    change: str
    instruction: Instruction
    program: Program

    def __str__(self) -> str:
        return f"{self.change} {self.instruction}"


def mutants(result: Result) -> Iterator[Mutant]:
    """All that drop or weaken one instruction which a run executed."""
    for index in sorted(executed(result)):
        instruction = result.program.kernel.body[index]
        opcode = instruction.opcode
        if opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            yield _mutant(result.program, index, "waits no more:", _succeeds(instruction))
        if opcode.startswith("mbarrier.arrive.expect_tx"):
            yield _mutant(result.program, index, "expects no bytes:", _expects_nothing(instruction))
        if opcode.startswith(REMOVED):
            yield _mutant(result.program, index, "lacks", _nothing(instruction))


def unsaid(result: Result) -> Iterator[Mutant]:
    """All that write nothing in one place, or name one lane less among those that take part, of what a run
    executed."""
    for index in sorted(executed(result)):
        instruction = result.program.kernel.body[index]
        if instruction.opcode.startswith(WRITES):
            yield _mutant(result.program, index, "lacks", _nothing(instruction))
        if instruction.opcode.startswith(EXCHANGES) and instruction.operands[-1] in ALL_LANES:
            yield _mutant(result.program, index, "without lane 31:", _without_a_lane(instruction))


def displaced(result: Result) -> Iterator[Mutant]:
    """All that synchronise wrongly in one place which a run executed: at the mbarrier behind the right one,
    with one arrival more or fewer, with 16 bytes more or fewer, at another named barrier or with a warp fewer
    at it, or waiting for one group less."""
    body = result.program.kernel.body
    for index in sorted(executed(result)):
        opcode = body[index].opcode
        changes: dict[str, tuple[int, Callable[[Operand], Operand | None]]] = {}
        if opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait", "mbarrier.arrive")):
            changes["at the next mbarrier:"] = 1, _behind
        if opcode.startswith("mbarrier.init"):
            changes |= {f"arrivals {n:+}:": (1, _more(body, n)) for n in (-1, 1)}
        if opcode.startswith("mbarrier.arrive.expect_tx"):
            changes |= {f"bytes {n:+}:": (2, _more(body, n)) for n in (-16, 16)}
        if opcode.startswith(("bar.sync", "bar.arrive")):
            changes["at the next barrier:"] = 0, _more(body, 1)
            changes["a warp fewer:"] = 1, _more(body, -32)
        if "wait_group" in opcode:
            changes["a group less:"] = 0, _more(body, 1)
        for change, (place, new) in changes.items():
            operands = list(body[index].operands)
            operand = new(operands[place]) if place < len(operands) else None
            if operand is not None:
                operands[place] = operand
                changed = dataclasses.replace(body[index], operands=tuple(operands))
                yield _mutant(result.program, index, change, changed)


def lacking(result: Result, opcode: str) -> Iterator[Mutant]:
    """All that lack one instruction, whose opcode begins so, which a run executed."""
    for index in sorted(executed(result)):
        instruction = result.program.kernel.body[index]
        if instruction.opcode.startswith(opcode):
            yield _mutant(result.program, index, "lacks", _nothing(instruction))


COMES_TOGETHER = ("elect.sync", "match.any.sync", "bar.sync", "tcgen05.ld.sync", "tcgen05.wait")
"""What a warp's lanes come together for after a bar.warp.sync."""
MEETS = ("ld.shared", "st.shared", "mbarrier.arrive", "cp.async.bulk", "cp.reduce.async.bulk")
"""Instructions by which lanes may meet, or speak for one another."""


def implied(mutant: Mutant) -> bool:
    """True if all lanes have to come for another instruction that is .sync before any meets another one."""
    for instruction in mutant.program.kernel.body[mutant.index + 1 :]:
        if instruction.opcode.startswith(COMES_TOGETHER):
            return True
        if instruction.opcode.startswith(MEETS):
            return False
    return True


def can_matter(mutant: Mutant, result: Result) -> bool:
    """True if the instruction did anything in a run: fences always may; a wait, an arrival or a commit does
    if some warp learned by it that something is over. First waits for fresh buffers, last signals that nobody
    awaits, and waits for what is known already do not."""
    fence = mutant.instruction.opcode.startswith(("fence", "wgmma.fence"))
    return fence or mutant.instruction.line in result.useful


MOST_BLOCKS = 200_000
"""Blocks of a launch after which it counts as endless: backward kernels as they stand execute 27,000 at most.
A mutant that waits no more for the next tile's number may take its last tile again and again."""


def clean_to_its_end(clean: Callable[..., bool], *given: Any) -> bool:
    """Result of `clean(*given)`, or False at the first finding of a launch in it: what a mutant does after
    that tells nothing more, and takes much of the time. False, too, for a launch that does not end."""
    add, turn = Findings.add, Scheduler._turn

    def add_and_end(findings: Findings, finding: Finding) -> None:
        add(findings, finding)
        if finding.kind not in REMARKS:
            raise Fault(finding)

    def turn_or_end(scheduler: Scheduler, warp: Warp) -> None:
        if scheduler.time > MOST_BLOCKS:
            raise Fault(Finding("hang", f"more than {MOST_BLOCKS:,} blocks are executed"))
        turn(scheduler, warp)

    with patch.object(Findings, "add", add_and_end), patch.object(Scheduler, "_turn", turn_or_end):
        try:
            return clean(*given)
        except Fault:
            return False


def executed(result: Result) -> frozenset[int]:
    """Indices of the instructions that were executed."""
    blocks = result.program.blocks
    starts = {start for _, _, start in result.executed}
    return frozenset(i for start in starts for i in range(blocks[start].start, blocks[start].stop))


def _mutant(program: Program, index: int, change: str, new: Instruction) -> Mutant:
    return Mutant(index, change, program.kernel.body[index], program.changed(index, new))


def _behind(operand: Operand) -> Operand | None:
    return dataclasses.replace(operand, offset=operand.offset + 8) if isinstance(operand, Address) else None


def _more(body: tuple[Instruction, ...], by: int) -> Callable[[Operand], Operand | None]:
    """Function to the constant operand that is greater `by` so much; None where an operand is no constant or
    the sum is no natural number."""

    def more(operand: Operand) -> Operand | None:
        if isinstance(operand, Reg):
            (*_, operand) = next(x.operands for x in body if operand in x.operands[:1])
        if not isinstance(operand, Imm) or operand.value + by < 0:
            return None
        return Imm(operand.value + by)

    return more


def _nothing(instruction: Instruction) -> Instruction:
    return dataclasses.replace(instruction, opcode="nanosleep.u32", operands=(Imm(0),))


def _succeeds(instruction: Instruction) -> Instruction:
    done = instruction.operands[0]
    assert isinstance(done, Reg)
    return dataclasses.replace(instruction, opcode="mov.pred", operands=(done, Imm(1)))


def _without_a_lane(instruction: Instruction) -> Instruction:
    return dataclasses.replace(instruction, operands=(*instruction.operands[:-1], Imm(0x7FFFFFFF)))


def _expects_nothing(instruction: Instruction) -> Instruction:
    *others, _ = instruction.operands
    return dataclasses.replace(instruction, operands=(*others, Imm(0)))
