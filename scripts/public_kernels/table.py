"""The table of docs/simulator.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kernel_case import Outcome

CHIPS = {"sm_90a": "Hopper", "sm_100a": "Blackwell"}


def table(outcomes: Sequence[Outcome]) -> str:
    rows = ["| kernel | chip | right | findings | seconds |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        order = " (in order)" if outcome.in_order else ""
        right = f"yes{order}, {outcome.worst:.0e}" if outcome.right else f"no: {_short(outcome.error)}"
        kinds = Counter(kind for kind, _ in outcome.findings)
        found = ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in kinds.items())
        rows.append(f"| {outcome.name} | {CHIPS[outcome.arch]} | {right} | {found} | {outcome.seconds:.0f} |")
    right = sum(outcome.right for outcome in outcomes)
    return "\n".join(rows) + f"\n\n{right} of {len(outcomes)} are right.\n"


def _short(error: str) -> str:
    return " ".join(error.split())[:80].replace("|", "/")
