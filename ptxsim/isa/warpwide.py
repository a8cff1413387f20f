"""Instructions that the lanes of a warp execute together: exchange, votes, reductions, elections (PTX ISA,
"Data Movement and Conversion Instructions: shfl.sync", "Parallel Synchronization and Communication
Instructions: vote.sync, match.sync, activemask, redux.sync, elect.sync, bar.warp.sync").

The scheduler brings all lanes together that a membermask names, as far as they are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.operands import read, write
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, Step, translates
from ptxsim.ptx.nodes import Discard, Imm, Instruction, Operand, Pair
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, ONE_LANE, Mask
from ptxsim.watch.findings import Finding

Lanes = NDArray[np.bool_]
Teams = Callable[[Warp, Mask], Sequence[Mask]]
"""The lanes that act together; several teams where lanes come with different membermasks."""

_LANE = np.arange(LANES)
_BIT = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
_ALL = np.ones(LANES, np.bool_)
_FULL = 0xFFFFFFFF
_UNKNOWN = np.uint32(0xA5A5A5A5)
"""Value that a lane receives from one that takes no part."""
_NAN = np.uint32(0x7FFFFFFF)

# --- who takes part -----------------------------------------------------------------------------------------


def members(operand: Operand, instruction: Instruction) -> Teams:
    """Reader of the lanes that take part, from a membermask. Lanes that are not in their own membermask, and
    live ones that are named and do not come, are findings."""
    if not isinstance(operand, Imm):
        return _varying_members(operand, instruction)
    named = _as_lanes(int(operand.value) & _FULL)
    if not named.all():
        return lambda warp, mask: (_team(warp, mask, named, instruction),)

    def everyone(warp: Warp, mask: Mask) -> Sequence[Mask]:
        if mask is not None and (warp.live > mask).any():
            _team(warp, mask, named, instruction)
        return (mask,)

    return everyone


def _varying_members(operand: Operand, instruction: Instruction) -> Teams:
    masks = read(operand, "u32")

    def teams(warp: Warp, mask: Mask) -> Sequence[Mask]:
        came, values = _ALL if mask is None else mask, masks(warp)
        first = values[came.argmax()]
        if (values[came] == first).all():
            return (_team(warp, mask, _as_lanes(first), instruction),)
        return [
            _team(warp, came & (values == one), _as_lanes(one), instruction)
            for one in np.unique(values[came])
        ]

    return teams


def _team(warp: Warp, mask: Mask, named: Lanes, instruction: Instruction) -> Mask:
    came = _ALL if mask is None else mask
    for who, what in (
        (came & ~named, "not in their own membermask"),
        (named & warp.live & ~came, "named but absent"),
    ):
        if who.any():
            lanes = ", ".join(str(lane) for lane in np.flatnonzero(who))
            warp.cta.launch.findings.add(
                Finding("misuse", f"lanes {lanes} of {warp} are {what}", instruction)
            )
    return mask


def _as_lanes(bits: Any) -> Lanes:
    return (np.uint32(bits) & _BIT) != 0


def _as_bits(lanes: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """uint32 [...] from bool [..., 32]."""
    return np.packbits(lanes, axis=-1, bitorder="little").view(np.uint32)[..., 0]


def _results(operand: Operand) -> tuple[Operand, Operand]:
    """The two results of d|p, or of d."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Discard())


# --- exchange -----------------------------------------------------------------------------------------------


@translates("shfl")
def shfl(instruction: Instruction, form: Form) -> Step:
    """d|p, a, b, c, membermask: a lane outside its segment keeps its own value, and p tells."""
    first, second = _results(instruction.operands[0])
    d, p = write(first, "b32"), write(second, "pred")
    _, a, b, c, named = instruction.operands
    value, teams = read(a, "b32"), members(named, instruction)
    wants_inside = not isinstance(second, Discard)
    sources = _sources(form.one_of(*_SOURCES), b, c)

    def step(warp: Warp, mask: Mask) -> None:
        source, inside = sources(warp)
        moved = value(warp).take(source)
        for lanes in teams(warp, mask):
            if lanes is None:
                d(warp, moved, None)
            else:
                d(warp, np.where(lanes.take(source), moved, _UNKNOWN), lanes)
            if wants_inside:
                p(warp, inside, lanes)

    return step


