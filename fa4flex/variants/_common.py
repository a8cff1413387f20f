"""Common parts of variants: checks of parameters, worded alike in all of them, and positions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.score import ScoreFunction

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BOOL = (torch.bool,)
_USUAL = {INTEGERS: torch.int64, FLOATS: torch.float32, BOOL: torch.bool}
_KINDS = {INTEGERS: "an integer tensor", FLOATS: "a floating tensor", BOOL: "a bool tensor"}


def whole(variant: str, name: str, value: Any, least: int = 1) -> int:
    """`value` as an int >= least."""
    if not isinstance(value, (bool, Tensor, float)):
        try:  # an int as it is: torch.compile would take operator.index() of one for a constant
            number = value if isinstance(value, int) else operator.index(value)
        except TypeError:
            number = least - 1
        if number >= least:
            return number
    raise InputError(
        f"{variant}({name}={value!r})",
        f"an int >= {least}",
        f"pass a Python int of {least} or more: a new value does not recompile anything",
    )


def finite(variant: str, name: str, value: Any, positive: bool = False) -> float:
    """`value` as a finite float, above zero where `positive`."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf
    negative = fits and positive and value <= 0
    if not fits or negative:
        raise InputError(
            f"{variant}({name}={value!r})",
            f"a finite number{' above 0' if positive else ''}",
            f"leave {variant} out to switch it off" if negative else "pass a Python number",
        )
    return float(value)


def table(
    variant: str, name: str, value: Any, kinds: tuple[torch.dtype, ...], ranks: Sequence[int], shape: str
) -> Tensor:
    """`value` as a tensor of a dtype in `kinds` and of a rank in `ranks`; `shape` is how to say it."""
    if not isinstance(value, Tensor) or value.dtype not in kinds:
        fix = f"convert it: torch.as_tensor({name}, dtype={_USUAL[kinds]})"
        raise InputError(f"{variant}({name}=<{kind_of(value)}>)", f"{_KINDS[kinds]} {shape}", fix)
    if value.ndim not in ranks or value.numel() == 0:
        raise InputError(
            f"{variant}({name}=<{list(value.shape)}>)",
            f"{shape}, not empty",
            "add or drop dimensions to match",
        )
    return value


def for_heads(mod: ScoreFunction, heads: int) -> ScoreFunction:
    """`mod`, marked: its tables have a row for each of `heads` query heads, and calls with others raise."""
    mod.query_heads = heads  # type: ignore[attr-defined]
    return mod


def offsets_to_ids(variant: str, name: str, offsets: Any) -> Tensor:
    """Cumulative lengths [N + 1] as the sequence number of every token, int32 [offsets[-1]]."""
    offsets = table(variant, name, offsets, INTEGERS, (1,), "[N + 1]")
    lengths = (offsets[1:] - offsets[:-1]).long()
    if offsets.numel() < 2 or int(offsets[0]) != 0 or bool((lengths < 0).any()):
        raise InputError(
            f"{variant}({name}={offsets.tolist()[:8]})",
            "N + 1 entries that start at 0 and never decrease",
            "pass cumulative lengths: F.pad(lengths.cumsum(0), (1, 0))",
        )
    return torch.repeat_interleave(
        torch.arange(len(lengths), dtype=torch.int32, device=offsets.device), lengths
    )


# --- positions ------------------------------------------------------------------------------------------


def aligned(q_idx: Any, q_len: Any, kv_len: Any) -> Any:
    """The key position of query `q_idx` when the last query stands at the last key (bottom-right alignment).

    This is FlashAttention's convention: with a cache, the q_len new queries are the last of kv_len tokens.
    """
    return q_idx + (kv_len - q_len)


def coordinate(stride: int, size: int, outermost: bool) -> Callable[[Any], Any]:
    """Index -> coordinate along one axis of a row-major grid, by the fewest divisions."""
    if outermost:
        return (lambda idx: idx) if stride == 1 else (lambda idx: idx // stride)
    if stride == 1:
        return lambda idx: idx % size
    return lambda idx: idx // stride % size


def strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major grid."""
    result = [1]
    for size in reversed(sizes[1:]):
        result.append(result[-1] * size)
    return tuple(reversed(result))
