"""A kernel made ready to run: its instructions translated, in blocks between which warps may be switched."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from fa4flex.simulator.isa.operands import Read, read
from fa4flex.simulator.isa.table import Act, Step, Unmodelled, translate
from fa4flex.simulator.ptx.nodes import (
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

LEAVE = ("exit", "ret")
JUMPS = ("bra", *LEAVE)
Made = dict[int, Step | Act | None]
"""Translations by index; None for jumps."""
RegisterKey = tuple[int, int]
"""(width of the file, index)."""


@dataclass(frozen=True)
class Guard:
    index: int
    unless: bool


@dataclass(eq=False)
class Block:
    """Steps and perhaps a jump, or a single Act. Ends before instruction `stop`.

    `together` says that its first instruction needs several lanes at once: those in `members`, or all alive.
    `touched` are the registers it reads or writes, `computed` those but for moves.
    """

    start: int
    stop: int
    steps: list[tuple[Step, Guard | None]] = field(default_factory=list)
    act: tuple[Act, Guard | None] | None = None
    jump: tuple[int | None, Guard | None] | None = None
    """(where to, or None to exit; condition)"""
    together: bool = False
    members: Read | None = None
    touched: frozenset[RegisterKey] = frozenset()
    computed: frozenset[RegisterKey] = frozenset()


@dataclass(frozen=True)
class Program:
    kernel: Kernel
    blocks: dict[int, Block]
    """By the index of their first instruction."""

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
    """Whether an instruction is executed by several lanes together."""
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
    block = Block(start, stop)
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
            found = set(_registers(operand))
            touched |= found
            # Compilers move registers about after a wgmma.fence as well; the assembler renames those away.
            if instruction.name != "mov":
                computed |= found
    first = body[start]
    if needs_company(first):
        block.together, block.members = True, _members(first)
    block.touched, block.computed = frozenset(touched), frozenset(computed)
    return block


def _target(instruction: Instruction) -> int:
    target = instruction.operands[0]
    if not isinstance(target, Label):
        raise Unmodelled(instruction, "a branch to no label")
    return target.target


def _members(instruction: Instruction) -> Read | None:
    """The mask of lanes that an instruction such as shfl.sync names last, None for all."""
    last = instruction.operands[-1] if instruction.operands else None
    if instruction.has("aligned") or instruction.name not in (
        "shfl",
        "vote",
        "match",
        "redux",
        "elect",
        "bar",
    ):
        return None
    if instruction.name == "bar" and not instruction.has("warp"):
        return None
    if isinstance(last, Imm) and int(last.value) & 0xFFFFFFFF == 0xFFFFFFFF:
        return None
    return read(last, "u32") if isinstance(last, Reg | Imm) else None


def _registers(operand: Operand) -> list[RegisterKey]:
    match operand:
        case Reg():
            return [(operand.file, operand.index)]
        case Negated(register):
            return [(1, register.index)]
        case Vector(items):
            return [key for item in items for key in _registers(item)]
        case Pair(first, second):
            return [*_registers(first), *_registers(second)]
        case Address(base, _, coords):
            parts = (base, *coords)
            return [key for part in parts for key in _registers(part)]
    return []
