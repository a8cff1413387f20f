"""Ordered sums on simulated GPUs: gradients to the last bit the same under any timing, and right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import captured_cases
import pytest
import torch
from helpers import Width, forward_on_cpu, of_backward, widths
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.varlen import Varlen
from fa4flex.variants import causal, sliding_window
from ptxsim.doors.device import Gpu

KEYS = 128
"""Keys per tile."""
SCALE = 2.0**-40
ARCHS = ("sm_90a", "sm_100a")
MASKS: dict[str, Any] = {
    "full": None,
    "causal": causal,
    "window": sliding_window(150),
    "by tables": lambda b, h, q, k: (q // 64 * 5 + k // KEYS * 3 + h) % 4 != 0,
}
TELLING = ("full", "causal", "by tables")
"""Masks under which some rows see both tiles of keys that cancel each other."""


def sensitive(q_len: int, kv_len: int, keys: int = KEYS, width: int = 64) -> tuple[list[Tensor], Tensor]:
    """q, k, v and dout with which dQ shows in which order it was added up: what the first tile of `keys`
    adds, the second takes away again, and what others add is small beside it."""
    q, k, v = (torch.randn(1, h, n, width).bfloat16() for h, n in ((2, q_len), (1, kv_len), (1, kv_len)))
    k[:, :, :keys] *= 2**12
    k[:, :, keys : 2 * keys], v[:, :, keys : 2 * keys] = -k[:, :, :keys], v[:, :, :keys]
    return [q, k, v], torch.randn(1, 2, q_len, width).bfloat16()


def gradients(
    attn: Callable[..., Any], qkv: list[Tensor], dout: Tensor, varlen: Varlen | None = None
) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in qkv]
    out = attn(*inputs, varlen=varlen)
    return torch.autograd.grad(out, inputs, dout.to(out.dtype))


def simulated(arch: str, timing: str, seed: int, *given: Any) -> tuple[tuple[Tensor, ...], Gpu]:
    """Gradients on a simulated GPU, with several CTAs at the same time. Forward passes, in which nothing is
    added up by several of them, are the CPU's."""
    with forward_on_cpu(), ptxsim.device(arch, seed, timing, together=4) as gpu:
        found = gradients(*given)
    return found, gpu


def repeated(
    arch: str,
    name: str,
    deterministic: bool,
    timings: list[tuple[str, int]],
    keys: int = KEYS,
    width: int = 64,
) -> list[tuple[Tensor, ...]]:
    q_len = 100 if name == "full" else 400
    qkv, dout = sensitive(q_len, 2 * keys + 244, keys, width)
    attn = fa4flex.compile(mask=MASKS[name], scale=SCALE, schedule=Schedule(deterministic=deterministic))
    found = []
    for timing, seed in timings:
        one, gpu = simulated(arch, timing, seed, attn, qkv, dout)
        where = f"{arch}, {name}, {timing} {seed}"
        assert len(of_backward(gpu)) == 3 and not gpu.findings, f"{where}: {gpu.report()}"
        found.append(one)
    return found


