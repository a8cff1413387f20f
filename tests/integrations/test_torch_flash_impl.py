"""torch's operators of flash attention by fa4flex: registered for tensors of a simulated GPU, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention
from helpers import SMS, cumulative
from torch import Tensor

import fa4flex.integrations.torch as doors
import ptxsim
from fa4flex import Dropout, UnsupportedError, reference
from fa4flex.integrations import flash_operators
from fa4flex.runtime import compute

OPS = torch.ops.aten


@pytest.fixture
def finite_masks() -> None:
    """No model is under test."""


@pytest.fixture
def registered() -> Iterator[None]:
    made = doors.register("CPU")
    yield
    made.remove()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a CPU count as those that kernels are for."""
    monkeypatch.setattr(flash_operators.launch, "by_kernels", lambda *_: True)
    monkeypatch.setattr(flash_operators.compute, "backward", compute._backward_blockwise)
    path = "fa4flex.runtime.launch._path"
    monkeypatch.setattr(path, lambda variant, q: flash_operators.launch._single_queries)


def heads_first(*lengths: int, heads: int = 2) -> Iterator[Tensor]:
    for n in lengths:
        yield torch.randn(1, n, heads, 64).bfloat16().transpose(1, 2).requires_grad_()


def judge(got: Any, want: Any) -> None:
    for x, exact in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), exact.double(), atol=0.03, rtol=0.03)


def bottom_right(b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
    return kv - kv_len <= q - q_len


def test_it_is_among_torchs_implementations() -> None:
    attention = torch.nn.attention
    if not hasattr(attention, "list_flash_attention_impls"):
        with pytest.raises(UnsupportedError, match="patch_sdpa"):
            doors.activate()
        return
    assert "fa4flex" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    doors.activate()
    assert attention.current_flash_attention_impl() == "fa4flex"
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


def test_without_a_choice_of_implementations_the_other_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl", raising=False)
    with pytest.raises(UnsupportedError, match="patch_sdpa"):
        doors.activate()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("registered", "on_cpu")
def test_dense_operators_with_gradients(causal: bool) -> None:
    q, k, v = heads_first(24, 40, 40)
    out, lse, *_ = OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.2)
    want, want_lse = reference.attention(q, k, v, mask=bottom_right if causal else None, scale=0.2)
    judge((out, lse), (want, want_lse))
    assert out.stride() == torch.empty_like(q).stride() and lse.dtype == torch.float32
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    judge(got, torch.autograd.grad(want, (q, k, v), dout.double()))
    assert [x.stride() for x in got] == [torch.empty_like(x).stride() for x in (q, k, v)]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 2)], ids=str)
@pytest.mark.usefixtures("registered", "on_cpu")
def test_packed_operators_through_varlen_attn(window: tuple[int, int]) -> None:
    own = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    cu_q, cu_k = cumulative((7, 20, 1)), cumulative((9, 30, 4))
    q, k, v = (torch.randn(n, 2, 64).bfloat16().requires_grad_() for n in (28, 43, 43))
    out = own(q, k, v, cu_q, cu_k, 20, 30, window_size=window)
    left, right = window

    def mask(b: Any, h: Any, i: Any, j: Any, q_len: Any, kv_len: Any) -> Any:
        d = j - (i + kv_len - q_len)
        return ((left < 0) | (-d <= left)) & ((right < 0) | (d <= right))

    ranges = reference.sequence_ranges(cu_q), reference.sequence_ranges(cu_k)
    want, want_lse = reference.varlen((q, k, v), ranges, None, mask)
    judge((out,), (want,))
    dout = torch.randn_like(out)
    judge(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout.double()))

    into = torch.empty_like(q)
    lse = OPS._flash_attention_forward_no_dropout_inplace(
        into, q, k, v, cu_q, cu_k, 20, 30, 0.0, False, False, window_size_left=left, window_size_right=right
    )
    assert torch.equal(into, out)
    judge((lse,), (want_lse,))


