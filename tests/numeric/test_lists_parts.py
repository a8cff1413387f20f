"""Parts, growth and pictures of lists, and messages for maps and lists of other lengths and heads."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from helpers import close
from torch import Tensor

import fa4flex
from fa4flex import BlockMap, InputError, Lists, UnsupportedError, reference, select
from fa4flex.variants import causal


def drawn_lists(rng: random.Random, queries: int) -> Lists:
    """Lists of two entries of a batch and three heads, with negative ids, ids past the end, and repeats."""
    q_len, kv_len, unit = rng.randint(3, 20), rng.randint(1, 30), rng.randint(1, 6)
    shape = 2, 3, -(-q_len // queries), rng.randint(1, 6)
    ids = torch.randint(-2, -(-kv_len // unit) + 2, shape, dtype=torch.int32)
    counts = torch.randint(0, shape[3] + 1, shape[:3]) if rng.random() < 0.5 else None
    return Lists(ids, counts, kv_len=kv_len, q_len=q_len, unit=unit, queries=queries)


@pytest.mark.parametrize("number", range(6))
def test_a_part_of_lists_is_the_part_of_their_map(number: int, seed: int) -> None:
    rng = random.Random(seed + number)
    lists = drawn_lists(rng, rng.randint(1, 3))
    rows = lists.ids.shape[2]
    first = rng.randrange(rows)
    last = rng.randint(first + 1, rows)
    for index in (
        0,
        (slice(None), [2, 0]),
        (1, numpy.int64(1)),
        (slice(None), slice(None), slice(first, last)),
        (slice(None), torch.tensor([1, 1]), slice(first, last)),
        (slice(None), slice(None), -1),
    ):
        part, of_map = lists[index], lists.map()[index]
        assert torch.equal(part.classes(), of_map.classes)
        assert (part.q_len, part.kv_len) == (of_map.q_len, of_map.kv_len)
        assert (part.counts is None) == (lists.counts is None)


def test_parts_of_lists_with_a_window_keep_their_last_queries() -> None:
    ids = torch.zeros(1, 2, 6, 1, dtype=torch.int32)
    lists = Lists(ids, kv_len=6, window=2)
    assert lists[:, 1].window == 2 and lists[..., 3:].q_len == 3 and lists[..., 3:].ids.shape[2] == 3
    with pytest.raises(UnsupportedError, match="tail, window and sinks"):
        lists[..., :3]
    with pytest.raises(InputError, match="at most three"):
        lists[0, 0, 0, 0]


@pytest.mark.parametrize("number", range(4))
def test_lists_grow(number: int, seed: int) -> None:
    """New queries list nothing; new keys are those of a unit that was there, or of one that nobody lists."""
    rng = random.Random(seed + number)
    lists = drawn_lists(rng, rng.randint(1, 3))
    assert lists.q_len is not None
    grown = lists.grown(lists.q_len + 4, lists.kv_len + 7)
    assert (grown.q_len, grown.kv_len) == (lists.q_len + 4, lists.kv_len + 7)
    before = replace(lists, ids=lists.ids.where(lists.ids < -(-lists.kv_len // lists.unit), -1))
    rows, units = before.classes().shape[2:]
    again = grown.classes()
    assert torch.equal(again[:, :, :rows, :units], before.classes())
    assert int(again.sum()) == int(before.classes().sum())
    with pytest.raises(InputError, match=f"kv_len={lists.kv_len - 1} for lists of kv_len={lists.kv_len}"):
        lists.grown(kv_len=lists.kv_len - 1)


def test_a_step_of_decoding_keeps_its_lists() -> None:
    """The chosen units of the last step serve the next one, whose key is in the window."""
    q, k, v = (torch.randn(1, n, s, 8, dtype=torch.float64) for n, s in ((4, 1), (2, 33), (2, 33)))
    scores = select.score(q, select.pool(k[:, :, :32], 8), over_heads=("mean", 2))
    chosen = replace(select.topk(scores, 2, own=1), window=4)
    grown = chosen.grown(kv_len=33)
    allowed = grown.classes().repeat_interleave(8, 3)[..., :33] > 0
    allowed = allowed | (torch.arange(33) >= 29)
    mask = lambda b, h, q_idx, kv_idx: allowed[b, h // 2, q_idx, kv_idx]  # noqa: E731
    assert close(fa4flex.attention(q, k, v, blocks=grown), reference.attention(q, k, v, None, mask)[0])


def test_lists_show_themselves() -> None:
    lists = Lists(torch.randint(0, 8, (1, 2, 16, 3)), kv_len=64, unit=8, queries=4, window=5)
    html = lists._repr_html_()
    assert "64 queries x 64 keys in blocks of 4 x 8" in html and "window 5" in html
    assert html.count("<svg") == 2
    share = f"{100 * float(lists.map().densities[0, 1]):.1f} %"
    assert share in re.findall(r"<tr>(.*?)</tr>", html)[2]


def test_figures_of_lists() -> None:
    pytest.importorskip("matplotlib")
    lists = Lists(torch.randint(0, 8, (1, 2, 16, 3)), kv_len=64, unit=8, queries=4)
    assert len(lists.plot().axes) == 2 and len(lists.plot(h=1).axes) == 1


def test_lists_of_many_pairs_are_not_drawn() -> None:
    """Their map would take a byte for each of 2^36 pairs."""
    many = Lists(torch.zeros(1, 1, 1, 2, dtype=torch.int32).expand(1, 1, 1 << 18, 2), kv_len=1 << 18)
    html = many._repr_html_()
    assert "<svg" not in html and "entries of a row" in html and "262144 queries x 262144 keys" in html
    with pytest.raises(UnsupportedError, match=r"lists\[:, :, :"):
        many.plot()


def test_densities_of_heads() -> None:
    classes = torch.randint(0, 3, (2, 3, 5, 7), dtype=torch.uint8)
    blocks = BlockMap(classes, (4, 4), 20, 28)
    wanted = (classes != 0).double().mean((2, 3))
    assert torch.allclose(blocks.densities.double(), wanted)
    assert blocks.densities.double().mean().item() == pytest.approx(1 - blocks.sparsity)


def test_indices_of_numpy() -> None:
    classes = torch.randint(0, 3, (2, 3, 5, 7), dtype=torch.uint8)
    blocks, at = BlockMap(classes, (4, 4), 20, 28), numpy.arange(3)
    assert torch.equal(blocks[at[1], at[2]].classes, classes[1:2, 2:3])
    assert torch.equal(blocks[:, :, at[1] : at[2]].classes, classes[:, :, 1:2])


# --- messages -----------------------------------------------------------------------------------------------

IDS = torch.zeros(1, 2, 4, 2, dtype=torch.int32)
MAP = BlockMap(torch.ones(1, 1, 2, 2, dtype=torch.uint8), 4, 8, 8)


def call(blocks: Any, q_len: int = 8, kv_len: int = 8, heads: int = 2) -> Tensor:
    q, k = torch.randn(1, heads, q_len, 8), torch.randn(1, heads, kv_len, 8)
    return fa4flex.compile(mask=causal)(q, k, k, blocks=blocks)


ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: call(MAP & causal), "blocks is a fa4flex.And(.|\n)*give it as mask="),
    (lambda: fa4flex.compile(blocks=MAP & causal), "blocks is a fa4flex.And(.|\n)*give it as mask="),
    (lambda: BlockMap.from_dense(torch.ones(2, 2).bool(), 4.0), r"block_size=4.0"),  # type: ignore[arg-type]
    (lambda: BlockMap.from_dense(torch.ones(2, 2).bool(), None), r"block_size=None"),  # type: ignore[arg-type]
    (lambda: BlockMap.from_dense(numpy.ones((2, 2), bool), 4), "torch.as_tensor"),  # type: ignore[arg-type]
    (lambda: MAP[torch.tensor([True])], r"which.nonzero\(\)"),
    (lambda: call(MAP, kv_len=13), r"or let it grow: blocks.grown\(q_len=8, kv_len=13\)"),
    (lambda: call(MAP, q_len=7), r"of the same blocks: dataclasses.replace\(blocks, q_len=7, kv_len=8\)"),
    (lambda: call(MAP, q_len=4), r"or take a part of it: blocks\[:, :, rows, columns\]"),
    (lambda: call(Lists(IDS[:, :1], kv_len=8, unit=4), q_len=16), r"how many queries share a row: queries=4"),
    (lambda: call(Lists(IDS, kv_len=8), q_len=4, heads=3), r"expected: a divisor of 3"),
    (lambda: call(BlockMap(torch.ones(3, 1, 2, 2).to(torch.uint8), 4, 8, 8)), "3 batch entries for inputs"),
    (lambda: select.mass(select.score(*[torch.randn(1, 1, 4, 4)] * 2), torch.tensor(90.0)), "share=90.0"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_says_what_was_given_and_what_to_do(number: int) -> None:
    make, text = ERRORS[number]
    with pytest.raises((InputError, UnsupportedError), match=text) as raised:
        make()
    assert "to fix:" in str(raised.value)


def test_advice_of_messages_is_right() -> None:
    assert call(MAP.grown(q_len=8, kv_len=13), kv_len=13).shape == (1, 2, 8, 8)
    assert call(replace(MAP, q_len=7, kv_len=8), q_len=7).shape == (1, 2, 7, 8)
    assert call(Lists(IDS[:, :1], kv_len=8, unit=4, queries=4), q_len=16).shape == (1, 2, 16, 8)