Reach = tuple[NDArray[np.intp], NDArray[np.bool_]]
"""From which lane each lane takes, and whether that was in range (if not, it is the lane itself)."""
_SOURCES: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "up": lambda by, low, high: (_LANE - by, _LANE - by >= high),
    "down": lambda by, low, high: (_LANE + by, _LANE + by <= high),
    "bfly": lambda by, low, high: (_LANE ^ by, (_LANE ^ by) <= high),
    "idx": lambda by, low, high: (low | by, (low | by) <= high),
}
"""Source lanes, and whether they are in range, by mode, from b and the first and last lane of each lane's
segment (for up, `high` is its lower bound)."""


def _sources(mode: str, b: Operand, c: Operand) -> Callable[[Warp], Reach]:
    by, segments, combine = read(b, "u32"), _segments(mode, c), _SOURCES[mode]

    def reach(warp: Warp) -> Reach:
        low, high, usable = segments(warp)
        source, inside = combine(by(warp) & usable, low, high)
        return np.where(inside, source, _LANE), inside

    if isinstance(b, Imm) and isinstance(c, Imm):
        constant = reach(None)  # type: ignore[arg-type]  # literals need no warp
        return lambda warp: constant
    return reach


def _segments(mode: str, c: Operand) -> Callable[[Warp], tuple[Any, Any, Any]]:
    """First and last lane of each lane's segment, and the bits of b that count; int64 [32]."""
    bounds = read(c, "u32")

    def segments(warp: Warp) -> tuple[Any, Any, Any]:
        given = bounds(warp).astype(np.int64)
        clamp, segment = given & 31, given >> 8 & 31
        low = _LANE & segment
        return low, low | (clamp & ~segment), 31 & ~segment if mode == "idx" else np.full(LANES, 31)

    if isinstance(c, Imm):
        constant = segments(None)  # type: ignore[arg-type]
        return lambda warp: constant
    return segments


# --- votes and reductions -----------------------------------------------------------------------------------

_Vote = Callable[[Lanes, Mask], Any]
_VOTES: dict[str, _Vote] = {
    "any": lambda chosen, team: chosen.any(),
    "all": lambda chosen, team: (chosen if team is None else chosen | ~team).all(),
    "uni": lambda chosen, team: not chosen.any() or (chosen if team is None else chosen | ~team).all(),
    "ballot": lambda chosen, team: _as_bits(chosen),
}


@translates("vote")
def vote(instruction: Instruction, form: Form) -> Step:
    decide = _VOTES[form.one_of(*_VOTES)]
    result, source, named = instruction.operands
    d, value, teams = write(result, form.type), read(source, "pred"), members(named, instruction)

    def step(warp: Warp, mask: Mask) -> None:
        values = value(warp)
        for lanes in teams(warp, mask):
            d(warp, decide(values if lanes is None else values & lanes, lanes), lanes)

    return step


@translates("activemask")
def activemask(instruction: Instruction, form: Form) -> Step:
    d = write(instruction.operands[0], "b32")
    return lambda warp, mask: d(warp, _as_bits(_ALL if mask is None else mask), mask)


