"""fa4flex and what a user would pick instead for block-sparse attention and selections."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa4flex.bench.environment import version_of
from fa4flex.bench.peers import Absent, Run
from fa4flex.bench.report import OURS
from fa4flex.bench.sparse_rows import ListsRow, MapRow, Problem, StepRow, TopkRow, step_lists

OTHER = "is not asked for such rows"
"""Reason for which a peer is left out of a row's table."""


@dataclass(frozen=True)
class SparsePeer:
    """A peer's call in the rows that it has.

    package  of which its version is told
    same     its results are those that a row is judged by; else it is timed beside the others alone
    differentiates  it has gradients of its own, which autograd does not ask for
    """

    name: str
    package: str
    same: bool = True
    differentiates: bool = False

    def version(self) -> str:
        version = version_of(self.package)
        return f"{self.package} {version}" if version else "not installed"

    def prepare(self, problem: Problem) -> Run | Absent:
        raise NotImplementedError


class Own(SparsePeer):
    """fa4flex: maps and lists as `blocks=`, select.topk, and a step that selects anew."""

    def prepare(self, problem: Problem) -> Run | Absent:
        import fa4flex
        from fa4flex.select import Scores, topk
        from fa4flex.variants import causal

        row = problem.row
        if isinstance(row, TopkRow):
            (values,) = problem.tensors
            scores = Scores(values.view(1, 1, row.rows, row.units), 1, 1, row.rows, row.units)
            return lambda: topk(scores, row.k).ids.view(row.rows, row.k)
        q, k, v = problem.tensors
        if isinstance(row, StepRow):
            return _step(problem, fa4flex.compile(mask=causal))
        if isinstance(row, ListsRow):
            listing = fa4flex.compile(mask=causal)
            return lambda: listing(q, k, v, blocks=problem.blocks)
        assert isinstance(row, MapRow)
        if row.new:
            attn = fa4flex.compile()
            return lambda: attn(q, k, v, blocks=row.map_of(problem.blocks.classes.clone()))
        attn = fa4flex.compile(blocks=problem.blocks)
        return lambda: attn(q, k, v)


def _step(problem: Problem, attn: Any) -> Run:
    """Selection and both passes; the output is what is judged."""
    inputs = tuple(x.detach().requires_grad_() for x in problem.tensors)

    def run() -> Tensor:
        with torch.enable_grad():
            out: Tensor = attn(*inputs, blocks=step_lists(problem).map())
            torch.autograd.grad(out, inputs, problem.held)
        return out.detach()

    return run


class Dense(SparsePeer):
    """fa4flex's causal attention of all keys, by which a list's time is judged; or of a step, its selection
    alone."""

    def prepare(self, problem: Problem) -> Run | Absent:
        import fa4flex
        from fa4flex.variants import causal

        if not isinstance(problem.row, ListsRow):
            return Absent(OTHER)
        attn, (q, k, v) = fa4flex.compile(mask=causal), problem.tensors
        return lambda: attn(q, k, v)


class Selecting(SparsePeer):
    """The selection alone of a step."""

    def prepare(self, problem: Problem) -> Run | Absent:
        return (lambda: step_lists(problem).ids) if isinstance(problem.row, StepRow) else Absent(OTHER)


@dataclass(frozen=True)
class FlexBlocks(SparsePeer):
    """flex_attention with a BlockMask of full blocks; uncompiled, it reads the mask_mod alone."""

    compiled: bool = True

    def prepare(self, problem: Problem) -> Run | Absent:
        from torch.nn.attention.flex_attention import flex_attention

        row = problem.row
        if not isinstance(row, MapRow):
            return Absent("has blocks of queries alone" if isinstance(row, ListsRow) else OTHER)
        call: Any = flex_attention
        if self.compiled:
            torch.compiler.reset()
            call = torch.compile(flex_attention, dynamic=False)
        q, k, v = problem.tensors

        def blocks() -> Any:
            made = row.map_of(problem.blocks.classes.clone()) if row.new else problem.blocks
            return made.to_torch(None if self.compiled else made.mask())

        kept = blocks()
        return lambda: call(q, k, v, block_mask=blocks() if row.new else kept)


class CudnnBlocks(SparsePeer):
    """Block-sparse attention of cuDNN's frontend, by lists of full blocks."""

    def prepare(self, problem: Problem) -> Run | Absent:
        row = problem.row
        if not isinstance(row, MapRow):
            return Absent(OTHER)
        if row.rows != row.keys:
            return Absent("has square blocks alone")
        module = importlib.import_module("cudnn.block_sparse_attention")
        (q, k, v), dout = problem.tensors, problem.dout
        most = int((problem.blocks.classes > 0).sum(-1).max())

        def lists() -> dict[str, Any]:
            full = problem.blocks.classes > 0
            indices = full.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
            return {
                "q2k_block_index": indices[..., :most].to(torch.int32).contiguous(),
                "q2k_block_nums": full.sum(-1, dtype=torch.int32).contiguous(),
                "sparse_block_size": row.rows,
                "softmax_scale": row.width**-0.5,
            }

        kept = lists()

        def forward() -> Tensor:
            now = lists() if row.new else kept
            found: Tensor = next(iter(module.block_sparse_attention_forward(q, k, v, **now).values()))
            return found

        if dout is None:
            return forward
        out, lse = tuple(module.block_sparse_attention_forward(q, k, v, **kept).values())[:2]

        def backward() -> tuple[Tensor, ...]:
            found = module.block_sparse_attention_backward(dout, q, k, v, out, lse, **kept)
            return tuple(found.values() if hasattr(found, "values") else found)[:3]

        return backward


