"""Basic blocks of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ptxsim.ptx.nodes import Instruction, Kernel, Label, Operand, Vector

_LEAVES = frozenset(["bra", "brx", "ret", "exit", "trap", "call"])


@dataclass(frozen=True)
class Block:
    """body[start:stop]: entered at the start only and, until the last instruction, never left."""

    start: int
    stop: int


def blocks(
    kernel: Kernel, ends: Callable[[Instruction], bool] = lambda instruction: False
) -> tuple[Block, ...]:
    """The body cut before each target of a branch, and after each instruction that branches, that leaves the
    kernel or that `ends` a block for another reason. In order; they cover the body."""
    body = kernel.body
    cuts = {0, len(body)}
    for index, instruction in enumerate(body):
        cuts.update(label for operand in instruction.operands for label in targets(operand))
        if instruction.name in _LEAVES or ends(instruction):
            cuts.add(index + 1)
    starts = sorted(cuts)
    return tuple(Block(start, stop) for start, stop in pairwise(starts))


def targets(operand: Operand) -> tuple[int, ...]:
    """Indices that an operand branches to: of a label, or of the labels of a brx."""
    match operand:
        case Label(_, target):
            return (target,)
        case Vector(items):
            return tuple(item.target for item in items if isinstance(item, Label))
    return ()
