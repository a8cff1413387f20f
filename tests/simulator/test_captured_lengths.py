"""Gradients of captured tensors where sequences have lengths, and where sums are ordered, by the generated
kernels on the simulated GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import captured_cases
import pytest
import torch
from helpers import SMS, drawn_timing, forward_on_cpu, of_backward, of_passes, worst
from test_simulated_lengths import KINDS, Spans, Width, described, drawn, sequences
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.primitives.schedule import Schedule
from fa4flex.variants import causal

Q_LEN, KV_LEN, SEQUENCES = 280, 330, 5
"""At least as long as the packed tensors, which bound any sequence."""


def _below(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def dense() -> Tensor:
    return captured_cases.leaf(SEQUENCES, 4, Q_LEN, KV_LEN, dtype=torch.bfloat16)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Tensor], Any]] = {
    "slopes": (
        lambda t: lambda s, b, h, q, k: s + t[h] * (k - q),
        lambda: (torch.rand(4) * 0.1).requires_grad_(),
        _below,
    ),
    "per sequence": (lambda t: lambda s, b, h, q, k: s * t[b], lambda: torch.rand(5).requires_grad_(), None),
    "per key": (lambda t: lambda s, b, h, q, k: s + t[b, k], lambda: captured_cases.leaf(5, KV_LEN), _below),
    "by distance": (
        lambda t: lambda s, b, h, q, k: s + t[h, q - k + KV_LEN],
        lambda: captured_cases.leaf(4, 2 * KV_LEN),
        _below,
    ),
    "dense": (lambda t: lambda s, b, h, q, k: s + t[b, h, q, k], dense, _below),
    "dense, everything": (lambda t: lambda s, b, h, q, k: s + t[b, h, q, k], dense, None),
}
ARCHS = ("sm_90a", "sm_100a")
FIXED = ("slopes", "per sequence", "dense", "dense, everything")
"""Cases whose gradients kernels also add up in one order."""


def gradients(forward: Callable[..., Any], qkv: list[Tensor], table: Tensor, dout: Tensor) -> list[Tensor]:
    inputs = [*(x.detach().requires_grad_() for x in qkv), table]
    out = forward(*inputs[:3])
    return list(torch.autograd.grad(out, inputs, dout.to(out.dtype)))


def plain(name: str, table: Tensor, dout: Tensor, spans: Spans) -> Callable[..., Tensor]:
    """The same maths in PyTorch, sequence by sequence."""
    mod, _, mask = CASES[name]

    def forward(*qkv: Tensor) -> Tensor:
        total = torch.zeros_like(dout, dtype=qkv[0].dtype)
        parts = [sequences(x, spans, side) for x, side in zip(qkv, (0, 1, 1), strict=True)]
        for n, (q, k, v) in enumerate(zip(*parts, strict=True)):
            composition = {"score_mod": lambda s, b, h, i, j, n=n: mod(table)(s, b + n, h, i, j)}
            composition |= {} if mask is None else {"mask": mask}
            if q.shape[2] and k.shape[2]:
                out = torch.zeros_like(total)
                sequences(out, spans, 0)[n].copy_(captured_cases.plain(composition, q, k, v)[0])
                total = total + out
        return total

    return forward


def close(arch: str, name: str, kind: str, width: Width, deterministic: bool) -> None:
    mod, make, mask = CASES[name]
    table = make()
    varlen, spans = described(kind)
    qkv, dout, _ = drawn(kind, width, spans)
    attn = fa4flex.compile(score_mod=mod(table), mask=mask, schedule=Schedule(deterministic=deterministic))
    timing, seed = drawn_timing()
    where = f"{arch}, {name}, {kind}, width {width}, {deterministic=}, {timing} {seed}"

    def forward(*x: Tensor) -> Tensor:
        return attn(*x, varlen=varlen)

    with ptxsim.device(arch, seed, timing, sms=SMS) as gpu:
        got = gradients(forward, qkv, table, dout)
    findings = [finding for result in of_backward(gpu) for finding in result.findings]
    assert len(of_backward(gpu)) == 3 and not findings, f"{where}: {gpu.report()}"

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        *qkv, dout = given
        exact = gradients(forward, [x.double() for x in qkv], table, dout)
        return exact, gradients(plain(name, table, dout, spans), qkv, table, dout)

    exact, budgets = captured_cases.over_draws(once, [x.nan_to_num(0) for x in (*qkv, dout)], more=16)
    captured_cases.judge(where, got, exact, budgets)


@pytest.mark.slow
def test_some_lengths() -> None:
    close(random.choice(ARCHS), random.choice(sorted(CASES)), random.choice(KINDS), 64, False)


@pytest.mark.slow
def test_some_lengths_in_order() -> None:
    close(random.choice(ARCHS), random.choice(FIXED), random.choice(KINDS), 64, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ARCHS)
def test_lengths(arch: str, name: str, kind: str) -> None:
    width = random.choice((64, 128, 192 if arch == "sm_90a" else (192, 128)))
    close(arch, name, kind, width, name in FIXED and random.random() < 0.5)


# --- ordered sums -------------------------------------------------------------------------------------------


def ordered(arch: str, name: str, timings: list[tuple[str, int]]) -> None:
    """Asserts that gradients are the same to the last bit under any timing, with forward passes of the
    CPU."""
    mod, make, mask = CASES[name]
    table = make()
    qkv = [torch.randn(1, h, n, 64).bfloat16() for h, n in ((4, 130), (2, 300), (2, 300))]
    dout = torch.randn(1, 4, 130, 64).bfloat16()
    attn = fa4flex.compile(score_mod=mod(table), mask=mask, schedule=Schedule(deterministic=True))
    found = []
    for timing, seed in timings:
        with forward_on_cpu(), ptxsim.device(arch, seed, timing, together=4) as gpu:
            found.append(gradients(attn, qkv, table, dout))
        where = f"{arch}, {name}, {timing} {seed}"
        assert len(of_backward(gpu)) == 3 and not gpu.findings, f"{where}: {gpu.report()}"
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0])), f"{arch}, {name}: {timings}"


@pytest.mark.slow
def test_bits_repeat() -> None:
    ordered(random.choice(ARCHS), random.choice(FIXED), [("eager", 0), ("random", random.randrange(99))])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("arch", ARCHS)
def test_bits_repeat_often(arch: str, name: str) -> None:
    ordered(arch, name, [("eager", 0), *(("random", seed) for seed in range(8))])


@pytest.mark.slow
def test_sums_of_several_lanes_are_made_in_pytorch() -> None:
    """Reductions in memory come in any order: where lanes add to one element, no kernel is launched."""
    mod, make, _ = CASES["by distance"]
    table = make()
    attn = fa4flex.compile(score_mod=mod(table), mask=causal, schedule=Schedule(deterministic=True))
    qkv = [torch.randn(1, 4, 70, 64).bfloat16() for _ in range(3)]
    dout = torch.randn(1, 4, 70, 64).bfloat16()
    with ptxsim.device("sm_90a") as gpu:
        got = gradients(attn, qkv, table, dout)
    assert len(of_passes(gpu)) == 1
    exact = gradients(attn, [x.double() for x in qkv], table, dout)
    composition = {"score_mod": mod(table), "mask": causal}
    same = gradients(lambda *x: captured_cases.plain(composition, *x)[0], qkv, table, dout)
    budgets = [worst(x, y)[0] for x, y in zip(same, exact, strict=True)]
    captured_cases.judge("deterministic", got, exact, budgets)
