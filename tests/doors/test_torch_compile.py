"""The registered operator under torch.compile: whole graphs, captured tensors, drop-in flex_attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import fa4flex
from fa4flex import Varlen
from fa4flex.variants import causal, sliding_window, softcap


def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]


class Block(nn.Module):
    """A layer with a learned bias per head, captured by its attention."""

    def __init__(self, heads: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.project = nn.Linear(heads * dim, 3 * heads * dim)
        self.slopes = nn.Parameter(torch.randn(heads))
        self.sinks = nn.Parameter(torch.randn(heads))
        slopes = self.slopes

        def biased(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
            return score + slopes[h].exp() * (kv_idx - q_idx)

        self.attention = fa4flex.compile(biased, causal & sliding_window(7), sinks=lambda: self.sinks)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, self.dim)).permute(2, 0, 3, 1, 4)
        out, lse = self.attention(q, k, v, return_lse=True)
        return out.transpose(1, 2).flatten(2) * lse.mean()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_layer_compiles_to_one_graph(backend: str) -> None:
    layer = Block()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    parameters = dict(layer.named_parameters())
    for length in (19, 33):  # a second length must not need another trace of the mods
        x = torch.randn(2, length, 32)
        truth = torch.autograd.grad(layer(x).square().sum(), list(parameters.values()))
        found = torch.autograd.grad(compiled(x).square().sum(), list(parameters.values()))
        for name, f, t in zip(parameters, found, truth, strict=True):
            torch.testing.assert_close(f, t, rtol=1e-3, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_packed_sequences_compile() -> None:
    attn = fa4flex.compile(softcap(4.0), causal)
    varlen = Varlen(torch.tensor([0, 5, 12], dtype=torch.int32))
    compiled = torch.compile(
        lambda q, k, v: attn(q, k, v, varlen=varlen) + 1, fullgraph=True, backend="aot_eager"
    )
    q, k, v = qkv(12, 2, 8)
    torch.testing.assert_close(compiled(q, k, v), attn(q, k, v, varlen=varlen) + 1)


def test_the_operators_meet_torchs_contract() -> None:
    """Schema, fake tensors and autograd registration, by torch's own checker."""
    attn = fa4flex.compile(
        lambda s, b, h, i, j, t=torch.randn(2, dtype=torch.float64, requires_grad=True): s + t[h] * 0.1 * j,
        causal,
    )
    q, k, v = qkv(1, 2, 6, 4, dtype=torch.float64)
    now = attn._calling()
    program = now.prepared.program
    ints, floats = program.numbers(now.bound.scalars)
    arguments = (
        q,
        k,
        v,
        list(attn.program.tensors()),
        None,
        None,
        None,
        None,
        None,
        program.text,
        ints,
        [torch.tensor(x, dtype=torch.float64) for x in floats],
        0.5,
        False,
    )
    torch.library.opcheck(
        torch.ops.fa4flex.attention,
        arguments,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_static",
        ),
    )


MODULE_BIAS = torch.randn(4, requires_grad=True)


def module_level(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + MODULE_BIAS[h] * (q_idx - kv_idx)


def test_drop_in_inside_a_compiled_function() -> None:
    q, k, v = qkv(2, 4, 20, 8)
    compiled = torch.compile(
        lambda q, k, v: fa4flex.flex_attention(q, k, v, score_mod=module_level),
        fullgraph=True,
        backend="aot_eager",
    )
    truth = fa4flex.flex_attention(q, k, v, score_mod=module_level)
    torch.testing.assert_close(compiled(q, k, v), truth)
    (found,) = torch.autograd.grad(compiled(q, k, v).sum(), MODULE_BIAS)
    (wanted,) = torch.autograd.grad(truth.sum(), MODULE_BIAS)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("gqa", [False, True])
def test_drop_in_agrees_with_torch(gqa: bool) -> None:
    """Same arguments, same results as torch's flex_attention where that honours the request."""
    q = torch.randn(2, 4, 150, 16)  # without gradients: torch has no CPU backward
    k, v = torch.randn(2, 2, 2 if gqa else 4, 140, 16)

    def window(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (q_idx - kv_idx).abs() < 30 + h

    def relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score - (q_idx - kv_idx).abs() / (h + 1)

    mask = create_block_mask(window, 2, 4, 150, 140, device="cpu", BLOCK_SIZE=32)
    arguments = {"score_mod": relative, "block_mask": mask, "scale": 0.3, "enable_gqa": gqa}
    aux = AuxRequest(lse=True, max_scores=True)
    out, found = fa4flex.flex_attention(q, k, v, **arguments, return_aux=aux)  # type: ignore[arg-type]
    truth, wanted = torch_flex_attention(q, k, v, **arguments, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-4, atol=1e-5)
    assert found.max_scores.le(found.lse).all(), "the largest score is at most the log of the sum"


def test_a_pure_block_map_masks() -> None:
    """Blocks that are not listed are not allowed, mask_mod or not."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = (
        torch.ones(1, 1, 3, dtype=torch.int32),
        torch.arange(3, dtype=torch.int32).view(1, 1, 3, 1),
    )
    diagonal = BlockMask.from_kv_blocks(
        counts, indices.expand(1, 1, 3, 3).contiguous(), BLOCK_SIZE=16, seq_lengths=(48, 48)
    )
    q, k, v = qkv(1, 2, 48, 8)
    same_block = lambda b, h, i, j: i // 16 == j // 16  # noqa: E731
    torch.testing.assert_close(
        fa4flex.flex_attention(q, k, v, block_mask=diagonal), fa4flex.attention(q, k, v, mask=same_block)
    )
