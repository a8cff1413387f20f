"""Traces of the model of time, made by hand: in which order warps execute lines of PTX, and what these do to
barriers and units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ptxsim.model.events import Event
from ptxsim.model.recorder import Trace, WarpTrace
from ptxsim.ptx import parse
from ptxsim.ptx.nodes import Instruction, Kernel

HEAD = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry made()
{
    .reg .pred %p<8>;
    .reg .b16 %rs<64>;
    .reg .b32 %r<256>;
    .reg .b64 %rd<256>;
"""
Does = dict[int, Event | Callable[[int], Event]]
"""Effect of each line: the same every time, or by how often it was executed before."""
Way = tuple[int, int, Iterable[int], Does]
"""(CTA, warp, lines in the order of execution, what they do)"""


def kernel(*lines: str) -> Kernel:
    return next(iter(parse(HEAD + "\n".join([*lines, "ret;", "}"])).kernels.values()))


def instruction(line: str) -> Instruction:
    return kernel(line).body[0]


def trace(lines: Sequence[str], ways: Iterable[Way], ctas: int = 1) -> Trace:
    return Trace(kernel(*lines), "sm_100a", ctas, ctas, tuple(_walk(way) for way in ways))


def straight(lines: Sequence[str], *warps: int) -> Trace:
    """Some warps of one CTA execute all lines once."""
    return trace(lines, [(0, warp, range(len(lines)), {}) for warp in warps])


def _walk(way: Way) -> WarpTrace:
    rank, index, order, does = way
    before: Counter[int] = Counter()
    entries = []
    for line in order:
        what = does.get(line)
        entries.append((line, line + 1, what(before[line]) if callable(what) else what))
        before[line] += 1
    return WarpTrace(rank, index, tuple(entries))
