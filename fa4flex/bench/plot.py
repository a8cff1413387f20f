"""Bars of TFLOP/s, and curves of ratios. Imported only when a plot is written: matplotlib is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from fa4flex.bench.report import OURS, RowReport

_COLOURS = ("#2f6fdf", "#e08a2e", "#5aa469", "#8a8f9c", "#b65fc1", "#c94f4f")


def save(reports: Sequence[RowReport], title: str, path: Path) -> None:
    """One group of bars per row, one colour per peer; the format is that of the path's ending."""
    every = dict.fromkeys(name for report in reports for name in report.peers)
    names = [name for name in every if name == OURS or any(report.tflops(name) for report in reports)]
    figure = Figure(figsize=(max(6.0, 1.1 * len(reports) + 2), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        rates = [report.tflops(name) or 0.0 for report in reports]
        places = [i + (number - (len(names) - 1) / 2) * width for i in range(len(reports))]
        bars = axes.bar(places, rates, width, label=name, color=_COLOURS[number % len(_COLOURS)])
        if name == OURS:
            axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(reports)), [report.row.name for report in reports], rotation=30, ha="right")
    axes.set_ylabel(", ".join(dict.fromkeys(report.row.unit for report in reports)))
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(frameon=False, ncols=len(names), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def save_ratios(curves: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Speeds over those of the best peer, by pass, each sorted from the slowest to the fastest row; what lies
    below the line of 1 is behind."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(1.0, color=_COLOURS[3], linewidth=0.8)
    for number, (name, values) in enumerate(curves.items()):
        places = [100 * (i + 0.5) / len(values) for i in range(len(values))]
        label = f"{name}, {len(values)} rows"
        axes.plot(places, values, ".-", label=label, color=_COLOURS[number], linewidth=0.8, markersize=5)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(8))  # powers of ten are too far apart
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:.2f}")
    axes.set_xlim(0, 100)
    axes.set_xlabel("rows, %")
    axes.set_ylabel("speed over the best peer's")
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
