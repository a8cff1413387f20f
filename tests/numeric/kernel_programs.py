"""Programs that a call on a GPU would compile, without one: the runtime itself proves, plans and emits
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cuda_cases
import torch
from cuda_cases import FEW, VARIANTS, Draw, Sizes, of_lengths
from torch import Tensor

import fa4flex
from fa4flex.codegen.emit import Source
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import Target
from fa4flex.lower import Lowered
from fa4flex.primitives.kv_scales import E4M3, Per
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths
from fa4flex.runtime.cuda import backward, engine
from fa4flex.runtime.key_sources import Contiguous, EightBit, KeySource, Paged
from fa4flex.runtime.launch import calling
from fa4flex.variant import resolved

Width = tuple[int, int]
"""Head widths of q and k, and of v."""

Given = tuple[Source, Problem, Signature]
"""Inputs of the compiler."""

Asked = tuple[Lowered, Signature]
"""One kernel, and what its arguments look like."""

# --- how compositions are called ----------------------------------------------------------------------------


def _ends(length: int) -> Tensor:
    """cu_seqlens of two sequences, the first of 100 tokens at most."""
    return torch.tensor([0, min(100, length // 2), length], dtype=torch.int32)


def _used(length: int) -> Tensor:
    """seqused of both batch entries."""
    return torch.tensor([length, 1], dtype=torch.int32)


LENGTHS: dict[str, Callable[[int, int], SequenceLengths]] = {
    "dense": lambda q_len, kv_len: NO_LENGTHS,
    "packed": lambda q_len, kv_len: SequenceLengths(_ends(q_len), _ends(kv_len)),
    "used": lambda q_len, kv_len: SequenceLengths(seqused_k=_used(kv_len)),
    "used queries": lambda q_len, kv_len: SequenceLengths(seqused_q=_used(q_len)),
    "used both": lambda q_len, kv_len: SequenceLengths(None, None, _used(q_len), _used(kv_len)),
    "packed, used both": lambda q_len, kv_len: SequenceLengths(
        _ends(q_len), _ends(kv_len), _used(q_len // 2), _used(kv_len // 2),
    ),
}  # fmt: skip
"""Sequence lengths by name, made from the longest query and key length of a batch of two."""


@dataclass(frozen=True)
class Cache:
    """Cache in which keys and values lie: pages of so many keys, 0 for none; if `eight_bit` e4m3, with scales
    of this granularity."""

    page_size: int = 0
    eight_bit: bool = False
    per: Per = ""

    def holding(self, k: Tensor, v: Tensor) -> KeySource:
        """The source that stands for keys and values [B, H, S, D], as kernels read it beside queries with
        heads first; of the same number of pages for each entry of the batch."""
        pages: tuple[Tensor, Tensor] | tuple[None, None] = None, None
        if self.page_size:
            batch, _, tokens, _ = k.shape
            columns = -(-tokens // self.page_size)
            table = torch.arange(batch * columns, dtype=torch.int32).view(batch, columns)
            pages = table, torch.full((batch,), tokens, dtype=torch.int32)
            k, v = (
                x.new_zeros(batch * columns, self.page_size, x.shape[1], x.shape[3]).transpose(1, 2)
                for x in (k, v)
            )
        if self.eight_bit:
            shape = k.shape[: {"": 0, "head": 2, "page": 2, "token": 3}[self.per]]
            k_scale, v_scale = (torch.ones(shape) if self.per else None for _ in range(2))
            return EightBit(k.to(E4M3), v.to(E4M3), k_scale, v_scale, self.per, self.per, *pages)
        return Contiguous(k, v) if pages[0] is None else Paged(k, v, *pages)


@dataclass(frozen=True)
class Kind:
    """A composition and how it is called.

    lengths       one of LENGTHS
    heads_first   q, k and v come as [B, H, S, D] rather than [B, S, H, D]; packed ones are [T, H, D]
    statistics    what a forward pass returns besides the output
    dlse          the log-sum-exp has a gradient
    options       what fa4flex.compile takes besides the composition
    cache         in which keys and values lie; packed calls have pages
    """

    draw: Draw
    lengths: str = "dense"
    sizes: Sizes = Sizes()
    heads_first: bool = True
    statistics: tuple[str, ...] = ("lse",)
    dlse: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: Cache = Cache()

    def called(self, width: Width) -> tuple[Any, Call]:
        """The engine that takes a call of heads of these widths, and the call."""
        torch.manual_seed(0)  # what is proved may depend on the contents of tables
        with patch.object(cuda_cases, "DEVICE", torch.device("cpu")):
            sizes = self.draw.sizes(self.sizes).wide(*width)
            composition = self.draw.make(sizes)
        variant = fa4flex.compile(**composition, **self.options).variant
        q, k, v = self._laid_out(*sizes.qkv())
        now = calling(resolved(variant.core, sizes.heads, q), None)
        kv = self.cache.holding(k, v)
        operands = now.bound.trace.tensors(now.bound.bases)
        given = LENGTHS[self.lengths](sizes.q_len, sizes.kv_len)
        if kv.seqused_k is not None:
            given = given._replace(cu_seqlens_k=None)
        rest = now.bound.scalars, now.scale(q), self.heads_first, self.statistics
        return now.prepared.engine, Call(q, kv, operands, now.sinks, given, *rest)

    def _laid_out(self, *qkv: Tensor) -> tuple[Tensor, ...]:
        if self.lengths.startswith("packed"):
            packed = tuple(x[0].transpose(0, 1).contiguous() for x in qkv)
            return (packed[0], *qkv[1:]) if self.cache.page_size else packed
        return qkv if self.heads_first else tuple(x.transpose(1, 2).contiguous() for x in qkv)


_CAUSAL = VARIANTS["causal"][0]
KINDS: dict[str, Kind] = {
    "plain": Kind(FEW["dense"]),
    **{name: Kind(draws[0]) for name, draws in VARIANTS.items()},
    "causal, packed": Kind(_CAUSAL, "packed"),
    "causal, used lengths": Kind(_CAUSAL, "used"),
    "causal, float16": Kind(_CAUSAL, sizes=Sizes(dtype=torch.float16)),
}
"""Kinds by name: the first composition of every variant, and what else changes the code around the hooks."""


def _gym() -> dict[str, Kind]:
    """Every mod of attention-gym, at the sizes that it is made for; none where it is not installed."""
    try:
        from gym import instances
    except ImportError:
        return {}
    return {
        f"gym {x.name}": Kind(
            Draw(lambda s, part=part, fn=x.fn: {part: fn}, of_lengths(x.q_len, x.kv_len)),
            sizes=Sizes(x.B, x.H, x.H),
        )
        for (part, _), x in instances().items()
    }


GYM = _gym()

# --- what is compiled for a call ----------------------------------------------------------------------------


def launched_forward(kind: Kind, width: Width, target: Target) -> tuple[Any, Given]:
    """The plan that a call makes, and what it has compiled."""
    return _of_the_pass(every_kernel("forward", kind, width, target))


def launched_backward(kind: Kind, width: Width, target: Target) -> tuple[Any, Given]:
    """The plan that gradients of a call make, also those of captured tensors that ask for them, and what they
    have compiled."""
    return _of_the_pass(every_kernel("backward", kind, width, target))


def every_kernel(direction: str, kind: Kind, width: Width, target: Target) -> list[Asked]:
    """All kernels that the compiler is asked for in a pass, those for lengths and tables included, instead
    of which nothing is compiled."""
    taken, call = kind.called(width)
    asked: list[Asked] = []

    def not_compiled(lowered: Lowered, signature: Signature) -> Any:
        asked.append((lowered, signature))
        return SimpleNamespace(launch=lambda *given: None, key=lowered.source.key)

    with (
        patch.object(Lowered, "compile", not_compiled),
        patch.object(engine, "target_of", lambda device: target),
    ):
        if direction == "forward":
            engine.make_ready(taken, call)
        else:
            out = torch.empty(*call.q.shape[:-1], call.kv.v.shape[-1], dtype=call.q.dtype)
            lse = torch.empty(call.q.shape[:-1])
            saved = backward.Saved(out, lse, out, lse if kind.dlse else None)
            needs = tuple(slot for slot, x in enumerate(call.operands) if x.requires_grad)
            backward._make_ready(taken, call, saved, needs, taken.schedule.deterministic)
    return asked


def _of_the_pass(asked: list[Asked]) -> tuple[Any, Given]:
    (one,) = [one for one in asked if one[0].direction in ("forward", "backward")]
    lowered, signature = one
    return lowered.plan, (lowered.source, lowered.problem, signature)
