"""Helpers of several test files: how results and gradients are compared, and how mods are called."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import ptxsim
from fa4flex.primitives.base import call_mod
from fa4flex.primitives.weights import SOFTMAX
from fa4flex.runtime import compute
from fa4flex.runtime.gradients import Outline
from fa4flex.variants._cases import scored
from ptxsim.active import simulating

SMS = 3
"""Multiprocessors that simulated GPUs are said to have: so few that persistent blocks take several tiles."""

Width = int | tuple[int, int]
"""Head width of q, k and v; or of q and k, and of v."""


def widths(width: Width) -> tuple[int, int]:
    """Head widths of q and k, and of v."""
    return width if isinstance(width, tuple) else (width, width)


def drawn_timing() -> tuple[str, int]:
    """One of the simulator's timings, and its seed."""
    return random.choice([("eager", 0), ("late", 1), ("random", random.randrange(99))])


def drawn_device(chip: str = "sm_90a") -> Any:
    """A simulated GPU of SMS multiprocessors with a drawn timing."""
    timing, seed = drawn_timing()
    return ptxsim.device(chip, seed, timing, sms=SMS)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def cumulative(lengths: Sequence[int]) -> Tensor:
    """int32 [N + 1]: where each of N sequences of these lengths starts, and where the last one ends."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Elements that nobody writes of tensors made within are NaN: fresh memory is often zero, which is right
    for keys that no query sees."""
    like, empty, strided = torch.empty_like, Tensor.new_empty, Tensor.new_empty_strided

    def filled(x: Tensor) -> Tensor:
        return x.fill_(math.nan) if x.is_floating_point() else x

    with (
        patch.object(torch, "empty_like", lambda *x, **how: filled(like(*x, **how))),
        patch.object(Tensor, "new_empty", lambda *x, **how: filled(empty(*x, **how))),
        patch.object(Tensor, "new_empty_strided", lambda *x, **how: filled(strided(*x, **how))),
    ):
        yield


def of_passes(gpu: Any) -> list[Any]:
    """Results of a simulated GPU's launches, without those of kernels that correct lengths, make tables,
    merge splits, or add up parts of dK and dV."""
    others = "sequences", "block_tables", "list_tiles", "read_contents", "combine", "sum_parts"
    return [result for result in gpu.results if not any(name in result.kernel for name in others)]


def backward_launches(arch: str, kv_len: int, width: Width) -> int:
    """Launches of a backward pass of dense lengths: three, but two where one of Hopper's blocks has all keys
    of its queries, and writes their dQ itself; and four where dV has a kernel of its own on Blackwell."""
    d, dv = widths(width)
    if arch == "sm_100a" and (d > 192 or dv > 128):
        return 4
    return 2 if arch == "sm_90a" and kv_len <= 128 and max(widths(width)) <= 128 else 3


def of_backward(gpu: Any) -> list[Any]:
    """Results of the launches of backward passes: what is before the products, these, and what is after."""
    forward = "fwd_", "decode_"
    return [result for result in of_passes(gpu) if not any(name in result.kernel for name in forward)]


@contextlib.contextmanager
def forward_on_cpu() -> Iterator[None]:
    """Within, simulated GPUs launch backward passes alone: the forward pass of a call with gradients is the
    CPU's. For tests that ask of gradients what the forward kernel has no part in; others launch both."""

    def of(program: Any, launch: Any, call: Any, **more: Any) -> Outline:
        if not simulating():
            return made(program, launch, call, **more)
        return made(program, lambda call: _on_cpu(program, call), call)

    made = Outline.of
    with patch.object(Outline, "of", staticmethod(of)):
        yield


def _on_cpu(program: Any, call: Any) -> tuple[Tensor, Tensor, None]:
    """out, lse and no maxima."""
    with patch.object(compute, "on_gpu", lambda q: False):
        out, lse, *_ = compute.forward(program, call.turned())
    return call.turn(out).contiguous(), lse, None


