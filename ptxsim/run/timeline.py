"""A picture of a launch: one line per warp, a bar wherever it ran, against blocks of instructions executed
so far.

Time is the order in which the simulator ran warps, not that of a GPU: it shows who waited for whom.
"""

from __future__ import annotations

from html import escape

from ptxsim.run.counts import roles
from ptxsim.run.launch import Result

WIDTH, ROW, LEFT = 960, 14, 150
COLOURS = ("#4878a8", "#d1603d", "#6a9f58", "#967bb6", "#c9a227", "#5f9ea0")


def svg(result: Result) -> str:
    """The picture as an SVG document."""
    names = {}
    for number, role in enumerate(roles(result)):
        for warp in role.warps:
            names[warp] = role.name, COLOURS[number % len(COLOURS)]
    warps = sorted({(cta, warp) for _, cta, warp, _, _ in result.turns})
    rows = {key: i for i, key in enumerate(warps)}
    end = max((stop for *_, stop in result.turns), default=1) or 1
    height = ROW * (len(rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {height}" '
        f'font-family="sans-serif" font-size="10">',
        f'<text x="4" y="{ROW - 3}">{escape(result.kernel[:60])} on {result.arch}</text>',
    ]
    for (cta, warp), row in rows.items():
        label = f"CTA {cta} warp {warp} {names.get(warp, ('', ''))[0]}"
        parts.append(f'<text x="4" y="{ROW * (row + 2) - 4}">{escape(label)}</text>')
    for _, cta, warp, start, stop in result.turns:
        x, width = LEFT + WIDTH * start / end, max(0.3, WIDTH * (stop - start) / end)
        y, colour = ROW * (rows[cta, warp] + 1) + 2, names.get(warp, ("", "#888"))[1]
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>"])
