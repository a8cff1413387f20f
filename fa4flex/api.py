"""The doors: compile(), attention(), flex_attention(). Every error is dressed here, once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from fa4flex.codegen.blame import dress
from fa4flex.codegen.build import Program, Trace
from fa4flex.errors import Fa4flexError, InputError, UnsupportedError
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.heads import ratio
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.sinks import Sinks
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import launch
from fa4flex.variant import Layout, Variant, at_call, compose

if TYPE_CHECKING:
    from fa4flex.view.explain import Explanation
    from fa4flex.view.mask import MaskView

_LSE = ("lse",)


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
    """A compiled variant: `attn(q, k, v)`. Differentiable; one object serves every length and device.

    What its functions captured (tensors, numbers, attributes, globals) is looked up again at each call.
    """

    variant: Variant
    _caller: launch.Caller | None = None

    @property
    def program(self) -> Program:
        """The variant traced and analysed, with what it captured as it is now."""
        return Program(self.variant, self._calling().bound)

    @property
    def trace(self) -> Trace:
        """What was found in its functions; other variants of the same code share it."""
        return self._calling().bound.trace

    @property
    def prepared(self) -> launch.Prepared:
        """What calls of this variant share."""
        return self._calling().prepared

    def _calling(self) -> launch.Calling:
        return launch.calling(self.variant, self._caller)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        varlen: Varlen | None = None,
        paging: Paging | None = None,
        blocks: BlockMap | BlockMask | None = None,
        scale: float | None = None,
        sinks: Tensor | Sinks | None = None,
        return_lse: bool = False,
    ) -> Any:
        """softmax(score_mod(scale * q k^T)) v over the allowed keys.

        q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv] (layout "bhsd"; "bshd" swaps dimensions 1
        and 2), Hq a multiple of Hkv; dtype bfloat16, float16, float32 or float64. With `varlen` they are
        packed: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]. With `paging` k and v are caches
        [pages, page_size, Hkv, D].

        blocks, scale and sinks [Hq], where given, take the place of those that were composed.

        Returns out in q's dtype and layout, or (out, lse) with lse [B, Hq, Sq] ([Hq, Tq] packed), the
        natural logarithm of the softmax's denominator, in float32 (float64 for float64 inputs). A query
        without allowed keys gives out 0, lse -inf and zero gradients. Both carry gradients.
        """
        changed = blocks is not None or scale is not None or sinks is not None
        variant = at_call(self.variant, blocks, scale, sinks) if changed else self.variant
        result = _run(variant, self._caller, (q, k, v), varlen, paging, _LSE if return_lse else ())
        return (result.out, result.lse) if return_lse else result.out

    def __repr__(self) -> str:
        return f"Attention({self.variant!r})"

    def __copy__(self) -> Attention:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        """A copy whose functions read copies of what they captured, as `copy.deepcopy` made them.

        A module that owns an Attention and the parameters that it reads is thus copied whole. Globals are
        shared.
        """
        other = object.__new__(Attention)
        memo[id(self)] = other  # before its contents: a module that a function reads may hold this object
        object.__setattr__(other, "variant", copy.deepcopy(self.variant, memo))
        object.__setattr__(other, "_caller", launch.Caller())
        return other

    def __reduce__(self) -> Any:
        return _loaded, (self.variant,)

    def explain(self, q_len: int = 4096, kv_len: int | None = None, arch: str | None = None) -> Explanation:
        """In words: what was composed, what was proved and what is evaluated, and why, at these lengths."""
        from fa4flex.view.explain import explain

        return explain(self.program, q_len, q_len if kv_len is None else kv_len, arch)

    def source(self, stage: str = "trace", **problem: Any) -> str:
        """The program at a stage as readable text, each line with the user's line that it came from.

        "trace", "facts" and "gradient" hold for every call. "plan", "forward" (the generated kernel module)
        and "ptx" are those of a GPU, at a head_dim of 128 in bfloat16 unless `problem` says otherwise:
        attn.source("forward", head_dim=64, dtype="float16").
        """
        from fa4flex.view.source import source

        return source(self.program, stage, **problem)

    @cached_property
    def mask(self) -> MaskView:
        """The mask's picture: `attn.mask.plot(256, 256)`, `print(attn.mask)`."""
        from fa4flex.view.mask import MaskView

        return MaskView(self.program)

    def _repr_html_(self) -> str:
        return self.mask._repr_html_()


def _loaded(variant: Variant) -> Attention:
    return Attention(variant, launch.Caller())


