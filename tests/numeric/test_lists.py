"""Lists of keys, and parts and growth of maps: what each means pair by pair, in calls of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import close, cumulative, evaluate
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import fa4flex
from fa4flex import BlockMap, Lists, Paging, Varlen, reference
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.variants import causal, sliding_window


def drawn_lists(heads: int, rng: random.Random, **more: Any) -> Lists:
    """Lists with duplicates, negative ids and ids past the end, of queries and keys that may fill no last
    unit."""
    unit, queries = more.pop("unit", rng.randint(1, 5)), more.pop("queries", rng.randint(1, 4))
    q_len, kv_len, batch = rng.randint(1, 12), rng.randint(1, 20), rng.randint(1, 2)
    rows, cap = -(-q_len // queries), rng.randint(0, 6)
    ids = torch.randint(-2, -(-kv_len // unit) + 3, (batch, heads, rows, cap), dtype=torch.int32)
    counts = torch.randint(0, cap + 1, (batch, heads, rows)) if rng.random() < 0.5 else None
    return Lists(ids, counts, unit=unit, queries=queries, q_len=q_len, kv_len=kv_len, **more)


def meaning(lists: Lists, heads: int, inner: Callable[[int, int], bool]) -> Tensor:
    """allowed[b, h, q, kv] as the definition has it, pair by pair."""
    batch, own = lists.ids.shape[:2]
    allowed = torch.zeros(batch, heads, lists.q_len, lists.kv_len, dtype=torch.bool)
    for b, h, q, kv in torch.ones_like(allowed).nonzero().tolist():
        row = (b, h * own // heads, q // lists.queries)
        live = lists.capacity if lists.counts is None else int(lists.counts[row])
        position = q + lists.kv_len - lists.q_len
        whole = (position + 1) // lists.unit  # units that end before the key after the query's own
        seen = kv // lists.unit in lists.ids[row].tolist()[:live]
        seen = seen or kv < lists.sinks or position - lists.window < kv <= position
        seen = seen or (lists.tail > 0 and (whole - lists.tail + 1) * lists.unit <= kv <= position)
        allowed[b, h, q, kv] = seen and inner(q, kv)
    return allowed


@pytest.mark.parametrize("number", range(25))
def test_lists_mean_what_is_written(number: int, seed: int) -> None:
    rng = random.Random(seed + number)
    own = rng.choice([1, 2])
    lists = drawn_lists(
        own, rng, tail=rng.choice([0, 1, 2]), window=rng.choice([0, 3]), sinks=rng.choice([0, 2])
    )
    heads, shape = 2 * own, (lists.ids.shape[0], 2 * own, lists.q_len, lists.kv_len)
    assert torch.equal(evaluate(lists.mask(), *shape), meaning(lists, heads, lambda q, kv: True))
    seen = lambda q, kv: kv <= q + lists.kv_len - lists.q_len  # noqa: E731
    assert torch.equal(evaluate(lists.mask(causal), *shape), meaning(lists, heads, seen))
    assert torch.equal(evaluate(causal & fa4flex.as_mask(lists), *shape), meaning(lists, heads, seen))


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_attention_over_lists(number: int, backend: Any, seed: int) -> None:
    rng = random.Random(seed + number)
    own, beside = rng.choice([1, 2]), rng.choice([{}, {"tail": 1}, {"window": 2, "sinks": 1}])
    lists, heads = drawn_lists(own, rng, **beside), 2 * own
    batch = lists.ids.shape[0]
    q, k, v = (
        torch.randn(batch, n, length, 8, dtype=torch.float64, requires_grad=True)
        for n, length in ((heads, lists.q_len), (own, lists.kv_len), (own, lists.kv_len))
    )
    allowed = meaning(lists, heads, lambda q, kv: kv <= q + lists.kv_len - lists.q_len)
    mask = lambda b, h, q_idx, kv_idx: allowed[b, h, q_idx, kv_idx]  # noqa: E731
    want, _ = reference.attention(q, k, v, None, mask)
    wanted = torch.autograd.grad(want.sin().sum(), (q, k, v))
    at_call = fa4flex.compile(mask=causal, backend=backend)(q, k, v, blocks=lists)
    composed = fa4flex.compile(mask=causal, blocks=lists, backend=backend)(q, k, v)
    for got in (at_call, composed):
        assert close(got, want)
        for x, y in zip(torch.autograd.grad(got.sin().sum(), (q, k, v)), wanted, strict=True):
            assert close(x, y)


def test_lists_of_maps_and_back() -> None:
    classes = torch.randint(0, 2, (2, 3, 4, 5), dtype=torch.uint8)
    blocks = BlockMap(classes, (8, 4), 30, 17)
    lists = Lists.of(blocks)
    assert torch.equal(lists.classes(), classes) and torch.equal(lists.map().classes, classes)
    assert torch.equal(lists.counts, classes.sum(-1).int())
    for row, listed in zip(lists.ids.flatten(0, 2).tolist(), classes.flatten(0, 2).tolist(), strict=True):
        found = [at for at, one in enumerate(listed) if one]
        assert row == found + [-1] * (5 - len(found))
    few = Lists.of(blocks, 2)
    assert few.capacity == 2 and torch.equal(few.ids, lists.ids[..., :2])
    assert torch.equal(few.counts, classes.sum(-1).int().clamp(max=2))


def test_from_lists() -> None:
    blocks = BlockMap.from_lists([[0], [], [2, 0, 2]], 4)
    assert blocks.classes[0, 0].tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 1]] and blocks.kv_len == 12
    by_head = BlockMap.from_lists([[[0], [1]], [[], [0, 1]]], (4, 2), 7, 5)
    assert by_head.classes[0].tolist() == [[[1, 0, 0], [0, 1, 0]], [[0, 0, 0], [1, 1, 0]]]
    assert (by_head.q_len, by_head.kv_len) == (7, 5)
    tensor = torch.tensor([[1, -1], [-1, -1]])
    assert BlockMap.from_lists(tensor, 4).classes[0, 0].tolist() == [[0, 1], [0, 0]]
    with pytest.raises(InputError, match="key block 3 in ids"):
        BlockMap.from_lists([[3]], 4, kv_len=8)
    with pytest.raises(InputError, match="other numbers of rows"):
        BlockMap.from_lists([[[0], [1]], [[0]]], 4)
    with pytest.raises(InputError, match="lists of blocks as int"):
        BlockMap.from_lists(3, 4)


def test_parts_of_maps_are_maps_of_these_tokens() -> None:
    classes = torch.randint(0, 3, (2, 4, 5, 6), dtype=torch.uint8)
    blocks = BlockMap(classes, (4, 3), 18, 16)
    part = blocks[1, 2:, 1:3]
    assert torch.equal(part.classes, classes[1:2, 2:, 1:3]) and (part.q_len, part.kv_len) == (8, 16)
    last = blocks[..., -1, 4:]
    assert torch.equal(last.classes, classes[:, :, -1:, 4:]) and (last.q_len, last.kv_len) == (2, 4)
    assert torch.equal(blocks[:, [3, 0]].classes, classes[:, [3, 0]])
    assert torch.equal(blocks[torch.tensor([1, 1])].classes, classes[[1, 1]])
    assert [torch.equal(one.classes, classes[b : b + 1]) for b, one in enumerate(blocks)] == [True, True]
    whole = evaluate(blocks.mask(), 2, 4, 18, 16)
    assert torch.equal(evaluate(part.mask(), 1, 2, 8, 16), whole[1:2, 2:, 4:12])
    for index, text in [
        ((slice(None), slice(None), [0, 2]), "rows of blocks indexed by"),
        ((slice(None), slice(None), slice(0, 4, 2)), "without a step"),
        ((0, 4), "index 4 into 4 heads"),
        ((0, 0, 0, 0, 0), "at most four"),
        ((slice(None), slice(None), slice(2, 2)), "no rows"),
        (1.5, "batch indexed by float"),
    ]:
        with pytest.raises(InputError, match=text):
            blocks[index]
    with pytest.raises(IndexError, match="shared by all batch"):
        BlockMap(classes[:1], (4, 3), 18, 16)[1]


def test_parts_with_a_window_keep_its_meaning_or_are_refused(seed: int) -> None:
    ids = torch.randint(0, 4, (1, 1, 6, 2))
    lists = Lists(ids, unit=4, queries=2, kv_len=16, window=3)
    whole = evaluate(lists.mask(), 1, 1, 12, 16)
    last = lists.map()[:, :, 2:]
    assert torch.equal(evaluate(last.mask(), 1, 1, 8, 16), whole[:, :, 4:])
    for index in ((0, 0, slice(0, 2)), (0, 0, slice(None), slice(0, 2))):
        with pytest.raises(UnsupportedError, match=r"a part of ListedMap.*window=3"):
            lists.map()[index]


def test_growth() -> None:
    classes = torch.randint(0, 3, (1, 2, 2, 3), dtype=torch.uint8)
    blocks = BlockMap(classes, (4, 4), 7, 9)
    grown = blocks.grown(kv_len=17, new="full")
    assert torch.equal(grown.classes[..., :3], classes) and bool((grown.classes[..., 3:] == 2).all())
    assert (grown.q_len, grown.kv_len, grown.classes.shape) == (7, 17, (1, 2, 2, 5))
    assert blocks.grown(8, 12).classes.equal(classes)  # the last blocks had room
    assert blocks.grown(9, new="empty").classes[:, :, 2].sum() == 0
    with pytest.raises(InputError, match=r"kv_len=5 for a map of kv_len=9"):
        blocks.grown(kv_len=5)
    with pytest.raises(InputError, match="new='all'"):
        blocks.grown(new="all")


def test_growth_in_decoding() -> None:
    """One query after another, each over the blocks that it lists and those that came since."""
    k, v = (torch.randn(1, 2, 24, 8, dtype=torch.float64) for _ in range(2))
    blocks = BlockMap.from_lists([[0]], (1, 4), 1, 8)
    for kv_len in range(8, 24):
        q = torch.randn(1, 2, 1, 8, dtype=torch.float64)
        blocks = blocks.grown(kv_len=kv_len)
        got = fa4flex.compile(blocks=blocks)(q, k[:, :, :kv_len], v[:, :, :kv_len])
        seen = [kv for kv in range(kv_len) if kv < 4 or kv >= 8]
        if seen:
            want = reference.attention(q, k[:, :, seen], v[:, :, seen])[0]
            assert close(got, want)


def test_maps_of_key_heads() -> None:
    classes = torch.randint(0, 3, (1, 2, 3, 3), dtype=torch.uint8)
    blocks = BlockMap(classes, 4, 12, 12)
    of_queries = blocks.for_query_heads(6)
    assert torch.equal(of_queries.classes, classes[:, [0, 0, 0, 1, 1, 1]])
    with pytest.raises(InputError, match=r"for_query_heads\(3\) of a map of 2 heads"):
        blocks.for_query_heads(3)
    with pytest.raises(InputError, match=r"blocks.for_query_heads\(4\)"):
        fa4flex.compile(blocks=blocks)(*(torch.randn(1, n, 12, 8) for n in (4, 2, 2)))


@pytest.mark.parametrize("inner", [None, causal])
def test_maps_under_torch(inner: Any) -> None:
    blocks = BlockMap(torch.randint(0, 3, (2, 2, 4, 3), dtype=torch.uint8), (4, 8), 15, 22)
    made = blocks.to_torch(inner)
    assert made.seq_lengths == (15, 22) and tuple(made.BLOCK_SIZE) == (4, 8)
    back, mod = BlockMap.from_torch(made)
    assert torch.equal(back.classes, blocks.classes)
    assert torch.equal(evaluate(back.mask(mod), 2, 2, 15, 22), evaluate(blocks.mask(inner), 2, 2, 15, 22))
    assert torch.equal(
        reference.allowed_pairs(made, (2, 2, 15, 22)), evaluate(blocks.mask(inner), 2, 2, 15, 22)
    )


def test_full_blocks_beside_a_mask() -> None:
    """Given as blocks= a full block is allowed whatever the mask says; `blocks & mask` is what both allow."""
    blocks = BlockMap(torch.full((1, 1, 2, 2), 2, dtype=torch.uint8), 4, 8, 8)
    qkv = [torch.randn(1, 1, 8, 8, dtype=torch.float64) for _ in range(3)]
    assert close(fa4flex.compile(mask=causal, blocks=blocks)(*qkv), reference.attention(*qkv)[0])
    both = fa4flex.compile(mask=blocks & causal)
    assert close(both(*qkv), reference.attention(*qkv, None, causal)[0])
    said = " ".join(fa4flex.compile(mask=causal, blocks=blocks).explain(8).split())
    assert "a full block is allowed whatever the mask says" in said


# --- ragged batches -----------------------------------------------------------------------------------------


def ragged(lengths: list[int], heads: int = 2) -> tuple[list[Tensor], Tensor]:
    qkv = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    return qkv, cumulative(lengths)


def by_sequence(qkv: list[Tensor], cu: Tensor, mask_of: Callable[[int, int], Any]) -> Tensor:
    """The reference of each sequence alone, under mask_of(sequence, first token)."""
    outs = []
    for n, (first, last) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        one = [x[first:last].transpose(0, 1)[None] for x in qkv]
        outs.append(reference.attention(*one, None, mask_of(n, first))[0][0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("shared", [True, False])
def test_packed_maps_are_over_each_sequences_own_indices(shared: bool, backend: Any) -> None:
    qkv, cu = ragged([5, 11, 8])
    classes = torch.randint(0, 3, (1 if shared else 3, 2, 3, 3), dtype=torch.uint8)
    blocks = BlockMap(classes, 4, 12, 12)

    def mask_of(n: int, first: int) -> Any:
        plane = classes[0 if shared else n]

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            found = plane[h, q_idx // 4, kv_idx // 4]
            return (found == 2) | ((found == 1) & (kv_idx <= q_idx))

        return mask

    want = by_sequence(qkv, cu, mask_of)
    attn = fa4flex.compile(mask=causal, backend=backend)
    got = attn(*qkv, varlen=Varlen(cu), blocks=blocks)
    assert close(got, want)
    wanted = torch.autograd.grad(want.sin().sum(), qkv)
    for x, y in zip(torch.autograd.grad(got.sin().sum(), qkv), wanted, strict=True):
        assert close(x, y)


def test_maps_of_all_packed_tokens() -> None:
    qkv, cu = ragged([5, 11, 8])
    classes = torch.randint(0, 3, (1, 2, 6, 6), dtype=torch.uint8)
    blocks = BlockMap(classes, 4, 24, 24)

    def mask_of(n: int, first: int) -> Any:
        return lambda b, h, q_idx, kv_idx: classes[0, h, (q_idx + first) // 4, (kv_idx + first) // 4] != 0

    got = fa4flex.compile(mask=blocks.packed(cu))(*qkv, varlen=Varlen(cu))
    assert close(got, by_sequence(qkv, cu, mask_of))
    both = fa4flex.compile(mask=blocks.packed(cu) & causal)(*qkv, varlen=Varlen(cu))
    seen = lambda n, first: lambda b, h, q, kv: mask_of(n, first)(b, h, q, kv) & (kv <= q)  # noqa: E731
    assert close(both, by_sequence(qkv, cu, seen))
    with pytest.raises(InputError, match="ends at 25, the map is of 24 tokens"):
        blocks.packed(cumulative([25]))


def test_paged_maps_and_lists() -> None:
    k, v = (torch.randn(2, 2, 24, 8, dtype=torch.float64) for _ in range(2))
    q = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    table, used = torch.tensor([[3, 1, 6], [0, 5, 2]]), torch.tensor([19, 24])
    caches = []
    for x in (k, v):
        cache = torch.zeros(7, 8, 2, 8, dtype=torch.float64)
        cache[table] = x.transpose(1, 2).unflatten(1, (3, 8))
        caches.append(cache)
    lists = Lists(torch.randint(-1, 6, (2, 2, 3, 2)), unit=4, kv_len=24)
    got = fa4flex.compile(mask=causal)(q, *caches, paging=Paging(table, used), blocks=lists)
    for b in range(2):
        length = int(used[b])
        one = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]
        allowed = evaluate(mask_of_lists(lists, b, length), 1, 4, 3, length)
        dense = lambda _, h, q_idx, kv_idx, a=allowed: a[0, h, q_idx, kv_idx]  # noqa: E731
        assert close(got[b : b + 1], reference.attention(*one, None, dense)[0])


def mask_of_lists(lists: Lists, b: int, length: int) -> Any:
    def mask(_: Any, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        rows = lists.ids[b][h // 2, q_idx]
        return (rows == (kv_idx // lists.unit)[..., None]).any(-1) & (kv_idx <= q_idx + length - lists.q_len)

    return mask


def test_maps_that_do_not_cover_a_sequence_are_refused() -> None:
    qkv, cu = ragged([5, 11])
    blocks = BlockMap(torch.ones(1, 1, 2, 2, dtype=torch.uint8), 4, 8, 8)
    with pytest.raises(InputError, match=r"a sequence of 11 tokens with a block map of q_len=8") as e:
        fa4flex.compile(blocks=blocks)(*qkv, varlen=Varlen(cu))
    assert "blocks.packed" in str(e.value)
    three = BlockMap(torch.ones(3, 1, 3, 3, dtype=torch.uint8), 4, 12, 12)
    with pytest.raises(InputError, match="3 batch entries for inputs with 2"):
        fa4flex.compile(blocks=three)(*qkv, varlen=Varlen(cu))


def test_second_passes_over_packed_maps() -> None:
    qkv, cu = ragged([5, 11])
    blocks = BlockMap(torch.randint(0, 3, (1, 2, 3, 3), dtype=torch.uint8), 4, 12, 12)
    attn = fa4flex.compile(blocks=blocks)
    q, k, v = (x.detach() for x in qkv)
    out, lse = attn(q, k, v, varlen=Varlen(cu), return_lse=True)
    weights = attn.probabilities(q, k, lse, varlen=Varlen(cu))
    assert close(torch.einsum("hqk,khd->qhd", weights, v), out)


def test_parts_and_growth_of_maps_in_one_graph() -> None:
    q, k, v = torch.randn(2, 4, 8, 8), torch.randn(2, 2, 8, 8), torch.randn(2, 2, 8, 8)
    classes, heads = torch.randint(0, 3, (2, 2, 3, 3), dtype=torch.uint8), torch.tensor([1, -2])

    def call(classes: Tensor, heads: Tensor) -> Tensor:
        blocks = BlockMap(classes, 3, 8, 7)[:, heads].grown(kv_len=8).for_query_heads(4)
        return fa4flex.attention(q, k, v, mask=causal, blocks=blocks)

    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(compiled(classes, heads), call(classes, heads))


def test_traces_of_maps_and_lists_are_kept() -> None:
    """A call traces nothing that an earlier one has traced: no method of a map has an import of its own."""
    classes = torch.randint(0, 3, (1, 1, 3, 3), dtype=torch.uint8)
    lists = Lists(torch.randint(-1, 3, (1, 2, 3, 2)), kv_len=12, unit=4, queries=4, window=2)
    blocks = BlockMap(classes, 4, 12, 12)
    for mask in (blocks.mask(causal), lists.mask(causal), blocks.packed(cumulative([12])), causal & blocks):
        assert fa4flex.compile(mask=mask).trace.reader is not None


# --- errors -------------------------------------------------------------------------------------------------

IDS = torch.zeros(1, 1, 4, 2, dtype=torch.int32)
MAP = BlockMap(torch.ones(2, 1, 2, 2, dtype=torch.uint8), 2, 4, 4)
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Lists(IDS.float(), kv_len=8), "ids of torch.float32"),
    (lambda: Lists(IDS[0], kv_len=8), "ids of rank 3"),
    (lambda: Lists(IDS, kv_len=0), "kv_len=0\n  expected: an int of 1 or more"),
    (lambda: Lists(IDS, kv_len=8, window=-1), "window=-1"),
    (lambda: Lists(IDS, kv_len=8, unit=2.0), "unit=2.0"),
    (lambda: Lists(IDS, kv_len=8, q_len=5), "4 rows of ids for q_len=5"),
    (lambda: Lists(IDS, torch.zeros(1, 1, 3, dtype=torch.int32), kv_len=8), r"counts \[1, 1, 3\] on cpu"),
    (
        lambda: fa4flex.attention(*(torch.randn(1, 1, 5, 8) for _ in range(3)), blocks=Lists(IDS, kv_len=5)),
        "q_len=4, kv_len=5, but got q_len=5, kv_len=5",
    ),
    (
        lambda: fa4flex.attention(
            *(torch.randn(1, 3, 4, 8) for _ in range(3)), blocks=Lists(IDS.expand(1, 2, 4, 2), kv_len=4)
        ),
        "2 heads for inputs with 3",
    ),
    (
        lambda: fa4flex.compile(mask=Lists(IDS, kv_len=8), blocks=Lists(IDS, kv_len=8)),
        "both as mask= and as blocks=",
    ),
    (lambda: Lists(IDS, kv_len=8, window=2).map().to_torch(), "tail, window and sinks"),
    (lambda: Lists(IDS, kv_len=8, sinks=1).map().packed(torch.tensor([0, 4])), "tail, window and sinks"),
    (lambda: MAP.packed(torch.tensor([[0, 4]])), r"cu_seqlens_q of shape \[1, 2\]"),
    (lambda: MAP.to_torch(causal, q_len=4), r"to_torch\(q_len=...\)"),
    (lambda: Lists.of(MAP, 0), "capacity=0"),
    (lambda: Lists.of(IDS), "lists of torch.int32"),  # type: ignore[arg-type]
    (lambda: MAP[[True, False]], "batch indexed by list"),
    (lambda: MAP[torch.tensor([2])], "index 2 into 2 batch"),
    (lambda: MAP[::-1], "a positive step"),
    (lambda: MAP["a":], "batch indexed by slice"),  # type: ignore[misc]
    (lambda: MAP.grown(kv_len=9, new=["full"]), r"new=\['full'\]"),  # type: ignore[arg-type]
    (lambda: BlockMap.from_lists([[0.5]], 2), "0.5 in a list of blocks"),
    (lambda: BlockMap.from_lists([[True]], 2), "True in a list of blocks"),
    (lambda: BlockMap.from_lists([[0], [[1]]], 2), r"\[1\] in a list of blocks"),
    (lambda: BlockMap.from_lists([[1 << 40]], 2), "1099511627776 in a list of blocks"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_says_what_was_given_and_what_to_do(number: int) -> None:
    make, text = ERRORS[number]
    with pytest.raises((InputError, UnsupportedError), match=text) as raised:
        make()
    assert "to fix:" in str(raised.value)


def test_short_units_on_a_gpu_are_refused_and_their_map_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa4flex.primitives import lists as module

    monkeypatch.setattr(module, "simulating", lambda: True)
    lists = Lists(IDS, unit=16, kv_len=64)
    with pytest.raises(UnsupportedError, match=r"units of 16 keys.*\n.*\n.*blocks=lists.map\(\).* 16 bytes"):
        fa4flex.compile(blocks=lists)
    assert fa4flex.compile(blocks=lists.map()).variant.blocks is not None
    long = Lists(IDS, unit=64, kv_len=256)
    assert fa4flex.compile(blocks=long).variant.blocks is not None


def test_lists_show_themselves() -> None:
    lists = Lists(IDS, torch.ones(1, 1, 4, dtype=torch.int32), kv_len=8, unit=4, window=3)
    again = eval(repr(lists), {"Lists": Lists, "torch": torch})
    assert torch.equal(again.ids, lists.ids) and (again.unit, again.window, again.kv_len) == (4, 3, 8)
    shown = create_mask(lists.mask(sliding_window(2)).bind(q_len=4, kv_len=8, num_heads=1), 1, 1, 4, 8, "cpu")
    assert shown.shape == (1, 1, 4, 8)
