"""Dense batches to round to codes by kernels, and what is right of codes: the definition in float64, and
PyTorch operations."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa4flex import Quantized, quantize
from fa4flex.quantization.formats import FORMATS
from fa4flex.quantization.rotation import Rotation

E4M3 = torch.float8_e4m3fn
ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Key of each column within 16: see tests/numeric/test_quantize.py."""

SLACK = 2e-6
"""Error of float32 sums, relative to what is summed, or to the largest number that a scale covers: twice what
PyTorch operations are off by, of up to 3000 tokens."""

TENSORS = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "q_bias", "v_offset")


@dataclass(frozen=True)
class How:
    """Sizes, options of quantize, and how q, k and v lie in memory: "whole", "fused" parts of one projection,
    or with "odd" strides, which no kernel reads in place."""

    batch: int = 2
    heads: tuple[int, int, int] = (4, 2, 2)
    q_len: int = 70
    kv_len: int = 300
    d: int = 64
    dv: int = 64
    dtype: torch.dtype = torch.bfloat16
    layout: str = "bhsd"
    qk: str = "int8"
    pv: str = "float8_e4m3"
    rotate: bool = True
    center_k: bool = True
    center_v: bool = True
    memory: str = "whole"
    seed: int = 0

    @property
    def options(self) -> Any:
        names = "layout", "qk", "pv", "rotate", "center_k", "center_v", "seed"
        return {name: getattr(self, name) for name in names}

    @classmethod
    def drawn(cls) -> How:
        """Any case, small."""
        group, kv_heads = random.choice([1, 1, 3]), random.choice([1, 2])
        return cls(
            random.choice([1, 2]),
            (group * kv_heads, kv_heads, random.choice([1, kv_heads])),
            random.choice([1, 33, 128, 131]),
            random.choice([1, 15, 127, 128, 129, 260]),
            random.choice([32, 64, 96, 128, 160]),
            random.choice([16, 48, 64, 128]),
            random.choice([torch.bfloat16, torch.float16]),
            random.choice(["bhsd", "bshd"]),
            random.choice(["int8", "float8_e4m3"]),
            random.choice(["float8_e4m3", "float8_e4m3", "bfloat16"]),
            *(random.random() < 0.7 for _ in range(3)),
            random.choice(["whole", "fused", "odd"]),
            random.randrange(9),
        )


Draw = tuple[Tensor, Tensor, Tensor]


def normal(how: How) -> Draw:
    """Tensors with outliers and means."""
    made = []
    for size in shapes(how):
        x = torch.randn(size) + 2 * torch.randn(size[-1])
        x[..., random.randrange(size[-1])] *= 20
        made.append(x * 10 ** random.uniform(-4, 2))
    return laid(how, made)


def whole_numbers(how: How) -> Draw:
    """Small whole numbers: all sums of them are exact where tokens and blocks of channels are powers of 4."""
    return laid(how, [torch.randint(-8, 9, size).float() for size in shapes(how)])


def shapes(how: How) -> list[tuple[int, ...]]:
    """Sizes of q, k and v [B, H, S, D]."""
    lengths, widths = (how.q_len, how.kv_len, how.kv_len), (how.d, how.d, how.dv)
    return [(how.batch, *x) for x in zip(how.heads, lengths, widths)]


def laid(how: How, qkv: list[Tensor]) -> Draw:
    made = [x.to(how.dtype) for x in qkv]
    if how.layout == "bshd":
        made = [x.transpose(1, 2).contiguous() for x in made]
    if how.memory == "fused":  # a part of a wider last dimension
        made = [torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]] for x in made]
    elif how.memory == "odd":
        made = [torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0] for x in made]
    return made[0], made[1], made[2]


def by_operations(how: How, qkv: Draw) -> Quantized:
    return quantize(*qkv, **how.options)


# --- by definition ------------------------------------------------------------------------------------------


