"""Gradients of ragged sequences by the generated kernels on simulated GPUs: right, nothing found in them,
and what lies past a sequence's end, here NaN, is never read."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from captured_cases import over_draws
from helpers import SMS, Width, drawn_timing, of_backward, poisoned, widths
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.primitives.sinks import Sinks
from fa4flex.primitives.varlen import Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap
from ptxsim.units import tma

LENGTHS = [(70, 70), (0, 20), (130, 200), (1, 0), (9, 5)]
USED = [(33, 70), (0, 20), (130, 129), (1, 0), (4, 2)]
SINKS = torch.randn(4, requires_grad=True)
COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(60)},
    "by tables": {"mask": lambda b, h, q, k: (q >= k) & (q % 64 < 40) & (b != 2)},
    "sinks": {"mask": causal, "sinks": Sinks(SINKS)},
}
ARCHS = ("sm_90a", "sm_100a")
KINDS = ("packed", "packed, used", "padded")
Spans = list[tuple[slice, slice]]
WIDTHS: dict[str, tuple[Width, ...]] = {
    "sm_90a": (64, 96, 128, 192, (192, 128), 256),
    "sm_100a": (64, 96, 128, (160, 128), (192, 128)),
}


def vector(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def described(kind: str) -> tuple[Varlen, Spans]:
    """The lengths as the library takes them; rows of queries and of keys that take part, by sequence."""
    used = [vector([pair[side] for pair in USED]) for side in range(2)]
    if kind == "padded":
        return Varlen(seqused_q=used[0], seqused_k=used[1]), [(slice(q), slice(k)) for q, k in USED]
    starts = [[sum(pair[side] for pair in LENGTHS[:n]) for n in range(len(LENGTHS) + 1)] for side in range(2)]
    count = USED if "used" in kind else LENGTHS
    begins = zip(starts[0][:-1], starts[1][:-1], count, strict=True)
    spans = [(slice(q, q + n), slice(k, k + m)) for q, k, (n, m) in begins]
    cu = [vector(s) for s in starts]
    return Varlen(*cu, *(used if "used" in kind else ())), spans


def sequences(x: Tensor, spans: Spans, side: int) -> list[Tensor]:
    """Views [1, H, n, D] of each sequence of a packed or padded tensor, of what takes part."""
    if x.ndim == 4:
        return [x[n : n + 1, :, span[side]] for n, span in enumerate(spans)]
    return [x[span[side]].transpose(0, 1)[None] for span in spans]


def drawn(kind: str, width: Width, spans: Spans) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v, dout and dlse, NaN where nothing takes part."""
    d, dv = widths(width)
    q_rows, k_rows = (sum(pair[side] for pair in LENGTHS) for side in range(2))
    given = []
    queries, keys = (q_rows, 130, 4, 0), (k_rows, 300, 2, 1)
    for (rows, longest, heads, side), wide in ((queries, d), (keys, d), (keys, dv), (queries, dv)):
        padded = kind == "padded"
        x = torch.full((len(USED), heads, longest, wide) if padded else (rows, heads, wide), math.nan)
        for one in sequences(x, spans, side):
            one.normal_()
        given.append(x.bfloat16())
    dlse = torch.full_like(given[3][..., 0], math.nan, dtype=torch.float32)
    for one in sequences(dlse[..., None], spans, 0):
        one.normal_()
    return given[:3], given[3], dlse if kind == "padded" else dlse.T


def gradients(name: str, qkv: list[Tensor], upstream: tuple[Tensor, Tensor], varlen: Varlen) -> list[Tensor]:
    """Gradients of q, k and v, and of the sinks."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    out, lse = fa4flex.compile(**COMPOSED[name])(*inputs, varlen=varlen, return_lse=True)
    inputs += [SINKS] * (name == "sinks")
    return list(torch.autograd.grad((out, lse), inputs, [x.to(y) for x, y in zip(upstream, (out, lse))]))


def rounded(qkv: tuple[Tensor, ...], dout: Tensor, spans: Spans) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of plain attention, exact and by bf16 PyTorch, relative to the largest of each input's."""
    found: list[list[Tensor]] = []
    for dtype in (torch.float64, torch.bfloat16):
        inputs = [x.detach().to(dtype).requires_grad_() for x in qkv]
        total = torch.zeros((), dtype=dtype)
        parts = [sequences(x, spans, side) for x, side in zip((*inputs, dout), (0, 1, 1, 0), strict=True)]
        for q, k, v, upstream in zip(*parts, strict=True):
            if q.shape[2] and k.shape[2]:
                k, v = (x.repeat_interleave(2, 1) for x in (k, v))
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
                total = total + (scores.softmax(-1) @ v * upstream.to(dtype)).sum()
        found.append(list(torch.autograd.grad(total, inputs)))
    largest = [x.abs().max() for x in found[0]]
    # In float64: the division itself must not round.
    exact, same = ([x.double() / y for x, y in zip(one, largest, strict=True)] for one in found)
    return exact, same


