"""Table of translators by instruction.

A translator reads an Instruction once, before the kernel runs, and returns what is executed every time: a
Step, or an Act where the instruction may have to wait or where other warps should get their turn. It is
called for what a row of the grammar (grammar.py) knows, with the form that the row gives it; for any other
modifier, type or operand Unmodelled is raised: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ptxsim.errors import UnsupportedError
from ptxsim.isa import grammar, syntax
from ptxsim.isa.operands import WrongOperand
from ptxsim.isa.syntax import Fitting, Form, Row
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


Translator = Callable[[Instruction, Form], Step | Act]
_TABLE: dict[str, Translator] = {}


class Unmodelled(UnsupportedError):
    """An instruction, modifier or operand that the simulator does not know."""

    def __init__(self, instruction: Instruction, why: str = "", known: Sequence[str] = ()) -> None:
        operands = ", ".join(type(o).__name__ for o in instruction.operands)
        rows = "".join(f"\n    {text}" for text in dict.fromkeys(known))
        super().__init__(
            f"{instruction} with operands ({operands}){': ' + why if why else ''}",
            f"one of{rows}" if rows else "an instruction that the simulator models (docs/simulator.md)",
            "compile without it, or add a row to ptxsim/isa/grammar.py and what it does to its translator",
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
    """The translation by the row that the instruction fits. Raises Unmodelled."""
    row, form = _matched(instruction)
    try:
        return _TABLE[_name(instruction.parts)](instruction, form)
    except WrongOperand as error:
        raise Unmodelled(instruction, str(error), [row.text]) from None


def form_of(instruction: Instruction) -> Form:
    """The form that the grammar gives an instruction. Raises Unmodelled."""
    return _matched(instruction)[1]


def _matched(instruction: Instruction) -> tuple[Row, Form]:
    """The first row that an instruction fits."""
    fitting = _fitting(instruction.opcode)
    for one in fitting:
        if one.takes(instruction.operands):
            return one.row, one.form
    if fitting:
        raise Unmodelled(instruction, "operands", [one.row.text for one in fitting])
    raise Unmodelled(instruction, *_why(instruction))


def _name(parts: Sequence[str]) -> str:
    """The longest name of a translator that an opcode begins with, or ""."""
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in _TABLE), "")


@lru_cache(maxsize=4096)
def _fitting(opcode: str) -> list[Fitting]:
    """The rows that the modifiers of an opcode fit."""
    parts = tuple(opcode.split("."))
    name = _name(parts)
    matched = ((row, row.match(parts, name.count(".") + 1)) for row in rows_of(name))
    return [Fitting(row, form, row.choices(form)) for row, form in matched if form is not None]


@lru_cache(maxsize=1024)
def rows_of(name: str) -> tuple[Row, ...]:
    """Rows of a translator's name: they begin with it, and with no longer one."""
    word = name.partition(".")[0]
    named = [other.split(".") for other in _TABLE if other.partition(".")[0] == word]
    found = []
    for row in grammar.rows(word):
        fitting = [".".join(other) for other in named if row.begins(other)]
        if name in fitting and not any(other.startswith(f"{name}.") for other in fitting):
            found.append(row)
    return tuple(found)


def _why(instruction: Instruction) -> tuple[str, list[str]]:
    """Modifiers that no row has, and the rows that know most of them."""
    rows = rows_of(_name(instruction.parts)) or grammar.rows(instruction.name)
    if not rows:
        return "", []
    if refused := next((row.refused for row in rows if row.refused), ""):
        return refused, []
    shared = {row: sum(any(m in g.tokens for g in row.groups) for m in instruction.parts) for row in rows}
    nearest = [row.text for row in rows if shared[row] == max(shared.values())]
    known = {token for row in rows for group in row.groups for token in group.tokens}
    unknown = [f".{part}" for part in instruction.modifiers if part not in known]
    return f"modifiers {', '.join(unknown)}" if unknown else "modifiers that do not go together", nearest


def registered() -> dict[str, Any]:
    """Names and their translators."""
    return dict(sorted(_TABLE.items()))


def listing() -> str:
    """The instructions that are modelled as lines of a Markdown table: what docs/simulator.md has."""
    lines = []
    for section, text in grammar.ROWS.items():
        texts = set(syntax.rows(text))
        names = [name for name in registered() if any(row.text in texts for row in rows_of(name))]
        lines.append(f"| {section} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)
