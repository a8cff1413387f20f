"""Masks: which (query, key) pairs take part. They compose with `&`, `|` and `~`.

A Mask is callable like the mask_mod that it is, so it also runs under torch's flex_attention:
`mask(b, h, q_idx, kv_idx)`, with `q_len=` and `kv_len=` where the mask depends on lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4flex.errors import InputError
from fa4flex.primitives.base import CONTEXT, Family, accepted_context, call_mod, positional, settle

MaskMod = Callable[..., Any]


class Mask:
    """Base of all masks. `context` names the lengths it needs."""

    context: tuple[str, ...] = ()
    # torch tells mask_mods from score_mods by counting parameters, and would count **context as one.
    __signature__ = positional("b", "h", "q_idx", "kv_idx")

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        raise NotImplementedError

    def __and__(self, other: Mask | MaskMod) -> Mask:
        return And(self, as_mask(other))

    def __rand__(self, other: Mask | MaskMod) -> Mask:
        return And(as_mask(other), self)

    def __or__(self, other: Mask | MaskMod) -> Mask:
        return Or(self, as_mask(other))

    def __ror__(self, other: Mask | MaskMod) -> Mask:
        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def bind(self, **context: int) -> Mask:
        """This mask with lengths fixed, e.g. to hand it to torch's `create_block_mask`."""
        return Bound(self, tuple(sorted(context.items())))

    @property
    def __name__(self) -> str:
        return repr(self)


@dataclass(frozen=True, eq=False, repr=False)
class ModMask(Mask):
    """A mask_mod as a mask; `label` is what its repr prints."""

    mod: MaskMod
    label: str

    @property
    def context(self) -> tuple[str, ...]:  # type: ignore[override]
        return accepted_context(self.mod)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        return call_mod(self.mod, (b, h, q_idx, kv_idx), context)

    def __repr__(self) -> str:
        return self.label


def _union_of_contexts(*masks: Mask) -> tuple[str, ...]:
    return tuple(name for name in CONTEXT if any(name in mask.context for mask in masks))


def _part(mask: Mask, indices: tuple[Any, ...], context: dict[str, Any]) -> Any:
    return call_mod(mask, indices, context)


@dataclass(frozen=True, eq=False, repr=False)
class And(Mask):
    left: Mask
    right: Mask

    @property
    def context(self) -> tuple[str, ...]:  # type: ignore[override]
        return _union_of_contexts(self.left, self.right)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        indices = (b, h, q_idx, kv_idx)
        return _part(self.left, indices, context) & _part(self.right, indices, context)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Or(Mask):
    left: Mask
    right: Mask

    @property
    def context(self) -> tuple[str, ...]:  # type: ignore[override]
        return _union_of_contexts(self.left, self.right)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        indices = (b, h, q_idx, kv_idx)
        return _part(self.left, indices, context) | _part(self.right, indices, context)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    inner: Mask

    @property
    def context(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.context

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        # xor rather than ~, because a mask_mod may return a plain Python bool and ~True is -2.
        return _part(self.inner, (b, h, q_idx, kv_idx), context) ^ True

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


@dataclass(frozen=True, eq=False, repr=False)
class Bound(Mask):
    """A mask with some lengths fixed."""

    inner: Mask
    fixed: tuple[tuple[str, int], ...]

    @property
    def context(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name in self.inner.context if name not in dict(self.fixed))

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        return _part(self.inner, (b, h, q_idx, kv_idx), {**context, **dict(self.fixed)})

    def __repr__(self) -> str:
        return f"{self.inner!r}.bind({', '.join(f'{k}={v}' for k, v in self.fixed)})"


def as_mask(value: Mask | MaskMod | Family[Mask]) -> Mask:
    """`value` as a Mask: a mask, a family (its defaults), or any mask_mod.

    Raises InputError for anything that is not callable.
    """
    value = settle(value)
    if isinstance(value, Mask):
        return value
    if not callable(value):
        raise InputError(
            f"{value!r} was given as a mask",
            "a mask_mod(b, h, q_idx, kv_idx), a fa4flex mask, or a torch BlockMask",
            "wrap a boolean tensor as a function: lambda b, h, q_idx, kv_idx: allowed[q_idx, kv_idx]",
        )
    return ModMask(value, getattr(value, "__name__", repr(value)))


def mask_family(make: Callable[..., MaskMod]) -> Family[Mask]:
    """Decorator: a function from parameters to a mask_mod becomes a family of masks."""
    return Family(make, ModMask)
