"""Ratios of random rows: sorted, counted and in words. Rows are those of `bench-random.json`, as
dictionaries."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fa4flex.bench.report import OURS

Json = Mapping[str, Any]

PARTS: dict[str, Callable[[Json], str]] = {
    "width": lambda row: f"d{row['problem']['head_dim']}",
    "mask": lambda row: str(row["problem"]["mask"]),
    "heads": lambda row: "1:1" if row["problem"]["heads"] == row["problem"]["kv_heads"] else "grouped",
    "tokens": lambda row: _octave(row["problem"]["length"]),
    "batch": lambda row: _octave(row["problem"]["batch"]),
}
"""Properties by which rows are counted: what is behind is a kind, seldom a row."""


@dataclass(frozen=True)
class Ratios:
    """Speeds over those of the best peer in rows of one pass, the slowest first; `left` rows have no such
    ratio."""

    rows: tuple[Json, ...]
    left: int

    @staticmethod
    def of(rows: Sequence[Json]) -> Ratios:
        timed = [row for row in rows if ratio(row) is not None]
        return Ratios(tuple(sorted(timed, key=lambda row: ratio(row) or 0.0)), len(rows) - len(timed))

    @property
    def values(self) -> list[float]:
        return [value for row in self.rows if (value := ratio(row)) is not None]

    @property
    def behind(self) -> int:
        return sum(value < 1 for value in self.values)

    def summary(self) -> dict[str, Any]:
        """Median, least, number and share of rows behind; without the first two where no row has a ratio."""
        found: dict[str, Any] = {"rows": len(self.rows), "without a ratio": self.left, "behind": self.behind}
        if self.rows:
            found |= {"median": statistics.median(self.values), "least": min(self.values)}
            found["share behind"] = self.behind / len(self.rows)
        return found


def ratio(row: Json) -> float | None:
    """Speed over that of the best peer; None where one of the two was not timed."""
    value: float | None = row.get("ratio to best peer")
    return value


def by_pass(rows: Sequence[Json]) -> dict[str, Ratios]:
    """Ratios of each pass that has rows."""
    passes = dict.fromkeys(row["pass"] for row in rows)
    return {name: Ratios.of([row for row in rows if row["pass"] == name]) for name in passes}


def failures(rows: Sequence[Json]) -> list[str]:
    """Rows in which fa4flex failed, or was wrong, in words; a row that was not run has not failed."""
    return [f"{row['row']}: {why}" for row in rows if (why := failure(row))]


def failure(row: Json) -> str:
    """Reason why a row counts as failed; empty where it does not."""
    if "error" in row:
        return str(row["error"])
    if "not run" in row:
        return ""
    ours = row["peers"].get(OURS, {})
    missed = [x for x in row["verdicts"] if x["passed"] is False and x["says"].startswith("error over")]
    wrong = f"error {missed[0]['value']:.3g} times plain PyTorch's" if missed else ""
    return str(ours.get("reason", wrong))


# --- text ---------------------------------------------------------------------------------------------------


def text(rows: Sequence[Json]) -> str:
    """All of a report: sorted ratios by pass, what rows behind have in common, absences, states and
    failures."""
    parts = [_pass_text(name, ratios) for name, ratios in by_pass(rows).items()]
    parts += [_lines("peers without a time", _absences(rows)), _lines("under load", _states(rows))]
    skipped = [row for row in rows if "not run" in row]
    if skipped:
        parts.append(f"{len(skipped)} rows were not run: {skipped[0]['not run']}")
    parts.append(_lines("FAILED", failures(rows)))
    return "\n\n".join(part for part in parts if part)


def line(row: Json) -> str:
    """One row: its ratio, its name, and the times that are compared."""
    if "error" in row:
        return f"FAILED  {row['row']}: {row['error']}"
    if "not run" in row:
        return f"     -  {row['row']}: not run, {row['not run']}"
    ours, best = row["peers"][OURS], row.get("best peer")
    if "median_ms" not in ours:
        return f"FAILED  {row['row']}: {ours['reason']}"
    beside = f"beside {1e3 * row['peers'][best]['median_ms']:.1f} ({best})" if best else "without a peer"
    value = ratio(row)
    said = f"{value:6.3f}" if value else f"{'-':>6}"
    rate = f"{ours['tflops']:.3g} TFLOP/s"
    return f"{said}  {row['row']}: {1e3 * ours['median_ms']:.1f} us {beside}, {rate}"


def _pass_text(name: str, ratios: Ratios) -> str:
    found = ratios.summary()
    if not ratios.rows:
        return f"{name}: none of {ratios.left} rows has a ratio"
    head = (
        f"{name}: median {found['median']:.3f}, least {found['least']:.3f}, behind in {ratios.behind} of "
        f"{len(ratios.rows)} rows ({found['share behind']:.1%}); {ratios.left} have no ratio"
    )
    return "\n".join([head, *(line(row) for row in ratios.rows), *_parts(ratios)])


def _parts(ratios: Ratios) -> list[str]:
    """A line per property: median and rows behind of each of its values."""
    lines = []
    for name, part in PARTS.items():
        values: dict[str, list[float]] = {}
        for row in ratios.rows:
            values.setdefault(part(row), []).append(ratio(row) or 0.0)
        said = (
            f"{value} {statistics.median(found):.3f} ({sum(x < 1 for x in found)} of {len(found)} behind)"
            for value, found in sorted(values.items(), key=lambda one: statistics.median(one[1]))
        )
        lines.append(f"  by {name}: {', '.join(said)}")
    return lines


def _absences(rows: Sequence[Json]) -> list[str]:
    """Reasons of peers, each with the number of its rows."""
    counts: dict[str, int] = {}
    for row in rows:
        for name, measured in row.get("peers", {}).items():
            if name != OURS and "reason" in measured:
                key = f"{name}: {measured['reason']}"
                counts[key] = counts.get(key, 0) + 1
    return [f"{key} ({count} rows)" for key, count in counts.items()]


def _states(rows: Sequence[Json]) -> list[str]:
    """Least and greatest of clocks, power and temperature while rows were measured; other settings as they
    were."""
    seen: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row.get("state under load", {}).items():
            seen.setdefault(name, []).append(value)
    return [f"{name}: {_range(values)}" for name, values in seen.items()]


def _range(values: Sequence[str]) -> str:
    try:
        ordered = sorted(values, key=lambda value: float(value.split()[0]))
    except ValueError:
        return ", ".join(sorted(set(values)))
    return f"{ordered[0]} to {ordered[-1]}"


def _lines(head: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{head}:", *(f"  {x}" for x in lines)]) if lines else ""


def _octave(number: int) -> str:
    """The range of a power of two that a number lies in, such as 1024-2047."""
    least: int = 1 << (number.bit_length() - 1)
    return f"{least}-{2 * least - 1}" if least > 1 else "1"
