"""A kernel made ready to run: its instructions translated, in blocks between which warps may be switched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

from ptxsim.isa.operands import Read, read
from ptxsim.isa.table import Act, Step, Unmodelled, translate
from ptxsim.isa.together import Elementwise
from ptxsim.ptx.nodes import (
    Address,
    Imm,
    Instruction,
    Kernel,
    Label,
    Negated,
    Operand,
    Pair,
    Reg,
    Vector,
)
from ptxsim.run import plan
from ptxsim.run.plan import RegisterKey
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask

LEAVE = ("exit", "ret")
JUMPS = ("bra", *LEAVE)
MASKED = ("shfl", "vote", "match", "redux", "elect")
"""Instructions, beside those with .warp, whose last operand says which lanes take part."""
Made = dict[int, Step | Act | None]
"""Translations by index; None for jumps."""


@dataclass(frozen=True)
class Guard:
    index: int
    unless: bool


@dataclass(eq=False)
class Block:
    """Steps and perhaps a jump, or a single Act: `body`, which ends before instruction `stop` of the kernel.

    `together` says that its first instruction needs several lanes at once: those in `members`, or all alive.
    `touched` are the registers it reads or writes, `computed` those but for moves.
    """

    start: int
    stop: int
    body: tuple[Instruction, ...]
    steps: list[tuple[Step, Guard | None]] = field(default_factory=list)
    act: tuple[Act, Guard | None] | None = None
    jump: tuple[int | None, Guard | None] | None = None
    """(where to, or None to exit; condition)"""
    together: bool = False
    members: Read | None = None
    orders_lanes: bool = False
    """True if its first instruction orders the lanes of a warp (watch/lanes.py)."""
    touched: frozenset[RegisterKey] = frozenset()
    computed: frozenset[RegisterKey] = frozenset()
    runs: int = 0
    """Number of times it was executed for all 32 lanes, by any launch."""

    @cached_property
    def planned(self) -> list[Step]:
        """The steps as they are executed for all 32 lanes: many at once, and in another order. What an
        observer has put in front of the instructions' own stays there."""
        added = len(self.steps) - len(self.body) + (self.jump is not None)
        first = [step if guard is None else _when(step, guard) for step, guard in self.steps[:added]]
        own = [_item(i, step, guard) for i, (step, guard) in zip(self.body, self.steps[added:])]
        return first + plan.steps(own)


@dataclass(frozen=True)
class Program:
    kernel: Kernel
    blocks: dict[int, Block]
    """Blocks by the index of their first instruction."""

    @classmethod
    def of(cls, kernel: Kernel) -> Program:
        """Translate all instructions. Raises Unmodelled for the first that is not known."""
        made = [None if i.name in JUMPS else translate(i) for i in kernel.body]
        return cls(kernel, {b.start: b for b in _blocks(kernel, made)})

    def changed(self, index: int, instruction: Instruction) -> Program:
        """The program with one instruction that is no jump replaced by another one."""
        body = (*self.kernel.body[:index], instruction, *self.kernel.body[index + 1 :])
        old = next(b for b in self.blocks.values() if b.start <= index < b.stop)
        made = {i: None if body[i].name in JUMPS else translate(body[i]) for i in range(old.start, old.stop)}
        new = _block(body, made, old.start, old.stop)
        return Program(dataclasses.replace(self.kernel, body=body), {**self.blocks, old.start: new})


def needs_company(instruction: Instruction) -> bool:
    """True if an instruction is executed by several lanes together."""
    return instruction.has("sync") or instruction.has("aligned") or instruction.name in ("bar", "barrier")


def _blocks(kernel: Kernel, made: list[Step | Act | None]) -> list[Block]:
    body = kernel.body
    leaders = {0}
    for index, instruction in enumerate(body):
        if instruction.name == "bra":
            leaders.add(_target(instruction))
        if instruction.name in JUMPS or isinstance(made[index], Act):
            leaders.add(index + 1)
        if isinstance(made[index], Act) or needs_company(instruction):
            leaders.add(index)
    starts = sorted(i for i in leaders if i < len(body))
    known = dict(enumerate(made))
    return [_block(body, known, a, b) for a, b in zip(starts, [*starts[1:], len(body)])]


