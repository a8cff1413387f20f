"""What the simulator found wrong, and how it says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fa4flex.simulator.ptx.nodes import Instruction

REMARKS = frozenset(("missing wait",))
"""Kinds of what the PTX ISA forbids and hardware is known to make good."""


@dataclass(frozen=True)
class Finding:
    """`kind` is one word or two ("race", "hang", "out of bounds", ...), `text` says who and what.

    `instruction` is where it was noticed, `other` the earlier access or operation that it conflicts with.
    """

    kind: str
    text: str
    instruction: Instruction | None = None
    other: Instruction | None = None

    @property
    def place(self) -> tuple[str, int, int]:
        """What makes two findings the same."""
        lines = (x.line if x else 0 for x in (self.instruction, self.other))
        return self.kind, *lines  # type: ignore[return-value]

    def __str__(self) -> str:
        at = f"\n  at  {self.instruction}" if self.instruction else ""
        other = f"\n  and {self.other}" if self.other else ""
        return f"{self.kind}: {self.text}{at}{other}"


@dataclass
class Findings:
    """Each finding once, with how often it was met."""

    _found: dict[tuple[str, int, int], tuple[Finding, int]] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        first, times = self._found.get(finding.place, (finding, 0))
        self._found[finding.place] = first, times + 1

    def __iter__(self) -> Iterator[Finding]:
        return (finding for finding, _ in self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def times(self, finding: Finding) -> int:
        return self._found[finding.place][1]


class Fault(Exception):
    """Ends a launch: what cannot be continued, such as an access outside memory or a hang."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))