# --- comparing ------------------------------------------------------------------------------------------


def worst(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The largest error of an element, and the largest Euclidean error of a row; NaN spreads."""
    error = (got.double() - want.double()).abs()
    if error.numel() == 0:
        return 0.0, 0.0
    return error.max().item(), error.norm(dim=-1).max().item()


DRAWS = 7
"""Number of draws that no_worse needs: of three, one comparison in 9,000 fails by luck; of seven, none in
500,000 that were drawn anew."""


def no_worse(ours: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> None:
    """Asserts worst errors per draw of typically at most twice plain PyTorch's, never 4 times its worst."""
    # One draw compares luck: the worst of 50,000 elements varies threefold from draw to draw, in both alike.
    for what, (errors, allowed) in enumerate(zip(zip(*ours), zip(*plain), strict=True)):
        assert median(errors) <= 2 * median(allowed), f"{what}: typically {errors}, plain PyTorch {allowed}"
        assert max(errors) <= 4 * max(allowed), f"{what}: once {max(errors)}, plain PyTorch {allowed}"


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> bool:
    """True for equal infinities, no NaN, and elsewhere within `tolerance` of the largest value."""
    if got.shape != want.shape or got.isnan().any() or not torch.equal(got.isinf(), want.isinf()):
        return False
    finite = ~want.isinf()
    scale = max(1.0, want[finite].abs().max().item() if finite.any() else 0.0)
    return bool(((got - want)[finite].abs() <= tolerance * scale).all())


def called(attn: Any, *qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of a call; of a normaliser that has no log-sum-exp, zeros as the oracle has."""
    if attn.variant.weights == SOFTMAX:
        return attn(*qkv, **options, return_lse=True)  # type: ignore[no-any-return]
    out = attn(*qkv, **options)
    b, *rest = out.shape[:-1]
    rows = (rest[0], b) if out.ndim == 3 else (b, *rest[:: -1 if attn.variant.layout == "bshd" else 1])
    sums = torch.float64 if out.dtype == torch.float64 else torch.float32
    return out, 0 * out.flatten()[:1].sum() + out.new_zeros(rows, dtype=sums)


def gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of sum(result * upstream); rows of an lse that are -inf carry none."""
    total = sum((torch.where(r.isfinite(), r, 0) * u).sum() for r, u in zip(results, upstream, strict=True))
    return list(torch.autograd.grad(total, inputs))


def agree(found: Sequence[Tensor], truth: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Asserts that float64 results, and their gradients by `inputs`, are those of the oracle."""
    upstream = [torch.randn_like(t) for t in truth]
    got = [*found, *gradients(found, inputs, upstream)]
    want = [*truth, *gradients(truth, inputs, upstream)]
    for number, (g, w) in enumerate(zip(got, want, strict=True)):
        part = f"result {number}" if number < len(truth) else f"gradient of input {number - len(truth)}"
        assert g.dtype == w.dtype, f"{part}: {g.dtype}, expected {w.dtype}"
        assert g.shape == w.shape, f"{part}: {tuple(g.shape)}, expected {tuple(w.shape)}"
        assert close(g, w), f"{part} is off by {worst(g, w)[0]}"


# --- calling mods ---------------------------------------------------------------------------------------


def added(mod: Callable[..., Any], shape: tuple[int, int, int, int]) -> Tensor:
    """Bias that a mod adds, in float64, checked to be independent of the score."""
    zero, other = torch.zeros(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    bias = scored(mod, zero)
    torch.testing.assert_close(scored(mod, other) - other, bias)
    return bias


def evaluate(mask: Any, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Pairs [B, H, Sq, Skv] that a mask allows, one by one."""
    indices = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, q_len, kv_len)), indexing="ij")
    return call_mod(mask, tuple(indices), {"q_len": q_len, "kv_len": kv_len, "num_heads": heads})
