"""Data flow of a kernel: what its instructions read and write, where its basic blocks begin, which registers
hold the same in all lanes, and which are live at the end of a block."""

from __future__ import annotations

from dataclasses import dataclass

from ptxsim.ptx.nodes import Discard, Instruction, Kernel, Label, Operand, Special
from ptxsim.run.program import JUMPS, LEAVE, registers_of

Register = tuple[int, int]
"""(width of the file, index)"""
NO_RESULT = {"st", "red", "bra", "bar", "barrier", "fence", "membar", "stmatrix", "exit", "ret", "prefetch"}
NO_RESULT |= {"setmaxnreg", "griddepcontrol", "nanosleep", "trap", "cp", "discard", "pmevent", "brkpt"}
NO_RESULT |= {"clusterlaunchcontrol", "applypriority"}
VARYING = {"%tid.x", "%tid.y", "%tid.z", "%laneid", "%lanemask_lt", "%lanemask_le", "%lanemask_eq"}
MIXED = {"ld", "tcgen05", "shfl", "elect", "atom", "mbarrier", "ldmatrix", "match"}
"""Instructions whose results differ between lanes whatever their operands (loads of parameters aside)."""


def width(register: Register) -> int:
    """32-bit registers that it takes; none for predicates."""
    return {1: 0, 64: 2, 128: 4}.get(register[0], 1)


def operands_of(instruction: Instruction) -> tuple[tuple[Register, ...], tuple[Register, ...]]:
    """(registers read, registers written)"""
    results = _results(instruction)
    read: list[Register] = [] if instruction.guard is None else registers_of(instruction.guard)
    written: list[Register] = []
    for position, operand in enumerate(instruction.operands):
        (written if position < results else read).extend(registers_of(operand))
    return tuple(read), tuple(written)


def _results(instruction: Instruction) -> int:
    """Number of results among the operands, which come first."""
    name, operands = instruction.name, instruction.operands
    if name in NO_RESULT or not operands:
        return 0
    if name == "tcgen05":
        return int(instruction.has("ld"))
    if name == "mbarrier":
        waits = instruction.has("try_wait") or instruction.has("test_wait")
        return int(waits or isinstance(operands[0], Discard))
    return 1


def loads_constant(instruction: Instruction) -> bool:
    """A load of a parameter, which is the same in all lanes and an operand of machine instructions."""
    return instruction.name == "ld" and any(m.startswith(("param", "const")) for m in instruction.modifiers)


def mixes(instruction: Instruction) -> bool:
    """True if results may differ between lanes although the operands do not."""
    if loads_constant(instruction):
        return False
    return instruction.name in MIXED or any(_varies(o) for o in instruction.operands)


def _varies(operand: Operand) -> bool:
    return isinstance(operand, Special) and operand.name in VARYING


@dataclass(frozen=True)
class Flow:
    """`uniform` says of each register whether it holds the same in all lanes, as far as definitions show;
    `needed` are the registers that are read after the basic block that begins at an index, `entering`
    those that are read in it or after it and hold something before."""

    leaders: frozenset[int]
    uniform: dict[Register, bool]
    entering: dict[int, frozenset[Register]]
    needed: dict[int, frozenset[Register]]

    @classmethod
    def of(cls, kernel: Kernel) -> Flow:
        leaders = _leaders(kernel.body)
        entering, needed = _liveness(kernel.body, sorted(leaders))
        return cls(leaders, _uniform(kernel.body), entering, needed)


def _leaders(body: tuple[Instruction, ...]) -> frozenset[int]:
    """Leaders of basic blocks."""
    found = {0}
    for index, instruction in enumerate(body):
        if instruction.name in JUMPS:
            found.add(index + 1)
            found |= {o.target for o in instruction.operands if isinstance(o, Label)}
    return frozenset(i for i in found if i < len(body))


def _uniform(body: tuple[Instruction, ...]) -> dict[Register, bool]:
    found: dict[Register, bool] = {}
    made = [(operands_of(i), mixes(i)) for i in body]
    for (_, writes), mixed in made:
        for register in writes:
            found[register] = found.get(register, True) and not mixed
    changed = True
    while changed:
        changed = False
        for (reads, writes), _ in made:
            if not all(found.get(r, True) for r in reads):
                changed |= any(found[r] for r in writes)
                found.update(dict.fromkeys(writes, False))
    return found


Needs = dict[int, frozenset[Register]]


def _liveness(body: tuple[Instruction, ...], leaders: list[int]) -> tuple[Needs, Needs]:
    """(registers that enter each block with what is still read, those that leave it so)"""
    blocks = list(zip(leaders, [*leaders[1:], len(body)]))
    used: dict[int, set[Register]] = {}
    made: dict[int, set[Register]] = {}
    for start, stop in blocks:
        reads_first: set[Register] = set()
        writes_all: set[Register] = set()
        for instruction in body[start:stop]:
            reads, writes = operands_of(instruction)
            reads_first |= set(reads) - writes_all
            if instruction.guard is None:
                writes_all |= set(writes)
        used[start], made[start] = reads_first, writes_all
    entering = {start: frozenset(used[start]) for start, _ in blocks}
    leaving: Needs = {start: frozenset() for start, _ in blocks}
    changed = True
    while changed:
        changed = False
        for start, stop in reversed(blocks):
            after = frozenset[Register]().union(*(entering[s] for s in _next(body, stop)))
            if after != leaving[start]:
                leaving[start] = after
                entering[start] = frozenset(used[start] | (after - made[start]))
                changed = True
    return entering, leaving


def _next(body: tuple[Instruction, ...], stop: int) -> list[int]:
    """Successors of a block that ends before `stop`."""
    last = body[stop - 1]
    found = [o.target for o in last.operands if isinstance(o, Label)] if last.name == "bra" else []
    if last.name not in JUMPS or last.guard is not None:
        found.append(stop)
    assert last.name not in LEAVE or len(found) < 2
    return [index for index in found if index < len(body)]
