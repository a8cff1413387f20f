"""Findings of the simulator, and their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ptxsim.ptx.nodes import Instruction

Place = tuple[str, int, str]
REMARKS = frozenset(("no waits",))
"""Kinds of what the PTX ISA forbids, hardware is known to make good, and a kernel relies on throughout."""


@dataclass(frozen=True)
class Finding:
    """`kind` is one word or two ("race", "hang", "out of bounds", ...), `text` says who and what.

    `instruction` is where it was noticed, `other` the earlier access or operation that it conflicts with.
    `times` is how often it was met: `text` and `other` are those of the first time.
    """

    kind: str
    text: str
    instruction: Instruction | None = None
    other: Instruction | None = None
    times: int = field(default=1, compare=False)

    @property
    def place(self) -> Place:
        """Key of findings of a kernel that are the same: the kind, the instruction, and the kind of the other
        one, of which there may be hundreds where a loop is unrolled."""
        line = self.instruction.line if self.instruction else 0
        return self.kind, line, self.other.opcode if self.other else ""

    def __str__(self) -> str:
        at = f"\n  at  {self.instruction}" if self.instruction else ""
        other = f"\n  and {self.other}" if self.other else ""
        often = f", {self.times} times" if self.times > 1 else ""
        return f"{self.kind}: {self.text}{often}{at}{other}"


@dataclass
class Findings:
    """Each finding once, with how often it was met."""

    _found: dict[Place, tuple[Finding, int]] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        first, times = self._found.get(finding.place, (finding, 0))
        self._found[finding.place] = first, times + finding.times

    def __iter__(self) -> Iterator[Finding]:
        return (replace(finding, times=times) for finding, times in self._found.values())

    def __len__(self) -> int:
        return len(self._found)


class Fault(Exception):
    """Ends a launch: what cannot be continued, such as an access outside memory or a hang."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))
