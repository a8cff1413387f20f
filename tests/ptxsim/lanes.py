"""One instruction on given bits: in a whole warp, in some of its lanes, and onto its own operand."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
from machine import execute, machine, reg, some_lanes

from ptxsim.isa import approx, bits, compare, convert, floating, logic, move
from ptxsim.isa import arithmetic as _arithmetic
from ptxsim.ptx.nodes import Operand, Pair
from ptxsim.state.cta import Warp

TRANSLATORS = (_arithmetic, approx, bits, compare, convert, floating, logic, move)
"""Imported because that is what registers them."""
FILES = {1: "pred", 16: "u16", 32: "u32", 64: "u64"}
Source = tuple[str, Any] | Operand
"""A register's type and its bits in 32 lanes, or an operand as it is."""


def fill(warp: Warp, type: str, index: int, values: Any) -> None:
    file = reg(type, index).file
    array = getattr(warp, FILES[file])[index]
    if file == 1:
        array[:] = values
    else:
        array[:] = np.array([int(v) % (1 << file) for v in values], dtype=array.dtype)


def held(warp: Warp, type: str, index: int) -> list[int]:
    return [int(v) for v in getattr(warp, FILES[reg(type, index).file])[index]]


def apply(opcode: str, result: str | tuple[str, str], *sources: Source) -> Any:
    """Bits of the result (or of both results of a pair) in 32 lanes.

    The instruction runs three times or more: for all lanes; for some, where the others must keep what they
    have; and with the result in the register of each operand of its width.
    """
    results = (result,) if isinstance(result, str) else result
    warp, operands = _prepared(sources)
    targets = [reg(type, 7 - i if type == "pred" else 30 - i) for i, type in enumerate(results)]
    first = targets[0] if len(targets) == 1 else Pair(targets[0], targets[1])
    execute(warp, opcode, first, *operands)
    whole = [held(warp, type, t.index) for type, t in zip(results, targets)]
    _check_some_lanes(opcode, results, targets, first, sources, whole)
    if isinstance(result, str):
        _check_in_place(opcode, result, sources, whole[0])
        return whole[0]
    return whole


@cache
def _warp() -> Warp:
    return machine().warps[0]


def _prepared(sources: tuple[Source, ...]) -> tuple[Warp, list[Operand]]:
    warp, operands = _warp(), list[Operand]()
    for file in (warp.u16, warp.u32, warp.u64):
        file[30][:] = file[29][:] = np.random.randint(0, 1 << 16, 32)
    for index, source in enumerate(sources):
        if isinstance(source, tuple):
            fill(warp, source[0], index + 1, source[1])
            operands.append(reg(source[0], index + 1))
        else:
            operands.append(source)
    return warp, operands


def _check_some_lanes(opcode: str, results: Any, targets: Any, first: Any, sources: Any, whole: Any) -> None:
    warp, operands = _prepared(sources)
    before = [held(warp, type, t.index) for type, t in zip(results, targets)]
    mask = some_lanes()
    execute(warp, opcode, first, *operands, mask=mask)
    for type, t, old, new in zip(results, targets, before, whole):
        want = [n if m else o for o, n, m in zip(old, new, mask)]
        assert held(warp, type, t.index) == want, f"{opcode}: lanes outside the mask, or other values inside"


def _check_in_place(opcode: str, result: str, sources: tuple[Source, ...], whole: list[int]) -> None:
    for index, source in enumerate(sources):
        if isinstance(source, tuple) and reg(source[0], 0).file == reg(result, 0).file:
            warp, operands = _prepared(sources)
            execute(warp, opcode, reg(result, index + 1), *operands)
            assert held(warp, result, index + 1) == whole, f"{opcode} onto its own operand {index + 1}"


def words(width: int, *corners: int) -> list[int]:
    """32 words: corners, and random bits of all lengths."""
    top = 1 << width
    usual = [0, 1, 2, top - 1, top - 2, top // 2, top // 2 - 1, top // 2 + 1, *corners]
    lengths = [width, 6, random.randint(1, width)]
    return [
        random.choice(usual) if random.random() < 0.4 else random.getrandbits(random.choice(lengths))
        for _ in range(32)
    ]


def signed(value: int, width: int) -> int:
    value %= 1 << width
    return value - (1 << width) if value >> (width - 1) else value


def as_type(value: int, type: str) -> int:
    """The number that bits mean as an integer type."""
    width = int(type[1:])
    return signed(value, width) if type[0] == "s" else value % (1 << width)
