"""Module of one program for torch's flex_attention: its mods, and the call, compiled or as a dense reference.

On a GPU the module's `attend` runs under torch.compile. On a CPU torch has compiled kernels for outputs
alone; the rest (gradients, the log-sum-exp) runs uncompiled, as torch's dense reference.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.emit.source import Source
from fa4flex.codegen.expr import TRUE
from fa4flex.primitives.normalizer import refuse_flex
from fa4flex.runtime.flex.block_mask import BLOCK, Blocks
from fa4flex.runtime.flex.compiled import Attend, Compiled, Outputs
from fa4flex.runtime.flex.mods import Buffer, Function, Setting, mask_function, score_function
from fa4flex.torch_internals import flattened, saving_by_hooks, unflattened

_LN2 = math.log(2.0)


class Wanted(NamedTuple):
    """Parts of a call that its module is made for. lse, max_scores: whether they are results."""

    scale: float
    lse: bool
    max_scores: bool
    sinks: bool
    tile: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Module:
    """Generated functions of one program, and what they are to return."""

    score: Function | None
    mask: Function | None
    wanted: Wanted

    @property
    def text(self) -> str:
        """Text of the generated module."""
        parts = [_HEADER, *(x.text for x in (self.score, self.mask) if x is not None), self._attend()]
        return "\n\n".join(parts)

    def _attend(self) -> str:
        wanted = self.wanted
        lines = ["def attend(q, k, v, blocks, score_buffers, mask_buffers, sinks):"]
        for kind, of, arguments in (
            ("score", self.score, "score, b, h, q_idx, kv_idx"),
            ("mask", self.mask, "b, h, q_idx, kv_idx"),
        ):
            if of is None:
                continue
            own = buffers_of(of)
            if own:
                # Torch refuses tensors of a mask that require gradients, though it has none for them.
                read = "score_buffers" if kind == "score" else "[x.detach() for x in mask_buffers]"
                lines.append(f"    {''.join(f'{kind}_{x.name}, ' for x in own)}= {read}")
            made = [x for x in of.buffers if x != x.base]
            lines += [
                f"    {kind}_{x.name} = derived({kind}_{x.base.name}, q.shape[1], {x.spread})" for x in made
            ]
            value = "".join(f", {kind}_{x.name}" for x in of.buffers)
            lines += [
                "",
                f"    def {kind}({arguments}):",
                f"        return {kind}_mod({arguments}{value})",
                "",
            ]
        block_mask = "None"
        if self.mask is not None:
            lines.append("    block_mask = block_mask_of(blocks, (q.shape[2], k.shape[2]), mask)")
            block_mask = "block_mask"
        score = "None" if self.score is None else "score"
        aux = f"AuxRequest(lse={wanted.lse or wanted.sinks}, max_scores={wanted.max_scores})"
        tile = {} if wanted.tile is None else dict(zip(("BLOCK_M", "BLOCK_N"), wanted.tile, strict=True))
        lines += [
            "    out, found = flex_attention(",
            f"        q, k, v, {score}, {block_mask}, scale={wanted.scale!r}, enable_gqa=True,",
            f"        kernel_options={tile or None}, return_aux={aux},",
            "    )",
            "    lse = found.lse",
        ]
        if wanted.sinks:
            lines.append("    out, lse = with_sinks(out, lse, sinks)")
        lines.append(f"    return out, {'lse' if wanted.lse else None}, found.max_scores\n")
        return "\n".join(lines)

    def compiled(self, fallback: Callable[[], Attend] | None = None) -> Compiled:
        """`attend` under torch.compile. Each module has code of its own: torch counts recompilations by code.

        Roundings to bfloat16 and float16 in the mods are kept, which Inductor would leave out.
        """
        namespace = Source("flex_attention", self.text).namespace()
        rounds = any(f".to(torch.{name})" in self.text for name in ("bfloat16", "float16"))
        return Compiled(namespace["attend"], {"emulate_precision_casts": True} if rounds else None, fallback)

    def uncompiled(self) -> Attend:
        """The same by the dense reference behind torch's operator, which has gradients on a CPU too."""
        names = Source("flex_attention", self.text).namespace()
        score_mod, mask_mod = names.get("score_mod", _same), names.get("mask_mod", noop_mask)
        wanted = self.wanted

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            blocks: Blocks | None,
            score_buffers: tuple[Tensor, ...],
            mask_buffers: tuple[Tensor, ...],
            sinks: Tensor | None,
        ) -> Outputs:
            lengths = q.shape[2], k.shape[2]
            value = block_mask_of(_whole(q) if blocks is None else blocks, lengths, mask_mod)
            copies = _derived(self.score, score_buffers, q.shape[1])
            masks = tuple([x.detach() for x in mask_buffers])
            operator: Any = torch.ops.higher_order.flex_attention
            out, lse, largest = operator(
                q, k, v, score_mod, value.as_tuple(), wanted.scale, dict(_OPTIONS), copies, masks
            )
            lse, largest = lse * _LN2, largest * _LN2
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
            return out, lse if wanted.lse else None, largest if wanted.max_scores else None

        def saving_inputs_alone(*arguments: Any) -> Outputs:
            with _one_at_a_time:
                beside = saving_by_hooks() or threading.active_count() > 1
                if beside and torch.is_grad_enabled():
                    tensors, structure = flattened(arguments)
                    result: Outputs = _Again.apply(attend, structure, *tensors)
                    return result
                return attend(*arguments)

        return saving_inputs_alone


