"""Variant: what the user composed. Frozen; everything later is derived from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.flex_attention import BlockMask

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.dropout import Dropout, as_dropout, check_beside, drawn, stand_in
from fa4flex.primitives.lists import Lists, kept_map, lists_kept
from fa4flex.primitives.mask import Mask, as_mask
from fa4flex.primitives.normalizer import (
    Normalizer,
    as_normalizer,
    check_composition,
    sinks_of,
)
from fa4flex.primitives.output import OutputMod, as_output
from fa4flex.primitives.precision import Precision, check_skip
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.score import ScoreMod, as_score
from fa4flex.primitives.sinks import Sinks
from fa4flex.primitives.weights import SOFTMAX, Weights

Layout = Literal["bhsd", "bshd"]
Backend = Literal["auto", "flex"]


@dataclass(frozen=True, eq=False, repr=False)
class Variant:
    """One attention: output_mod of softmax over allowed keys of score_mod(scale * q.k), plus sinks, times v.

    With a normaliser, its weights take the place of the softmax's.

    score_mod  a ScoreMod, or None for the scaled score itself
    mask       a Mask, or None for every key
    blocks     a BlockMap: full blocks do not evaluate `mask`; in empty blocks nothing is allowed
    sinks      learnable logits, one per query head, in the softmax's denominator
    output_mod a function of the normalised output, or None for the output itself
    dropout    a Dropout of the normalised weights, or None
    normalizer a Normalizer, or None for the softmax
    scale      multiplies q.k; None means 1 / sqrt(head_dim)
    layout     of q, k, v and the output: "bhsd" (PyTorch) or "bshd" (FlashAttention)
    backend    "auto", or "flex": torch's flex_attention, wherever the tensors are
    """

    score_mod: ScoreMod | None = None
    mask: Mask | None = None
    blocks: BlockMap | None = None
    sinks: Sinks | None = None
    scale: float | None = None
    layout: Layout = "bhsd"
    # None stands for Precision() and Schedule(): Dynamo of torch 2.11 takes no object for a default.
    precision: Precision = None  # type: ignore[assignment]
    schedule: Schedule = None  # type: ignore[assignment]
    backend: Backend = "auto"
    output_mod: OutputMod | None = None
    dropout: Dropout | None = None
    normalizer: Normalizer | None = None

    scored: ScoreMod | None = field(init=False)
    """Score mod and the function of an elementwise normaliser as one."""
    weights: Weights = field(init=False)
    """Rule by which weights are made of what `scored` gives."""
    allowed: Mask | None = field(init=False)
    """Block map and mask as one: allowed = block map AND (full block OR mask)."""

    def __post_init__(self) -> None:
        allowed = self.mask if self.blocks is None else self.blocks.mask(self.mask)
        object.__setattr__(self, "allowed", allowed)
        if self.precision is None:
            object.__setattr__(self, "precision", _PRECISION)
        if self.schedule is None:
            object.__setattr__(self, "schedule", _SCHEDULE)
        scored, weights = self.score_mod, SOFTMAX
        if self.normalizer is not None:
            check_composition(self)
            weights, function = self.normalizer.weights, self.normalizer.function
            if function is not None:
                scored = function if scored is None else scored >> function
        object.__setattr__(self, "scored", scored)
        object.__setattr__(self, "weights", weights)
        check_beside(self)

    @property
    def core(self) -> Variant:
        """The variant without its output function."""
        return self if self.output_mod is None else changed(self, output_mod=None)

    @property
    def shown(self) -> Variant:
        """The variant without its output function, for whoever traces without calling: dropout has a seed."""
        core = self.core
        return core if core.dropout is None else changed(core, dropout=stand_in(core.dropout))

    def seeded(self, device: torch.device) -> Variant:
        """The variant of one call, whose dropout has its seed on the device."""
        dropout = self.dropout
        if dropout is None or isinstance(dropout.seed, Tensor):
            return self
        return changed(self, dropout=drawn(dropout, device))

    @property
    def has_sinks(self) -> bool:
        """True if calls have sinks: those of the variant, or a constant of the softmax's sum."""
        return self.sinks is not None or bool(self.normalizer is not None and self.normalizer.plus)

    def logits(self) -> Tensor | None:
        """The sinks of this call. Raises UnsupportedError for a constant of the softmax's sum that is none of
        them: whoever calls with such a variant would leave it out."""
        if self.normalizer is not None and self.normalizer.plus:
            raise UnsupportedError(
                f"{self.normalizer!r} in a call that does not add it",
                "calls of fa4flex.compile(...), fa4flex.attention and fa4flex.nn.Attention",
                "give it as sinks: sinks=torch.full((heads,), math.log(n))",
            )
        return None if self.sinks is None else self.sinks.now()

    def __repr__(self) -> str:
        defaults = {"precision": _PRECISION, "schedule": _SCHEDULE}
        arguments = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.init and getattr(self, f.name) != defaults.get(f.name, f.default)
        ]
        return f"Variant({', '.join(arguments)})"