def check(how: How, qkv: Draw, found: Quantized) -> None:
    """Raise AssertionError unless the codes are those of float64 numbers that are as near as float32 sums."""
    q, k, v = ((x if how.layout == "bhsd" else x.transpose(1, 2)).double() for x in qkv)
    mean = k.mean(2, keepdim=True) if how.center_k else torch.zeros_like(k[:, :, :1])
    if how.center_k:
        assert found.q_bias is not None
        each = mean.repeat_interleave(q.shape[1] // k.shape[1], 1)
        size = (q * each).abs().sum(-1)
        near(found.q_bias, (q * each).sum(-1), size)
    else:
        assert found.q_bias is None
    largest = FORMATS[how.qk].largest
    of_q, of_k = turned(how, q), turned(how, k - mean)
    spread = turned(how, k).abs().amax() if how.center_k else 0.0  # what a difference to the mean loses
    in_layout = (lambda x: x) if how.layout == "bhsd" else (lambda x: x.transpose(1, 2))
    near(found.q_scale, divisor(of_q.abs().amax(-1), largest), of_q.abs().amax(-1) / largest)
    codes(in_layout(found.q), of_q, found.q_scale[..., None], SLACK * largest, how.qk)
    tiles = torch.stack([x.abs().amax((2, 3)) for x in of_k.split(128, 2)], -1)
    near(found.k_scale, divisor(tiles, largest), (tiles + spread) / largest)
    scale = found.k_scale.repeat_interleave(128, 2)[:, :, : how.kv_len, None]
    codes(in_layout(found.k), of_k, scale, SLACK * (largest + spread / scale.double()), how.qk)
    check_values(how, v, found)


def check_values(how: How, v: Tensor, found: Quantized) -> None:
    if how.pv == "bfloat16":
        assert found.v_scale is None and found.v_offset is None
        return
    assert found.v_scale is not None
    mean = v.mean(2) if how.center_v else torch.zeros_like(v[:, :, 0])
    most = (v - mean[:, :, None]).abs().amax(2)
    size = v.abs().amax(2)
    near(found.v_scale, divisor(most, 448), size / 448)
    natural = torch.empty_like(found.v.view(torch.uint8))
    for column in range(natural.shape[-1]):
        natural[..., column // 16 * 16 + ORDER[column % 16]] = found.v.view(torch.uint8)[..., column]
    assert natural.shape[-1] == -(-how.kv_len // 128) * 128 and not natural[..., how.kv_len :].any()
    here = natural[..., : how.kv_len].view(E4M3).transpose(2, 3)
    scale = found.v_scale[:, :, None]
    slack = SLACK * (448 + size[:, :, None] / scale.double())
    codes(here, v - mean[:, :, None], scale, slack, "float8_e4m3")
    if how.center_v:
        assert found.v_offset is not None
        of_codes = here.double().mean(2) * found.v_scale.double()
        near(found.v_offset, mean - of_codes, size + here.double().abs().mean(2) * found.v_scale)
    else:
        assert found.v_offset is None


def turned(how: How, x: Tensor) -> Tensor:
    """x times signs and a Hadamard matrix, by Sylvester's construction."""
    if not how.rotate:
        return x
    block, matrix = how.d & -how.d, torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signed = x * Rotation(how.d, how.seed).signs(x.device).double()
    return (signed.unflatten(-1, (-1, block)) @ matrix / math.sqrt(block)).flatten(-2)


def divisor(most: Tensor, largest: float) -> Tensor:
    return torch.where(most == 0, 1.0, most / largest)


def near(found: Tensor, exact: Tensor, size: Tensor) -> None:
    assert found.dtype == torch.float32 and found.shape == exact.shape and found.is_contiguous()
    error = (found.double() - exact).abs()
    assert (error <= SLACK * size).all(), float((error / size).max())


def codes(found: Tensor, exact: Tensor, scale: Tensor, slack: Any, form: str) -> None:
    """Codes are those of quotients that are off by no more than `slack`."""
    largest = FORMATS[form].largest
    quotient = exact / scale.double()
    low, high = ((quotient + x).clamp(-largest, largest) for x in (-slack, slack))
    if form == "int8":
        assert found.dtype == torch.int8
        low, high = low.round(), high.round()
    else:
        assert found.dtype == E4M3
        low, high = (x.float().to(E4M3).double() for x in (low, high))
    number = found.double()
    assert (low <= number).all() and (number <= high).all(), (
        int(((low > number) | (number > high)).sum()), found.numel(),
    )  # fmt: skip


# --- as PyTorch operations do -------------------------------------------------------------------------------


def same(found: Quantized, expected: Quantized, but: tuple[str, ...] = (), signs: bool = True) -> None:
    """All bits are equal, NaN as NaN; those of zeros, too, if `signs`."""
    for name in TENSORS:
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None and name not in but:
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride(), name
            if a.dtype == E4M3:
                a, b = (x.view(torch.uint8) if signs else x.float() for x in (a, b))
            differ = (a != b) & ~((a != a) & (b != b))
            assert not differ.any(), (name, int(differ.sum()), a[differ][:4], b[differ][:4])
