"""Scaled products of queries and keys by the kernel, on simulated GPUs: as float64 makes them, as near as
float32, under all timings, whatever memory held before; nothing outside the tensors is read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from paged_pools import guarded
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import ptxsim
from fa4flex import select, variants
from fa4flex.primitives.pooled import products
from fa4flex.runtime.cuda import pooled_scores as kernels

TIMINGS = [("eager", 0), ("late", 1), ("random", 2)]


def whole(*shape: int) -> Tensor:
    """16 channels of whole numbers, whose means over 8 tokens and products are exact: nothing that is chosen
    depends on an order of sums, and there are many ties."""
    return torch.randint(-2, 3, (*shape, 16)).bfloat16()


def check(q: Tensor, k: Tensor, chip: str = "sm_90a") -> None:
    timing, seed, scale = *random.choice(TIMINGS), random.choice([0.125, 0.3])
    wanted = products(q.double(), k.double(), scale)
    assert kernels.multiplies(q, k)
    with ptxsim.device(chip, seed, timing) as gpu:
        found = kernels.scores(q, k, scale)
    assert len(gpu.results) == 1 and not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    assert found is not None and found.dtype == torch.float32 and found.shape == wanted.shape
    # Of D products in float32: no sum is off by more than D roundings of the greatest one.
    most = products(q.double().abs(), k.double().abs(), scale)
    assert ((found.double() - wanted).abs() <= q.shape[3] * 2.0**-24 * most).all()


@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("rows", "count", "width"), [(5, 4, 64), (130, 70, 128), (33, 129, 8), (1, 300, 80), (70, 33, 256)]
)
def test_products(rows: int, count: int, width: int, chip: str) -> None:
    dtype, heads = random.choice([torch.bfloat16, torch.float16]), random.choice([1, 2])
    q = guarded(torch.randn(2, 2 * heads, rows, width).to(dtype))
    check(q, guarded(torch.randn(2, heads, count, width).to(dtype)), chip)


def test_many_keys_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of many keys, where there are many blocks anyway."""
    monkeypatch.setattr(kernels, "BLOCKS", 1)
    check(torch.randn(1, 1, 40, 32).half(), torch.randn(1, 1, 300, 32).half())


def test_rows_of_any_strides() -> None:
    q, k = (torch.randn(1, n, 2, 64).bfloat16().transpose(1, 2) for n in (20, 12))
    check(q, k)


def test_scores_are_one_launch_with_gradients() -> None:
    """Gradients of q and of k; what a function makes of them, and of which groups of heads, is as before."""
    q = torch.randn(1, 4, 9, 16).bfloat16().requires_grad_()
    k = torch.randn(1, 2, 11, 16).bfloat16().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        made = select.score(q, k, lambda s, b, h, q_idx, kv_idx: s + h, over_heads=("max", 2)).values
        return made, *torch.autograd.grad(made.sin().sum(), (q, k))

    wanted = run()
    with ptxsim.device("sm_90a") as gpu:
        found = run()
    assert len(gpu.results) == 1 and not gpu.findings
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(found[0], wanted[0])


def test_other_tensors_are_multiplied_by_operations() -> None:
    """float32, two dtypes, and widths that no piece of 16 bytes divides or that are too wide."""
    q, k = torch.randn(1, 1, 5, 272), torch.randn(1, 1, 6, 272)
    some = (q[..., :16], k[..., :16]), (q.bfloat16(), k.bfloat16())
    some += (q[..., :12].half(), k[..., :12].half()), (q[..., :16].half(), k[..., :16].bfloat16())
    with ptxsim.device("sm_90a") as gpu:
        for a, b in some:
            assert torch.equal(select.score(a, b, scale=0.5).values, products(a, b, 0.5))
    assert not gpu.results


def test_a_selection_of_blocks_is_five_launches() -> None:
    """Two poolings, products, the best with the causal rule and own blocks, and the map, as operations of
    torch select."""
    q, k = whole(1, 2, 96), whole(1, 2, 96)

    def chosen() -> Tensor:
        scores = select.score(select.pool(q, 8), select.pool(k, 8)).causal()
        return select.topk(scores, 4, own=1).map().classes

    with ptxsim.device("sm_90a") as gpu:
        found = chosen()
    assert len(gpu.results) == 5 and not gpu.findings
    assert torch.equal(found, chosen())


VARIANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "moba": lambda q, k: variants.moba(q, k, 8, 4).ids,
    "quest": lambda q, k: variants.quest(q, k, 8, 5).ids,
    "video_blocks": lambda q, k: variants.video_blocks(q, k, 8, 5).ids,
    "lines": lambda q, k: torch.cat(select.lines(q[:1], k[:1], 9, 9, last=16), 1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_methods_select_the_same(name: str) -> None:
    """Selections by kernels are those by operations of torch."""
    q, k = whole(2, 4, 44), whole(2, 2, 72)
    wanted = VARIANTS[name](q, k)
    with ptxsim.device("sm_90a") as gpu:
        found = VARIANTS[name](q, k)
    assert gpu.results and not gpu.findings
    assert torch.equal(found, wanted)


def test_one_graph_selects_by_operators() -> None:
    """torch.compile, with what is computed by kernels as nodes, and gradients of scores."""
    q = torch.randn(1, 2, 96, 16).bfloat16().requires_grad_()
    k = torch.randn(1, 1, 96, 16).bfloat16().requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        scores = select.score(select.pool(q, 8), select.pool(k, 8)).causal()
        return select.topk(scores, 4, own=1).map().classes, scores.values.relu().sum()

    with ptxsim.device("sm_90a") as gpu:
        graph = torch.compile(run, fullgraph=True, backend="aot_eager")
        (classes, total), (wanted, other) = graph(), run()
        gradients = [torch.autograd.grad(x, (q, k)) for x in (total, other)]
    assert len(gpu.results) == 10 and not gpu.findings
    assert torch.equal(classes, wanted)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_who_intercepts_operators_sees_operations() -> None:
    """Under vmap, make_fx and tangents there is no launch, and nothing is lost."""
    q = torch.randn(3, 1, 2, 20, 16).bfloat16()

    def run(x: Tensor) -> Tensor:
        return select.score(select.pool(x, 4), select.pool(x, 4)).causal().values

    wanted = torch.stack([run(x) for x in q])
    with ptxsim.device("sm_90a") as gpu:
        torch.testing.assert_close(torch.vmap(run)(q), wanted)
        graph = make_fx(run, tracing_mode="fake")(q[0])
        torch.testing.assert_close(graph(q[0]), wanted[0])
        _, tangent = torch.func.jvp(run, (q[0],), (q[1],))
    assert not gpu.results
    torch.testing.assert_close(tangent, torch.func.jvp(run, (q[0],), (q[1],))[1])


def test_many_heads_choose_by_their_own_keys() -> None:
    """A threshold, a share and the best, by kernels as by operations, of pooled keys of fewer heads."""
    q, k = whole(2, 4, 40), whole(2, 2, 72)

    def run() -> list[Tensor]:
        scores = select.score(q, select.pool(k, 8)).causal(whole=True)
        best = select.topk(scores, 4, own=1, first=1).ids
        chosen = select.threshold(scores, 0.1, own=1), select.mass(scores, 0.6, last=1)
        return [best, *(x.classes for x in chosen)]

    wanted = run()
    with ptxsim.device("sm_90a") as gpu:
        found = run()
    assert not gpu.findings
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