def close(name: str, kind: str, width: Width, arch: str) -> None:
    """Asserts at most twice bf16 PyTorch's error, relative to the largest gradient; 0 past the ends."""
    varlen, spans = described(kind)
    qkv, dout, dlse = drawn(kind, width, spans)
    timing, seed = drawn_timing()
    where = f"{name}, {kind}, width {width}, {arch}, {timing} {seed}"
    with poisoned(), ptxsim.device(arch, seed, timing, sms=SMS) as gpu:
        got = gradients(name, qkv, (dout, dlse), varlen)
    findings = [finding for result in of_backward(gpu) for finding in result.findings]
    # Forward kernels clear what lies past an end by several warpgroups: see test_simulated_variants.py.
    assert len(of_backward(gpu)) == 3 and not findings, f"{where}: {gpu.report()}"
    exact = gradients(name, [x.double() for x in qkv], (dout, dlse), varlen)
    _, errors = over_draws(lambda *given: rounded(given[:3], given[3], spans), (*qkv, dout))
    errors += [max(errors)] * (len(got) - 3)
    for x, y, error in zip(got, exact, errors, strict=True):
        assert (x.double() - y).abs().max() <= 2 * error * y.abs().max(), where
    for side, x in zip((0, 1, 1), got, strict=False):
        for one in sequences(x, spans, side):
            one.zero_()
        assert x.count_nonzero() == 0, f"{where}: gradients past the end"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("packed", "padded"))
@pytest.mark.parametrize("arch", ARCHS)
def test_maps_of_loads_begin_at_their_tensors(arch: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardware looks up a map's base, also where strides around all of memory lead from one that is not
    mapped to bytes that are; a process's heap, which the simulator reads, goes on before a tensor."""
    bases, load = set(), tma.load

    def recording(map: tma.TensorMap, box: tma.Box, memory: tma.Memory) -> Any:
        bases.add(map.address)
        return load(map, box, memory)

    monkeypatch.setattr(tma, "load", recording)
    varlen, spans = described(kind)
    qkv, dout, _ = drawn(kind, 64, spans)
    inputs = [x.requires_grad_() for x in qkv]
    with ptxsim.device(arch, sms=SMS):
        out = fa4flex.compile(mask=causal)(*inputs, varlen=varlen)
        bases.clear()
        torch.autograd.grad(out, inputs, dout)
    assert bases and bases <= {x.data_ptr() for x in (*qkv, dout)}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_entries_that_are_no_whole_tokens_apart(arch: str) -> None:
    """Entries of a padded batch 8 elements more apart than their tokens take are copied first."""
    varlen, spans = described("padded")
    qkv, dout, _ = drawn("padded", 64, spans)
    apart = []
    for x in (*qkv, dout):
        room = torch.full((x.shape[0], x[0].numel() + 8), math.nan, dtype=x.dtype)
        apart.append(room[:, :-8].view_as(x).copy_(x))
    found = []
    for q, k, v, upstream in ((*qkv, dout), apart):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with ptxsim.device(arch, sms=SMS):
            out = fa4flex.compile(mask=causal)(*inputs, varlen=varlen)
            found.append(torch.autograd.grad(out, inputs, upstream))
    for one, other, span in zip(*found, (0, 1, 1), strict=True):
        for x, y in zip(sequences(one, spans, span), sequences(other, spans, span), strict=True):
            assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_some_gradients(arch: str) -> None:
    width = random.choice((40, *WIDTHS[arch]))
    close(random.choice(sorted(COMPOSED)), random.choice(KINDS), width, arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arch", "width"), [(arch, width) for arch in ARCHS for width in WIDTHS[arch]], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COMPOSED)
def test_gradients(arch: str, name: str, kind: str, width: Width) -> None:
    close(name, kind, width, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_sequences_none_of_which_has_keys(arch: str) -> None:
    """There is nothing to launch: TMA has no map of nothing. Rows that take no part have no log-sum-exp."""
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    q = torch.randn(5, 2, 64).bfloat16().requires_grad_()
    k, v = (torch.randn(0, 1, 64).bfloat16().requires_grad_() for _ in "kv")
    varlen = Varlen(vector([0, 3, 5]), vector([0, 0, 0]), seqused_q=vector([2, 2]))
    with ptxsim.device(arch) as gpu:
        out, lse = fa4flex.compile(mask=causal, sinks=Sinks(sinks))(q, k, v, varlen=varlen, return_lse=True)
        (out.sum() + lse[:, [0, 1, 3, 4]].sum()).backward()
    assert not gpu.results and not out.any()
    expected = sinks.detach()[:, None].expand(2, 5).clone()
    expected[:, 2] = -torch.inf
    assert torch.equal(lse, expected)
    assert sinks.grad is not None and sinks.grad.tolist() == [4.0, 4.0]
    assert q.grad is not None and not q.grad.any()