@translates("match")
def match(instruction: Instruction, form: Form) -> Step:
    """any: the lanes with the same value. all: the lanes if they have one value, else none, and p tells
    which."""
    first, second = _results(instruction.operands[0])
    d, p, value = write(first, "b32"), write(second, "pred"), read(instruction.operands[1], form.type)
    teams = members(instruction.operands[2], instruction)

    def any_step(warp: Warp, mask: Mask) -> None:
        values = value(warp)
        same = values[:, None] == values
        for lanes in teams(warp, mask):
            d(warp, _as_bits(same if lanes is None else same & lanes), lanes)

    def all_step(warp: Warp, mask: Mask) -> None:
        values = value(warp)
        for lanes in teams(warp, mask):
            mine = values if lanes is None else values[lanes]
            agree = bool((mine == mine[0]).all())
            d(warp, _as_bits(_ALL if lanes is None else lanes) if agree else 0, lanes)
            p(warp, agree, lanes)

    return any_step if "any" in form.flags else all_step


@translates("redux")
def redux(instruction: Instruction, form: Form) -> Step:
    """min and max of f32 take +0 for larger than -0; without .NaN they pass over NaNs if a number is left."""
    reduce = _REDUCTIONS[instruction.parts[2:]]
    result, source, named = instruction.operands
    kind = "u32" if form.type in ("b32", "f32") or "add" in form.flags else form.type
    d, value, teams = write(result, kind), read(source, kind), members(named, instruction)

    def step(warp: Warp, mask: Mask) -> None:
        values = value(warp)
        for lanes in teams(warp, mask):
            d(warp, reduce(values if lanes is None else values[lanes]), lanes)

    return step


def _float_reduction(take: Callable[[Any], Any], absolute: bool, spread_nan: bool) -> Callable[[Any], Any]:
    def reduce(bits: NDArray[np.uint32]) -> Any:
        bits = bits & np.uint32(0x7FFFFFFF) if absolute else bits
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
        if is_nan.all() or (spread_nan and is_nan.any()):
            return _NAN
        numbers = bits[~is_nan].view(np.int32)
        # Negative floats run against the order of their bits: turned round, all bits sort as the numbers do.
        return numbers[take(numbers ^ (numbers >> 31 & 0x7FFFFFFF))].view(np.uint32)

    return reduce


_REDUCTIONS: dict[tuple[str, ...], Callable[[Any], Any]] = {
    ("add", "u32"): lambda values: np.add.reduce(values, dtype=np.uint32),
    ("add", "s32"): lambda values: np.add.reduce(values, dtype=np.uint32),
    ("and", "b32"): np.bitwise_and.reduce,
    ("or", "b32"): np.bitwise_or.reduce,
    ("xor", "b32"): np.bitwise_xor.reduce,
}
for _kind in ("u32", "s32"):
    _REDUCTIONS |= {("min", _kind): np.minimum.reduce, ("max", _kind): np.maximum.reduce}
for _op, _take in (("min", np.argmin), ("max", np.argmax)):
    _REDUCTIONS |= {
        (_op, "f32"): _float_reduction(_take, False, False),
        (_op, "abs", "f32"): _float_reduction(_take, True, False),
        (_op, "NaN", "f32"): _float_reduction(_take, False, True),
        (_op, "abs", "NaN", "f32"): _float_reduction(_take, True, True),
    }

# --- election and barrier -----------------------------------------------------------------------------------


@translates("elect")
def elect(instruction: Instruction, form: Form) -> Step:
    """d is the lowest lane that takes part, and p is true there only."""
    first, second = _results(instruction.operands[0])
    d, p, teams = write(first, "b32"), write(second, "pred"), members(instruction.operands[1], instruction)

    def step(warp: Warp, mask: Mask) -> None:
        for lanes in teams(warp, mask):
            leader = 0 if lanes is None else int(lanes.argmax())
            d(warp, leader, lanes)
            p(warp, ONE_LANE[leader], lanes)

    return step


@translates("bar.warp", "barrier.warp")
def warp_barrier(instruction: Instruction, form: Form) -> Act:
    """Lanes run in step and see each other's memory at once: there is nothing left to wait for."""
    teams = members(instruction.operands[0], instruction)

    def run(warp: Warp, mask: Mask) -> None:
        teams(warp, mask)

    return Act(run)
