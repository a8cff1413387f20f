"""Bytes that ranks receive in a run are those that the planner says, on up to 16 simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Threads, on_ranks

import fa4flex
from fa4flex import variants as v
from fa4flex.parallel import ContextParallel, Layout, plan
from fa4flex.parallel.traffic import Model, busiest, by_heads, by_keys, heads_move

BATCH, DIM, DIM_V = 2, 8, 6
MASKS = {
    "causal": (v.causal, 61, 61),
    "sliding_window": (v.causal & v.sliding_window(9), 61, 61),
    "documents": (v.causal & v.document(torch.arange(64) // 17), 64, 64),
    "global_window": (v.global_window(8, 3), 61, 61),
    "few queries": (v.causal, 5, 60),
    "more queries": (v.causal, 60, 23),
}


def counted(
    mask: Any, lengths: tuple[int, int], ranks: int, layout: Layout, heads: tuple[int, int]
) -> tuple[Model, list[tuple[int, int]]]:
    """Sizes of a run in bfloat16, and the bytes that each rank received, forward and backward."""
    attn = fa4flex.compile(mask=mask)
    shapes = [(heads[0], lengths[0], DIM), (heads[1], lengths[1], DIM), (heads[1], lengths[1], DIM_V)]
    whole = [torch.randn(BATCH, *shape, dtype=torch.bfloat16) for shape in shapes]

    def run(links: Threads) -> tuple[int, int]:
        cp = ContextParallel(attn.variant, links, layout)
        at = cp.placement(lengths)
        of: Any = ("queries", "keys", "keys")
        own = [at.shard(x, links.rank, 2, which).requires_grad_() for x, which in zip(whole, of, strict=True)]
        out = cp(*own, lengths=lengths)
        forward = links.received
        out.sum().backward()
        return forward, links.received - forward

    return Model(*heads, DIM, DIM_V, 2, 4, BATCH), on_ranks(ranks, run)


@pytest.mark.parametrize("ranks", (2, 4, 8, 16))
@pytest.mark.parametrize("name", MASKS)
def test_keys_that_move(name: str, ranks: int) -> None:
    mask, *lengths = MASKS[name]
    for guests in ("never", "always"):
        layout = Layout(tile=4, stages=2, moves="keys", guests=guests)  # type: ignore[arg-type]
        model, found = counted(mask, (lengths[0], lengths[1]), ranks, layout, (4, 2))
        planned = plan(
            fa4flex.compile(mask=mask),
            (lengths[0], lengths[1]),
            ranks,
            tile=4,
            stages=2,
            guests=guests,  # type: ignore[arg-type]
        )
        assert found == [by_keys(planned, rank, model) for rank in range(ranks)], guests
        assert busiest(planned, model) == max(map(sum, found))
        if guests == "always" and (name == "few queries" or (name == "global_window" and ranks > 4)):
            assert planned.placement.splits


@pytest.mark.parametrize("ranks", (2, 8, 16))
def test_heads_that_move(ranks: int) -> None:
    layout = Layout(tile=4, moves="heads")
    model, found = counted(v.causal, (61, 61), ranks, layout, (2 * ranks, ranks))
    planned = plan(fa4flex.compile(mask=v.causal), 61, ranks, tile=4)
    assert found == [by_heads(planned, rank, model) for rank in range(ranks)]
    assert busiest(planned, model, "heads") == max(map(sum, found))


def test_what_moves_is_asked_of_each_plan_and_model() -> None:
    """Answers are kept by both: other heads, or another mask, give another."""
    dense, near = (
        plan(fa4flex.compile(mask=x), 1024, 4, tile=4) for x in (v.causal, MASKS["sliding_window"][0])
    )
    wide = Model(heads=8, kv_heads=8, dim=64, dim_v=64)
    for _ in range(2):
        assert heads_move(dense, wide), "fewer bytes than all keys of all heads"
        assert not heads_move(dense, wide._replace(heads=6, kv_heads=6)), "6 heads on 4 ranks"
        assert not heads_move(near, wide)
