"""Share of a kernel's instructions and barriers that launches executed.

What no launch executes is not checked: a stage of a ring that a small size never uses again has barriers
whose faults nothing shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ptxsim.ptx.nodes import Instruction
from ptxsim.run.counts import category
from ptxsim.run.launch import Result
from ptxsim.run.program import Program

BARRIERS = frozenset(("barrier waits", "barrier signals"))


@dataclass(frozen=True)
class Coverage:
    """Instructions of a kernel in all, and those that no launch of it came to, in their order."""

    kernel: str
    body: tuple[Instruction, ...]
    missed: tuple[Instruction, ...]

    def __str__(self) -> str:
        waits, missed = barriers(self.body), barriers(self.missed)
        text = f"executed {_share(len(self.body) - len(self.missed), len(self.body))} instructions"
        text += f" and {_share(len(waits) - len(missed), len(waits))} barriers" if waits else ""
        return f"{text}, not those on PTX lines {_lines(missed)}" if missed else text

    def unexecuted(self) -> str:
        """Instructions that no launch came to, a line for each opcode: how many, and their PTX lines."""
        lines: dict[str, list[int]] = {}
        for instruction in self.missed:
            lines.setdefault(instruction.opcode, []).append(instruction.line)
        most = sorted(lines.items(), key=lambda each: (-len(each[1]), each[0]))
        return "\n".join(
            f"  never executed: {len(at)} {opcode}, PTX lines {_ranges(at)}" for opcode, at in most
        )


def coverage(results: Iterable[Result]) -> list[Coverage]:
    """Coverage of each kernel by all of its launches, in the order of the first ones."""
    programs: dict[int, tuple[Program, set[int]]] = {}
    for result in results:
        _, starts = programs.setdefault(id(result.program.kernel), (result.program, set()))
        starts.update(start for _, _, start in result.executed)
    return [_of(program, starts) for program, starts in programs.values()]


def _of(program: Program, starts: set[int]) -> Coverage:
    missed = [i for start, block in sorted(program.blocks.items()) if start not in starts for i in block.body]
    return Coverage(program.kernel.name, program.kernel.body, tuple(missed))


def barriers(body: Iterable[Instruction]) -> list[Instruction]:
    """Arrivals at barriers, and waits for them."""
    return [instruction for instruction in body if category(instruction) in BARRIERS]


def _share(executed: int, of: int) -> str:
    return f"{executed:,} of {of:,}"


def _lines(instructions: list[Instruction]) -> str:
    """Their PTX lines, ascending, each once."""
    return ", ".join(map(str, sorted({instruction.line for instruction in instructions})))


def _ranges(lines: list[int]) -> str:
    """Lines ascending, those that follow one another from the first to the last."""
    found: list[list[int]] = []
    for line in sorted(set(lines)):
        if found and found[-1][-1] == line - 1:
            found[-1].append(line)
        else:
            found.append([line])
    return ", ".join(f"{some[0]}-{some[-1]}" if len(some) > 1 else str(some[0]) for some in found)
