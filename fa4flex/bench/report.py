"""From times to TFLOP/s, ratios and verdicts; tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fa4flex.bench.accuracy import Accuracy
from fa4flex.bench.measure import Samples
from fa4flex.bench.suites import MOST_ERROR, Target

OURS = "fa4flex"


@dataclass(frozen=True)
class Measured:
    """One peer in one row: times and errors, or the reason why there are none. A wrong result has no
    times. aside: it computes something else, and is no competitor."""

    samples: Samples | None = None
    accuracy: Accuracy | None = None
    reason: str = ""
    aside: bool = False

    @property
    def right(self) -> bool:
        """True within ten times plain PyTorch's error: a wrong result is no competitor."""
        return self.accuracy is None or self.accuracy.ratio <= 10

    @property
    def why(self) -> str:
        """Reason why there are no times to compare; empty where there are."""
        if self.right or self.accuracy is None:
            return self.reason
        return f"WRONG RESULT, {self.accuracy.ratio:.3g} times plain PyTorch's error"


@dataclass(frozen=True)
class Verdict:
    """One target: `passed` is None where it could not be judged, which `says` explains."""

    says: str
    value: float | None
    limit: float
    passed: bool | None

    @property
    def word(self) -> str:
        return {True: "pass", False: "FAIL", None: "not judged"}[self.passed]