def timings(count: int) -> list[tuple[str, int]]:
    return [
        ("eager", 0),
        ("late", random.randrange(64)),
        *(("random", random.randrange(99)) for _ in range(count)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_sums_in_any_order_show(arch: str) -> None:
    in_any_order(arch)


def in_any_order(arch: str, keys: int = KEYS, width: int = 64) -> None:
    """Asserts what these tests would find without ordered sums: dq alone depends on the timing."""
    tried = [("eager", 0), *(("random", seed) for seed in range(4))]
    (dq, dk, dv), *others = repeated(arch, "full", False, tried, keys, width)
    assert any(not torch.equal(other[0], dq) for other in others)
    assert all(torch.equal(other[1], dk) and torch.equal(other[2], dv) for other in others)


def same(arch: str, name: str, count: int, keys: int = KEYS, width: int = 64) -> None:
    chosen = timings(count)
    first, *others = repeated(arch, name, True, chosen, keys, width)
    for other, (timing, seed) in zip(others, chosen[1:], strict=True):
        for what, x, y in zip(("dq", "dk", "dv"), other, first, strict=True):
            assert torch.equal(x, y), f"{arch}, {name}: {what} differs, {timing} {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_bits_repeat(arch: str) -> None:
    same(arch, random.choice(TELLING), 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("arch", ARCHS)
def test_bits_repeat_often(arch: str, name: str) -> None:
    same(arch, name, 12)


def plain(mask: Any, lengths: list[tuple[int, int]], packed: bool, *qkv: Tensor) -> Tensor:
    """PyTorch's operations in the tensors' own dtype, sequence by sequence; zeros past the end of each."""
    outs, (q_at, k_at) = [], (0, 0)
    composition = {} if mask is None else {"mask": mask}
    for i, (rows, keys) in enumerate(lengths):
        if packed:
            starts = (q_at, k_at, k_at)
            q, k, v = (
                x[start : start + n].movedim(0, 1)[None]
                for x, start, n in zip(qkv, starts, (rows, keys, keys), strict=True)
            )
            q_at, k_at = q_at + rows, k_at + keys
        else:
            q, k, v = (x[i : i + 1, :, :n] for x, n in zip(qkv, (rows, keys, keys), strict=True))
        out, _ = captured_cases.plain(composition, q, k, v)
        past = 0 if packed else qkv[0].shape[2] - rows
        outs.append(out[0].movedim(0, 1) if packed else torch.nn.functional.pad(out, (0, 0, 0, past)))
    return torch.cat(outs)


def right(arch: str, name: str, kind: str, width: Width = 64) -> None:
    """Asserts at most twice the error of the same maths in PyTorch, in bf16."""
    d, dv = widths(width)
    varlen = None
    if kind == "packed":
        lengths = [(n, n) for n in (150, 0, 300, 1)]
        ends = torch.tensor([0, 150, 150, 450, 451], dtype=torch.int32)
        qkv, varlen = [torch.randn(451, *x).bfloat16() for x in ((4, d), (2, d), (2, dv))], Varlen(ends, ends)
    else:
        lengths = [(130, 300)] * 2
        qkv = [torch.randn(2, *x).bfloat16() for x in ((4, 130, d), (2, 300, d), (2, 300, dv))]
        if kind == "padded":
            lengths = [(130, 140), (20, 300)]
            used = [torch.tensor(each, dtype=torch.int32) for each in zip(*lengths, strict=True)]
            varlen = Varlen(seqused_q=used[0], seqused_k=used[1])
    dout = torch.randn(*qkv[0].shape[:-1], dv).bfloat16()
    attn = fa4flex.compile(mask=MASKS[name], schedule=Schedule(deterministic=True))
    timing, seed = random.choice(timings(1))
    found, gpu = simulated(arch, timing, seed, attn, qkv, dout, varlen)
    findings = [finding for result in of_backward(gpu) for finding in result.findings]
    assert len(of_backward(gpu)) == 3 and not findings, f"{arch}, {name}, {timing} {seed}: {gpu.report()}"

    def by_hand(*qkv: Tensor, varlen: Varlen | None) -> Tensor:
        return plain(MASKS[name], lengths, kind == "packed", *qkv)

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        *qkv, dout = given
        return gradients(attn, [x.double() for x in qkv], dout, varlen), gradients(by_hand, qkv, dout)

    exact, budgets = captured_cases.over_draws(once, (*qkv, dout))
    captured_cases.judge(f"{arch}, {name}, {kind}, width {width}, {timing} {seed}", found, exact, budgets)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_some_gradients(arch: str) -> None:
    kind, width = random.choice(("dense", "packed", "padded")), random.choice((64, (192, 128)))
    right(arch, random.choice(sorted(MASKS)), kind, width)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", (64, 96, 192, (192, 128)), ids=str)
@pytest.mark.parametrize("kind", ("dense", "packed", "padded"))
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("arch", ARCHS)
def test_gradients(arch: str, name: str, kind: str, width: Width) -> None:
    if arch == "sm_90a" or width != 192:
        right(arch, name, kind, width)


def test_torch_asks_for_it_too() -> None:
    """Under torch.use_deterministic_algorithms the same launches as with the schedule."""
    qkv, dout = sensitive(64, 300)
    ordered = fa4flex.compile(scale=SCALE, schedule=Schedule(deterministic=True))
    expected, _ = simulated("sm_90a", "eager", 0, ordered, qkv, dout)
    torch.use_deterministic_algorithms(True)
    try:
        found, gpu = simulated("sm_90a", "random", 1, fa4flex.compile(scale=SCALE), qkv, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(of_backward(gpu)) == 3 and all(map(torch.equal, found, expected))
