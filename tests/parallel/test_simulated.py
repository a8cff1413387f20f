"""Context parallelism on ranks simulated by threads: results and gradients are those of one process."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import called, close, gradients, leaf
from ranks import Board, Threads, on_ranks
from torch import Tensor
from variant_table import TABLE, Case, Sizes

import fa4flex
from fa4flex import InputError
from fa4flex import variants as v
from fa4flex.parallel import ContextParallel, Layout, context, exchange, plan, rectangle
from fa4flex.parallel.rectangle import Rectangles
from fa4flex.runtime import compute

Composition = dict[str, Any]


@pytest.fixture(autouse=True)
def _few_queries_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are cut for few queries without keys of others, as there are few of any kind here."""
    monkeypatch.setattr(exchange, "LEAST_SPARED", 4)


def spread(
    case: Case, ranks: int, layout: Layout, qkv: tuple[Tensor, ...], upstream: list[Tensor], across: int = 1
) -> list[Tensor]:
    """Output, log-sum-exp and all gradients, whole, from simulated ranks; those learned of each. across:
    ranks in a row that exchange tokens for heads."""
    boards = [Board(across) for _ in range(ranks // across)], [Board(ranks // across) for _ in range(across)]

    def run(links: Threads) -> tuple[Any, list[Tensor]]:
        learned = [x.detach().clone().requires_grad_() for x in case.learned]
        row, column = divmod(links.rank, across)
        of_heads = None if across == 1 else Threads(column, across, boards[0][row])
        along = Threads(row, ranks // across, boards[1][column])
        variant = fa4flex.compile(**case.compose(*learned)).variant
        cp = ContextParallel(variant, along, layout, across=of_heads)
        assert cp.rank == links.rank
        at = cp.placement((case.sizes.q_len, case.sizes.kv_len), case.sizes.batch, case.sizes.heads)
        of = ("queries", "keys", "keys")
        own = [
            at.shard(x.detach(), links.rank, 2, which).clone().requires_grad_()  # type: ignore[arg-type]
            for x, which in zip(qkv, of, strict=True)
        ]
        out, lse = called(cp, *own)
        above = [at.shard(x, links.rank) for x in upstream]
        return at, [out, lse, *gradients((out, lse), [*own, *learned], above)]

    found = on_ranks(ranks, run)
    at = found[0][0]
    whole = [
        at.unshard([x[1][i] for x in found], of=of)
        for i, of in enumerate(("queries", "queries", "queries", "keys", "keys"))
    ]
    for i in range(len(case.learned)):
        each = [x[1][5 + i] for x in found]
        assert all(torch.equal(x, each[0]) for x in each)
        whole.append(each[0])
    return whole


def compare(
    case: Case, ranks: int, layout: Layout, across: int = 1, qkv: tuple[Tensor, ...] | None = None
) -> None:
    q, k, values = case.sizes.qkv() if qkv is None else qkv
    attn = fa4flex.compile(**case.compose(*case.learned))
    out, lse = called(attn, q, k, values)
    upstream = [torch.randn_like(out), torch.randn_like(lse)]
    wanted = [out, lse, *gradients((out, lse), [q, k, values, *case.learned], upstream)]
    found = spread(case, ranks, layout, (q, k, values), upstream, across)
    names = ["out", "lse", "dq", "dk", "dv", *(f"learned {i}" for i in range(len(case.learned)))]
    for name, got, want in zip(names, found, wanted, strict=True):
        assert close(got, want), f"{name} on {ranks} ranks with {layout}"


SMALL = Sizes(batch=2, heads=2, kv_heads=1)
LAYOUTS = {2: Layout(tile=4), 3: Layout(tile=4, stages=2), 8: Layout(tile=2)}
GUESTS = {3: Layout(tile=4, stages=2, guests="always"), 8: Layout(tile=2, guests="always")}


SPREAD = [name for name in TABLE if name != "softpick"]
"""Variants whose parts can be put together."""


@pytest.mark.parametrize("name", SPREAD)
def test_every_variant(name: str) -> None:
    compare(TABLE[name][0](SMALL), 3, LAYOUTS[3])


@pytest.mark.parametrize("name", SPREAD)
def test_every_variant_with_guests(name: str) -> None:
    """Queries whose keys are divided among ranks."""
    compare(TABLE[name][0](SMALL), 3, GUESTS[3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", (LAYOUTS, GUESTS), ids=("plain", "guests"))
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("name", SPREAD)
def test_every_draw(name: str, ranks: int, layout: dict[int, Layout]) -> None:
    if ranks in layout:
        for draw in TABLE[name]:
            compare(draw(Sizes()), ranks, layout[ranks])


def test_one_query_visits_all_ranks() -> None:
    """A query of a cache that is spread over ranks: each computes it against the keys that it holds."""
    case = Case(Sizes(2, 4, 2, 1, 45), lambda table: {"score_mod": v.learned_bias(table)}, (leaf(4, 89),))
    layout = Layout(tile=3, guests="always")
    found = plan(fa4flex.compile(**case.compose(*case.learned)), (1, 45), 8, tile=3, guests="always")
    assert len(found.placement.splits[0].parts) == 8 and not any(found.exchange.received)
    compare(case, 8, layout)


@pytest.mark.parametrize("name", ("alibi", "gpt_oss_sinks", "learned_bias", "mla", "vision_cross"))
def test_tokens_for_heads_within_tokens(name: str) -> None:
    """Two ranks have the tokens of each of two parts of the sequence, and exchange them for heads."""
    compare(TABLE[name][0](Sizes(batch=2, heads=4, kv_heads=2)), 4, Layout(tile=4), across=2)


@pytest.mark.parametrize("moves", ("keys", "heads"))
def test_keys_and_values_that_differ_in_heads(moves: str) -> None:
    case = TABLE["alibi"][0](Sizes(batch=2, heads=8, kv_heads=4))
    q, k, values = case.sizes.qkv()
    values = values[:, :2].detach().requires_grad_()
    compare(case, 2, Layout(tile=4, moves=moves), qkv=(q, k, values))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="8 query heads and 4 heads of keys and 2 of values on 4 ranks"):
        compare(case, 4, Layout(tile=4, moves="heads"), qkv=(q, k, values))
    compare(case, 2, Layout(tile=4), across=2, qkv=(q, k, values))


def test_as_many_keys_as_queries() -> None:
    """Keys lie where their queries do, in as many ranges."""
    for kind in ("contiguous", "head-tail", "min-heap", None):
        drawn = leaf(4, 89)
        case = Case(
            Sizes(q_len=45, kv_len=45),
            lambda table: {"score_mod": v.learned_bias(table), "mask": v.causal},
            (drawn,),
        )
        compare(case, 8 if kind is None else 4, Layout(kind, tile=3, stages=2))


def test_kernels_leave_multiprocessors_to_an_exchange_in_flight() -> None:
    """All but the kernels of the last keys to come, in either pass; nowhere on CPUs."""
    variant = fa4flex.compile(mask=v.causal).variant
    margins: dict[int, list[int]] = {rank: [] for rank in range(2)}
    here = threading.local()

    def recorded(call: Any) -> Any:
        def recording(program: Any, *given: Any) -> Any:
            margins[here.rank].append(program.schedule.sm_margin)
            return call(program, *given)

        return recording

    def run(links: Threads) -> list[int]:
        here.rank = links.rank
        cp = ContextParallel(variant, links, Layout(tile=4, stages=2, sm_margin=3))
        count = len(cp.positions(64))
        own = [leaf(1, 2, count, 8) for _ in range(3)]
        out = cp(*own, lengths=64)
        # Autograd would run it in a thread of its own.
        with torch.autograd.set_multithreading_enabled(False):
            out.sum().backward()
        return [len(of_ranks[links.rank]) for of_ranks in cp.plan(64).exchange.rectangles]

    for on_gpu in (False, True):
        for found in margins.values():
            found.clear()
        with (
            patch.object(context, "on_gpu", lambda _, there=on_gpu: there),
            patch.multiple(compute, forward=recorded(compute.forward), backward=recorded(compute.backward)),
        ):
            counts = on_ranks(2, run)
        for rank, (own, first, last) in enumerate(counts):
            margin = 3 * on_gpu
            forward = [margin] * (own + first) + [0] * last
            backward = [0] * last + [margin] * (first + own)
            assert margins[rank] == forward + backward and last


def test_results_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are merged, with each other or with sinks, have the dtype of sums; what one rectangle
    computes has that of the output."""
    monkeypatch.setattr(exchange, "LEAST_SPARED", 61)  # all ranges as they were dealt
    qkv = [torch.randn(1, heads, 61, 8).bfloat16() for heads in (4, 2, 2)]
    found = parts(fa4flex.compile(mask=v.causal), qkv, "never")
    assert {dtype for dtype, parts in found if parts > 1} == {torch.float32}
    assert {dtype for dtype, parts in found if parts == 1} == {torch.bfloat16}
    for guests in ("never", "always"):
        mask = v.global_window(8, 3) & v.document(torch.arange(61) // 31)
        found = parts(fa4flex.compile(mask=mask, sinks=torch.randn(4)), qkv, guests)
        assert {dtype for dtype, _ in found} == {torch.float32}
    found = parts(fa4flex.compile(mask=mask), qkv, "always")
    assert {dtype for dtype, parts in found if parts > 1} == {torch.float32}
    assert {dtype for dtype, parts in found if parts == 1} == {torch.bfloat16}


def test_what_torch_rounds_is_widened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention writes the dtype of q: none other is asked of it, and parts are merged as sums are."""
    asked = []
    forward = compute.forward

    def recorded(program: Any, *given: Any) -> Any:
        asked.append(program.precision.output)
        return forward(program, *given)

    monkeypatch.setattr(rectangle, "by_flex", lambda backend, q: True)
    monkeypatch.setattr(compute, "forward", recorded)
    qkv = [torch.randn(1, 2, 61, 8).bfloat16() for _ in range(3)]
    found = parts(fa4flex.compile(mask=v.causal), qkv, "never")
    assert {dtype for dtype, _ in found} == {torch.bfloat16, torch.float32}
    assert set(asked) == {torch.bfloat16}


def test_queries_without_keys_of_others_are_merged_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first of a rank's queries, behind a window; few such queries make no range of their own."""
    attn = fa4flex.compile(mask=v.causal & v.sliding_window(9))
    of_ranks = [((0, 32),), ((32, 40), (40, 64)), ((64, 72), (72, 96)), ((96, 104), (104, 128))]
    found = plan(attn, 128, 4, tile=4, stages=2).exchange
    assert list(found.queries) == of_ranks
    assert [len(x) for x in found.rectangles[0]] == [1, 1, 1, 1]
    of_second = [[(x.queries, x.keys) for x in stage[1]] for stage in found.rectangles]
    assert of_second == [[((40, 64), (32, 64))], [((32, 40), (24, 40))], []], (
        "first those that wait for nothing"
    )
    monkeypatch.setattr(exchange, "LATE", 0.1)  # of 8 queries' work among 32, at least 8 / 32 have to wait
    parted = plan(attn, 128, 4, tile=4).exchange
    assert [len(x) for x in parted.rectangles[0]] == [1, 2, 2, 2], "own keys of all"
    assert [sum(len(stage[rank]) for stage in parted.rectangles[1:]) for rank in range(4)] == [0, 1, 1, 1]
    monkeypatch.setattr(exchange, "LEAST_SPARED", 25)
    fewer = plan(attn, 128, 4, tile=4, batch=2, heads=3, stages=3).exchange
    assert list(fewer.queries) == [((0, 32),), ((32, 64),), ((64, 96),), ((96, 128),)]


def test_keys_arrive_in_as_many_parts_as_are_asked_for() -> None:
    attn = fa4flex.compile(mask=v.causal & v.sliding_window(200))
    found = [len(plan(attn, 4096, 4, **given).exchange.rectangles) - 1 for given in ({}, {"stages": 3})]
    assert found == [1, 3]


def parts(attn: fa4flex.Attention, qkv: list[Tensor], guests: Any) -> list[tuple[torch.dtype, int]]:
    """Dtype of each part that 4 ranks compute, and in how many parts its queries are computed."""
    layout = Layout(tile=4, moves="keys", guests=guests)
    asked: list[tuple[int, torch.dtype]] = []
    forward = Rectangles.forward

    def recorded(self: Rectangles, given: Any, start: tuple[int, int], dtype: torch.dtype) -> Any:
        out, lse = forward(self, given, start, dtype)
        asked.append((start[0], out.dtype))
        return out, lse

    def run(links: Threads) -> list[int]:
        cp = ContextParallel(attn.variant, links, layout)
        of: Any = ("queries", "keys", "keys")
        at = cp.placement(qkv[0].shape[2])
        assert bool(at.splits) == (guests == "always")
        out = cp(*(at.shard(x, links.rank, 2, which) for x, which in zip(qkv, of, strict=True)))
        assert out.dtype == torch.bfloat16
        stages = cp.plan(qkv[0].shape[2]).exchange.rectangles
        return [x.queries[0] for stage in stages for x in stage[links.rank]]

    with patch.object(Rectangles, "forward", recorded):
        starts = [start for of_rank in on_ranks(4, run) for start in of_rank]
    assert sorted(starts) == sorted(start for start, _ in asked)
    return [(dtype, starts.count(start)) for start, dtype in asked]


DROPOUT = {
    "moving keys": Layout(tile=4),
    "guests": Layout(tile=4, guests="always"),
    "moving heads": Layout(tile=4, moves="heads"),
}


@pytest.mark.parametrize("layout", DROPOUT)
@pytest.mark.parametrize("across", [1, 2])
@pytest.mark.parametrize("normalizer", [None, v.sigmoid_attention(0.0)], ids=["softmax", "sigmoid"])
def test_dropout_counts_in_the_whole(normalizer: Any, across: int, layout: str, seed: int) -> None:
    """Ranks drop the pairs that one process drops, in both passes."""
    composition = {"mask": v.causal, "dropout": fa4flex.Dropout(0.3, seed), "normalizer": normalizer}
    case = Case(Sizes(2, 4, 4, 29, 37), lambda: composition, ())
    compare(case, 2 * across, DROPOUT[layout], across)


def test_ranks_have_the_seed_that_the_first_has_drawn(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    attn, first, mine = fa4flex.compile(dropout=0.5), torch.randint(1 << 60, ()), threading.local()
    q, k, values = Sizes(1, 2, 2, 24, 24).qkv()

    def run(links: Threads) -> Any:
        mine.rank = links.rank
        cp = ContextParallel(attn.variant, links, Layout(tile=4))
        at = cp.placement(24, 1, 2)
        return at, cp(*[at.shard(x, links.rank, 2) for x in (q, k, values)])

    with monkeypatch.context() as patched:
        patched.setattr(context, "drawn", lambda dropout, _: fa4flex.Dropout(dropout.p, first + mine.rank))
        found = on_ranks(2, run)
    whole = found[0][0].unshard([x[1] for x in found])
    assert close(whole, attn(q, k, values, dropout=fa4flex.Dropout(0.5, first)))
