"""Predictions as text: what warps do, in words and as a picture."""

from __future__ import annotations

from ptxsim.model.machine import Walker
from ptxsim.model.prediction import Prediction
from ptxsim.model.roles import role

NAME = 60
"""Letters of a kernel's name that are shown."""


def explain(p: Prediction) -> str:
    """The prediction in words."""
    chip = p.chip
    lines = [
        f"{p.kernel[:NAME]} on {chip.name}: {chip.processors} multiprocessors, {chip.gigahertz} GHz, "
        f"{chip.peak_tflops:,.0f} TFLOP/s at most",
        f"  one step of {p.step_flops / 1e6:.1f} MFLOP takes {p.cycles_per_step:,.0f} clocks, "
        f"{p.step_flops / chip.mma_flops:,.0f} of them would be MMAs alone: {p.steady_tflops:,.0f} TFLOP/s",
        f"  bounded by {p.bound}; beginning, end and masks of a CTA take {p.overhead:,.0f} clocks more",
        "  busy: " + ", ".join(f"{unit} {share:.0%}" for unit, share in p.utilisation.items()),
    ]
    for one in p.roles:
        first, last = min(one.warps), max(one.warps)
        where = f"warps {first}-{last}" if last > first else f"warp {first}"
        waits = sorted(one.waiting.items(), key=lambda item: -item[1])
        causes = ", ".join(f"{cause} {share:.0%}" for cause, share in waits if share >= 0.005)
        lines.append(f"  {one.name}, {where}: issues {one.issuing:.0%}; waits for {causes or 'nothing'}")
    return "\n".join(lines)


def timeline(p: Prediction, steps: float = 2.0, width: int = 96) -> str:
    """A picture in text of some steps, one row per role and one for the tensor core: `#` busy most of the
    time, `+` for a quarter of it, `:` held by its own results or pipes, `.` waiting for others."""
    start = p.window[0]
    each = steps * p.cycles_per_step / width
    lines = [f"{steps:g} steps from clock {start:,.0f}, {each:,.0f} clocks a letter"]
    rows = {"tensor core": [(s, e - s) for s, e, _ in p.machine.multiplied]}
    lines += [
        _row(name, [_level(spans, start + i * each, each) for i in range(width)])
        for name, spans in rows.items()
    ]
    seen = set()
    for walker in p.machine.walkers:
        name = role(walker)
        if walker.trace.rank or name in seen or name == "other":
            continue
        seen.add(name)
        lines.append(_row(name, [_state(walker, start + i * each, each) for i in range(width)]))
    return "\n".join(lines)


def _row(name: str, letters: list[str]) -> str:
    return f"{name:<12}|{''.join(letters)}|"


def _level(spans: list[tuple[float, float]], at: float, size: float) -> str:
    busy = sum(max(0.0, min(s + d, at + size) - max(s, at)) for s, d in spans) / size
    return "#" if busy >= 0.5 else "+" if busy >= 0.1 else "."


def _state(walker: Walker, at: float, size: float) -> str:
    """State of a warp during most of a span of time."""
    waiting = _between(walker.spans, at, size)
    if waiting >= 0.5:
        return "."
    issuing = sum(1 for t in walker.times if at <= t < at + size) / size
    return "#" if issuing >= 0.5 else "+" if issuing >= 0.2 else ":"


def _between(spans: list[tuple[float, float]], at: float, size: float) -> float:
    return sum(max(0.0, min(stop, at + size) - max(start, at)) for start, stop in spans) / size