READ_ANEW = frozenset((
    "score_mod", "mask", "blocks", "allowed", "sinks", "scale", "dropout", "normalizer", "scored",
))  # fmt: skip
"""Fields that may change from call to call: caches read them again at each call. An output function is none:
what keeps results of a variant never has to do with one (see `Variant.core`)."""

settings_of: Callable[[Variant], tuple[Any, ...]] = attrgetter(
    *(f.name for f in fields(Variant) if f.name not in READ_ANEW)
)
"""All other fields. Cached results serve a later call only if these are equal."""


def compose(
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | BlockMask | BlockMap | Lists | None = None,
    *,
    blocks: BlockMap | BlockMask | Lists | None = None,
    sinks: Tensor | Callable[[], Tensor] | Sinks | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    output_mod: Callable[..., Any] | None = None,
    dropout: Dropout | float | None = None,
    normalizer: Normalizer | Callable[..., Normalizer] | None = None,
    **data: Any,
) -> Variant:
    """User arguments -> Variant: bare variants become their defaults, a BlockMask its map and mask_mod, Lists
    their map.

    `data` holds `precision`, `schedule` and `backend`. Raises InputError for what does not fit, TypeError
    for options that do not exist.
    """
    _check_options(data)
    mask, blocks = _mask_and_map(mask, blocks)
    backend = data.pop("backend", "auto")
    if backend not in _BACKENDS:
        raise InputError(
            f"backend={backend!r}",
            '"auto" or "flex" (torch\'s flex_attention)',
            'leave it at "auto": kernels where there are some, else what the device has',
        )
    _check_scale(scale)
    _check_types({"blocks": blocks, **data})
    if layout not in _LAYOUTS:
        raise InputError(
            f"layout={layout!r}",
            '"bhsd" (batch, heads, sequence, head_dim) or "bshd"',
            "transpose other layouts: a strided view costs no copy",
        )
    check_skip(data.get("precision", _PRECISION), {"backend": backend})
    return Variant(
        score_mod=None if score_mod is None else as_score(score_mod),
        mask=None if mask is None else as_mask(mask),
        blocks=blocks,
        sinks=sinks if sinks is None or isinstance(sinks, Sinks) else Sinks(sinks),
        scale=None if scale is None else float(scale),
        layout=layout,
        precision=data.get("precision", _PRECISION),
        schedule=data.get("schedule", _SCHEDULE),
        backend=backend,
        output_mod=None if output_mod is None else as_output(output_mod),
        dropout=as_dropout(dropout),
        normalizer=None if normalizer is None else as_normalizer(normalizer),
    )


def _mask_and_map(mask: Any, blocks: BlockMap | BlockMask | Lists | None) -> tuple[Any, BlockMap | None]:
    """The mask_mod and the map of what was given as either. Raises InputError where one is given twice."""
    if isinstance(mask, (BlockMask, BlockMap, Lists)):
        if blocks is not None:
            raise InputError(
                "a block map was given both as mask= and as blocks=",
                "one block map",
                "pass the map as blocks= and the mask_mod as mask=",
            )
        mask, blocks = None, mask
    if isinstance(blocks, Lists):
        blocks = kept_map(blocks)
    if isinstance(blocks, BlockMask):
        blocks, own = BlockMap.from_torch(blocks)
        if own is not None and mask is not None:
            raise InputError(
                "mask= was given together with a BlockMask that has its own mask_mod",
                "one mask_mod for the partial blocks",
                "put both into the BlockMask's mask_mod, or build the map with fa4flex.BlockMap",
            )
        mask = own if own is not None else mask
    return mask, blocks


_PRECISION, _SCHEDULE = Precision(), Schedule()
_LAYOUTS, _BACKENDS = get_args(Layout), get_args(Backend)


def at_call(
    variant: Variant,
    blocks: BlockMap | BlockMask | Lists | None = None,
    scale: float | None = None,
    sinks: Tensor | Callable[[], Tensor] | Sinks | None = None,
    dropout: Dropout | float | None = None,
) -> Variant:
    """The variant with the overrides of one call."""
    arguments: dict[str, Any] = {}
    if isinstance(blocks, Lists):
        blocks = blocks.brought()
    if isinstance(blocks, BlockMask):
        arguments["blocks"], own = BlockMap.from_torch(
            blocks, variant.schedule.contents
        )  # torch's that stands for none has no map
        if own is not None:
            arguments["mask"] = as_mask(own)
    elif blocks is not None:
        _check_types({"blocks": blocks})
        arguments["blocks"] = blocks
    if scale is not None:
        _check_scale(scale)
        arguments["scale"] = scale
    if sinks is not None:
        arguments["sinks"] = _sinks_of_call(sinks)
    if dropout is not None:
        arguments["dropout"] = as_dropout(dropout)
    return changed(variant, **arguments)


