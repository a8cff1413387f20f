"""Query heads that share a KV head share tiles of packed sequences, on simulated Hopper GPUs: under any
mask and score that allows it, right in every timing."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import Width, cumulative, no_worse, poisoned, widths, worst
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Schedule, Varlen, reference
from fa4flex.kernels.fwd_sm90.config import HANDED
from fa4flex.variants import alibi, causal, sliding_window, softcap

SMS = 132
"""Multiprocessors: all tiles of a launch have blocks of their own, whose number tells how many there are."""

TIMINGS = (("eager", 0), ("late", 1), ("random", 2))

LENGTHS = (130, 0, 1, 33, 70, 15)
OTHERS = (7, 4, 1, 140, 0, 64)
"""Queries of sequences, and keys where they are others."""


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (IDS[b, q_idx] == IDS[b, kv_idx])


def of_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20 + 10 * h)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + NEAR[h, q_idx - kv_idx + 200]


IDS = (torch.rand(len(LENGTHS), 200) < 0.05).cumsum(1).to(torch.int32)
NEAR = torch.randn(8, 400)
SINKS = torch.randn(8)


@dataclass(frozen=True)
class Case:
    """composition   of the variant
    heads         of queries and of keys
    shared        heads of queries that share tiles
    rows          of a tile
    keys          lengths of keys, where they are not those of queries
    """

    composition: dict[str, Any]
    heads: tuple[int, int] = (8, 2)
    shared: int = 4
    width: Width = 128
    rows: int = 128
    keys: tuple[int, ...] = LENGTHS
    schedule: Schedule = field(default_factory=Schedule)


CASES = {
    "causal, 4 heads": Case({"mask": causal}),
    "causal, 4 narrow heads": Case({"mask": causal}, width=64, rows=192),
    "causal, 2 heads": Case({"mask": causal}, (4, 2), 2),
    "causal, 8 heads": Case({"mask": causal}, (8, 1), 8, 96),
    "causal, 16 narrow heads": Case({"mask": causal}, (16, 1), 16, 64, 192),
    "causal, 7 heads": Case({"mask": causal}, (14, 2), 1, 64, 192),
    "causal, a head": Case({"mask": causal}, (2, 2), 1),
    "causal, wide": Case({"mask": causal}, (4, 1), 4, 256),
    "causal, other keys": Case({"mask": causal}, keys=OTHERS),
    "causal, sorted": Case({"mask": causal}, schedule=Schedule(order="longest_first")),
    "causal, in turns": Case({"mask": causal}, schedule=Schedule(next_tile="in_turn")),
    "causal, sinks": Case({"mask": causal, "sinks": SINKS}),
    "window": Case({"mask": causal & sliding_window(40)}, width=(192, 128)),
    "window of each head": Case({"mask": of_heads}, shared=1),
    "alibi": Case({"score_mod": alibi, "mask": causal}),
    "alibi, 8 narrow heads": Case({"score_mod": alibi, "mask": causal}, (8, 1), 8, 64, 128),
    "alibi, 16 heads": Case({"score_mod": alibi, "mask": causal}, (16, 1), 1),
    "softcap, 16 heads": Case({"score_mod": softcap(20.0), "mask": causal}, (16, 1), 16),
    "relative": Case({"score_mod": relative, "mask": causal}),
    "document": Case({"mask": document}, shared=1),
    "no mask": Case({}, (8, 2)),
    "no mask, other keys, narrow": Case({}, (8, 1), 8, 64, 192, OTHERS),
}

IN_EVERY_RUN = ("causal, 4 heads", "alibi")


def drawn(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, tokens of which lie among rows of NaN."""
    wide, wide_v = widths(case.width)
    sizes = (
        (sum(LENGTHS), case.heads[0], wide),
        *((sum(case.keys), case.heads[1], n) for n in (wide, wide_v)),
    )
    found = []
    for tokens, heads, width in sizes:
        room = torch.full((tokens + 2, heads + 1, width + 8), math.nan, dtype=torch.float16)
        found.append(room[1:-1, 1:, :width].copy_(torch.randn(tokens, heads, width)))
    return found[0], found[1], found[2]


