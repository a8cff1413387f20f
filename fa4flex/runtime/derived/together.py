"""Results and their tangents by one kernel, where there is one, with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

from fa4flex.runtime import compute
from fa4flex.runtime.call import NO_LENGTHS, Call, Results, SequenceLengths
from fa4flex.runtime.cuda.launches.ready_tangents import Tangents
from fa4flex.runtime.cuda.tangents import run_tangents
from fa4flex.runtime.derived.parts import Attention, Level, Pull, Push, Recipe, applied, laid, laid_rows
from fa4flex.runtime.flex.choice import by_flex
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.programs import Published
from fa4flex.torch_internals import (
    pushes_alone,
    single_level,
    transform_level,
    unwrapped,
    without_transforms,
)


def attend(program: Published, call: Call) -> Results | None:
    """(out, lse, None) of a call of which q, k or v have tangents, with theirs. None where other tensors
    have some, in transforms of transforms, and where no kernel is for it."""
    if not compute.on_gpu(call.q) or by_flex(program.backend, call.q) or call.empty:
        return None
    if transform_level() is not None and not pushes_alone():
        return None
    parts = [_parted(x) for x in (call.q, call.kv.k, call.kv.v)]
    others = [_parted(x) for x in (call.sinks, *call.operands, *call.lengths) if x is not None]
    if any(tangent is not None for _, tangent in others):
        return None
    (q, tq), (k, tk), (v, tv) = parts
    tangents = Tangents(tq, tk, tv)
    if not tangents.moved:
        return None
    plain = _plain(call, (q, k, v), [x for x, _ in others])
    with without_transforms():
        pushed = _pushed(program, plain, tangents)
    if pushed is None:
        return None
    out, lse, tout, tlse = pushed
    return make_dual(out, tout), make_dual(lse, tlse), None


def _parted(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A tensor and its tangent, or None, outside of transforms."""
    primal, tangent = unpack_dual(x)
    return unwrapped(primal), None if tangent is None else unwrapped(tangent)


def _plain(call: Call, qkv: tuple[Tensor, Tensor, Tensor], others: list[Tensor]) -> Call:
    """The call with other tensors of heads, and `others` in place of sinks, captured tensors and lengths."""
    given = iter(others)
    q, k, v = qkv
    sinks = None if call.sinks is None else next(given)
    operands = tuple([next(given) for _ in call.operands])
    lengths = call.lengths
    if lengths is not NO_LENGTHS:
        lengths = SequenceLengths(*[None if x is None else next(given) for x in lengths])
    return call._replace(
        q=q, kv=Contiguous(k, v), sinks=sinks, operands=operands, lengths=lengths, statistics=("lse",)
    )


class _Made(NamedTuple):
    """A call as its derivatives need it: tensors are those that it can be differentiated by, as it has them,
    and then their tangents, those number `moved`."""

    call: Call
    tangents: Tangents
    program: Published
    recipe: Recipe
    moved: tuple[int, ...]
    tensors: int


def _pushed(program: Published, call: Call, tangents: Tangents) -> Sequence[Tensor] | None:
    """out, lse and their tangents, with gradients where they may be asked for."""
    moved = tuple([n for n, x in enumerate(tangents) if x is not None])
    sinks = [] if call.sinks is None else [call.sinks]
    tensors = [call.q, call.kv.k, call.kv.v, *sinks, *call.operands]
    given = [*tensors, *[x for x in tangents if x is not None]]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        with torch.no_grad():
            return run_tangents(program.engine, call, tangents)
    recipe = Recipe(program, tuple(call.scalars), call.scale, bool(sinks), call.lengths)
    made = _Made(call, tangents, program, recipe, moved, len(tensors))
    if single_level is None:
        return None
    with contextlib.suppress(_NoKernel), single_level():
        results: tuple[Tensor, ...] = _apply(made, *given)
        return results
    return None


class _NoKernel(Exception):
    """No kernel is for a call."""