def listed_now(variant: Variant) -> Variant:
    """The variant with the map of what the lists that it was composed of hold now."""
    lists = lists_kept(variant.blocks)
    return variant if lists is None else at_call(variant, lists)


def changed(variant: Variant, **fields: Any) -> Variant:
    """The variant with other values of some fields, and all others as they are."""
    if torch.compiler.is_compiling():
        return replace(variant, **fields)
    other = object.__new__(Variant)  # in half the time of `replace`, which calls a setter for each field
    vars(other).update(vars(variant), **fields)
    other.__post_init__()
    return other


def resolved(variant: Variant, heads: int, q: Tensor) -> Variant:
    """The variant for a call of queries q, of so many heads: a constant of the softmax's sum becomes
    sinks."""
    normalizer = variant.normalizer
    if normalizer is None or variant.weights != SOFTMAX:
        return variant
    dtype = variant.precision.compute_dtype(q.dtype)
    sinks = sinks_of(normalizer, variant.sinks, torch.empty(heads, dtype=dtype, device=q.device))
    return changed(variant, sinks=sinks, normalizer=None)


def query_heads(variant: Variant, q: Tensor) -> int:
    """Query heads of a call's q, dense or packed; 0 of one that checks will refuse."""
    axis = 2 if variant.layout == "bshd" and q.ndim == 4 else 1
    return q.shape[axis] if q.ndim > axis else 0


def _sinks_of_call(sinks: Any) -> Sinks:
    """Sinks that serve one call: a Parameter is one that the caller has just looked up."""
    if isinstance(sinks, Sinks):
        return sinks
    return Sinks(lambda: sinks) if isinstance(sinks, Parameter) else Sinks(sinks)


_TYPES: dict[str, tuple[tuple[type, ...], str, str]] = {
    "blocks": (
        (BlockMap, type(None)), "a fa4flex.BlockMap, a fa4flex.Lists or a torch BlockMask",
        "build one with fa4flex.BlockMap.from_dense(classes, block_size)",
    ),
    "precision": ((Precision,), "a fa4flex.Precision", 'e.g. fa4flex.Precision(compute="float64")'),
    "schedule": ((Schedule,), "a fa4flex.Schedule", "e.g. fa4flex.Schedule(tile=(64, 64))"),
}  # fmt: skip
"""Types that an option may have, their name, and how to get one."""


class UnknownOption(InputError, TypeError):
    """An option that does not exist. Also a TypeError, as Python's own of unknown keywords is."""


def _check_options(data: dict[str, Any]) -> None:
    unknown = sorted([name for name in data if name not in _TYPES and name != "backend"])
    if unknown:
        names = [field.name for field in fields(Variant) if field.init]
        near = get_close_matches(unknown[0], names, 1)
        fix = f"write {near[0]}= for {unknown[0]}=" if near else f"leave {unknown[0]}= out"
        raise UnknownOption(f"unknown options {', '.join(unknown)}", ", ".join(names), fix)


def _check_types(options: dict[str, Any]) -> None:
    for name, value in options.items():
        types, expected, fix = _TYPES[name]
        if not isinstance(value, types):
            kind = "Tensor" if isinstance(value, Tensor) else kind_of(value)
            if name == "blocks" and isinstance(value, Mask):  # as `blocks & mask` is
                fix = "a map combined with masks is a mask: give it as mask= to compile() or attention()"
            raise InputError(f"{name} is a {kind}", expected, fix)


def default_scale(head_dim: int) -> float:
    """Default factor of q.k."""
    return 1 / math.sqrt(head_dim)


def _check_scale(scale: Any) -> None:
    fix = "leave scale out for 1/sqrt(head_dim)"
    if isinstance(scale, Tensor) and scale.requires_grad:
        fix = "multiply the score in a score_mod, which carries gradients"
        raise InputError("scale is a tensor that requires grad", "a number", fix)
    if torch.compiler.is_compiling():  # a number that varies has no value yet
        return
    try:
        finite = scale is None or math.isfinite(scale)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"scale is a {type(scale).__name__}", "a finite number", fix) from None
    if not finite:
        raise InputError(f"scale={scale}", "a finite number", fix)
