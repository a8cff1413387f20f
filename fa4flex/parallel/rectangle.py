"""A variant as it is seen from a rectangle of its scores: some queries in a row against some keys in a row.

Tensors of a rectangle count from 0, and mods from the rectangle's place in the whole. So symbols are replaced
in the traced expressions: `q` by `q + q_start`, `kv` by `kv + kv_start`, lengths and the number of heads by
those of the whole. The places are captured numbers of the program, like a window's width: proofs, intervals,
gradients and kernels follow, and one program serves every rectangle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts, analyze
from fa4flex.codegen.expr import Expr, apply, nodes, scalar, substitute, sym
from fa4flex.codegen.trace.traced import renumber
from fa4flex.runtime import compute
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.programs import Published, publish
from fa4flex.variant import Variant

Whole = Mapping[str, int]
"""Lengths of the whole attention: q_len, kv_len and num_heads."""

_PLACES = {"q": "q_start", "kv": "kv_start", "h": "h_start"}
_WHOLE = ("q_len", "kv_len", "num_heads")


@dataclass(frozen=True)
class Shifted:
    """Facts of a variant seen from any rectangle. `numbers` says for each captured number what it is: a
    number of the variant itself, by slot, or a place or length, by name."""

    facts: Facts
    numbers: tuple[int | str, ...]

    def scalars(self, own: tuple[int | float, ...], places: Mapping[str, int]) -> tuple[int | float, ...]:
        """The captured numbers of one rectangle."""
        return tuple(places[x] if isinstance(x, str) else own[x] for x in self.numbers)


@lru_cache(maxsize=1024)
def shifted(facts: Facts, heads: bool = False) -> Shifted:
    """Facts over the whole -> facts over a rectangle of it. heads: if it may have some heads only."""
    given = (facts.score, facts.mask) if facts.kept is None else (facts.score, facts.mask, facts.kept)
    own = [node.value for node in nodes(*given) if node.op == "scalar"]
    names = [*(name for name in _PLACES.values() if heads or name != "h_start"), *_WHOLE]
    slots = {name: max(own, default=-1) + 1 + i for i, name in enumerate(names)}
    replaced = {sym(name): scalar(slots[name], "int") for name in _WHOLE}
    for name, place in _PLACES.items():
        if place in slots:
            replaced[sym(name)] = apply("add", sym(name), scalar(slots[place], "int"))
    roots = [substitute(root, replaced) for root in given]
    meaning: dict[int, int | str] = {slot: slot for slot in own} | {at: name for name, at in slots.items()}
    # Programs number what they read from 0, without gaps.
    read = sorted({node.value for node in nodes(*roots) if node.op == "scalar"})
    tensors = {
        slot: slot
        for node in nodes(*roots)
        for slot in ([node.value] if node.op == "load" else [node.value[0]] if node.op == "search" else [])
    }
    memo: dict[Expr, Expr] = {}
    order = {slot: at for at, slot in enumerate(read)}
    score, mask, *rest = [renumber(root, tensors, order, memo) for root in roots]
    result = analyze(score, mask, rest[0] if rest else None, facts.weights)
    return Shifted(result, tuple(meaning[slot] for slot in read))


@dataclass(frozen=True, eq=False)
class Rectangles:
    """One attention over the whole, ready to be computed rectangle by rectangle.

    scalars   numbers that the variant captured, by slot
    operands  tensors that it captured, by slot, whole: mods index them by places in the whole
    """

    facts: Facts
    variant: Variant
    scalars: tuple[int | float, ...]
    operands: tuple[Tensor, ...]
    scale: float
    whole: Whole
    h_start: int | None = None

    def leaving(self, margin: int) -> Rectangles:
        """The same, by kernels that leave at least so many multiprocessors to others."""
        schedule = self.variant.schedule
        if margin <= schedule.sm_margin or schedule.next_tile == "launch_control":
            return self
        return replace(self, variant=replace(self.variant, schedule=replace(schedule, sm_margin=margin)))

    def forward(
        self, qkv: tuple[Tensor, Tensor, Tensor], start: tuple[int, int], output: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Output, in the dtype `output`, and log-sum-exp of q [B, H, Sq, D] over k and v, the first query and
        key being at `start` in the whole. Sinks take no part. torch's flex_attention, where it computes,
        rounds its output to the dtype of q in any case."""
        q = qkv[0]
        program = self._program(q.dtype if by_flex("auto", q) else output)
        out, lse, _, _ = compute.forward(program, self._call(qkv, start))
        return out.to(output), lse

    def backward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        whole: tuple[Tensor, Tensor],
        upstream: tuple[Tensor, Tensor | None],
        start: tuple[int, int],
        needs: list[int],
    ) -> list[Tensor]:
        """[dq, dk, dv, then a gradient per slot of `needs`]: what this rectangle adds to them.

        `whole` is the output and log-sum-exp over all keys, sinks included: probabilities are relative to it.
        """
        out, lse = whole
        program = self._program()
        # Relative to its log-sum-exp the sum of a row is 1, or 0 where it has no keys.
        saved = out, lse, lse, (lse > -torch.inf).to(lse.dtype)
        gradients = [x for x in upstream if x is not None], saved
        return compute.backward(program, self._call(qkv, start), gradients, needs)

    @property
    def _shifted(self) -> Shifted:
        return shifted(self.facts, self.h_start is not None)

    def _program(self, output: torch.dtype | None = None) -> Published:
        facts = self._shifted.facts
        precision = self.variant.precision
        if output is not None:
            precision = replace(precision, output=output)
        return publish(facts, self.variant.schedule, precision)

    def _call(self, qkv: tuple[Tensor, Tensor, Tensor], start: tuple[int, int]) -> Call:
        q, k, v = qkv
        places = {**self.whole, "q_start": start[0], "kv_start": start[1], "h_start": self.h_start or 0}
        result = self._shifted.scalars(self.scalars, places)
        return Call(q, Contiguous(k, v), self.operands, None, NO_LENGTHS, result, self.scale, True, ("lse",))