_one_at_a_time = threading.RLock()
"""Held while torch's operator runs uncompiled, in either pass: it traces mods by state of the process."""


class _Again(torch.autograd.Function):
    """A function that is run again for its gradients, so that nothing but its arguments is saved.

    Torch differentiates mods by tracing them, and hooks of saved tensors see what that saves: not the same in
    each pass, so that a checkpoint that compares passes raises. Its own backward pass takes no lock.
    """

    @staticmethod
    def forward(ctx: Any, attend: Attend, structure: Any, *tensors: Any) -> Outputs:
        ctx.attend, ctx.structure = attend, structure
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return attend(*unflattened(tensors, structure))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[2:]
        tensors = [
            x if x is None else x.detach().requires_grad_(want)
            for x, want in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with _one_at_a_time:
            return None, None, *_Again._gradients(ctx, tensors, upstream)

    @staticmethod
    def _gradients(
        ctx: Any, tensors: list[Tensor | None], upstream: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        with torch.enable_grad():
            result = ctx.attend(*unflattened(tensors, ctx.structure))
        pairs = [(x, up) for x, up in zip(result, upstream, strict=True) if x is not None and up is not None]
        learned = [x for x in tensors if x is not None and x.requires_grad]
        outputs, gradients = zip(*pairs, strict=True)
        made = iter(torch.autograd.grad(outputs, learned, gradients, allow_unused=True))
        return [next(made) if want else None for want in ctx.needs_input_grad[2:]]


_HEADER = """import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from fa4flex.runtime.flex.attend import block_mask_of, derived, with_sinks
"""

_OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": True,
}  # fmt: skip
"""Options of torch's operator, which the function around it fills in."""


def module(facts: Facts, setting: Setting, wanted: Wanted) -> Module:
    """The module of a program. Raises UnsupportedError for what torch's mods cannot say."""
    if not facts.softmax:
        raise refuse_flex(f"a normaliser of {facts.weights.kind} weights")
    score = None if facts.score is SCORE else score_function(facts.score, setting)
    mask = None if facts.mask is TRUE else mask_function(facts.mask, setting)
    return Module(score, mask, wanted)


def _same(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def derived(table: Tensor, heads: int, spread: bool) -> Tensor:
    """A copy of a captured tensor; with `spread` one for each head, [H, ...]."""
    return table.expand(heads, *table.shape).contiguous() if spread else table.clone()


def _derived(function: Function | None, arguments: tuple[Tensor, ...], heads: int) -> tuple[Tensor, ...]:
    """Buffers of a function, made of those that a call gives."""
    if function is None or all(x == x.base for x in function.buffers):
        return arguments
    own = dict(zip(buffers_of(function), arguments, strict=True))
    return tuple([own[x] if x == x.base else derived(own[x.base], heads, x.spread) for x in function.buffers])


def buffers_of(function: Function | None) -> tuple[Buffer, ...]:
    """Buffers that a call gives a function."""
    return () if function is None else tuple(dict.fromkeys(x.base for x in function.buffers))


def block_mask_of(blocks: Blocks, lengths: tuple[int, int], mask_mod: Callable[..., Tensor]) -> BlockMask:
    """torch's BlockMask of lists of blocks; also in code that torch.compile traces."""
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=blocks[0],
        kv_indices=blocks[1],
        full_kv_num_blocks=blocks[2],
        full_kv_indices=blocks[3],
        q_num_blocks=blocks[4],
        q_indices=blocks[5],
        full_q_num_blocks=blocks[6],
        full_q_indices=blocks[7],
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
    )


def _whole(q: Tensor) -> Blocks:
    """Lists that torch's reference does not look at."""
    count = torch.zeros(1, 1, 1, dtype=torch.int32, device=q.device)
    return Blocks(*(count, count[..., None]) * 4)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps as if each head had one more logit, without a value: the keys keep a share of
    sigmoid(lse - sink). A row without keys keeps out 0, and its lse is the sink; gradients likewise.

    Source: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    sink = sinks.to(lse.dtype).view(1, -1, 1)
    seen = lse > -torch.inf
    known = torch.where(seen, lse, 0.0)
    share = torch.where(seen, torch.sigmoid(known - sink), 0.0)
    whole = torch.where(seen, torch.logaddexp(known, sink), sink.expand_as(lse))
    return (out * share.unsqueeze(-1)).to(out.dtype), whole
