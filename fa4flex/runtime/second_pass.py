"""Second passes over queries and keys, from a log-sum-exp: checks, gradients, and the operator that stands
for one under tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.default_device import on_the_host
from fa4flex.errors import EarlierError, Fa4flexError, InputError, UnsupportedError
from fa4flex.operators import OPERATORS, below
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.varlen import Varlen
from fa4flex.primitives.weights import SOFTMAX
from fa4flex.runtime import autocast, compute, launch
from fa4flex.runtime.call import NO_LENGTHS, SequenceLengths, lengths_of
from fa4flex.runtime.checks import check_descriptions, check_strided, in_transforms
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.packing import as_tensor, sequence_lengths
from fa4flex.runtime.programs import Published, read
from fa4flex.runtime.sharding import is_dtensor
from fa4flex.torch_internals import below_autograd
from fa4flex.variant import Variant, changed, listed_now

_FORWARD, _BACKWARD = OPERATORS["second_pass"], OPERATORS["second_pass_backward"]

Tensors = tuple[Tensor, Tensor, Tensor]
"""q, k and lse."""


class SecondCall(NamedTuple):
    """One second pass.

    q, k       [B, H, S, D], or packed [T, H, D]
    lse        [B, H, Sq], or packed [H, Tq]
    rows       integers [R]: rows of q, or among packed tokens, whose probabilities are wanted; negative ones
               count from the end. None: sums of all rows
    operands   captured tensors by slot; scalars: captured numbers by slot
    lengths    those of a ragged batch
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    rows: Tensor | None
    operands: tuple[Tensor, ...]
    lengths: SequenceLengths
    scalars: tuple[Any, ...]
    scale: Any

    @property
    def packed(self) -> bool:
        return self.lengths.cu_seqlens_q is not None

    @property
    def q_len(self) -> int:
        """Number of rows of q."""
        return self.q.shape[0 if self.packed else 2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that it may be differentiated by, if they float."""
        return self.q, self.k, self.lse, *self.operands

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        rows = () if self.rows is None else self.rows.shape
        if self.packed:
            return self.q.shape[1], *rows, self.k.shape[0]
        return *self.q.shape[:2], *rows, self.k.shape[2]


# --- calls ------------------------------------------------------------------------------------------------


def checked(variant: Variant, tensors: Tensors, varlen: Varlen | None) -> Variant:
    """The variant as second passes know it. Sinks, dropout and an output function have no part in them: these
    are inside lse, or come after. Raises InputError or UnsupportedError."""
    bare = changed(listed_now(variant).core, sinks=None, dropout=None)
    if bare.normalizer is not None and bare.weights == SOFTMAX:  # a constant of the sum is inside lse, too
        bare = changed(bare, normalizer=None)
    _refuse_others(bare)
    check_types(tensors)
    check_descriptions(varlen, None)
    return bare


def heads_first(variant: Variant, tensors: Tensors) -> tuple[Variant, Tensors]:
    """The same of tensors with heads before tokens."""
    q, k, lse = tensors
    if variant.layout == "bhsd" or q.ndim != 4 or k.ndim != 4:
        return variant, tensors
    return changed(variant, layout="bhsd"), (q.transpose(1, 2), k.transpose(1, 2), lse)


@on_the_host
def eager(
    variant: Variant,
    caller: launch.Caller | None,
    tensors: Tensors,
    varlen: Varlen | None,
    rows: Tensor | None,
) -> Tensor:
    """Probabilities of rows, or sums of all rows if `rows` is None, of a variant that was `checked`, in its
    layout, with gradients."""
    now: launch.Calling | None = None
    try:
        now = launch.calling(variant, caller)
        turned, (q, k, lse) = heads_first(variant, tensors)
        now = now._replace(variant=turned)
        q, k, _ = autocast.cast(q, k, lse)
        check_lse(q, lse, varlen)
        call = call_of(now, (q, k, lse), varlen, rows)
        with autocast.off(q):
            return _made(now.prepared.program, call)
    except EarlierError:
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise


def call_of(now: launch.Calling, tensors: Tensors, varlen: Varlen | None, rows: Tensor | None) -> SecondCall:
    """The call, with the captured tensors and numbers as they are now. Raises where they do not fit."""
    q, k, lse = tensors
    kv, operands = Contiguous(k, k), now.operands()
    launch.check_call(now, q, kv, varlen, operands)
    lengths, scalars = lengths_of(varlen, kv), now.bound.scalars
    return SecondCall(q, k, lse, rows, operands, lengths, scalars, now.scale(q))


def _made(program: Published, call: SecondCall) -> Tensor:
    """The result, by an operator where something traces or intercepts operators."""
    tensors = call.tensors
    if any(map(is_dtensor, tensors)):
        raise UnsupportedError(
            "probabilities, or sums of them, of DTensors",
            "local tensors: each key's sum is over the queries that a process holds",
            "call with x.to_local(), and add up the sums of the processes that share the queries",
        )
    if launch.observed(*tensors) and not in_transforms(*tensors):
        return by_operator(program, call)
    return result(program, call)


_KNOWN = frozenset((
    "score_mod", "mask", "blocks", "allowed", "sinks", "scale", "layout", "precision", "schedule", "backend",
    "output_mod",
))  # fmt: skip
"""Fields of variants that a second pass honours, or that have no part in it."""
_PRECISION = frozenset(("compute", "output"))


def _refuse_others(variant: Variant) -> None:
    """Raise UnsupportedError for what is set of a variant and not known here: probabilities would be those of
    another attention."""
    for owner, known in ((variant, _KNOWN), (variant.precision, _PRECISION)):
        for one in fields(owner):
            if one.init and one.name not in known and getattr(owner, one.name) != one.default:
                raise UnsupportedError(
                    f"probabilities of a variant with {one.name}={getattr(owner, one.name)!r}",
                    "a softmax of scores under masks, with or without sinks",
                    f"leave {one.name} out of the variant that is asked for them",
                )


def check_types(tensors: Tensors) -> None:
    """Raise InputError or UnsupportedError unless q, k and lse are strided tensors."""
    q, k, lse = tensors
    check_strided(q, k, k)
    if not isinstance(lse, Tensor) or lse.is_nested or lse.layout is not torch.strided:
        what = "a nested tensor" if isinstance(lse, Tensor) else f"a {kind_of(lse)}"
        raise InputError(
            f"lse is {what}",
            "the log-sum-exp of the same queries and keys, as attention returns it with return_lse=True",
            "pass the second result of attn(q, k, v, return_lse=True)",
        )


def check_lse(q: Tensor, lse: Tensor, varlen: Varlen | None) -> None:
    """Raise InputError unless lse is that of queries with heads first, or packed ones."""
    packed = varlen is not None and varlen.packed
    expected = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:3])
    if q.ndim == (3 if packed else 4) and tuple(lse.shape) != expected:
        raise InputError(
            f"lse {list(lse.shape)} for q {list(q.shape)}",
            f"{list(expected)}, a number per query and head",
            "pass the lse of these queries, as attention returns it with return_lse=True",
        )
    if lse.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"lse of {lse.dtype}",
            "float32, or float64: an error of it is a relative error of all probabilities",
            "keep the lse as attention returns it",
        )
    if lse.device != q.device:
        raise InputError(f"lse on {lse.device}, q on {q.device}", "one device", "move it with .to(q.device)")


# --- results and gradients ----------------------------------------------------------------------------------


def result(program: Published, call: SecondCall) -> Tensor:
    """The result, with derivatives of any kind."""
    from fa4flex.runtime.derived import weights  # calls of kernels do not wait for it
    from fa4flex.runtime.derived.parts import applied

    laid = [x.transpose(0, 1)[None] for x in call.tensors[:2]] if call.packed else list(call.tensors[:2])
    laid.append(call.lse[None] if call.packed else call.lse)
    fields = program, tuple(call.scalars), call.scale, False, call.lengths
    recipe = weights.SecondPass(*fields)
    if call.rows is not None:
        rows = _within(call.rows, call.q_len)
        laid = [laid[0].index_select(2, rows), laid[1], laid[2].index_select(2, rows)]
        recipe = weights.ChosenRows(*fields, rows, call.q_len)
    tensors = (*laid, *call.operands)
    (made,) = applied(weights.second_pass_of(recipe, len(tensors)), recipe, *tensors)
    return made.squeeze(0) if call.packed else made


def _within(rows: Tensor, q_len: int) -> Tensor:
    """Rows that exist, counted from the beginning. On a device nobody waits for their contents: a later call
    raises."""
    found = rows.long()
    right = ((found >= -q_len) & (found < q_len)).all()
    words = f"rows= beyond the {q_len} rows of q"
    if not rows.is_cpu:
        later.require_at_each_replay(right, words)
    elif not right:
        raise InputError(
            f"{words}: {int(found.min())} to {int(found.max())}",
            f"row numbers from 0 to {q_len - 1}, or from -{q_len} to -1",
            "among packed tokens they count from the first token of all",
        )
    return torch.where(found < 0, found + q_len, found).clamp(0, max(q_len - 1, 0))


def backward(program: Published, call: SecondCall, upstream: Tensor, needs: Sequence[int]) -> list[Tensor]:
    """Gradients of q, k and lse, then of the operands in slots `needs`."""
    with compute.outside(grad=True):
        tensors = [x.detach() for x in call.tensors]
        wanted = [0, 1, 2, *[3 + slot for slot in needs]]
        for n in wanted:
            tensors[n].requires_grad_()
        q, k, lse, *operands = tensors
        again = call._replace(q=q, k=k, lse=lse, operands=tuple(operands))
        by = [tensors[n] for n in wanted]
        return list(torch.autograd.grad(result(program, again), by, upstream, materialize_grads=True))


class _Outline(NamedTuple):
    """A call without its tensors, which autograd keeps."""

    program: Published
    fields: tuple[Any, ...]

    def call(self, tensors: Sequence[Any]) -> SecondCall:
        q, k, lse, rows, cu_q, cu_k, used_q, used_k, *operands = tensors
        lengths = SequenceLengths(cu_q, cu_k, used_q, used_k)
        lengths = NO_LENGTHS if all(x is None for x in lengths) else lengths
        return SecondCall(q, k, lse, rows, tuple(operands), lengths, *self.fields)


class Registered(torch.autograd.Function):
    """The operator, with gradients by another one."""

    @staticmethod
    def forward(ctx: Any, outline: _Outline, *tensors: Any) -> Tensor:
        ctx.outline = outline
        ctx.save_for_backward(*tensors)
        with below_autograd():
            return by_operator(outline.program, outline.call(tensors))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        needs = [slot for slot, want in enumerate(wanted[8:]) if want]
        if torch.is_grad_enabled():  # create_graph=True
            made = _Once.apply(ctx.outline, needs, upstream, *tensors)
        else:
            made = _gradients(ctx.outline, needs, upstream, tensors)
        placed: list[Tensor | None] = [*made[:3], *[None] * (len(tensors) - 3)]
        for slot, gradient in zip(needs, made[3:], strict=True):
            placed[8 + slot] = gradient
        return None, *placed


class _Once(torch.autograd.Function):
    """The gradients where a second derivative might be wanted, which is refused in words."""

    @staticmethod
    def forward(ctx: Any, outline: _Outline, needs: list[int], upstream: Tensor, *tensors: Any) -> Any:
        return tuple(_gradients(outline, needs, upstream, tensors))

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(
            "a second derivative of probabilities where something intercepts operators",
            "second derivatives of eager calls, and first derivatives",
            "leave out create_graph=True, or torch.compile, make_fx or whatever else intercepts",
        )


def _gradients(outline: _Outline, needs: list[int], upstream: Tensor, tensors: Sequence[Any]) -> list[Tensor]:
    value = {**_named(outline.program, outline.call(tensors)), "upstream": upstream, "needs": needs}
    made: list[Tensor] = torch.ops.fa4flex.second_pass_backward(*_BACKWARD.packed(value))
    return made


# --- operators --------------------------------------------------------------------------------------------


def by_operator(program: Published, call: SecondCall) -> Tensor:
    """The result by an operator of torch's."""
    made: Tensor = torch.ops.fa4flex.second_pass(*_FORWARD.packed(_named(program, call)))
    return made


def _named(program: Published, call: SecondCall) -> dict[str, Any]:
    ints, floats = program.numbers(call.scalars)
    tensors = [as_tensor(x) for x in floats]
    if isinstance(call.scale, Tensor):
        tensors.append(call.scale)
    return {
        "q": call.q,
        "k": call.k,
        "lse": call.lse,
        "rows": call.rows,
        "operands": call.operands,
        **call.lengths._asdict(),
        "program": program.text,
        "ints": ints,
        "floats": tensors,
        "scale": None if isinstance(call.scale, Tensor) else call.scale,
    }


def _read(value: dict[str, Any], data: bool = True) -> tuple[Published, SecondCall]:
    program, floats, scale = read(value["program"]), list(value["floats"]), value["scale"]
    floats = [float(x) for x in floats] if data else floats
    scale = floats.pop() if scale is None else scale
    scalars = program.scalars(value["ints"], floats)
    tensors = value["q"], value["k"], value["lse"], value["rows"], tuple(value["operands"])
    return program, SecondCall(*tensors, sequence_lengths(value), scalars, scale)


@on_the_host
def second_pass(*arguments: Any) -> Tensor:
    program, call = _read(_FORWARD.named(arguments))
    with autocast.off(call.q), compute.outside(grad=False):
        return result(program, call).contiguous()


@on_the_host
def second_pass_backward(*arguments: Any) -> list[Tensor]:
    value = _BACKWARD.named(arguments)
    program, call = _read(value)
    with autocast.off(call.q):
        results = backward(program, call, value["upstream"], value["needs"])
    return [x.contiguous() for x in results]


def second_pass_with_gradients(*arguments: Any) -> Tensor:
    program, call = _read(_FORWARD.named(arguments), data=False)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in call.tensors):
        with below_autograd():
            return by_operator(program, call)
    made: Tensor = Registered.apply(
        _Outline(program, tuple(call[6:])), *call[:4], *call.lengths, *call.operands
    )
    return made


backward_below = below("second_pass_backward")


def second_pass_fake(*arguments: Any) -> Tensor:
    program, call = _read(_FORWARD.named(arguments), data=False)
    return call.q.new_empty(call.shape, dtype=program.precision.compute_dtype(call.q.dtype))


def second_pass_backward_fake(*arguments: Any) -> list[Tensor]:
    value = _BACKWARD.named(arguments)
    like = [*[value[name] for name in ("q", "k", "lse")], *[value["operands"][n] for n in value["needs"]]]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
