"""Moves between registers, and addresses: mov cvta isspacep. PTX ISA 9.7.9.3, 9.7.9.4, 9.7.9.19 and
9.7.9.20."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim.isa.lanewise import (
    element_type,
    elementwise,
    lanewise,
    part_of,
    target,
    target_of,
    value,
    value_of,
)
from ptxsim.isa.operands import Array
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, translates
from ptxsim.isa.together import Elementwise, kind_of, place_of
from ptxsim.ptx.nodes import WIDTHS, Discard, Imm, Instruction, Reg, Vector
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.state.window import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW

_VECTORS = {("b16", 2): "b8", ("b32", 2): "b16", ("b32", 4): "b8", ("b64", 2): "b32", ("b64", 4): "b16"}
_VECTORS |= {("b128", 2): "b64", ("b128", 4): "b32"}
"""The type of the elements of a vector, by the whole's type and their number."""


@translates("mov")
def mov(ins: Instruction, form: Form) -> Step:
    """d, a; a may be a register, a literal, a special register or a variable's address, and either may be a
    vector."""
    type, (first, second) = form.type, ins.operands
    if isinstance(first, Vector):
        element = _VECTORS[type, len(first.items)]
        return _unpack_wide(ins, first) if type == "b128" else _unpack(ins, first, element)
    if isinstance(second, Vector):
        element = _VECTORS[type, len(second.items)]
        return _pack_wide(ins, second) if type == "b128" else _pack(ins, second, element)
    d, a = target(ins, 0, type), value(ins, 1, type)

    def step(warp: Warp, mask: Mask) -> None:
        d(warp, a(warp), mask)

    return step if type == "b128" else elementwise(ins, step, type, (type,), lambda values: values)


def _unpack(ins: Instruction, vector: Vector, element: str) -> Step:
    packed = f"{element}x{len(vector.items)}"
    moves = [
        (target_of(item, element), part_of(ins.operands[1], packed, part))
        for part, item in enumerate(vector.items)
        if not isinstance(item, Discard)
    ]
    if len(moves) == 2:
        (d, a), (e, b) = moves

        def two(warp: Warp, mask: Mask) -> None:
            d(warp, a(warp), mask)
            e(warp, b(warp), mask)

        return _unpack_together(ins, vector, element, two)

    def several(warp: Warp, mask: Mask) -> None:
        for d, a in moves:
            d(warp, a(warp), mask)

    return _unpack_together(ins, vector, element, several)


def _unpack_together(ins: Instruction, vector: Vector, element: str, step: Step) -> Step:
    kept = [(part, item) for part, item in enumerate(vector.items) if isinstance(item, Reg)]
    source, count, parts = ins.operands[1], len(vector.items), tuple(part for part, _ in kept)
    if not isinstance(source, Reg) or len(kept) < 2 or element == "b8":
        return step

    def split(whole: Array) -> tuple[Array, ...]:
        return tuple(whole[:, part::count] for part in parts)

    results = tuple(place_of(item, element) for _, item in kept)
    return Elementwise(step, kind_of(ins, parts), split, results, (place_of(source, f"{element}x{count}"),))


def _pack(ins: Instruction, vector: Vector, element: str) -> Step:
    """Elements are narrower than the result: no source can be the register that is written."""
    packed, count = f"{element}x{len(vector.items)}", len(vector.items)
    sources = [value_of(item, element) for item in vector.items]
    places = [part_of(ins.operands[0], packed, part) for part in range(count)]
    pairs = list(zip(places, sources))

    def step(warp: Warp, mask: Mask) -> None:
        for place, source in pairs:
            if mask is None:
                place(warp)[...] = source(warp)
            else:
                np.copyto(place(warp), source(warp), casting="unsafe", where=mask)

    return step if element == "b8" else _pack_together(ins, vector, packed, element, step)


def _pack_together(ins: Instruction, vector: Vector, packed: str, element: str, step: Step) -> Step:
    first, items = ins.operands[0], vector.items
    if not isinstance(first, Reg) or not all(isinstance(item, Reg | Imm) for item in items):
        return step
    nobody: Any = None  # literals need no warp
    sources = tuple(
        place_of(item, element) if isinstance(item, Reg) else value_of(item, element)(nobody)
        for item in items
    )
    count, dtype = len(items), element_type(packed)

    def join(*parts: Array) -> Array:
        whole = np.empty((max(map(len, parts)), count * LANES), dtype)
        for at, part in enumerate(parts):
            whole[:, at::count] = part
        return whole

    kinds = tuple(isinstance(item, Reg) for item in items)
    return Elementwise(step, kind_of(ins, kinds), join, (place_of(first, packed),), sources)


def _unpack_wide(ins: Instruction, vector: Vector) -> Step:
    element = _VECTORS["b128", len(vector.items)]
    whole = value(ins, 1, "b128")
    targets = [target_of(item, element) for item in vector.items]

    def step(warp: Warp, mask: Mask) -> None:
        columns = whole(warp).view(f"u{WIDTHS[element] // 8}")
        for part, d in enumerate(targets):
            d(warp, columns[:, part], mask)

    return step


def _pack_wide(ins: Instruction, vector: Vector) -> Step:
    element = _VECTORS["b128", len(vector.items)]
    sources, d = [value_of(item, element) for item in vector.items], target(ins, 0, "b128")
    return lambda warp, mask: d(warp, np.stack([s(warp) for s in sources], axis=1).view(np.uint64), mask)


# --- addresses ----------------------------------------------------------------------------------------------

_WINDOWS = {"local": LOCAL_WINDOW, "shared": SHARED_WINDOW}


@translates("cvta")
def cvta(ins: Instruction, form: Form) -> Step:
    """An address of a state space to a generic one, or with .to back. Global memory, parameters and constants
    have the same address in both; the windows of shared and local memory lie behind a bit of their own
    (state/window.py)."""
    window = _WINDOWS.get(form.named["space"].split("::")[0])
    if window is None:
        d, a = target(ins, 0, "u64"), value(ins, 1, "u64")
        return lambda warp, mask: d(warp, a(warp), mask)
    bit = np.uint64(window)
    if "to" in form.flags:
        return lanewise(ins, "u64", ("u64",), lambda a: a & (bit - np.uint64(1)))
    return lanewise(ins, "u64", ("u64",), lambda a: a | bit)


def in_window(addresses: Array, window: int) -> Array:
    """True where generic addresses, u64, lie in this window."""
    other = np.uint64(SHARED_WINDOW | LOCAL_WINDOW)
    return addresses & other == np.uint64(window)


@translates("isspacep")
def isspacep(ins: Instruction, form: Form) -> Step:
    """Query if a generic address lies in global, local or shared memory; shared::cta is the executing
    CTA's."""
    (space,) = form.flags
    p, a = target(ins, 0, "pred"), value(ins, 1, "u64")
    window = _WINDOWS.get(space.split("::")[0], 0)
    if window != SHARED_WINDOW:
        return lambda warp, mask: p(warp, in_window(a(warp), window), mask)

    def shared(warp: Warp, mask: Mask) -> None:
        addresses = a(warp)
        ranks = (addresses & np.uint64(SHARED_WINDOW - 1)) >> np.uint64(RANK_SHIFT)
        mine = ranks < len(warp.cta.cluster.ctas) if space == "shared::cluster" else ranks == warp.cta.rank
        p(warp, in_window(addresses, window) & mine, mask)

    return shared
