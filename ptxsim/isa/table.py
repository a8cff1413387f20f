"""Table of translators by instruction.

A translator reads an Instruction once, before the kernel runs, and returns what is executed every time: a
Step, or an Act where the instruction may have to wait or where other warps should get their turn. It raises
Unmodelled for any modifier, type or operand that it does not know: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptxsim.errors import UnsupportedError
from ptxsim.ptx.nodes import Instruction
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask

Step = Callable[[Warp, Mask], None]
"""Executes one instruction for the lanes in the mask. Only these lanes' registers and memory may change."""


@dataclass(frozen=True)
class Wait:
    """Reason why an Act is not done: `ready` turns true, and then the Act is executed again from its
    beginning.

    `what` says it to people ("mbarrier at shared 0x40 of CTA 1, phase 3"). `on` is the object waited for, by
    which late timing knows what to complete first.
    """

    ready: Callable[[], bool]
    what: str
    on: object = None
    limited: bool = False
    """True if the instruction may answer without success when its time is up."""


@dataclass(frozen=True)
class Act:
    """An instruction that other warps, or asynchronous units, take part in. `run` returns None when done,
    after which the scheduler may turn to another warp."""

    run: Callable[[Warp, Mask], Wait | None]
    signals: bool = False
    """True if others may be waiting for what this does: late timing lets them go first."""


Translator = Callable[[Instruction], Step | Act]
_TABLE: dict[str, Translator] = {}


class Unmodelled(UnsupportedError):
    """An instruction, modifier or operand that the simulator does not know."""

    def __init__(self, instruction: Instruction, why: str = "") -> None:
        operands = ", ".join(type(o).__name__ for o in instruction.operands)
        super().__init__(
            f"{instruction} with operands ({operands}){': ' + why if why else ''}",
            "an instruction that the simulator models (docs/simulator.md lists them)",
            "compile without it, or add a translator in ptxsim/isa",
        )


def translates(*names: str) -> Callable[[Translator], Translator]:
    """Registers a translator for all opcodes that begin with one of `names`; the longest name wins."""

    def register(translator: Translator) -> Translator:
        for name in names:
            assert name not in _TABLE, f"{name} has two translators"
            _TABLE[name] = translator
        return translator

    return register


def translate(instruction: Instruction) -> Step | Act:
    """The translation by the longest registered name. Raises Unmodelled."""
    parts = instruction.parts
    for length in range(len(parts), 0, -1):
        found = _TABLE.get(".".join(parts[:length]))
        if found is not None:
            return found(instruction)
    raise Unmodelled(instruction)


def registered() -> dict[str, Any]:
    """Names and their translators, for the documentation and its test."""
    return dict(sorted(_TABLE.items()))
