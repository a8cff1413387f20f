"""Code under torch.compile on a GPU, also as CUDA graphs of its own (mode="reduce-overhead"), which know no
memory but inputs and outputs: results of eager code, with contents and lengths that change at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_cases import DEVICE
from torch import Tensor

import fa4flex
from fa4flex import Paging, Varlen
from fa4flex.variants import alibi, causal, sliding_window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE is None or DEVICE.type != "cuda", reason="needs a CUDA device of capability 9.0"
    ),
]
STEPS = 5
"""Torch warms up at the first call of a graph, captures at the second, and replays from then on."""
HEADS, KV_HEADS, LENGTH, D, PAGE = 8, 4, 512, 64, 16

Attend = Callable[..., Tensor]
Case = tuple[Attend, Callable[[], tuple[Tensor, ...]]]
"""A function to compile, and new inputs for it."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def dense(**composition: Any) -> Case:
    attn = fa4flex.compile(**composition)
    shapes = [(2, heads, LENGTH, D) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return attn, lambda: tuple(drawn(*shape) for shape in shapes)


def documents() -> Case:
    """Ids that one tensor holds, new at each call."""
    ids = torch.zeros(2, LENGTH, dtype=torch.int32, device=DEVICE)
    attend, more = dense(mask=lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv))

    def inputs() -> tuple[Tensor, ...]:
        ids.copy_(torch.randint(0, 5, ids.shape).sort().values)
        return more()

    return attend, inputs


def packed() -> Case:
    attn = fa4flex.compile(score_mod=alibi, mask=causal)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        out: Tensor = attn(q, k, v, varlen=Varlen(cu, cu))
        return out

    def inputs() -> tuple[Tensor, ...]:
        middle = int(torch.randint(1, LENGTH, ()))
        cu = torch.tensor([0, middle, LENGTH], dtype=torch.int32, device=DEVICE)
        return *(drawn(LENGTH, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS)), cu

    return attend, inputs


def pages(q_len: int) -> Case:
    attn, columns = fa4flex.compile(mask=causal & sliding_window(100)), LENGTH // PAGE
    pool = [drawn(2 * columns, PAGE, KV_HEADS, D) for _ in range(2)]

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Tensor:
        out: Tensor = attn(q, k, v, paging=Paging(table, used))
        return out

    def inputs() -> tuple[Tensor, ...]:
        table = torch.randperm(2 * columns, device=DEVICE).view(2, columns).int()
        used = torch.randint(q_len, LENGTH + 1, (2,), dtype=torch.int32, device=DEVICE)
        return drawn(2, HEADS, q_len, D), *pool, table, used

    return attend, inputs


CASES: dict[str, Callable[[], Case]] = {
    "causal": lambda: dense(mask=causal),
    "alibi, window": lambda: dense(score_mod=alibi, mask=causal & sliding_window(100)),
    "documents": documents,
    "packed": packed,
    "pages, few queries": lambda: pages(2),
    "pages, many": lambda: pages(200),
}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name: str, mode: str) -> None:
    torch._dynamo.reset()
    attend, inputs = CASES[name]()
    compiled = torch.compile(lambda *given: attend(*given) * 2, fullgraph=True, mode=mode)
    with torch.no_grad():
        for step in range(STEPS):
            given = inputs()
            want = attend(*given) * 2
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*given), want), step


def listed(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor) -> Tensor:
    blocks = fa4flex.BlockMap.from_counts(counts, indices, 128, LENGTH, LENGTH)
    return fa4flex.attention(q, k, v, blocks=blocks) * 2


IN_ORDER = fa4flex.compile(schedule=fa4flex.Schedule(order="longest_first"))
"""Attention that copies pages: no kernel reads them in this order."""


def copied(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, indices: Tensor) -> Tensor:
    pools = (x.transpose(1, 2).reshape(-1, PAGE, KV_HEADS, D) for x in (k, v))
    out: Tensor = IN_ORDER(q.expand(4, -1, -1, -1), *pools, paging=Paging(indices[0, 0], counts[0, 0] * PAGE))
    return out * 2


@pytest.mark.parametrize("attend", [listed, copied])
def test_contents_that_do_not_fit_are_told_later_and_lose_nothing(attend: Attend) -> None:
    """The process goes on with the device, and with right results."""
    torch._dynamo.reset()
    q, k, v = (drawn(1, heads, LENGTH, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    counts = torch.full((1, 1, 4), 2, dtype=torch.int32, device=DEVICE)
    indices = torch.arange(4, dtype=torch.int32, device=DEVICE).expand(1, 1, 4, 4).contiguous()
    compiled = torch.compile(attend, fullgraph=True)
    with torch.no_grad():
        want = attend(q, k, v, counts, indices)
        assert torch.equal(compiled(q, k, v, counts, indices), want)
        with pytest.raises(fa4flex.errors.EarlierError, match=r"no other blocks|page of page_table"):
            compiled(q, k, v, counts, indices + 99)  # which tells itself where the device is fast
            fa4flex.synchronize()
        assert torch.equal(compiled(q, k, v, counts, indices), want)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["causal", "documents", "packed"])
def test_with_gradients(name: str, mode: str) -> None:
    """Sums over queries are made in any order: gradients differ by that."""
    torch._dynamo.reset()
    attend, inputs = CASES[name]()
    compiled = torch.compile(lambda *given: attend(*given) * 2, fullgraph=True, mode=mode)

    def gradients(function: Attend, given: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        out = function(*leaves, *given[3:])
        return [x.clone() for x in (out, *torch.autograd.grad(out.float().square().sum(), leaves))]

    for step in range(STEPS):
        given = inputs()
        want = gradients(lambda *x: attend(*x) * 2, given)
        torch.compiler.cudagraph_mark_step_begin()
        for ours, exact in zip(gradients(compiled, given), want, strict=True):
            assert (ours - exact).abs().max() <= 0.02 * exact.abs().max(), step
