"""Output functions of attention on a CPU: results and gradients by every kind of call are the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import agree, close, cumulative
from output_cases import FUNCTIONS, KINDS, Sizes, dense, leaves, sizes_of
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.codegen.build import bind_output
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.output import as_output
from fa4flex.primitives.precision import Precision
from fa4flex.runtime import output_values
from fa4flex.runtime.call import NO_LENGTHS
from fa4flex.runtime.output import program_of
from fa4flex.runtime.output_values import OutputCall
from fa4flex.variants import causal


def equal(found: Tensor, true: Tensor) -> None:
    assert close(found, true)


def compare(kind: str, function: str, sizes: Sizes, **layout: Any) -> None:
    leaf, sizes = leaves(torch.float64), sizes_of(kind, sizes)
    mod, learned = FUNCTIONS[function](sizes, leaf)
    made = KINDS[kind](sizes, leaf, {"mask": causal, "output_mod": mod}, **layout)
    exact = made.oracle(made.qkv)
    agree(made.attend(*made.qkv), exact, [*made.qkv, *learned])
    with torch.no_grad():
        equal(made.attend(*made.qkv)[0], exact[0])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_kind(kind: str, function: str, seed: int) -> None:
    compare(kind, function, Sizes())


@pytest.mark.parametrize("kv_heads", [1, 7])
def test_groups(kv_heads: int, seed: int) -> None:
    compare("dense", "full", Sizes(heads=7, kv_heads=kv_heads))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_queries_before_heads(function: str, seed: int) -> None:
    compare("dense", function, Sizes(), layout="bshd")


def test_a_query_without_keys_is_the_function_of_zero(seed: int) -> None:
    leaf = leaves(torch.float64)
    shift = leaf(4)

    def never(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx > 2) & (kv_idx >= 0)

    mod = lambda out, b, h, q_idx, d_idx: torch.cos(out) * shift[h]  # noqa: E731
    q, k, v = leaf(1, 4, 6, 8), leaf(1, 4, 9, 8), leaf(1, 4, 9, 8)
    out, lse = fa4flex.compile(mask=never, output_mod=mod)(q, k, v, return_lse=True)
    torch.testing.assert_close(out[0, :, :3], shift.view(4, 1, 1).expand(4, 3, 8))
    assert (lse[0, :, :3] == -torch.inf).all()
    dq, dk, dv, dshift = torch.autograd.grad(out[:, :, :3].sum(), (q, k, v, shift))
    assert not (dq.any() or dk.any() or dv.any())
    torch.testing.assert_close(dshift, torch.full_like(dshift, 24.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_at_half_precision(dtype: torch.dtype, seed: int) -> None:
    """At most twice that of PyTorch, which rounds the attention and then the product."""
    leaf, sizes = leaves(dtype), Sizes(q_len=64, kv_len=64)
    mod, (gate,) = FUNCTIONS["full"](sizes, leaf)
    made = dense(sizes, leaf, {"output_mod": mod})
    out, _ = made.attend(*made.qkv)
    exact = made.oracle(made.qkv)
    q, k, v = made.qkv
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True) * torch.sigmoid(gate)
    weight, wanted = torch.randn(out.shape).to(dtype), [*made.qkv, gate]
    own, theirs, right = (
        [x, *torch.autograd.grad((x * weight.to(x.dtype)).sum(), wanted)] for x in (out, plain, exact[0])
    )
    for mine, other, true in zip(own, theirs, right, strict=True):
        assert (mine.double() - true.double()).abs().max() <= 2 * (other.double() - true.double()).abs().max()


def test_contents_of_a_gate_may_change_between_calls(seed: int) -> None:
    sizes, leaf = Sizes(), leaves(torch.float64)
    mod, (gate,) = FUNCTIONS["full"](sizes, leaf)
    made = dense(sizes, leaf, {"output_mod": mod})
    attn = fa4flex.compile(output_mod=mod)
    for _ in range(3):
        with torch.no_grad():
            gate.normal_()
            equal(attn(*made.qkv), made.oracle(made.qkv)[0])


def test_another_gate_is_another_call(seed: int) -> None:
    """A closure over another tensor, and a number, of the same code."""
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))

    def gated(gate: Tensor, power: int) -> Any:
        return lambda out, b, h, q_idx, d_idx: out * gate[h] + power

    for power in range(3):
        gate = torch.randn(2, dtype=torch.float64)
        out = fa4flex.attention(q, k, v, output_mod=gated(gate, power))
        equal(out, reference.attention(q, k, v)[0] * gate.view(1, 2, 1, 1) + power)


# --- merging ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_merge_applies_it_once(layout: Any, seed: int) -> None:
    sizes, leaf = Sizes(), leaves(torch.float64)
    mod, (gate,) = FUNCTIONS["full"](sizes, leaf)
    made = dense(sizes, leaf, {"output_mod": mod})
    q, k, v = (x.transpose(1, 2) if layout == "bshd" else x for x in made.qkv)
    axis, attn = 1 if layout == "bshd" else 2, fa4flex.compile(layout=layout)
    parts = [attn(q, *(x.narrow(axis, *at) for x in (k, v)), return_lse=True) for at in ((0, 5), (5, 8))]
    out, _ = fa4flex.merge(*zip(*parts), layout, output_mod=mod)  # type: ignore[arg-type]
    exact = made.oracle(made.qkv)[0]
    equal(out.transpose(1, 2) if layout == "bshd" else out, exact)
    (dgate,), (right,) = (torch.autograd.grad(x.sum(), gate) for x in (out, exact))
    equal(dgate, right)


def test_a_merge_of_packed_parts(seed: int) -> None:
    leaf, sizes = leaves(torch.float64), Sizes(batch=2, q_len=4)
    mod, _ = FUNCTIONS["rows"](sizes, leaf)
    cu = cumulative([3, 4])
    q, k, v = leaf(7, 4, 8), leaf(7, 2, 8), leaf(7, 2, 8)
    out, lse = fa4flex.compile()(q, k, v, varlen=fa4flex.Varlen(cu, cu), return_lse=True)
    varlen = fa4flex.Varlen(cu_seqlens_q=cu, cu_seqlens_k=cu)
    merged, _ = fa4flex.merge([out], [lse], output_mod=mod, varlen=varlen)
    equal(merged, fa4flex.compile(output_mod=mod)(q, k, v, varlen=varlen))
    with pytest.raises(InputError, match="without their lengths"):
        fa4flex.merge([out], [lse], output_mod=mod)


def test_parts_of_functions_are_refused(seed: int) -> None:
    sizes, leaf = Sizes(), leaves(torch.float64)
    mod, _ = FUNCTIONS["full"](sizes, leaf)
    made = dense(sizes, leaf, {"output_mod": mod})
    part = fa4flex.compile(output_mod=mod)(*made.qkv, return_lse=True)
    with pytest.raises(UnsupportedError, match="went through the output function"):
        fa4flex.merge([part[0]], [part[1]])


def test_rows_of_no_sequence_are_no_part_of_a_gradient(seed: int) -> None:
    """A function may divide by 0 for rows that no sequence has."""
    leaf, used = leaves(torch.float64), torch.tensor([3, 5], dtype=torch.int32)
    table = torch.where(torch.arange(8) < 5, 1.0 + torch.rand(8), 0.0).double().requires_grad_()
    attn = fa4flex.compile(output_mod=lambda out, b, h, q_idx, d_idx: out / table[q_idx])
    q, k, v = leaf(2, 2, 8, 4), leaf(2, 2, 8, 4), leaf(2, 2, 8, 4)
    out = attn(q, k, v, varlen=fa4flex.Varlen(seqused_q=used))
    assert not out[:, :, 5:].any() and not out[0, :, 3:].any()
    for gradient in torch.autograd.grad(out.sum(), (table, q, k, v)):
        assert gradient.isfinite().all()


def test_heads_and_rows_of_a_larger_whole(seed: int) -> None:
    """Values and gradients of some rows and heads are those of the whole's."""
    gate = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)

    def mod(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any, q_len: Any, num_heads: Any) -> Any:
        return out * gate[h, q_idx] + q_len - num_heads

    out = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    bound, places = bind_output(as_output(mod)), torch.tensor([1, 7, 8])
    program = program_of(bound, Precision())
    call = OutputCall(out, (gate,), NO_LENGTHS, places, (9, 4, 6), (), True)
    own = gate.detach()[4:6][:, places].view(1, 2, 3, 1)
    equal(output_values.forward(program, call), out * own + 9 - 6)
    dout = torch.randn_like(out)
    before, of_gate = output_values.backward(program, call, dout, [0])
    equal(before, dout * own)
    wanted = torch.zeros(6, 9, dtype=torch.float64)
    wanted[4:6, places] = (dout * out).sum(-1)[0]
    equal(of_gate, wanted)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", ["dense", "packed", "padded"])
def test_as_on_a_device(kind: str, function: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No content decides what is computed, as the host waits for no device."""
    monkeypatch.setattr(output_values, "on_host", lambda x: False)
    compare(kind, function, Sizes())


def test_a_device_reads_nothing_past_the_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_values, "on_host", lambda x: False)
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    table = torch.randn(3, dtype=torch.float64)
    out = fa4flex.attention(q, k, v, output_mod=lambda out, b, h, q_idx, d_idx: out * table[q_idx])
    kept = table[torch.arange(5).clamp(max=2)]
    equal(out, fa4flex.attention(q, k, v) * kept.view(1, 1, 5, 1))
    with pytest.raises(InputError, match="read past"):
        fa4flex.attention(q, k, v, output_mod=lambda out, b, h, q_idx, d_idx: out * table[d_idx])