def _block(body: tuple[Instruction, ...], made: Made, start: int, stop: int) -> Block:
    block = Block(start, stop, body[start:stop])
    touched: set[RegisterKey] = set()
    computed: set[RegisterKey] = set()
    for index in range(start, stop):
        instruction, translated = body[index], made[index]
        guard = Guard(instruction.guard.index, instruction.unless) if instruction.guard else None
        if isinstance(translated, Act):
            block.act = translated, guard
        elif translated is not None:
            block.steps.append((translated, guard))
        elif instruction.name == "bra":
            block.jump = _target(instruction), guard
        else:
            block.jump = None, guard
        for operand in instruction.operands:
            found = set(registers_of(operand))
            touched |= found
            # Compilers move registers about after a wgmma.fence as well; the assembler renames those away.
            if instruction.name != "mov":
                computed |= found
    first = body[start]
    if needs_company(first):
        block.together, block.members = True, _members(first)
    block.orders_lanes = block.together or (block.act is not None and first.name in LEARN)
    block.touched, block.computed = frozenset(touched), frozenset(computed)
    return block


def acting(warp: Warp, guard: Guard | None, mask: Mask) -> tuple[Mask, bool]:
    """(lanes that take part, whether any does). The mask itself where the guard changes nothing."""
    if guard is None:
        return mask, True
    lanes = ~warp.pred[guard.index] if guard.unless else warp.pred[guard.index].copy()
    if mask is not None:
        lanes &= mask
    # Comparing bytes is several times quicker than numpy's all() and any() of 32 elements.
    content = lanes.tobytes()
    if content == (_ALL if mask is None else mask.tobytes()):
        return mask, True
    return lanes, content != _NONE


_ALL, _NONE = b"\1" * LANES, b"\0" * LANES


def _item(instruction: Instruction, step: Step, guard: Guard | None) -> plan.Item:
    """Plan item of a step: an instruction whose operands may be results and sources alike, or that does more
    than to compute, keeps its order among its like."""
    named = [set(registers_of(operand)) for operand in instruction.operands]
    run = step if guard is None else _when(step, guard)
    condition = {(1, guard.index)} if guard else set()
    if not isinstance(step, Elementwise):
        return plan.Item(run, None, condition, set().union(*named, {ORDER}))
    result, reads = named[0], set().union(*named[1:])
    if guard is None:
        return plan.Item(run, step.key, reads, result)
    return plan.Item(run, None, reads | condition, result)


LEARN = frozenset(("ld", "ldu", "atom"))
"""Names of strong accesses by which a lane may learn of another one."""
WORTH_PLANNING = 4
"""Executions after which a block's instructions are put together: that takes as long as some of these."""
ORDER: RegisterKey = (0, 0)
"""Stands for memory, and for whatever else there is to the order of instructions."""


def _when(step: Step, guard: Guard) -> Step:
    def run(warp: Warp, mask: Mask) -> None:
        lanes, any = acting(warp, guard, mask)
        if any:
            step(warp, lanes)

    return run


def _target(instruction: Instruction) -> int:
    target = instruction.operands[0]
    if not isinstance(target, Label):
        raise Unmodelled(instruction, "a branch to no label")
    return target.target


def _members(instruction: Instruction) -> Read | None:
    """The mask of lanes that an instruction such as shfl.sync names last, None for all."""
    last = instruction.operands[-1] if instruction.operands else None
    if instruction.name not in MASKED and not instruction.has("warp"):
        return None
    if isinstance(last, Imm) and int(last.value) & 0xFFFFFFFF == 0xFFFFFFFF:
        return None
    return read(last, "u32") if isinstance(last, Reg | Imm) else None


def registers_of(operand: Operand) -> list[RegisterKey]:
    """The registers that an operand names, predicates of negated ones too."""
    match operand:
        case Reg():
            return [operand.key]
        case Negated(register):
            return [(1, register.index)]
        case Vector(items):
            return [key for item in items for key in registers_of(item)]
        case Pair(first, second):
            return [*registers_of(first), *registers_of(second)]
        case Address(base, _, coords):
            parts = (base, *coords)
            return [key for part in parts for key in registers_of(part)]
    return []
