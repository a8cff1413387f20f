"""Masks that are no key intervals, asked of every pair by the kernels for few query rows: right against the
oracle on the simulated GPU, contiguous, padded, in pages and over 8-bit caches, without block tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import decoding
import decoding_pages
import pytest
import torch
from decoding import ALWAYS_ON_BOTH, split_in
from paged_pools import Size, drawn
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import BlockMap, Schedule, Varlen
from fa4flex.variants import causal, document, softcap, tree

pytestmark = [pytest.mark.usefixtures("chip"), ALWAYS_ON_BOTH]


def remainders(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx * 7 + q_idx + h) % 3 != 0


def never(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The first query of each head sees no key."""
    return (q_idx > 0) & ((kv_idx + h) % 5 > 1)


def parents(nodes: int) -> list[int]:
    return [random.randrange(-1, n) if n else -1 for n in range(nodes)]


def trees(batch: int, nodes: int) -> Tensor:
    """Another tree for each sequence."""
    return torch.stack([tree_of(parents(nodes)) for _ in range(batch)])


def tree_of(given: list[int]) -> Tensor:
    from fa4flex.variants.tree import ancestors_of

    return ancestors_of(given)


MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "tree": lambda batch, n: {"mask": tree(parents(n))},
    "a tree each, soft cap": lambda batch, n: {
        "mask": tree(ancestors=trees(batch, n)),
        "score_mod": softcap(5.0),
    },
    "remainders": lambda batch, n: {"mask": remainders},
    "rows without keys": lambda batch, n: {"mask": never},
}
"""Pieces for a batch of so many sequences with so many queries."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("splits", [1, 3])
def test_dense_keys(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, splits)
    size = decoding.Size(heads=8, kv_heads=2, q_len=5, kv_len=random.choice([64, 150, 191]), batch=2)
    decoding.check(fa4flex.compile(**MASKS[name](2, 5)), decoding.drawn(size))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_padded_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values past a sequence's end are NaN."""
    split_in(monkeypatch, 2)
    lengths = torch.tensor([131, 60], dtype=torch.int32)
    qkv = decoding.drawn(decoding.Size(q_len=5, kv_len=150, batch=2))
    for x in qkv[1:]:
        for b, n in enumerate(lengths):
            x[b, :, n:] = torch.nan
    attn, used = fa4flex.compile(**MASKS[name](2, 5)), Varlen(seqused_k=lengths)
    compare(attn, qkv, *decoding.attend(attn, *qkv, varlen=used), varlen=used)


def compare(attn: fa4flex.Attention, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, **more: Any) -> None:
    exact, exact_lse = attn(*(x.double() for x in qkv), return_lse=True, **more)
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", [*MASKS, "documents"])
def test_pages(name: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 2]))
    given = drawn(Size(q_len=5, lengths=(150, 33), d=128, dv=128, page_size=page_size))
    decoding_pages.check(fa4flex.compile(**PAGED[name](2, 5)), given)


PAGED = MASKS | {"documents": lambda batch, n: {"mask": document(torch.arange(200) // 40)}}
"""Over pages, block tables would need these gathered first."""


@pytest.mark.parametrize("page_size", [0, 16])
def test_8_bit_caches(page_size: int, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if chip == "sm_100a":
        pytest.skip("no kernel of Blackwell reads 8-bit caches")
    split_in(monkeypatch, 2)
    attn = fa4flex.compile(**MASKS["tree"](2, 4))
    if page_size:
        given = drawn(Size(q_len=4, lengths=(150, 33), page_size=page_size))
        q, k, v, more = given.q, given.k.nan_to_num(), given.v.nan_to_num(), {"paging": given.paging}
    else:
        (q, k, v), more = decoding.drawn(decoding.Size(q_len=4, batch=2)), {}
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    compare(attn, (q, k, v), *decoding.attend(attn, q, k, v, **more), **more)


@pytest.mark.slow
def test_backward_passes_have_block_tables(chip: str) -> None:
    attn, qkv = fa4flex.compile(mask=tree(parents(5))), decoding.drawn(decoding.Size(q_len=5, kv_len=150))
    leaves, dout = [x.requires_grad_() for x in qkv], torch.randn(1, 4, 5, 64).bfloat16()
    with ptxsim.device(chip) as gpu:
        found = torch.autograd.grad(attn(*leaves), leaves, dout)
    kernels = [result.kernel for result in gpu.results]
    assert all(any(part in name for name in kernels) for part in ("decode", "block_tables", "bwd"))
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(attn(*exact_leaves), exact_leaves, dout.double())
    for mine, true in zip(found, exact, strict=True):
        assert (mine.double() - true).abs().max() <= 2 * 2**-8 * true.abs().max()


def test_longer_keys_are_the_same_launch(chip: str) -> None:
    """Block tables would be made anew for each length."""
    attn, lengths = fa4flex.compile(mask=tree(parents(4))), [130, 131, 190]
    calls = [decoding.drawn(decoding.Size(q_len=4, kv_len=n)) for n in lengths]
    with torch.no_grad(), ptxsim.device(chip) as gpu:
        found = [attn(*qkv, return_lse=True) for qkv in calls]
    for qkv, results in zip(calls, found, strict=True):
        compare(attn, qkv, *results)
    kernels = [result.kernel for result in gpu.results]
    assert all("decode" in name or "combine" in name for name in kernels)


KEPT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a map's blocks": ({"mask": BlockMap.from_dense(torch.rand(1, 4) < 0.7, 40)}, {}),
    "documents": ({"mask": causal & document(torch.arange(160) // 40)}, {}),
    "a tile that is asked for": ({"mask": remainders}, {"schedule": Schedule(tile=(128, 128))}),
}


@pytest.mark.parametrize("name", KEPT)
def test_tables_stay_where_they_leave_out_keys(name: str, chip: str) -> None:
    pieces, more = KEPT[name]
    plan = fa4flex.compile(**pieces, **more).source(
        "plan", q_len=1, kv_len=160, heads=4, kv_heads=4, arch=chip
    )
    assert "a mask by block tables" in plan.splitlines()[0]
