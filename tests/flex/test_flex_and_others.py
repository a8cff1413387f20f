"""Results of torch's flex_attention where other backends compute the same: rows past the ends of
sequences, gradients of captured tensors of 16 bits, lengths and maps that became invalid, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fa4flex
from fa4flex import BlockMap, Varlen, reference
from fa4flex.errors import InputError
from fa4flex.variants import causal

S, HEADS = 64, 2


@pytest.mark.parametrize("sinks", (None, torch.tensor([0.5, -1.0])))
@pytest.mark.parametrize("backend", ("auto", "flex"))
def test_rows_past_the_end_have_neither_keys_nor_sinks(backend: Any, sinks: Any) -> None:
    attn = fa4flex.compile(sinks=sinks, backend=backend)
    q, k, v = (torch.randn(2, HEADS, S, 16) for _ in "qkv")
    used = torch.tensor([5, 40])
    out, lse = attn(q, k, v, varlen=Varlen(seqused_q=used), return_lse=True)
    exact, exact_lse = reference.attention(q, k, v, sinks=sinks)
    there = (torch.arange(S) < used[:, None])[:, None].expand(2, HEADS, S)
    torch.testing.assert_close(out.double(), torch.where(there[..., None], exact, 0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), torch.where(there, exact_lse, -torch.inf), atol=1e-5, rtol=1e-5)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    lengths = Varlen(torch.tensor([0, 30, S]), seqused_q=torch.tensor([5, 20]))
    out, lse = attn(*packed, varlen=lengths, return_lse=True)
    for start, end, past in ((0, 5, 30), (30, 50, S)):
        assert not out[end:past].any() and (lse[:, end:past] == -torch.inf).all()
        assert lse[:, start:end].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gradients_of_captured_tensors_are_summed_wide(dtype: torch.dtype) -> None:
    """Each element adds up thousands of terms: its sum is rounded once, which is half a unit in the last
    place; that of a sum in 16 bits is off by several tenths."""
    table = torch.zeros(4, dtype=dtype).requires_grad_()
    q, k, v = (torch.randn(2, HEADS, 256, 16, dtype=dtype) for _ in "qkv")
    weight = torch.rand(2, HEADS, 256, 16)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + table[(kv_idx * 3 + q_idx) % 4]

    def gradient(attend: Callable[..., Any]) -> torch.Tensor:
        (found,) = torch.autograd.grad((attend(q, k, v) * weight).sum(), table)
        return found.double()

    exact = gradient(lambda *x: reference.attention(*(y.double() for y in x), score)[0])
    own = gradient(fa4flex.compile(score))
    found = gradient(fa4flex.compile(score, backend="flex"))
    unit = torch.finfo(dtype).eps
    assert ((own - exact).abs() <= 2 * (own - exact).abs().max() + unit * exact.abs()).all()
    assert ((found - exact).abs() <= 2 * (own - exact).abs().max() + unit * exact.abs()).all()


CHANGED: dict[str, Callable[[Varlen], Any]] = {
    "a negative length": lambda x: x.seqused_k.__setitem__(0, -3),  # type: ignore[union-attr]
    "lengths that fall": lambda x: x.cu_seqlens_q.__setitem__(1, 50),  # type: ignore[union-attr]
    "another start": lambda x: x.cu_seqlens_q.__setitem__(0, 2),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("backend", ("auto", "flex"))
def test_lengths_that_became_invalid_are_refused(backend: Any, name: str) -> None:
    attn = fa4flex.compile(mask=causal, backend=backend)
    padded = "negative" in name
    lengths = Varlen(seqused_k=torch.tensor([5, 40])) if padded else Varlen(torch.tensor([0, 20, 40, S]))
    shape = (2, HEADS, S, 16) if padded else (S, HEADS, 16)
    qkv = [torch.randn(shape) for _ in "qkv"]
    for _ in range(3):
        attn(*qkv, varlen=lengths)
    CHANGED[name](lengths)
    with pytest.raises(InputError):
        attn(*qkv, varlen=lengths)


@pytest.mark.parametrize("change", (lambda x: x.fill_(3), lambda x: x.data.fill_(255)))
@pytest.mark.parametrize("backend", ("auto", "flex"))
def test_classes_that_are_none_are_refused(backend: Any, change: Callable[..., Any]) -> None:
    q, k, v = (torch.randn(1, HEADS, S, 16) for _ in "qkv")
    for mask in (None, causal):
        blocks = BlockMap.from_dense(torch.ones(4, 4, dtype=torch.uint8), 16)
        attn = fa4flex.compile(mask=mask, blocks=blocks, backend=backend)
        for _ in range(3):
            attn(q, k, v)
        change(blocks.classes)
        with pytest.raises(InputError, match="in the map"):
            attn(q, k, v)


BIAS = torch.randn(HEADS, S).requires_grad_()


def biased(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + BIAS[h, kv_idx]


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("options", ({}, {"mask": causal}, {"score_mod": biased, "mask": causal}))
def test_checkpoints_give_the_gradients_of_a_plain_pass(options: dict[str, Any], reentrant: bool) -> None:
    """First calls, and repeated ones, in the pass and when it is run again."""
    attn, linear = fa4flex.compile(**options, backend="flex"), torch.nn.Linear(16, 16)
    learned = [linear.weight, *([BIAS] if "score_mod" in options else [])]

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = linear(x)
        return x + attn(x, x, 2 * x) + attn(x, x * 1.5, x)

    for n in range(4):
        x = torch.randn(1, HEADS, S - 8 * (n % 2), 16, requires_grad=True)
        want = torch.autograd.grad(layer(x).sin().sum(), [x, *learned])
        for leaf in (x, *learned):
            leaf.grad = None
        checkpoint(layer, x, use_reentrant=reentrant).sin().sum().backward()  # type: ignore[union-attr]
        for leaf, expected in zip((x, *learned), want):  # sums of 128 rows, whose terms cancel
            atol = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(leaf.grad, expected, atol=atol, rtol=1e-5)
