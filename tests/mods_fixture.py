"""Mods written the many ways that people write them, with what each needs; see test_trace_habits.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 5
SLOPES = [0.5, 0.25, 0.125]
_RANDOM = torch.Generator().manual_seed(5)
TABLE = torch.randn(3, 64, generator=_RANDOM)
IDS = torch.arange(12).repeat_interleave(2) // 3
GRID = torch.randint(-4, 5, (2, 3, 24, 20), generator=_RANDOM)
PAIRS = torch.randint(0, 20, (24, 2), generator=_RANDOM)
SORTED = torch.tensor([3, 7, 7, 15], dtype=torch.int32)
BIAS = torch.randn(2, 3, 24, 6, generator=_RANDOM)
TEMPERATURE = torch.tensor(0.7)
FLAG = torch.tensor(True)

MASKS: dict[str, Callable[..., Any]] = {}
SCORES: dict[str, Callable[..., Any]] = {}


def mask(fn: Callable[..., Any]) -> Callable[..., Any]:
    MASKS[getattr(fn, "__name__", type(fn).__name__)] = fn
    return fn


def score(fn: Callable[..., Any]) -> Callable[..., Any]:
    SCORES[getattr(fn, "__name__", type(fn).__name__)] = fn
    return fn


# --- masks ------------------------------------------------------------------------------------------


@mask
def floors(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) // 4 == -2) | ((kv_idx - q_idx) % 7 < 3)


@mask
def truncates(b, h, q_idx, kv_idx):
    d = q_idx - kv_idx
    return (
        (torch.div(d, 3, rounding_mode="trunc") == 0)
        | (torch.fmod(d, 5) == -2)
        | (torch.div(d, 4, rounding_mode="floor") == 1)
    )


@mask
def reflected(b, h, q_idx, kv_idx):
    return (100 - q_idx) % 7 + (97 // (kv_idx + 1)) - 2 * (3 - kv_idx) > 2 ** (q_idx % 4)


@mask
def python_operators(b, h, q_idx, kv_idx):
    quotient, rest = q_idx // 5, q_idx % 5
    return (abs(-kv_idx + quotient) > rest) ^ (~q_idx < -7) & (+kv_idx > 2)


@mask
def bits(b, h, q_idx, kv_idx):
    return ((q_idx << 2) ^ (kv_idx >> 1) | (q_idx & 6)) % 3 == 0


@mask
def global_window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= WINDOW


@mask
def default_window(b, h, q_idx, kv_idx, window=7):
    return q_idx - kv_idx < window


def _partial_base(window, b, h, q_idx, kv_idx, *, left=0):
    return (q_idx - kv_idx < window) & (kv_idx >= left)


MASKS["partial"] = functools.partial(_partial_base, 6, left=2)


def _wrap(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


@mask
@_wrap
def wrapped(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


MASKS["lambda"] = lambda b, h, q, k: (q >= k) & (k > WINDOW)
MASKS["star"] = lambda *indices: indices[2] >= indices[3]
MASKS["always"] = lambda b, h, q, k: True
MASKS["literal"] = lambda b, h, q, k: torch.tensor(True)


class Windowed:
    def __init__(self, size):
        self.size = size
        self.table = IDS

    def mod(self, b, h, q_idx, kv_idx):
        return self.near(q_idx, kv_idx) & (self.table[q_idx] == self.table[kv_idx])

    def near(self, q, k):
        return (q - k).abs() < self.size

    def __call__(self, b, h, q_idx, kv_idx):
        return self.near(q_idx, kv_idx)


@dataclass(frozen=True)
class Sized:
    sizes: list = field(default_factory=lambda: [3, 5, 8])

    def __call__(self, b, h, q_idx, kv_idx):
        near = kv_idx < 0
        for i, size in enumerate(self.sizes):
            near = near | ((h == i) & (q_idx - kv_idx < size))
        return near


MASKS["bound_method"] = Windowed(4).mod
MASKS["callable"] = Windowed(4)
MASKS["dataclass"] = Sized()


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ids", IDS.clone())
        self.width = 9

    def forward(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) | (q_idx - kv_idx > self.width)


MASKS["module"] = Module()


def _loop(count):
    def looped(b, h, q_idx, kv_idx):
        hit = q_idx == kv_idx
        for i in range(count):
            hit |= q_idx == kv_idx + i * i
        return hit

    return looped


MASKS["range"] = _loop(4)


def _branch(mode, width):
    def branched(b, h, q_idx, kv_idx):
        if mode is None:
            return q_idx >= kv_idx
        return (q_idx - kv_idx < width) if width > 3 else (q_idx == kv_idx)

    return branched


MASKS["branch_none"] = _branch(None, 3)
MASKS["branch_width"] = _branch("x", 9)


def _square_root(n):
    side = math.isqrt(n)
    return lambda b, h, q, k: (q // int(math.sqrt(n)) == k // side) & (q < math.floor(n / 2.5))


MASKS["math"] = _square_root(25)


def _recursive(depth):
    def inside(q, k, d):
        return q == k if d == 0 else inside(q // 2, k // 2, d - 1)

    return lambda b, h, q, k: inside(q, k, depth)


MASKS["recursive"] = _recursive(3)


@mask
def nested_gather(b, h, q_idx, kv_idx):
    return PAIRS[PAIRS[q_idx, 0] % 24, 1] > kv_idx


@mask
def partial_gather(b, h, q_idx, kv_idx):
    low, high = PAIRS[q_idx]
    pair = PAIRS[q_idx]
    return (kv_idx >= torch.minimum(low, high)) & (kv_idx <= pair.max()) & (pair[-1] != 3)


@mask
def row_any(b, h, q_idx, kv_idx):
    return (PAIRS[q_idx] == kv_idx.unsqueeze(-1)).any(dim=-1) | (GRID[b, h, q_idx, :5] == 3).all()


@mask
def sliced(b, h, q_idx, kv_idx):
    return (
        (GRID[..., kv_idx][b, h, q_idx] > 0)
        | (GRID[b, :, q_idx, 2][h] < -2)
        | (GRID[b, h, q_idx][3:9][-1] == 0)
    )


@mask
def shapes(b, h, q_idx, kv_idx):
    block = GRID[b, h]
    column = block.transpose(0, 1)[kv_idx]
    return (column.view(4, 6).sum(dim=1).max() > column.mean(dtype=torch.float32) * 4) | (
        column.shape[0] != block.size(0)
    )


@mask
def factories(b, h, q_idx, kv_idx):
    allowed = b.new_ones((), dtype=torch.bool) & torch.ones_like(q_idx, dtype=torch.bool)
    return (
        allowed
        & (q_idx >= q_idx.new_full((), 3))
        & ~b.new_zeros((), dtype=torch.bool)
        & (kv_idx > torch.tensor(2))
    )


@mask
def captured_flag(b, h, q_idx, kv_idx):
    return torch.where(FLAG, q_idx >= kv_idx, q_idx < kv_idx)


@mask
def positions(b, h, q_idx, kv_idx):
    return (kv_idx == SORTED).any() | (torch.arange(4) * 5 == q_idx).any()


@mask
def searched(b, h, q_idx, kv_idx):
    return torch.searchsorted(SORTED, q_idx, right=True) == torch.bucketize(kv_idx, SORTED)


@mask
def logic(b, h, q_idx, kv_idx):
    even = torch.logical_not(q_idx % 2)
    return torch.logical_xor(even, kv_idx.remainder(3).eq(1)).logical_and(q_idx.ge(1)) | (kv_idx > 3) * (
        q_idx > 20
    )


@mask
def nan_checks(b, h, q_idx, kv_idx):
    ratio = (q_idx - 5) / (kv_idx - 3)
    return ratio.isnan() | torch.isneginf(ratio) | torch.isfinite(ratio) & (ratio > 1)


# --- scores -----------------------------------------------------------------------------------------


@score
def integer_result(score, b, h, q_idx, kv_idx):
    return q_idx - kv_idx


@score
def slopes(score, b, h, q_idx, kv_idx):
    slope = torch.where(h == 0, SLOPES[0], torch.where(h == 1, SLOPES[1], SLOPES[2]))
    return score - slope * (q_idx - kv_idx).abs()


@score
def relative(score, b, h, q_idx, kv_idx):
    return score * TEMPERATURE + TABLE[h, q_idx - kv_idx + 20]


@score
def negative_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx - kv_idx] + TABLE[-1, kv_idx]


@score
def derived_table(score, b, h, q_idx, kv_idx):
    scaled = (TABLE * 2 + 1).tanh()
    return score + scaled[h, q_idx] + TABLE.mean() - torch.exp(TEMPERATURE)


@score
def activations(score, b, h, q_idx, kv_idx):
    x = (
        F.softplus(score)
        + F.leaky_relu(score, 0.1)
        + F.elu(score)
        + F.selu(score)
        + F.mish(score)
        + F.hardswish(score)
    )
    return (
        x
        + F.logsigmoid(score)
        + F.relu6(score * 4)
        + F.softsign(score)
        + F.tanhshrink(score)
        + F.hardtanh(score)
    )


@score
def gelus(score, b, h, q_idx, kv_idx):
    return (
        F.gelu(score)
        + F.gelu(score, approximate="tanh")
        + F.silu(score)
        + score.relu()
        + torch.special.expit(score)
    )


@score
def elementary(score, b, h, q_idx, kv_idx):
    p = score.abs() + 1
    x = (
        torch.log(p)
        + p.log2()
        + p.log10()
        + torch.log1p(p)
        + p.sqrt()
        + p.rsqrt()
        + p.reciprocal()
        + p.exp2().log()
    )
    return (
        x
        + score.sin()
        + score.cos()
        + score.atan()
        + torch.atan2(score, p)
        + score.erf()
        + torch.erfc(score)
        + score.expm1()
    )


@score
def powers(score, b, h, q_idx, kv_idx):
    return (
        score**2
        + score**3
        - 2.0**h
        + (score.abs() + 1) ** 0.5
        + torch.pow(score, 4)
        + q_idx**2
        + 0.5 ** (h + 1.0)
        + score.square()
    )


@score
def rounding(score, b, h, q_idx, kv_idx):
    return (
        score.floor()
        + (score * 3).ceil()
        - torch.round(score * 5)
        + score.trunc()
        + torch.frac(score)
        + score.sign()
    )


@score
def bounded(score, b, h, q_idx, kv_idx):
    x = (
        score.clamp(-1, 0.5)
        + torch.clamp(q_idx - kv_idx, max=3)
        + score.clip(min=TEMPERATURE)
        + score.clamp_min(0)
    )
    return x + torch.fmax(score, TEMPERATURE) + torch.minimum(q_idx, kv_idx) + torch.max(score, TEMPERATURE)


@score
def casts(score, b, h, q_idx, kv_idx):
    half = score.to(torch.bfloat16).float() + score.half().to(score) + (q_idx > kv_idx).to(score.dtype)
    return (
        half
        + (score * 3).int()
        + (score > 0).long()
        + TABLE.to(torch.bfloat16)[h, kv_idx]
        + q_idx.type_as(score)
    )


@score
def fused(score, b, h, q_idx, kv_idx):
    x = torch.lerp(score, TEMPERATURE, 0.3) + torch.addcmul(score, score, TEMPERATURE, value=0.5)
    return (
        x
        + torch.logaddexp(score, TEMPERATURE)
        + torch.hypot(score, TEMPERATURE)
        + torch.add(score, h, alpha=2)
        + torch.rsub(score, 1)
    )


@score
def masked(score, b, h, q_idx, kv_idx):
    x = score.masked_fill(q_idx < kv_idx, -float("inf"))
    return torch.where(kv_idx > 17, torch.finfo(score.dtype).min, x).where(h < 2, score)


@score
def row_products(score, b, h, q_idx, kv_idx):
    row = BIAS[b, h, q_idx]
    other = BIAS[b, 0, kv_idx]
    x = (
        torch.dot(row, other)
        + row @ other
        + (row * other[:, None].squeeze(-1)).sum(-1)
        + row.amax()
        - row.prod()
    )
    return (
        score
        + x
        + row.softmax(-1)[kv_idx % 6]
        + torch.logsumexp(row, 0)
        + row.norm()
        + row.mean()
        + row.argmax()
    )


@score
def stacked(score, b, h, q_idx, kv_idx):
    return torch.stack([score, score * 2, q_idx * 1.0]).max() + torch.stack((q_idx, kv_idx))[kv_idx % 2]


@score
def outer(score, b, h, q_idx, kv_idx):
    row = BIAS[b, h, q_idx]
    normal = row / row.abs().sum()
    return (
        score + (row.unsqueeze(0) * row.unsqueeze(1)).sum() + (normal * row.sum())[2] + normal[kv_idx % 3 - 3]
    )


@score
def no_gradient(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        shift = score * 2
    return score.detach() + shift


@score
def aten(score, b, h, q_idx, kv_idx):
    return torch.ops.aten.mul.Tensor(torch.ops.aten.add(score, 1), 2) + torch.ops.aten.tanh.default(score)


def _captured_scale(scale: float, tables: list[Tensor]) -> Callable[..., Any]:
    def scaled(score, b, h, q_idx, kv_idx):
        total = score * (1.0 / scale) + 2**-scale + (3 - scale) // 2
        for i, table in enumerate(tables):
            total = total + table[h, kv_idx] * (i + scale)
        return total

    return scaled


SCORES["closure_tables"] = _captured_scale(1.5, [TABLE, TABLE * 2])
