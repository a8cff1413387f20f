"""Calls over lists that look like an earlier one, of other extents, contents and numbers: they are launched
as each is alone, and checked; and what they are told apart by. Kernels are left out, and CPU tensors stand
for those of a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from known_calls import POOL, attention, differing, heads, lengths
from launch_changes import HEADS, calls_on_gpu, shifted
from test_gpu_calls import Recorder

from fa4flex import InputError, Lists, Paging, Varlen, listed_calls
from fa4flex.errors import StateError
from fa4flex.kernels.plan.arguments import forward_schema
from fa4flex.kernels.plan.keys import CONTIGUOUS, in_pages, of_lists
from fa4flex.runtime.listed_keys import tiling_of

Call = tuple[tuple[torch.Tensor, ...], dict[str, Any]]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return calls_on_gpu(monkeypatch)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lists of the calls whose launch was looked for."""
    seen: list[Any] = []
    attend = listed_calls._attend

    def counted(now: Any, lists: Lists, *given: Any) -> Any:
        seen.append(lists)
        return attend(now, lists, *given)

    monkeypatch.setattr(listed_calls, "_attend", counted)
    return seen


def drawn(draw: random.Random, rows: tuple[int, int], keys: int, q_len: int, **options: Any) -> Lists:
    """Lists of a row for each query, of batch and rows; the ids are not looked at."""
    ids = torch.zeros(rows[0], draw.choice((1, 2)), rows[1], 40, dtype=torch.int32)
    return Lists(ids, kv_len=keys, q_len=q_len, **options)


def dense(draw: random.Random, **options: Any) -> Call:
    batch, q_len, keys = draw.randint(1, 9), draw.randint(1, 30), draw.randint(1, 4000)
    qkv = heads(HEADS, batch, q_len), heads(2, batch, keys), heads(2, batch, keys)
    return qkv, {"blocks": drawn(draw, (draw.choice((1, batch)), q_len), keys, q_len, **options)}


def counted(draw: random.Random) -> Call:
    qkv, given = dense(draw)
    lists = given["blocks"]
    return qkv, {"blocks": replace(lists, counts=torch.zeros(lists.ids.shape[:3], dtype=torch.int32))}


def beside(draw: random.Random) -> Call:
    numbers = {name: draw.randint(1, 9) for name in ("unit", "tail", "window", "sinks")}
    return dense(draw, **numbers)


def paged(draw: random.Random) -> Call:
    batch, columns, q_len = draw.randint(1, 9), draw.randint(1, 200), draw.randint(1, 4)
    table = torch.zeros(batch, 200, dtype=torch.int32)[:, :columns]
    used = lengths(batch, columns * 16, draw)
    given = {"paging": Paging(table, used), "blocks": drawn(draw, (batch, q_len), columns * 16, q_len)}
    return (heads(HEADS, batch, q_len), *POOL), given


def packed(draw: random.Random) -> Call:
    tokens, sequences = draw.randint(40, 4000), draw.randint(1, 9)
    inner = sorted(draw.randint(0, tokens) for _ in range(sequences - 1))
    cu = torch.tensor([0, *inner, tokens], dtype=torch.int32)
    qkv = tuple(torch.zeros(tokens, n, 64, dtype=torch.bfloat16) for n in (HEADS, 2, 2))
    lists = drawn(draw, (1, tokens), tokens, tokens)
    return qkv, {"varlen": Varlen(cu), "blocks": lists}


