"""Calls with lists of keys on a simulated GPU, beside the same call in float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Lists
from fa4flex.variants import alibi, causal, sliding_window, softcap

TIMINGS = (("eager", 0), ("late", 1), ("random", 2))

KERNELS = {"sm_90a": "lists_sm90", "sm_100a": "lists_sm100"}
"""Packages of the kernels for listed keys, by chips."""

CHIPS = tuple(KERNELS)

TABLE = torch.randn(140, 900) / 2


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h, kv_idx - q_idx + 400]


def striped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No intervals: asked of every pair."""
    return (kv_idx * 7 + q_idx + h) % 5 > 1


MODS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "causal": (None, causal),
    "alibi, causal": (alibi, causal),
    "softcap, window": (softcap(20.0), causal & sliding_window(90)),
    "relative": (relative, None),
    "pairs": (None, striped),
}


@dataclass(frozen=True)
class Size:
    """Heads of queries, of keys and of lists, queries, keys, widths, entries of the batch and of lists."""

    heads: int = 4
    kv_heads: int = 1
    list_heads: int = 1
    q_len: int = 3
    kv_len: int = 200
    d: int = 64
    dv: int = 64
    batch: int = 1
    lists: int = 1


def drawn_size(rng: random.Random, d: int = 64, dv: int | None = None) -> Size:
    """Groups of 1, 4, 7, 16, 64 and 70 heads; few tiles, each of which a simulated GPU takes a second for."""
    group = rng.choice((1, 4, 7, 16, 64, 70))
    kv_heads, batch, q_len = 1, 1, rng.choice((1, 3))
    if group < 16:
        kv_heads, batch = rng.choice(((1, 1), (2, 1), (1, 2)))
    list_heads = rng.choice((1, kv_heads, kv_heads * group if group < 16 else 1))
    kv_len = rng.choice((1, 63, 150, 220))
    lists = rng.choice((1, batch))
    return Size(group * kv_heads, kv_heads, list_heads, q_len, kv_len, d, dv or d, batch, lists)


def drawn_lists(rng: random.Random, size: Size, beside: bool = False, **options: Any) -> Lists:
    """Lists of units of any size, with ids of none, and some ids more than once."""
    unit = options.get("unit") or rng.choice((1, 1, 4, 16, 64, 3))
    queries = options.get("queries") or rng.choice((1, 1, 2))
    units, rows = -(-size.kv_len // unit), -(-size.q_len // queries)
    capacity = options.get("capacity") or rng.choice((1, 7, 40, min(250 // unit + 1, 160)))
    low, high = rng.choice(((-1, units), (-3, units + 3), (0, max(units // 8, 1))))
    shape = size.lists, size.list_heads, rows, capacity
    ids = torch.randint(low, high, shape, dtype=options.get("dtype", torch.int32))
    if rng.random() < 0.4:
        ids = ids.sort(-1).values
    counts = torch.randint(0, capacity + 1, shape[:3]) if options.get("counted") else None
    seen = {"tail": rng.choice((0, 1, 2)), "window": rng.choice((0, 5, 80)), "sinks": rng.choice((1, 20))}
    more = seen if beside else {}
    return Lists(ids, counts, kv_len=size.kv_len, q_len=size.q_len, unit=unit, queries=queries, **more)


def tensors(size: Size, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    s = size
    shapes = (
        (s.batch, s.heads, s.q_len, s.d),
        (s.batch, s.kv_heads, s.kv_len, s.d),
        (s.batch, s.kv_heads, s.kv_len, s.dv),
    )
    return [torch.randn(shape).to(dtype) for shape in shapes]


@dataclass
class Called:
    """Results from the simulated GPU, and what launched."""

    out: Tensor
    lse: Tensor
    results: list[Any] = field(default_factory=list)
    chip: str = "sm_90a"

    @property
    def gathered(self) -> list[Any]:
        """Launches of the kernel for listed keys of the chip."""
        return [result for result in self.results if f"kernels{KERNELS[self.chip]}" in result.kernel]


def attend(
    attn: fa4flex.Attention,
    *qkv: Tensor,
    timing: tuple[str, int] | None = None,
    chip: Any = "sm_90a",
    **more: Any,
) -> Called:
    """A call on a chip under some timing; nothing may be found."""
    name, seed = timing or random.choice((*TIMINGS, ("random", random.randrange(99))))
    with torch.no_grad(), ptxsim.device(chip, seed, name, sms=2) as gpu:
        out, lse = attn(*qkv, return_lse=True, **more)
    assert not gpu.findings, f"{name} {seed}: {gpu.report()}"
    return Called(out, lse, list(gpu.results), chip)


def check(attn: fa4flex.Attention, qkv: list[Tensor], **more: Any) -> Called:
    """The kernel for lists computes the call, and is as near to float64 as a rounded output can be."""
    found = attend(attn, *qkv, **more)
    assert found.gathered, "another kernel was launched"
    for name in ("timing", "chip"):
        more.pop(name, None)
    with torch.no_grad():
        exact = attn(*(x.double() for x in qkv), return_lse=True, **more)
    compare(found, *exact)
    return found


def compare(found: Called, exact: Tensor, exact_lse: Tensor) -> None:
    """Errors are within twice the rounding of probabilities and output; rows without keys are zeros."""
    out = found.out if found.out.ndim == 4 else found.out.transpose(0, 1)
    exact = exact if exact.ndim == 4 else exact.transpose(0, 1)
    if out.shape[:-1] != found.lse.shape:  # heads behind tokens
        out, exact = out.transpose(1, 2), exact.transpose(1, 2)
    empty, rounding = exact_lse == -torch.inf, torch.finfo(found.out.dtype).eps / 2
    assert torch.equal(found.lse == -torch.inf, empty) and not out[empty].any()
    error = (out.double() - exact).abs().max().item()
    assert error <= 2 * rounding * exact.abs().max().item(), error
    torch.testing.assert_close(found.lse.double()[~empty], exact_lse[~empty], atol=1e-4, rtol=0)


def allowed_pairs(lists: Lists, size: Size) -> Tensor:
    """Pairs [B, H, q_len, kv_len] that lists and what is beside them allow, one query after another."""
    allowed = torch.zeros(size.batch, size.heads, size.q_len, size.kv_len, dtype=torch.bool)
    group, at = size.heads // size.list_heads, torch.arange(size.kv_len)
    for b, h, q in itertools.product(range(size.batch), range(size.heads), range(size.q_len)):
        row = (b if lists.ids.shape[0] > 1 else 0), h // group, q // lists.queries
        ids = lists.ids[row] if lists.counts is None else lists.ids[row][: int(lists.counts[row])]
        position, seen = q + size.kv_len - size.q_len, torch.isin(at // lists.unit, ids)
        seen |= at < lists.sinks
        seen |= (at > position - lists.window) & (at <= position)
        first = ((position + 1) // lists.unit + 1 - lists.tail) * lists.unit
        allowed[b, h, q] = seen | (bool(lists.tail) & (at >= first) & (at <= position))
    return allowed