def _run(
    variant: Variant,
    caller: launch.Caller | None,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: launch.Statistics,
) -> launch.Result:
    if torch.compiler.is_dynamo_compiling():
        from fa4flex.runtime.graphs import run

        return run(variant, qkv, varlen, paging, statistics)
    now: launch.Calling | None = None
    try:
        now = launch.calling(variant, caller)
        return launch.run(now, *qkv, varlen, paging, statistics)
    except Fa4flexError as error:
        if now is not None:
            trace = now.bound.trace
            origins = [traced.origins for traced in (trace.score, trace.mask) if traced is not None]
            dress(error, [operand.name for operand in trace.operands], trace.scalar_names, *origins)
        error.add_note(f"in Attention({variant!r})")
        raise


def compile(
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | BlockMask | BlockMap | None = None,
    *,
    blocks: BlockMap | BlockMask | None = None,
    sinks: Tensor | Callable[[], Tensor] | Sinks | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    **data: Precision | Schedule,
) -> Attention:
    """Specialise attention to a variant.

    score_mod  any FlexAttention score_mod, a fa4flex score mod, or a chain of them with `>>`
    mask       any FlexAttention mask_mod, fa4flex masks combined with `&`, `|`, `~`, or a torch BlockMask
    blocks     a block-sparse map (fa4flex.BlockMap or BlockMask); `mask` then decides in partial blocks only
    sinks      [Hq] floating tensor: a learnable logit per head in the softmax's denominator; or a function
               that returns it, asked at each call
    scale      multiplies q.k; default 1 / sqrt(head_dim)
    layout     "bhsd" (PyTorch) or "bshd" (FlashAttention)
    precision, schedule   see fa4flex.Precision and fa4flex.Schedule

    What the functions captured is looked up again at each call, where it was found: closure variables,
    globals, attributes, default arguments. Tensors receive gradients.
    Raises TraceError, InputError or UnsupportedError; nothing is ignored.
    """
    variant = compose(score_mod, mask, blocks=blocks, sinks=sinks, scale=scale, layout=layout, **data)
    if torch.compiler.is_dynamo_compiling():
        return Attention(variant)
    made = Attention(variant, launch.Caller())
    made._calling()  # errors of the functions belong here
    return made


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    varlen: Varlen | None = None,
    paging: Paging | None = None,
    return_lse: bool = False,
    sinks: Tensor | Callable[[], Tensor] | Sinks | None = None,
    **composition: Any,
) -> Any:
    """compile(**composition) and call it, once. Functions of one code share what tracing found."""
    variant = compose(**composition)
    if sinks is not None:
        variant = at_call(variant, sinks=sinks)
    result = _run(variant, None, (q, k, v), varlen, paging, _LSE if return_lse else ())
    return (result.out, result.lse) if return_lse else result.out


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Drop-in for torch.nn.attention.flex_attention.flex_attention, with its arguments and results.

    query [B, Hq, L, E], key [Bkv, Hkv, S, E], value [Bkv, Hkv, S, Ev]; Bkv is B, or 1 to share keys over the
    batch. Unlike eager flex_attention, a BlockMask without mask_mod masks (its unlisted blocks are not
    allowed). kernel_options: BLOCK_M and BLOCK_N set the tile; any other raises UnsupportedError.
    """
    if return_lse and return_aux is not None:
        raise InputError(
            "return_lse and return_aux together", "one of them", "use return_aux=AuxRequest(lse=True)"
        )
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise InputError(
            f"return_aux is a {type(return_aux).__name__}", "an AuxRequest", "e.g. AuxRequest(lse=True)"
        )
    if query.ndim == 4 and key.ndim == 4 and value.ndim == 4:
        ratio(query.shape[1], key.shape[1], enable_gqa)
        if key.shape[0] == 1 and query.shape[0] > 1:
            key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    lse = return_lse or (return_aux is not None and bool(return_aux.lse))
    max_scores = return_aux is not None and bool(return_aux.max_scores)
    statistics = ("lse",) * lse + ("max_scores",) * max_scores
    variant = compose(score_mod, block_mask, scale=scale, schedule=_schedule(kernel_options))
    result = _run(variant, None, (query, key, value), None, None, statistics)
    if return_lse:
        return result.out, result.lse
    if return_aux is None:
        return result.out
    return result.out, AuxOutput(
        lse=result.lse if return_aux.lse else None,
        max_scores=result.max_scores if return_aux.max_scores else None,
    )


def _schedule(kernel_options: dict[str, Any] | None) -> Schedule:
    if not kernel_options:
        return _SCHEDULE
    options = dict(kernel_options)
    rows, keys = options.pop("BLOCK_M", None), options.pop("BLOCK_N", None)
    if options:
        raise UnsupportedError(
            f"kernel_options {sorted(options)}",
            "BLOCK_M and BLOCK_N",
            "leave them out: they tune Triton kernels, which fa4flex does not use",
        )
    if (rows is None) != (keys is None):
        raise InputError(f"kernel_options {kernel_options}", "BLOCK_M and BLOCK_N together", "give both")
    return _SCHEDULE if rows is None or keys is None else Schedule(tile=(rows, keys))


_SCHEDULE = Schedule()