def launched(recorder: Recorder, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the last launch, by name."""
    lists, paging = given["blocks"], given.get("paging")
    kept = CONTIGUOUS if paging is None else in_pages(16)
    schema = forward_schema(of_lists(kept, lists.counts is not None, lists.beside))
    return dict(zip(schema.names, recorder.launches[-1], strict=True))


CALLS_OF_EACH = 24

CALLS: dict[str, Callable[[random.Random], Call]] = {
    one.__name__: one for one in (dense, counted, beside, paged, packed)
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_other_extents_are_launched_as_each_would_be_alone(
    recorder: Recorder, found: list[Any], kind: str, seed: int
) -> None:
    draw, attn = random.Random(seed), attention(sinks=torch.randn(HEADS))
    kinds = 0
    for _ in range(CALLS_OF_EACH):
        qkv, given = CALLS[kind](draw)
        before = len(found)
        out = attn(*qkv, **given)
        kinds += len(found) > before
        this = launched(recorder, given)
        assert out is this["out"] and out.shape[:-1] == qkv[0].shape[:-1]
        attention(sinks=attn.variant.sinks)(*qkv, **given)  # engines are published afresh: nothing is ready
        assert differing(this, launched(recorder, given)) == []
    assert kinds <= CALLS_OF_EACH // 2, "each kind of tile is looked for twice"


def test_lists_that_do_not_fit_are_refused_at_every_call(recorder: Recorder, found: list[Any]) -> None:
    attn, (qkv, given) = attention(), dense(random.Random(3))
    lists = given["blocks"]
    for _ in range(3):
        attn(*qkv, **given)
    found.clear()
    launches = len(recorder.launches)
    with pytest.raises(StateError, match="kv_len"):
        attn(*qkv, blocks=replace(lists, kv_len=lists.kv_len + 1))
    with pytest.raises(InputError, match="batch"):
        attn(*qkv, blocks=replace(lists, ids=torch.cat([lists.ids] * (qkv[0].shape[0] + 1))))
    assert found == [] and len(recorder.launches) == launches, "a known launch served, but for its check"


def test_numbers_of_lists_reach_the_launch(recorder: Recorder, found: list[Any]) -> None:
    attn, (qkv, given) = attention(), dense(random.Random(0), unit=2, window=5)
    for n in range(6):
        lists = replace(given["blocks"], unit=2 + n, window=5 + n)
        attn(*qkv, blocks=lists)
        names = launched(recorder, {"blocks": lists})
        assert (names["unit"], names["window"], names["end"]) == (2 + n, 5 + n, lists.kv_len)
        assert names["ids"] is lists.ids
    assert len(found) == 2


OTHERS: dict[str, Callable[[tuple[torch.Tensor, ...], Lists], Call]] = {
    "wide ids": lambda x, y: (x, {"blocks": replace(y, ids=y.ids.long())}),
    "counts": lambda x, y: (x, {"blocks": replace(y, counts=torch.zeros(y.ids.shape[:3]).int())}),
    "a window": lambda x, y: (x, {"blocks": replace(y, window=3)}),
    "half as long lists": lambda x, y: (x, {"blocks": replace(y, ids=y.ids[..., ::2])}),
    "alignment": lambda x, y: ((shifted(x[0]), *x[1:]), {"blocks": y}),
    "dtype": lambda x, y: (tuple(one.half() for one in x), {"blocks": y}),
    "gradients": lambda x, y: ((x[0].clone().requires_grad_(), *x[1:]), {"blocks": y}),
    "a log-sum-exp": lambda x, y: (x, {"blocks": y, "return_lse": True}),
    "a parameter": lambda x, y: ((torch.nn.Parameter(x[0], requires_grad=False), *x[1:]), {"blocks": y}),
    "used keys": lambda x, y: (x, {"blocks": y, "varlen": Varlen(seqused_k=torch.ones(len(x[0])).int())}),
    "a sink": lambda x, y: (x, {"blocks": y, "sinks": torch.zeros(HEADS)}),
    "a negative scale": lambda x, y: (x, {"blocks": y, "scale": -1.0}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_told_apart(recorder: Recorder, found: list[Any], name: str, seed: int) -> None:
    attn, (qkv, given) = attention(), dense(random.Random(seed))
    for _ in range(4):
        attn(*qkv, **given)
    assert len(found) == 2, "with all shapes compared, too"
    qkv, others = OTHERS[name](qkv, given["blocks"])
    attn(*qkv, **others)
    assert len(found) == 3
    attn(*qkv, **others)
    attn(*qkv, **given)
    assert recorder.launches, "nothing else was displaced"


def test_rows_that_share_a_tile_are_another_kind(recorder: Recorder, found: list[Any]) -> None:
    attn, (k, v) = attention(), (heads(2, 2, 300) for _ in "kv")
    sizes = [(1, False, 1), (8, False, 8), (16, False, 16), (3, False, 2)]
    for q_len, *tiling in sizes:
        lists = Lists(torch.zeros(2, 2, q_len, 4).int(), kv_len=300, q_len=q_len)
        assert list(tiling_of(lists, HEADS, 2)) == tiling
        before = len(found)
        for _ in range(3):
            attn(heads(HEADS, 2, q_len), k, v, blocks=lists)
        assert len(found) == before + 2


def test_inference_mode_is_another_kind(recorder: Recorder, found: list[Any]) -> None:
    attn, (qkv, given) = attention(), dense(random.Random(5))
    for _ in range(4):
        attn(*qkv, **given)
    with torch.inference_mode():
        attn(*qkv, **given)
    assert len(found) == 3
