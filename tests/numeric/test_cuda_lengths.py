"""Lengths that change at every call on a GPU: no synchronisation, the right results, graphs that read them
anew, and wrong ones, which are told by the next call."""

from __future__ import annotations

from typing import Any

import on_gpus
import pytest
import torch
from helpers import cumulative
from torch import Tensor

import fa4flex
from fa4flex import Schedule, Varlen
from fa4flex.errors import InputError
from fa4flex.variants import causal, document, sliding_window

pytestmark = on_gpus.HOPPER

TOKENS, SEQUENCES = 2000, 9
SCHEDULES = {
    "auto": Schedule(),
    "longest first": Schedule(order="longest_first"),
    "deterministic": Schedule(deterministic=True),
}


def drawn(dtype: torch.dtype = torch.int32) -> Tensor:
    ends = torch.randint(0, TOKENS + 1, (SEQUENCES - 1,)).sort().values.tolist()
    lengths = [b - a for a, b in zip([0, *ends], [*ends, TOKENS], strict=True)]
    return cumulative(lengths).to("cuda", dtype)


def inputs(d: int = 64) -> tuple[list[Tensor], Tensor]:
    shapes = ((TOKENS, 4, d), (TOKENS, 2, d), (TOKENS, 2, d))
    qkv = [torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes]
    return qkv, torch.randn_like(qkv[0])


def step(attn: Any, qkv: list[Tensor], dout: Tensor, varlen: Varlen) -> list[Tensor]:
    out = attn(*qkv, varlen=varlen)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def expected(attn: Any, qkv: list[Tensor], dout: Tensor, cu: Tensor) -> list[Tensor]:
    """On the CPU, in float64."""
    there = [x.detach().cpu().double().requires_grad_() for x in qkv]
    return step(attn, there, dout.cpu().double(), Varlen(cu.cpu()))


def close(found: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(found, exact, strict=True):
        scale = float(b.abs().max())
        torch.testing.assert_close(a.cpu().double() / scale, b / scale, atol=2e-2, rtol=2e-2)


def ids() -> Tensor:
    """Documents of each sequence, in no order."""
    return torch.randint(0, 3, (SEQUENCES, TOKENS), device="cuda").sort(-1).values.roll(700, -1)


def compiled(contents: Tensor | None, schedule: str, mask: Any = causal) -> fa4flex.Attention:
    """A mask, or one of documents, which block tables tell."""
    mask = mask if contents is None else mask & document(contents)
    return fa4flex.compile(mask=mask, schedule=SCHEDULES[schedule])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("by_tables", [False, True])
def test_new_lengths_wait_for_nothing(schedule: str, dtype: torch.dtype, by_tables: bool) -> None:
    contents, mask = ids() if by_tables else None, causal & sliding_window(300)
    attn = compiled(contents, schedule, mask)
    exact = compiled(None if contents is None else contents.cpu(), schedule, mask)
    qkv, dout = inputs()
    sets = [drawn(dtype) for _ in range(4)]
    step(attn, qkv, dout, Varlen(sets[0]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [step(attn, qkv, dout, Varlen(cu)) for cu in sets]
        sets[0].copy_(sets[1])
        found.append(step(attn, qkv, dout, Varlen(sets[0])))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found[-1][0], found[1][0])
    for cu, one in zip(sets[1:], found[1:]):
        close(one, expected(exact, qkv, dout, cu))
    fa4flex.synchronize()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("by_tables", [False, True])
def test_a_graph_replays_with_new_lengths(schedule: str, by_tables: bool) -> None:
    """Both passes of two layers: the kernel of lengths is in the graph, and its faults are told; contents of
    the mask change, too."""
    contents, cu = ids() if by_tables else None, drawn()
    attn = compiled(contents, schedule)
    qkv, dout = inputs()
    varlen = Varlen(cu, cu)
    graph, layers = on_gpus.captured(lambda: [step(attn, qkv, dout, varlen) for _ in range(2)])
    for _ in range(5):
        cu.copy_(drawn())
        if contents is not None:
            contents.copy_(ids())
        graph.replay()
        exact = compiled(None if contents is None else contents.cpu(), schedule)
        for found in layers:
            close(found, expected(exact, qkv, dout, cu))
    cu[2] = -5
    graph.replay()
    with pytest.raises(InputError, match="cu_seqlens_q decreases after entry 1"):
        fa4flex.synchronize()


WRONG = {
    "starts at 3": [3, 100, 200, TOKENS],
    "decreases after entry 1: 900000 to -8": [0, 900000, -8, TOKENS],
    "ends at 1000000": [0, 5, 100, 1000000],
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_lengths_are_told_by_the_next_call(words: str) -> None:
    attn = fa4flex.compile(mask=causal)
    qkv, dout = inputs()
    right = torch.tensor([0, 5, 100, TOKENS], dtype=torch.int32, device="cuda")
    wrong = torch.tensor(WRONG[words], dtype=torch.int32, device="cuda")
    first = step(attn, qkv, dout, Varlen(right))
    with torch.no_grad():
        attn(*qkv, varlen=Varlen(wrong))
    torch.cuda.synchronize()
    with pytest.raises(InputError, match=words):
        attn(*qkv, varlen=Varlen(right))
    assert torch.equal(step(attn, qkv, dout, Varlen(right))[0], first[0])
