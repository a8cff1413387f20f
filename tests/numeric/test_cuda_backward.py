"""Gradients on the GPU against the fp64 oracle: every variant, widths, grouped heads, lengths, repeats.

pytest tests/numeric/test_cuda_backward.py -n 8        compiling the kernels takes most of the time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import captured_cases
import pytest
import torch
from cuda_cases import DEVICE, FEW, VARIANTS, Composition, Draw, Sizes, compiled, oracle_takes, plain, worst
from torch import Tensor

from fa4flex import reference
from fa4flex.runtime import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="needs a CUDA device of compute capability 9.0"),
]
DRAWS = [pytest.param(draws[0], id=name) for name, draws in VARIANTS.items()]
BY_NAME = [pytest.param(draw, id=name) for name, draw in FEW.items()]
LENGTHS = [(1, 1), (63, 200), (128, 129), (300, 64)]
ROUNDING = 2.0**-9
"""Of bfloat16, relative: what gradients may differ by where plain PyTorch happens to be exact."""


@pytest.fixture(autouse=True)
def on_the_device(seed: int) -> Iterator[None]:
    if DEVICE is None:
        yield
        return
    with torch.device(DEVICE):
        yield


def gradients(
    forward: Callable[..., tuple[Tensor, Tensor]], qkv: Sequence[Tensor], upstream: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Of q, k and v, through the output and the log-sum-exp of rows that see something."""
    inputs = [x.detach().clone().requires_grad_() for x in qkv]
    out, lse = forward(*inputs)
    dout, dlse = upstream
    seen = torch.where(lse.isinf(), 0.0, lse)
    total = (out * dout.to(out.dtype)).sum() + (seen * dlse.to(lse.dtype)).sum()
    return list(torch.autograd.grad(total, inputs))


def check(sizes: Sizes, composition: Composition) -> None:
    """At most twice plain PyTorch's error, in the worst element and in the worst row."""
    qkv = sizes.qkv()
    shape = qkv[0].shape[:3]
    upstream = torch.randn(*shape, sizes.dim_v, dtype=sizes.dtype), torch.randn(shape)
    attn, known = compiled(**composition), oracle_takes(composition)
    found = gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream)
    wide = [x.double() for x in qkv]
    exact = gradients(lambda *x: reference.attention(*x, **known), wide, upstream)
    same = gradients(lambda *x: plain(*x, known), qkv, upstream)
    for name, got, true, by_torch in zip(("dq", "dk", "dv"), found, exact, same, strict=True):
        assert not got.isnan().any(), f"NaN in {name}"
        largest = true.abs().max().item(), true.norm(dim=-1).max().item()
        errors, budgets = worst(got, true), worst(by_torch, true)
        for what, error, budget, size in zip(("element", "row"), errors, budgets, largest, strict=True):
            limit = max(2 * budget, ROUNDING * size)
            assert error <= limit, f"{name}: worst {what} off by {error:.3e}, limit {limit:.3e}"


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("draw", DRAWS)
def test_variant(draw: Draw, dim: int) -> None:
    if draw.dims is not None and dim != 64:
        pytest.skip("this variant has head dimensions of its own")
    sizes = draw.sizes(Sizes().wide(dim))
    check(sizes, draw.make(sizes))


@pytest.mark.parametrize("dim", [40, 96, 112])
@pytest.mark.parametrize("draw", BY_NAME)
def test_widths(draw: Draw, dim: int) -> None:
    sizes = draw.sizes(Sizes().wide(dim))
    check(sizes, draw.make(sizes))


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (7, 1), (8, 8)], ids=lambda h: f"{h[0]}-{h[1]}")
@pytest.mark.parametrize(
    "lengths", [(1, 1), (63, 200), (128, 129), (300, 64)], ids=lambda n: f"{n[0]}x{n[1]}"
)
def test_heads_and_lengths(heads: tuple[int, int], lengths: tuple[int, int]) -> None:
    draw = VARIANTS["causal"][0]
    sizes = draw.sizes(Sizes(1, *heads, *lengths))
    check(sizes, draw.make(sizes))


def test_keys_and_values_repeat_bit_for_bit() -> None:
    """Only dq is summed up by several blocks."""
    draw = VARIANTS["causal"][0]
    sizes = draw.sizes(Sizes())
    attn, qkv = compiled(**draw.make(sizes)), sizes.qkv()
    shape = qkv[0].shape[:3]
    upstream = torch.randn(*shape, sizes.dim_v, dtype=sizes.dtype), torch.randn(shape)
    first = gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream)
    for _ in range(20):
        again = gradients(lambda *x: attn(*x, return_lse=True), qkv, upstream)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])


@pytest.mark.parametrize("dim", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("name", captured_cases.CASES)
def test_captured(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of captured tensors too, by the kernel."""
    if DEVICE is not None and DEVICE.type == "cuda":
        monkeypatch.delattr(ops, "_blockwise_backward")
    grid = captured_cases.Grid(2, 4, 517, 701)
    composition, leaves = captured_cases.CASES[name](grid)
    sizes = Sizes(*grid[:2], 2, *grid[2:]).wide(dim)
    upstream = torch.randn(*grid[:3], dim, dtype=sizes.dtype), torch.randn(grid[:3])
    qkv, attn = sizes.qkv(), compiled(**composition)
    found = captured_cases.gradients(lambda *x: attn(*x, return_lse=True), qkv, leaves, upstream)
    captured_cases.judge(name, found, *captured_cases.measured(composition, qkv, leaves, upstream))