class Together(torch.autograd.Function):
    """The kernel, with gradients of all that it computes: of out and lse by a backward kernel, of their
    tangents block by block. Raises _NoKernel where there is none."""

    @staticmethod
    def forward(ctx: Any, made: _Made, *given: Tensor) -> tuple[Tensor, ...]:
        pushed = run_tangents(made.program.engine, made.call, made.tangents)
        if pushed is None:
            raise _NoKernel
        ctx.made = made._replace(call=_without_tensors(made.call), tangents=Tangents(None, None, None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, pushed.out, pushed.lse)
        return tuple(pushed)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, out, lse = ctx.saved_tensors
        made: _Made = ctx.made
        needs = tuple([n for n, wanted in enumerate(ctx.needs_input_grad[1:]) if wanted])
        placed: list[Tensor | None] = [None] * len(given)
        of_results = upstream[:2]
        if any(x is not None for x in of_results):
            own = tuple([n for n in needs if n < made.tensors])
            _add(placed, own, _of_results(made, own, given[: made.tensors], (out, lse), of_results))
        if any(x is not None for x in upstream[2:]):
            level = Push(Attention(made.recipe.kinds(made.tensors)), made.moved)
            _add(placed, needs, _blockwise(made, level, needs, given, upstream[2:], (out, lse)))
        return None, *placed


_apply: Any = super(torch.autograd.Function, Together).apply
"""`Together.apply`, whose arguments are outside of transforms, without what torch does for these."""


def _without_tensors(call: Call) -> Call:
    none: Any = None
    return call._replace(q=none, kv=none, sinks=none, operands=())


def _add(placed: list[Tensor | None], needs: Sequence[int], found: Sequence[Tensor]) -> None:
    for n, x in zip(needs, found, strict=True):
        before = placed[n]
        placed[n] = x if before is None else before + x


def _of_results(
    made: _Made,
    needs: tuple[int, ...],
    tensors: Sequence[Tensor],
    saved: tuple[Tensor, Tensor],
    upstream: Sequence[Tensor | None],
) -> Sequence[Tensor]:
    """Gradients of the tensors number `needs` by those of out and lse."""
    if torch.is_grad_enabled():  # create_graph=True
        level = Attention(made.recipe.kinds(made.tensors))
        return _blockwise(made, level, needs, tensors, upstream, saved)
    q, k, v, *rest = tensors
    sinks = rest.pop(0) if made.recipe.sinks else None
    call = made.call._replace(q=q, kv=Contiguous(k, v), sinks=sinks, operands=tuple(rest))
    (out, lse), (dout, dlse) = saved, upstream
    given = [torch.zeros_like(out) if dout is None else dout, *([] if dlse is None else [dlse])]
    first = 3 + made.recipe.sinks
    slots = [n - first for n in needs if n >= first]
    found = compute.backward(made.program, call, (given, (out, lse)), slots)
    by_number = dict(enumerate(found[:first])) | {
        slot + first: x for slot, x in zip(slots, found[first:], strict=True)
    }
    return [by_number[n] for n in needs]


def _blockwise(
    made: _Made,
    level: Level,
    needs: tuple[int, ...],
    given: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    saved: tuple[Tensor, Tensor],
) -> Sequence[Tensor]:
    """The same of any level, by PyTorch operations, with derivatives of any order."""
    packed = made.recipe.packed
    heads = {n for n, kind in enumerate(level.kinds) if kind in ("queries", "keys")}
    arranged = [laid(x, packed) if n in heads else x for n, x in enumerate(given)]
    out, lse = (torch.zeros_like(like) if x is None else x for x, like in zip(upstream, saved, strict=True))
    found = applied(Pull(level, needs), made.recipe, *arranged, laid(out, packed), laid_rows(lse, packed))
    return [
        x.squeeze(0).transpose(0, 1) if packed and n in heads else x
        for n, x in zip(needs, found, strict=True)
    ]
