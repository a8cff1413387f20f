"""Gradients by this library's generated Hopper kernels on the simulated GPU: right, and nothing found."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import captured_cases
import pytest
import torch
from helpers import SMS, Width, backward_launches, drawn_timing, of_backward, of_passes, poisoned, widths
from own_backward import kept_arguments
from pairs import hopper_pairs, long_steps
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.kernels.plan.arguments import COUNTERS, SCHEMAS
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.sinks import Sinks
from fa4flex.runtime.cuda.launches import ready_backward
from fa4flex.variants import alibi, causal, document, sliding_window, softcap
from ptxsim.doors.device import Gpu

pytestmark = pytest.mark.usefixtures("either_steps")

IDS = torch.arange(200) // 70
WIDE = (80, 96, 160, 192, 256, (192, 128), (160, 120), (128, 256), (160, 96), (96, 192))
"""Widths of q and v for which a block has 64 keys, or whose parts of dQ are narrow or several."""
PRODUCTS: tuple[Width, ...] = (160, 192, (160, 192), (192, 160), (96, 192))
"""Those at which warpgroups share out products."""

COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(60)},
    "documents": {"mask": document(IDS) & causal},
    "empty rows": {"mask": lambda b, h, q, k: (q >= k) & (q % 64 < 40)},
    "unseen keys": {"mask": lambda b, h, q, k: (k >= 128) & ((h != 1) | (k >= 190))},
    "sinks": {"mask": causal, "sinks": Sinks(torch.randn(4))},
}


def gradients(attn: Any, qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in qkv]
    out, lse = attn(*inputs, return_lse=True)
    lse = torch.where(lse == -math.inf, 0.0, lse)
    total = (out * dout.to(out.dtype)).sum() + (lse * dlse.to(lse.dtype)).sum()
    return list(torch.autograd.grad(total, inputs))


def judge(
    where: str,
    composition: dict[str, Any],
    got: list[Tensor],
    given: tuple[tuple[Tensor, ...], Tensor, Tensor],
) -> None:
    """Asserts at most twice the error of the same maths in PyTorch, in the tensors' own dtype."""
    (q, k, v), *upstream = given

    def plain(*qkv: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        return captured_cases.plain(composition, *qkv)

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        qkv, (dout, dlse) = given[:3], given[3:]
        wide = tuple(x.double() for x in qkv)
        exact = gradients(fa4flex.compile(**composition), wide, dout, dlse)
        return exact, gradients(plain, qkv, dout, dlse)

    pairs = q.shape[2] * k.shape[2]
    exact, budgets = captured_cases.over_draws(once, (q, k, v, *upstream), [pairs] * 3)
    captured_cases.judge(where, got, exact, budgets)


def judged(
    where: str,
    composition: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    device: AbstractContextManager[Gpu],
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Gpu:
    """The simulated GPU that made gradients of drawn q, k and v, which are as good as PyTorch's, and on which
    nothing was found."""
    qkv = tuple(torch.randn(*shape).to(dtype) for shape in shapes)
    rows = shapes[0][:-1]
    dout, dlse = torch.randn(*rows, shapes[2][-1]).to(dtype), torch.randn(*rows)
    attn = fa4flex.compile(**composition, **options)
    with poisoned(), device as gpu:
        got = gradients(attn, qkv, dout, dlse)
    assert not gpu.findings, f"{where}: {gpu.report()}"
    judge(where, composition, got, (qkv, dout, dlse))
    return gpu


def close(
    name: str,
    q_len: int,
    kv_len: int,
    width: Width,
    arch: str = "sm_90a",
    kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Asserts that gradients are as good as PyTorch's, and that the simulator finds nothing."""
    timing, seed = drawn_timing()
    where = f"{name}, {q_len} x {kv_len}, width {width}, {kv_heads} KV heads, {arch}, {timing} {seed}"
    wide, wide_v = widths(width)
    shapes = ((1, 4, q_len, wide), (1, kv_heads, kv_len, wide), (1, kv_heads, kv_len, wide_v))
    device = ptxsim.device(arch, seed, timing, sms=SMS)
    gpu = judged(where, COMPOSED[name], shapes, device, dtype)
    assert len(of_backward(gpu)) == backward_launches(arch, kv_len, width), where


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_gradients(draw: int) -> None:
    name = random.sample(sorted(COMPOSED), 2)[draw]
    close(name, random.choice((64, 130, 200)), 200, random.choice((40, 64, 128)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_len", "width", "by"),
    [
        *((130, 128, long_steps), (144, 128, nullcontext), (24, 192, nullcontext)),
        *((144, 80, nullcontext), (48, 24, nullcontext)),
    ],
)
def test_what_sums_are_padded_with_is_left_alone(
    q_len: int, width: int, by: Callable[[], AbstractContextManager[None]]
) -> None:
    """Sums of dQ for queries to which the last tile is padded, and for columns to which heads are: nobody
    clears, adds to or reads them. In short steps rows that are 8 apart lie together."""
    sizes = (q_len, width), (200, width), (200, 128)
    qkv = tuple(torch.randn(1, 2, *size).bfloat16() for size in sizes)
    dout, dlse = torch.randn(1, 2, q_len, 128).bfloat16(), torch.randn(1, 2, q_len)
    attn, given = fa4flex.compile(mask=causal), []
    with poisoned(), kept_arguments(given), ptxsim.device("sm_90a", sms=SMS) as gpu, by():
        got = gradients(attn, qkv, dout, dlse)
    assert not gpu.findings, gpu.report()
    judge(f"{q_len}, {width}", {"mask": causal}, got, (qkv, dout, dlse))
    (sums,) = (dict(zip(SCHEMAS["backward"].names, x, strict=False))["dq_sum"] for x in given)
    assert sums.isnan().sum() == sums.numel() - 2 * q_len * width > 0


@pytest.mark.slow
def test_some_wide_gradients() -> None:
    sizes = random.choice((65, 130)), random.choice((130, 200))
    close(random.choice(sorted(COMPOSED)), *sizes, random.choice(WIDE), kv_heads=random.choice((1, 2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
def test_some_gradients_by_products(pair: bool) -> None:
    """Two CTAs with 64 keys each, of which one may have none, or one by itself."""
    sizes, heads = (random.choice((65, 130)), random.choice((50, 130, 200))), random.choice((1, 2, 4))
    with hopper_pairs(pair):
        close(random.choice(sorted(COMPOSED)), *sizes, random.choice(PRODUCTS), kv_heads=heads)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize("width", (160, 192, (160, 192)), ids=str)
@pytest.mark.parametrize("name", COMPOSED)
def test_gradients_by_products(name: str, width: Width, pair: bool) -> None:
    with hopper_pairs(pair):
        close(name, 200, 200, width)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_gradients_lie_in_memory_as_their_inputs(arch: str) -> None:
    """Heads that are made by a transposition, of separate tensors and of parts of one: no copy follows."""
    composition = COMPOSED["alibi, causal"]
    q = torch.randn(2, 70, 4, 64).bfloat16().transpose(1, 2)
    both = torch.randn(2, 70, 2, 2, 64).bfloat16()
    k, v = (both[:, :, n].transpose(1, 2) for n in range(2))
    dout, dlse = torch.randn(2, 4, 70, 64).bfloat16(), torch.randn(2, 4, 70)
    attn = fa4flex.compile(**composition)
    with poisoned(), ptxsim.device(arch, sms=SMS) as gpu:
        # The launch that was made for contiguous ones serves them too.
        before = gradients(attn, tuple(x.contiguous() for x in (q, k, v)), dout, dlse)
        got = gradients(attn, (q, k, v), dout, dlse)
    assert not gpu.findings, gpu.report()
    assert all(x.is_contiguous() for x in before)
    assert all(x.transpose(1, 2).is_contiguous() for x in got)
    judge("contiguous", composition, before, ((q, k, v), dout, dlse))
    judge("transposed", composition, got, ((q, k, v), dout, dlse))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
def test_heads_within_rows(arch: str) -> None:
    """Layout bshd: both passes read and write it as it is."""
    composition = COMPOSED["alibi, causal"]
    qkv = tuple(torch.randn(1, heads, 130, 64).bfloat16() for heads in (4, 2, 2))
    dout, dlse = torch.randn(1, 4, 130, 64).bfloat16(), torch.randn(1, 4, 130)
    attn = fa4flex.compile(**composition, layout="bshd")
    rows = tuple(x.transpose(1, 2).contiguous() for x in (*qkv, dout))
    with poisoned(), ptxsim.device(arch, sms=SMS) as gpu:
        got = gradients(attn, rows[:3], rows[3], dlse)
    assert len(of_passes(gpu)) == 4 and not gpu.findings, gpu.report()
    assert all(x.is_contiguous() for x in got)
    judge(arch, composition, [x.transpose(1, 2) for x in got], (qkv, dout, dlse))


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", (40, 64, 128, *WIDE))
@pytest.mark.parametrize("name", COMPOSED)
def test_gradients(name: str, width: Width) -> None:
    close(name, 200, 200, width)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_heads", (1, 4))
@pytest.mark.parametrize("width", WIDE)
def test_wide_heads_and_lengths(width: Width, kv_heads: int) -> None:
    for q_len, kv_len in ((1, 1), (63, 130), (129, 65)):
        close("alibi, causal", q_len, kv_len, width, kv_heads=kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "width_v"), [(64, 64), (160, 160), (192, 128)])
def test_blocks_take_tile_after_tile(width: int, width_v: int) -> None:
    """Nine tiles of keys or more, some of which no query sees, by three blocks, which leave the counters as
    they were."""
    composition = COMPOSED["unseen keys"]
    sizes = (130, width), (300, width), (300, width_v)
    qkv = tuple(torch.randn(1, 3, *size).bfloat16() for size in sizes)
    dout, dlse = torch.randn(1, 3, 130, width_v).bfloat16(), torch.randn(1, 3, 130)
    attn, shared = fa4flex.compile(**composition), torch.zeros(COUNTERS, dtype=torch.int32)
    for timing in ("eager", "late", "random"):
        with (
            poisoned(),
            hopper_pairs(False),  # whose blocks are not persistent
            patch.object(ready_backward, "counters", lambda device: shared),
            ptxsim.device("sm_90a", random.randrange(99), timing, sms=SMS) as gpu,
        ):
            got = gradients(attn, qkv, dout, dlse)
        assert of_passes(gpu)[2].shape.grid[0] == SMS and not gpu.findings, f"{timing}: {gpu.report()}"
        assert not shared.any()
        judge(timing, composition, got, (qkv, dout, dlse))


def test_what_kernels_do_not_do_is_done_in_pytorch() -> None:
    """Outputs in another dtype than q: the forward pass is a launch, gradients are none."""
    attn = fa4flex.compile(mask=causal, precision=Precision(output=torch.float16))
    qkv = tuple(torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3))
    dout, dlse = torch.randn(1, 2, 70, 64).bfloat16(), torch.randn(1, 2, 70)
    with ptxsim.device("sm_90a") as gpu:
        got = gradients(attn, qkv, dout, dlse)
    assert len(of_passes(gpu)) == 1
    judge("outputs in float16", {"mask": causal}, got, (qkv, dout, dlse))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"), [("plain", "sm_90a"), ("softcap, window", "sm_90a"), ("softcap, window", "sm_100a")]
)
def test_mean_error_of_gradients(name: str, arch: str, seed: int) -> None:
    """Nearly that of PyTorch with scores in float32: P and dS are rounded to 16 bits once each. One rounding
    more gives 1.3 times as much; the draws of 192 queries vary by 0.05."""
    composition = COMPOSED[name]
    qkv = tuple(torch.randn(1, 1, 192, 64).half() for _ in range(3))
    dout, dlse = torch.randn_like(qkv[0]), torch.zeros(1, 1, 192)
    attn = fa4flex.compile(**composition)
    with ptxsim.device(arch, seed, "eager", sms=SMS):
        got = gradients(attn, qkv, dout, dlse)
    exact = gradients(attn, tuple(x.double() for x in qkv), dout, dlse)

    def plain(*inputs: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        q, k, v = inputs
        out, lse = attn(q.float(), k.float(), torch.eye(192)[None, None], return_lse=return_lse)
        return out.to(v.dtype) @ v, lse

    means = [
        [(x.double() - e).abs().mean().item() for x, e in zip(found, exact, strict=True)]
        for found in (got, gradients(plain, qkv, dout, dlse))
    ]
    assert all(ours <= 1.15 * theirs for ours, theirs in zip(*means, strict=True)), (
        f"{arch}, {name}, {seed}: {means}"
    )