class AnyRow(Protocol):
    """Row as reports see it: its name, what it is compared with, the unit of its rate (10^12 of `flops` a
    second), and what a file of numbers says of it."""

    @property
    def name(self) -> str: ...

    @property
    def targets(self) -> tuple[Target, ...]: ...

    @property
    def base(self) -> str: ...

    @property
    def most_cost(self) -> float: ...

    @property
    def shrink(self) -> int: ...

    @property
    def unit(self) -> str: ...

    def about(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RowReport:
    """A row with every peer's measurement, by the peer's name; fa4flex is among them. flops: FLOPs, or bytes
    where the row's unit is TB/s."""

    row: AnyRow
    flops: int
    peers: Mapping[str, Measured]
    state: Mapping[str, str] = field(default_factory=dict)

    def seconds(self, peer: str) -> float | None:
        """Median, or None where the peer has no usable time."""
        result = self.peers.get(peer)
        return result.samples.median if result and result.right and result.samples else None

    def tflops(self, peer: str) -> float | None:
        seconds = self.seconds(peer)
        return None if seconds is None else self.flops / seconds / 1e12

    @property
    def best_peer(self) -> str | None:
        """The fastest of those that are not fa4flex."""
        others = (name for name, one in self.peers.items() if name != OURS and not one.aside)
        times = {name: t for name in others if (t := self.seconds(name)) is not None}
        return min(times, key=times.__getitem__) if times else None

    def ratio(self, against: str) -> float | None:
        """fa4flex's speed over that of a peer, or of the "best" one."""
        name = self.best_peer if against == "best" else against
        ours, theirs = self.seconds(OURS), self.seconds(name) if name else None
        return theirs / ours if ours and theirs else None

    def reason(self, peer: str) -> str:
        """Reason why there is no time of `peer`."""
        name = self.best_peer if peer == "best" else peer
        result = self.peers.get(name) if name else None
        return "not measured" if result is None else result.why


# --- verdicts -----------------------------------------------------------------------------------------------


def verdicts(report: RowReport, all_reports: Sequence[RowReport]) -> list[Verdict]:
    """Speed by the row's targets, cost by its base, and fa4flex's error. Times of small sizes are not judged:
    targets are those of full ones."""
    results = [_speed(report, target) for target in report.row.targets]
    if report.row.base:
        base = next((r for r in all_reports if r.row.name == report.row.base), None)
        results.append(_cost(report, base))
    if report.row.shrink > 1:
        results = [replace(verdict, passed=None) for verdict in results]
    ours = report.peers.get(OURS)
    if ours and ours.accuracy:
        value = ours.accuracy.ratio
        results.append(Verdict("error over plain PyTorch's", value, MOST_ERROR, value <= MOST_ERROR))
    return results


def _speed(report: RowReport, target: Target) -> Verdict:
    value = report.ratio(target.against)
    name = f"best peer, {report.best_peer}" if target.against == "best" else target.against
    says = f"speed over {name}" + (f" (aim {target.aim:.2f})" if target.aim else "")
    if value is None:
        # Without a time of its own fa4flex has failed; without the other's, nothing can be said.
        failed = report.seconds(OURS) is None
        absent = OURS if failed else target.against
        why = f"{says}; {absent}: {report.reason(absent)}"
        return Verdict(why, None, target.ratio, False if failed else None)
    return Verdict(says, value, target.ratio, value >= target.ratio)


def _cost(report: RowReport, base: RowReport | None) -> Verdict:
    says, most = f"cost over {report.row.base}", report.row.most_cost
    ours, without = report.seconds(OURS), base.seconds(OURS) if base else None
    if ours is None or without is None:
        return Verdict(f"{says}: not measured", None, most, False if base else None)
    cost = ours / without - 1
    return Verdict(says, cost, most, cost <= most)


# --- tables -------------------------------------------------------------------------------------------------


def full_table(reports: Sequence[RowReport]) -> str:
    """Every peer of every row: TFLOP/s, milliseconds with quartiles, errors; reasons where there is none."""
    lines = [
        f"{'row':24} {'peer':8} {reports[0].row.unit:>8} {'ms':>9} {'quartiles':>17} {'ours/it':>8} "
        f"{'worst element':>14} {'worst row':>10} {'/plain':>7}"
    ]
    for report in reports:
        lines += [_line(report, name, measured) for name, measured in report.peers.items()]
    return "\n".join(lines)


def _line(report: RowReport, name: str, measured: Measured) -> str:
    head = f"{report.row.name:24} {name:8}"
    if measured.samples is None or measured.why:
        return f"{head} -- {measured.why}"
    low, high = (1e3 * t for t in measured.samples.quartiles)
    median = measured.samples.median
    rate = report.flops / median / 1e12
    ours = report.seconds(OURS)
    ratio = f"{median / ours:8.2f}" if ours else f"{'-':>8}"
    text = f"{head} {_rate(rate):>8} {1e3 * median:9.4f} {low:8.4f}-{high:8.4f} {ratio}"
    if measured.accuracy is None:
        return text
    a = measured.accuracy
    return f"{text} {a.element:14.2e} {a.row:10.2e} {a.ratio:7.2f}"


def short_table(reports: Sequence[RowReport]) -> str:
    """One line per target."""
    units = {report.row.unit for report in reports}
    unit = units.pop() if len(units) == 1 else "rate"
    lines = [f"{'row':24} {unit:>7}  {'':10} value / target"]
    for report in reports:
        rate = report.tflops(OURS)
        head = f"{report.row.name:24} {_rate(rate) if rate else '-':>7}"
        lines += [f"{head}  {verdict_text(verdict)}" for verdict in verdicts(report, reports)]
    return "\n".join(lines)


def _rate(tflops: float) -> str:
    return f"{tflops:.1f}" if tflops >= 1 else f"{tflops:.2g}"


def verdict_text(verdict: Verdict) -> str:
    value = "-" if verdict.value is None else f"{verdict.value:.3g}"
    return f"{verdict.word:10} {value:>6} / {verdict.limit:<5.3g} {verdict.says}"


# --- JSON ---------------------------------------------------------------------------------------------------


def as_json(reports: Sequence[RowReport]) -> list[dict[str, Any]]:
    return [_row_json(report, reports) for report in reports]


def _row_json(report: RowReport, reports: Sequence[RowReport]) -> dict[str, Any]:
    return {
        "row": report.row.name,
        **report.row.about(),
        "flops": report.flops,
        "state under load": dict(report.state),
        "peers": {name: _measured_json(report, measured) for name, measured in report.peers.items()},
        "ratio to best peer": report.ratio("best"),
        "best peer": report.best_peer,
        "ratio to flex": report.ratio("flex"),
        "ratio to FA4": report.ratio("FA4"),
        "verdicts": [vars(verdict) for verdict in verdicts(report, reports)],
    }


def _measured_json(report: RowReport, measured: Measured) -> dict[str, Any]:
    results: dict[str, Any] = {"reason": measured.why} if measured.why else {}
    if measured.samples is not None and measured.right:
        rate = {"TFLOP/s": "tflops", "TB/s": "tbytes"}[report.row.unit]
        results = {
            "median_ms": 1e3 * measured.samples.median,
            rate: report.flops / measured.samples.median / 1e12,
            "samples_ms": [1e3 * t for t in measured.samples.seconds],
        }
    if measured.accuracy is not None:
        results["errors"] = {**vars(measured.accuracy), "over plain": measured.accuracy.ratio}
    return results