@pytest.mark.usefixtures("registered", "on_cpu")
def test_dense_operators_of_queries_before_heads() -> None:
    q, k, v = (torch.randn(2, n, 2, 64).bfloat16().requires_grad_() for n in (24, 40, 40))
    arguments = q, k, v, None, None, 24, 40, 0.0, True, False
    out, lse, *_ = OPS._flash_attention_forward(*arguments)
    turned = tuple(x.transpose(1, 2) for x in (q, k, v))
    want, want_lse = reference.attention(*turned, mask=bottom_right)
    judge((out, lse), (want.transpose(1, 2), want_lse))
    dout = torch.randn_like(out)
    judge(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(want.transpose(1, 2), (q, k, v), dout.double()),
    )
    used = torch.tensor([40, 7], dtype=torch.int32)
    with torch.no_grad():
        out = OPS._flash_attention_forward(*arguments, seqused_k=used)[0]
        for n, length in enumerate(used.tolist()):
            one = turned[0][n : n + 1], turned[1][n : n + 1, :, :length], turned[2][n : n + 1, :, :length]
            judge((out[n : n + 1],), (reference.attention(*one, mask=bottom_right)[0].transpose(1, 2),))


@pytest.mark.usefixtures("registered", "on_cpu")
def test_what_no_kernel_is_for_is_refused_where_torch_has_none() -> None:
    q, k, v = heads_first(8, 8, 8)
    wide = [x.repeat(1, 1, 1, 3) for x in (q, k, v)]
    for given, options in (((q, k, v), (0.0, False, True)), (wide, (0.5,))):
        with pytest.raises(UnsupportedError, match="dropout"):
            OPS._scaled_dot_product_flash_attention(*given, *options)
    with pytest.raises(UnsupportedError, match="float32"):
        OPS._scaled_dot_product_flash_attention(q.float(), k.float(), v.float())
    slopes = torch.ones(2)
    with pytest.raises(UnsupportedError, match="alibi_slopes"):
        OPS._flash_attention_forward(q, k, v, None, None, 8, 8, 0.0, False, False, alibi_slopes=slopes)


@pytest.mark.slow
@pytest.mark.usefixtures("registered", "on_cpu")
def test_dropout_keeps_its_seed_in_the_random_state() -> None:
    q, k, v = heads_first(24, 40, 40)
    out, lse, *_, state, _, _ = OPS._scaled_dot_product_flash_attention(q, k, v, 0.3, True)
    dropout = Dropout(0.3, int(state.view(torch.int64)[0]))
    want, want_lse = reference.attention(q, k, v, mask=bottom_right, dropout=dropout)
    judge((out, lse), (want, want_lse))
    dout = torch.randn_like(out)
    judge(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout.double()))
    again = OPS._scaled_dot_product_flash_attention(q, k, v, 0.3, True)[0]
    assert not torch.equal(out, again)


def test_what_is_refused_runs_on_torchs_kernel() -> None:
    calls = []

    class Kernel:
        def call_boxed(self, keys: Any, *arguments: Any, **options: Any) -> str:
            calls.append((keys, arguments, options))
            return "torch's"

    q, k, v = heads_first(8, 8, 8)
    call = doors._or_torchs(flash_operators.sdpa_forward, Kernel())
    assert call("keys", q, k, v, 0.5, scale=2.0) == "torch's"  # tensors on a CPU
    assert call("keys", q, k, v) == "torch's"
    assert calls[0][0] == "keys" and calls[0][1][3] == 0.5 and calls[0][2] == {"scale": 2.0}


def test_kernels_of_torch_are_found_and_called_with_all_arguments() -> None:
    name, key = "_scaled_dot_product_flash_attention_for_cpu", "CPU"
    q, k, v = heads_first(8, 8, 8)
    expected = OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.3)
    kernel, seen = doors._kernel_of(name, key), []
    if kernel is None:
        pytest.skip("this torch has no torch.library.get_kernel")

    def refuses(*arguments: Any, **options: Any) -> Any:
        seen.append((arguments, options))
        raise UnsupportedError("this", "that", "something else")

    library = torch.library.Library("aten", "IMPL", key)
    library.impl(name, doors._or_torchs(refuses, kernel), key, with_keyset=True)
    got = OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.3)
    assert len(seen) == 1 and torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert doors._kernel_of("_scaled_dot_product_flash_attention", key) is None


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_on_a_simulated_gpu() -> None:
    q, k, v = heads_first(40, 72, 72)
    with ptxsim.device("sm_90a", sms=SMS) as gpu:
        out, lse, *_ = OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), dout)
    assert not gpu.findings and len(gpu.results) >= 3
    want, want_lse = reference.attention(q, k, v, mask=bottom_right)
    judge((out, lse), (want, want_lse))
    judge(got, torch.autograd.grad(want, (q, k, v), dout.double()))