def by_sequence(x: Tensor) -> list[Tensor]:
    """Rows of each head of each sequence, of those that have some."""
    ends = cumulative(LENGTHS).tolist()
    return [x[a:b, h] for a, b in itertools.pairwise(ends) for h in range(x.shape[1]) if b > a]


def judge(case: Case, found: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """At most six times the error of rounding the exact results, as probabilities are rounded too; each head
    of each sequence is a draw."""
    ranges = tuple(reference.sequence_ranges(cumulative(n)) for n in (LENGTHS, case.keys))
    exact, exact_lse = reference.varlen(qkv, ranges, **case.composition)  # type: ignore[arg-type]
    out, lse = found
    rounded = exact.half()
    errors = [[worst(x, y) for x, y in zip(by_sequence(z), by_sequence(exact))] for z in (out, rounded)]
    no_worse(errors[0], [tuple(3 * n for n in both) for both in errors[1]])
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    finite = ~exact_lse.isinf()
    assert (lse - exact_lse)[finite].abs().max() <= 1e-5 * max(1.0, exact_lse[finite].abs().max().item())


def tiles(case: Case) -> int:
    """The most tiles that sequences of so many tokens in all may have."""
    queries = case.rows // case.shared
    return (sum(LENGTHS) // queries + len(LENGTHS)) * (case.heads[0] // case.shared)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in IN_EVERY_RUN else pytest.mark.slow) for x in CASES]
)
def test_rows_of_a_group(name: str) -> None:
    case = CASES[name]
    qkv, ends = drawn(case), [cumulative(n) for n in (LENGTHS, case.keys)]
    attn = fa4flex.compile(**case.composition, schedule=case.schedule)
    for timing, seed in random.sample(TIMINGS, 2):
        with torch.no_grad(), poisoned(), ptxsim.device("sm_90a", seed, timing, sms=SMS) as gpu:
            found = attn(*qkv, varlen=Varlen(*ends), return_lse=True)
        assert not _surprising(gpu), f"{timing} {seed}: {gpu.report()}"
        assert gpu.results[-1].shape.grid == (min(tiles(case), SMS), 1, 1)
        judge(case, found, qkv)


def _surprising(gpu: Any) -> list[Any]:
    """Findings, but that warpgroups write the same zeros past an end: see test_simulated_variants.py."""
    found = []
    for finding in gpu.findings:
        lines = (finding.instruction, finding.other)
        same = finding.kind == "race" and all(x and x.opcode == "st.shared.b16" for x in lines)
        found += [] if same else [finding]
    return found


@pytest.mark.slow
def test_few_blocks_take_tiles_that_one_warp_finds(seed: int) -> None:
    """Random lengths: some sequences have no tokens, or one."""
    draw = random.Random(seed)
    lengths = [draw.choice((0, 1, draw.randint(2, 40), draw.randint(41, 200))) for _ in range(40)]
    case = Case({"mask": causal}, (4, 1), 4, 64, 192)
    wide = torch.randn(sum(lengths), 4, 64).half(), *torch.randn(2, sum(lengths), 1, 64).half().unbind()
    ends, attn = cumulative(lengths), fa4flex.compile(**case.composition)
    with torch.no_grad(), poisoned(), ptxsim.device("sm_90a", seed, "random", sms=3) as gpu:
        out, lse = attn(*wide, varlen=Varlen(ends, ends), return_lse=True)
    assert not _surprising(gpu), gpu.report()
    ranges = reference.sequence_ranges(ends)
    exact, exact_lse = reference.varlen(wide, (ranges, ranges), mask=causal)
    assert (out - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert (lse - exact_lse).abs().max() <= 1e-4


def test_a_tile_is_handed_over_whole() -> None:
    from fa4flex.kernels.common.work import Work

    assert len(Work._fields) == HANDED