class FlaNsa(SparsePeer):
    """The selected branch of fla's native sparse attention: lists of blocks for each query and KV head."""

    def prepare(self, problem: Problem) -> Run | Absent:
        row = problem.row
        if not isinstance(row, ListsRow):
            return Absent(OTHER)
        if row.window or row.keys == 1 or row.q_len != row.kv_len:
            return Absent("has lists of blocks without a window beside them, for as many queries as keys")
        call = importlib.import_module("fla.ops.nsa").parallel_nsa
        q, k, v = (x.transpose(1, 2).contiguous() for x in problem.tensors)
        gate = torch.ones(q.shape[:3], dtype=q.dtype, device=q.device)
        ids = problem.blocks.ids.transpose(1, 2).contiguous().long()

        def run() -> Tensor:
            out: Tensor = call(
                q, k, v, g_slc=gate, block_indices=ids, block_counts=row.entries, block_size=row.keys
            )
            return out.transpose(1, 2)

        return run


class FlaMoba(SparsePeer):
    """fla's mixture of block attention, which selects for each query."""

    def prepare(self, problem: Problem) -> Run | Absent:
        row = problem.row
        if not isinstance(row, StepRow):
            return Absent(OTHER)
        call = importlib.import_module("fla.ops.moba").parallel_moba
        inputs = tuple(x.transpose(1, 2).detach().contiguous().requires_grad_() for x in problem.tensors)
        ends = torch.tensor([0, row.length], dtype=torch.int32, device=inputs[0].device)
        held = problem.held.transpose(1, 2).contiguous()  # type: ignore[union-attr]

        def run() -> Tensor:
            with torch.enable_grad():
                out: Tensor = call(*inputs, ends, row.length, row.keys, row.chosen)
                torch.autograd.grad(out, inputs, held)
            return out.detach()

        return run


@dataclass(frozen=True)
class GymGather(SparsePeer):
    """attention-gym's gather_attn: lists of single tokens that all heads share, with values that are the
    keys."""

    impl: str = "fused"

    def prepare(self, problem: Problem) -> Run | Absent:
        row = problem.row
        if not isinstance(row, ListsRow):
            return Absent(OTHER)
        if not row.tied or row.kv_heads > 1 or row.keys > 1:
            return Absent("has lists of single tokens, of one KV head whose values are its keys")
        call = importlib.import_module("attn_gym.sparse.gather_attn").gather_attn
        q, k, _ = problem.tensors
        near, ids = k[:, :, : row.q_len].contiguous(), problem.blocks.ids[:, 0]
        return lambda: call(q, near, k, ids, sliding_window_size=0, impl=self.impl)


class TorchTopk(SparsePeer):
    """torch.topk, which takes any of equal scores, in any order."""

    def prepare(self, problem: Problem) -> Run | Absent:
        row = problem.row
        if not isinstance(row, TopkRow):
            return Absent(OTHER)
        (values,) = problem.tensors
        return lambda: values.topk(row.k, sorted=False).indices


PEERS: tuple[SparsePeer, ...] = (
    Own(OURS, "fa4flex"),
    Dense("dense", "fa4flex", same=False),
    Selecting("selecting", "fa4flex", same=False),
    FlexBlocks("flex", "torch"),
    CudnnBlocks("cuDNN BSA", "nvidia-cudnn-frontend", differentiates=True),
    FlaNsa("fla NSA", "fla-core"),
    FlaMoba("fla MoBA", "fla-core", same=False),
    GymGather("gym gather", "attn_gym"),
    TorchTopk("torch.topk", "torch"),
)
_ON_A_CPU: dict[str, SparsePeer] = {
    "flex": FlexBlocks("flex", "torch", compiled=False),
    "gym gather": GymGather("gym gather", "attn_gym", impl="reference"),
}


def peers_of(smoke: bool) -> tuple[SparsePeer, ...]:
    """All peers; of a smoke run, those that need no compiler and no GPU where they have such a form."""
    return tuple(_ON_A_CPU.get(peer.name, peer) if smoke else peer for peer in PEERS)


def gradients(peer: SparsePeer, problem: Problem) -> Run | Absent:
    """The backward pass of one forward pass, again and again."""
    if peer.differentiates:
        return peer.prepare(problem)
    leaves = tuple(x.detach().requires_grad_() for x in problem.tensors)
    with torch.enable_grad():
        forward = peer.prepare(replace(problem, tensors=leaves, dout=None))
        if isinstance(forward, Absent):
            return forward
        out = forward()
    return lambda: torch.autograd.grad(out, leaves, problem.dout, retain_graph=True)
