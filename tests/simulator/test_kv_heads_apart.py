"""Keys and values that differ in heads, by the generated kernels on simulated GPUs: right against the oracle,
nothing found, nothing repeated in memory, and dK and dV added up over the query heads that share each."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from captured_cases import over_draws, plain
from helpers import Width, cumulative, drawn_device, widths, worst
from paged_pools import guarded
from test_simulated_backward import judged
from torch import Tensor

import fa4flex
from fa4flex import Paging, Sinks, Varlen, reference
from fa4flex.kernels.plan import splitting
from fa4flex.variants import alibi, causal, sliding_window, softcap

ARCHS = ("sm_90a", "sm_100a")

Heads = tuple[int, int, int]
"""Query heads, heads of keys and heads of values."""

APART: tuple[Heads, ...] = ((8, 4, 2), (8, 2, 4), (8, 8, 1), (14, 7, 2))
"""The first two share KV heads of two query heads, whose rows may share tiles; the last one's have none."""

COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(60)},
    "by tables": {"mask": lambda b, h, q, k: (q >= k) & (q % 64 < 40) & (h != 1)},
}


def drawn(
    heads: Heads, lengths: tuple[int, int], width: Width, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k and v."""
    wide, wide_v = widths(width)
    sizes = zip(heads, (lengths[0], lengths[1], lengths[1]), (wide, wide, wide_v), strict=True)
    return [torch.randn(2, *size).to(dtype) for size in sizes]


def right(where: str, composition: dict[str, Any], found: tuple[Tensor, Tensor], qkv: list[Tensor]) -> None:
    """At most twice the error of the same maths in PyTorch."""

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        exact, _ = reference.attention(*given, **composition)
        return [exact], [plain(composition, *given)[0]]

    (exact,), (budget,) = over_draws(once, qkv)
    assert worst(found[0], exact)[0] <= max(2 * budget, 2**-8 * exact.abs().max().item()), where
    _, lse = reference.attention(*qkv, **composition)
    torch.testing.assert_close(found[1].double(), lse, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads", APART, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_forward(arch: str, heads: Heads) -> None:
    name, width = random.choice(sorted(COMPOSED)), random.choice((64, 128, (64, 128)))
    qkv = drawn(heads, random.choice(((130, 200), (70, 300))), width)
    attn = fa4flex.compile(**COMPOSED[name])
    with torch.no_grad(), drawn_device(arch) as gpu:
        found = attn(*qkv, return_lse=True)
    assert any("fwd_" in result.kernel for result in gpu.results) and not gpu.findings, gpu.report()
    right(f"{name}, {heads}, {width}", COMPOSED[name], found, qkv)


@pytest.mark.slow
@pytest.mark.parametrize("heads", APART, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_few_queries(arch: str, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are split between blocks, whose parts are merged."""
    monkeypatch.setattr(splitting, "_splits", lambda pairs, tiles, *_: (min(2, tiles),) * 2)
    composition = {"mask": causal, "score_mod": alibi}
    qkv = drawn(heads, (random.choice((1, 2)), 200), 64)
    attn = fa4flex.compile(**composition)
    with torch.no_grad(), drawn_device(arch) as gpu:
        found = attn(*qkv, return_lse=True)
    kernels = [result.kernel for result in gpu.results]
    assert any("decode" in name for name in kernels) and any("combine" in name for name in kernels)
    assert not gpu.findings, gpu.report()
    right(f"{heads}", composition, found, qkv)


@pytest.mark.slow
@pytest.mark.parametrize("heads", APART, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_gradients(arch: str, heads: Heads) -> None:
    name = random.choice(sorted(COMPOSED))
    composition = COMPOSED[name]
    if random.random() < 0.5:
        composition = composition | {"sinks": Sinks(torch.randn(heads[0]))}
    q_len, kv_len = random.choice(((130, 200), (70, 60)))
    (wide, wide_v), (hq, hk, hv) = random.choice(((64, 64), (64, 128), (128, 64))), heads
    shapes = ((1, hq, q_len, wide), (1, hk, kv_len, wide), (1, hv, kv_len, wide_v))
    where = f"{name}, {heads}, {q_len} x {kv_len}, {wide}, {wide_v}, {arch}"
    gpu = judged(where, composition, shapes, drawn_device(arch))
    adding = sum("sum_parts" in result.kernel for result in gpu.results)
    assert adding >= 1, where


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_of_packed_sequences(arch: str) -> None:
    (hq, hk, hv), width = random.choice(APART), 64
    lengths = [(70, 90), (0, 20), (33, 128)]
    cu_q, cu_k = (cumulative([pair[side] for pair in lengths]) for side in range(2))
    given = [torch.randn(int(cu[-1]), h, width).bfloat16() for cu, h in ((cu_q, hq), (cu_k, hk), (cu_k, hv))]
    dout = torch.randn(given[0].shape).bfloat16()
    ranges = reference.sequence_ranges(cu_q), reference.sequence_ranges(cu_k)

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        *qkv, dout = given
        found = []
        exact = [x.double().requires_grad_() for x in qkv]
        out, _ = reference.varlen((exact[0], exact[1], exact[2]), ranges, mask=causal)
        found.append(list(torch.autograd.grad(out, exact, dout.double())))
        same = [x.detach().requires_grad_() for x in qkv]
        parts = []
        for (q0, q1), (k0, k1) in zip(*ranges, strict=True):
            if q1 > q0:
                cut = same[0][q0:q1], same[1][k0:k1], same[2][k0:k1]
                one = plain({"mask": causal}, *(x.transpose(0, 1)[None] for x in cut))[0]
                parts.append(one[0].transpose(0, 1))
        found.append(list(torch.autograd.grad(torch.cat(parts), same, dout)))
        return found[0], found[1]

    exact, budgets = over_draws(once, (*given, dout))
    inputs = [x.requires_grad_() for x in given]
    with drawn_device(arch) as gpu:
        out = fa4flex.compile(mask=causal)(*inputs, varlen=Varlen(cu_q, cu_k))
        found = torch.autograd.grad(out, inputs, dout)
    assert not gpu.findings, gpu.report()
    for got, want, budget in zip(found, exact, budgets, strict=True):
        assert worst(got, want)[0] <= max(2 * budget, 2**-8 * want.abs().max().item()), (hq, hk, hv)


PAGES = {"boxes": 16, "rows": 1, "whole rows": 64}
"""Keys of a page that make copies of a kind."""


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [2, 70])
@pytest.mark.parametrize("page_size", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("arch", ARCHS)
def test_pages(arch: str, page_size: int, q_len: int) -> None:
    """Pools of keys and of values that differ in heads are read in place."""
    hq, hk, hv = random.choice(APART)
    lengths, width = [150, 71], random.choice((64, 128))
    live = [-(-n // page_size) for n in lengths]
    pages = torch.randperm(sum(live) + 2)
    table = torch.full((2, max(live) + 1), -1, dtype=torch.int32)
    table[0, : live[0]], table[1, : live[1]] = pages[: live[0]], pages[live[0] : sum(live)]
    used = torch.tensor(lengths, dtype=torch.int32)
    k, v = (torch.randn(len(pages), page_size, h, width).bfloat16() for h in (hk, hv))
    q = torch.randn(2, hq, q_len, width).bfloat16()
    attn = fa4flex.compile(mask=causal, score_mod=alibi)
    with torch.no_grad(), drawn_device(arch) as gpu:
        given = guarded(k), guarded(v)
        out, lse = attn(q, *given, paging=Paging(guarded(table), guarded(used)), return_lse=True)
    assert len({result.kernel for result in gpu.results if "combine" not in result.kernel}) == 1
    assert not gpu.findings, gpu.report()
    for n, length in enumerate(lengths):
        own = (cache[table[n, : live[n]].long()].flatten(0, 1)[:length] for cache in (k, v))
        one = [q[n : n + 1], *(x.transpose(0, 1)[None] for x in own)]
        found = out[n : n + 1], lse[n : n + 1]
        right(f"{hq, hk, hv}, pages of {page_size}", {"mask": causal, "score_mod": alibi}, found, one)


@pytest.mark.slow
def test_mixed_batches_go_by_another_kernel() -> None:
    """The kernel for mixed batches over pages takes as many heads of keys as of values."""
    hq, hk, hv = 8, 4, 2
    cu, used = cumulative([2, 40]), torch.tensor([60, 40], dtype=torch.int32)
    k, v = (torch.randn(8, 16, h, 64).bfloat16() for h in (hk, hv))
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    q = torch.randn(42, hq, 64).bfloat16()
    with torch.no_grad(), drawn_device("sm_90a") as gpu:
        out = fa4flex.compile(mask=causal)(q, k, v, varlen=Varlen(cu), paging=Paging(table, used))
    assert not gpu.findings and not any("mixed" in result.kernel for result in gpu.results)
    for n, ((first, last), length) in enumerate(
        zip(reference.sequence_ranges(cu), used.tolist(), strict=True)
    ):
        own = (cache[table[n].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (k, v))
        one = [q[first:last].transpose(0, 1)[None], *own]
        exact = reference.attention(*one, mask=causal)[0]
        same = plain({"mask": causal}, *one)[0]
        error = worst(out[first:last].transpose(0, 1)[None], exact)[0]
        assert error <= max(2 * worst(same, exact)[0], 2**-8 * exact.abs().max().item())
