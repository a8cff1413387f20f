"""Picture of when kernels run on each GPU.

    python benchmarks/draw_spans.py spans.json picture.svg [--row causal]

Spans are those that benchmarks/parallel_growth.py --profile writes; each GPU has a lane for attention and
what belongs to it, and one for exchanges.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

WIDTH, LEFT, LANE, GAP = 960, 70, 14, 8
COLOURS = {"attention": "#3b7dd8", "other": "#8a94a6", "exchange": "#f2a73b"}
Span = tuple[float, float, str]
"""Begin and end in microseconds, and "attention", "exchange" or "other"."""

LEAST = 0.25
"""Width of a span, in pixels, below which it is drawn with the one before."""


def picture(ranks: list[list[Span]]) -> str:
    """SVG of the spans of all GPUs, in microseconds, by one clock for each."""
    end = max(hi for spans in ranks for _, hi, _ in spans)
    first = min(lo for spans in ranks for lo, _, _ in spans)
    scale = WIDTH / (end - first)
    height = len(ranks) * (2 * LANE + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {height}" '
        'font-family="sans-serif" font-size="11" fill="#2b3140">'
    ]
    for rank, spans in enumerate(ranks):
        top = rank * (2 * LANE + GAP)
        parts.append(f'<text x="4" y="{top + LANE + 3}">GPU {rank}</text>')
        for kind, colour in COLOURS.items():
            y = top + (LANE if kind == "exchange" else 0)
            for lo, hi in joined([x for x in spans if x[2] == kind], LEAST / scale):
                x, width = LEFT + (lo - first) * scale, max((hi - lo) * scale, LEAST)
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE - 2}" fill="{colour}"/>'
                )
    words = ", ".join(COLOURS)
    parts.append(f'<text x="{LEFT}" y="{height - 10}">{words}: {(end - first) / 1e3:.2f} ms in all</text>')
    return "\n".join([*parts, "</svg>", ""])


def joined(spans: list[Span], least: float = 0.0) -> list[tuple[float, float]]:
    """Spans as ranges; those no farther from each other than `least` are one."""
    found: list[tuple[float, float]] = []
    for lo, hi, _ in sorted(spans):
        if found and lo - found[-1][1] <= least:
            found[-1] = found[-1][0], max(hi, found[-1][1])
        else:
            found.append((lo, hi))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spans", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--row", default="", help="part of a row's name; the first by default")
    given = parser.parse_args()
    rows = json.loads(given.spans.read_text())
    name = next(name for name in rows if given.row in name)
    given.picture.write_text(picture(rows[name]))


if __name__ == "__main__":
    main()
