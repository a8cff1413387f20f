"""Scenarios of four processes: heads over one dimension of a mesh, the sequence over the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers import close
from scenarios import main as main  # which each process runs
from scenarios import raises, scenario
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from worker import D, H, S, copies, drawn, qkv

import fa4flex
from fa4flex import variants as v
from fa4flex.parallel import SequenceParallelAttention

HEADS_THEN_TOKENS = [Shard(1), Shard(2)]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))


def by_head(bias: Tensor, sinks: Tensor) -> fa4flex.Attention:
    """A bias and a mask that differ by head of the whole, and learn."""
    tilted = v.alibi  # its slopes follow from the number of heads
    return fa4flex.compile(
        tilted >> (lambda s, b, h, i, j: s + bias[h, i - j + 80]),
        lambda b, h, i, j: (j <= i) & (i - j < 5 + 9 * h),
        sinks=lambda: sinks,
    )


@scenario
def heads_by_tensor_parallelism() -> None:
    """Output, log-sum-exp and all gradients are those of one process; lengths that do not divide evenly."""
    here = mesh()
    for options, lengths in (({}, (S, S)), ({"moves": "keys", "stages": 2}, (7, 50))):
        learned, tensors = drawn((H, 160), (H,)), qkv(*lengths)
        whole, ours = copies(*tensors, *learned), copies(*learned)
        wanted = by_head(*whole[3:])(*whole[:3], return_lse=True)
        parts = [distribute_tensor(x, here, HEADS_THEN_TOKENS).requires_grad_() for x in tensors]
        found = by_head(*ours).parallel(here, tile=4, **options)(*parts, return_lse=True)
        above = drawn(*(x.shape for x in wanted))
        torch.autograd.backward(wanted, above)
        torch.autograd.backward(found, [distribute_tensor(x, here, HEADS_THEN_TOKENS) for x in above])
        for a, b in zip(found, wanted, strict=True):
            assert list(a.placements) == HEADS_THEN_TOKENS and close(a.full_tensor(), b)
        for a, b in zip(parts, whole, strict=False):
            assert close(a.grad.full_tensor(), b.grad)
        for a, b in zip(ours, whole[3:], strict=True):
            assert close(a.grad, b.grad)
    replicated = distribute_tensor(tensors[0], here, [Replicate(), Shard(2)])
    raises(
        ["k placed as", "Shard(1), the heads"], lambda: by_head(*ours).parallel(here)(replicated, *parts[1:])
    )
    odd = [distribute_tensor(torch.randn(1, 3, 8, D), here, HEADS_THEN_TOKENS) for _ in range(3)]
    raises(["3 query heads"], lambda: fa4flex.compile().parallel(here)(*odd))


@scenario
def the_other_layout() -> None:
    """Layout "bshd": the sequence is dimension 1 there, and 2 of the log-sum-exp."""
    here = mesh()
    tensors = [x.transpose(1, 2).contiguous() for x in qkv()]
    attn = fa4flex.compile(v.alibi, v.causal, layout="bshd")
    parts = [distribute_tensor(x, here, [Shard(2), Shard(1)]) for x in tensors]
    out, lse = attn.parallel(here, tile=4)(*parts, return_lse=True)
    assert list(out.placements) == [Shard(2), Shard(1)] and list(lse.placements) == HEADS_THEN_TOKENS
    for a, b in zip((out, lse), attn(*tensors, return_lse=True), strict=True):
        assert close(a.full_tensor(), b)


@scenario
def tokens_for_heads_within_tokens() -> None:
    """heads_dim: each part of the sequence is spread over two ranks, which exchange its tokens for heads."""
    here = mesh()
    learned, tensors = drawn((H, 160), (H,)), qkv()
    whole, ours = copies(*tensors, *learned), copies(*learned)
    wanted = by_head(*whole[3:])(*whole[:3])
    cp = by_head(*ours).parallel(here, tile=4, heads_dim="tp")
    own = copies(*(cp.shard(x, 2, batch=2, heads=H) for x in tensors))
    out = cp(*own)
    assert close(cp.unshard(out, 2, S, batch=2, heads=H), wanted)
    (above,) = drawn(wanted.shape)
    wanted.backward(above)
    out.backward(cp.shard(above, 2, batch=2, heads=H))
    for a, b in zip((*own, *ours), whole, strict=True):
        assert close(a.grad, b.grad if a.shape == b.shape else cp.shard(b.grad, 2, batch=2, heads=H))
    odd = dist.get_rank() == 3
    raises(["dtype"], lambda: cp(*(x.float() if odd else x for x in own)))
    raises(["tokens of q"], lambda: cp(own[0][:, :, 1:] if odd else own[0], *own[1:], lengths=S))
    raises(["heads_dim='cp'"], lambda: by_head(*ours).parallel(here, heads_dim="cp"))


class Block(nn.Module):
    """Self-attention whose attention is a module, or an attribute."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        given: dict[str, Any] = {"mask": v.causal & v.sliding_window(20)}
        self.attention: Any = (
            fa4flex.nn.Attention(
                lambda s, b, h, i, j, bias: s + bias[h, i - j + 80],
                parameters={"bias": drawn((H, 160))[0]},
                sinks=drawn((H,))[0],
                **given,
            )
            if module
            else fa4flex.compile(v.alibi, **given)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, values = x.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.attention(q, k, values)
        return out


@scenario
def as_a_style() -> None:
    """parallelize_module: whole inputs, parts of them, and parts of heads; results sharded or whole."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    unnamed = init_device_mesh("cpu", (4,))
    for module in (True, False):
        one = Block(module)
        whole = copies(*drawn((2, S + 3, 3 * H * D)))[0]  # 56: four equal parts
        wanted = one(whole)
        (above,) = drawn(wanted.shape)
        wanted.backward(above)
        for here, style, held in (
            (flat, SequenceParallelAttention(output_layouts=Replicate(), tile=4), None),
            (unnamed, SequenceParallelAttention(input_layouts=Shard(2), tile=4), 1),
        ):
            ours, rank = Block(module), dist.get_rank()
            plan = {"attention": style} if module else style
            parallelize_module(ours, here, plan)
            own = whole.detach() if held is None else whole.detach().chunk(4, 1)[rank]
            (own,) = copies(own)
            out = ours(own)
            out.backward(above if held is None else above.chunk(4, 2)[rank])
            assert close(out, wanted if held is None else wanted.chunk(4, 2)[rank])
            assert close(own.grad, whole.grad if held is None else whole.grad.chunk(4, 1)[rank])
            for a, b in zip(ours.parameters(), one.parameters(), strict=True):
                assert close(a.grad, b.grad)
    raises(["for Linear"], lambda: parallelize_module(nn.Linear(2, 2), flat, style))


@scenario
def as_a_style_with_tensor_parallelism() -> None:
    """Plain tensors of a share of the heads, as a column-wise projection leaves them."""
    here = mesh()
    ours = fa4flex.nn.Attention(v.alibi, v.causal, sinks=drawn((H,))[0])
    tensors = qkv()
    wanted = ours(*tensors, return_lse=True)
    style = SequenceParallelAttention(
        "cp", input_layouts=(Shard(1), Replicate()), output_layouts=(Shard(1), Replicate()), tile=4
    )
    parallelize_module(ours, here, style)
    at = here.get_local_rank("tp")
    found = ours(*(x.chunk(2, 1)[at] for x in tensors), return_lse=True)
    for a, b in zip(found, wanted, strict=True):
        assert close(a, b.chunk(2, 1)[at])
    raises(["dim="], lambda: parallelize_module(ours, here, SequenceParallelAttention()))
