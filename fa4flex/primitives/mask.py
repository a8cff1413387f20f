"""Masks: which (query, key) pairs take part. They compose with `&`, `|` and `~`.

A Mask is callable like the mask_mod that it is, so it also runs under torch's flex_attention:
`mask(b, h, q_idx, kv_idx)`, with `q_len=` and `kv_len=` where the mask depends on lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name  # an import within a method of a mask would have no trace of it kept
from typing import TYPE_CHECKING, Any

from fa4flex.errors import InputError
from fa4flex.primitives.base import CONTEXT, Family, FunctionMod, Mod, call_with, kind_of, positional, settle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MaskMod = Callable[..., Any]


class Mask(Mod):
    """Base of all masks. `context` names the lengths it needs."""

    role = noun = "mask"
    combined_with = "& (and), | (or), ~ (not)"
    # torch tells mask_mods from score_mods by counting parameters, and would count **context as one.
    __signature__ = positional("b", "h", "q_idx", "kv_idx")

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        raise NotImplementedError

    def __and__(self, other: Any) -> Mask:
        return And(self, as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return And(as_mask(other), self)

    def __or__(self, other: Any) -> Mask:
        return Or(self, as_mask(other))

    def __ror__(self, other: Any) -> Mask:
        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def bind(self, **context: int) -> Mask:
        """This mask with lengths fixed, e.g. to hand it to torch's `create_block_mask`."""
        return Bound(self, tuple(sorted(context.items())))

    def plot(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        tile: tuple[int, int] | None = None,
        b: int = 0,
        h: int = 0,
    ) -> Figure:
        """A matplotlib Figure: every pair up to 512 tokens, tiles of `tile` (queries, keys) beyond, of batch
        entry `b` and query head `h`. Needs the extra `plot`."""
        return resolve_name("fa4flex.view.mask:view_of")(self).plot(q_len, kv_len, tile, b, h)


@dataclass(frozen=True, eq=False, repr=False)
class ModMask(FunctionMod, Mask):
    """A mask_mod as a mask."""

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        return call_with(self.mod, (b, h, q_idx, kv_idx), self.context, context, self)


def _part(mask: Mask, indices: tuple[Any, ...], context: dict[str, Any]) -> Any:
    return call_with(mask, indices, mask.context, context)


# Contexts are found once, when masks are composed: a call only reads attributes and calls functions.


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    left: Mask
    right: Mask
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = (*self.left.context, *self.right.context)
        object.__setattr__(self, "context", tuple(name for name in CONTEXT if name in names))

    @property
    def parts(self) -> tuple[Mod, ...]:
        return self.left, self.right


class And(_Pair):
    """Pairs that both masks allow."""

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        indices = (b, h, q_idx, kv_idx)
        return _part(self.left, indices, context) & _part(self.right, indices, context)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


class Or(_Pair):
    """Pairs that one of the masks allows."""

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        indices = (b, h, q_idx, kv_idx)
        return _part(self.left, indices, context) | _part(self.right, indices, context)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Around(Mask):
    """A mask that asks another one, and for what that one asks for."""

    inner: Mask
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", self.inner.context)

    @property
    def parts(self) -> tuple[Mod, ...]:
        return (self.inner,)


class Not(Around):
    """Pairs that the mask hides."""

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
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        arguments = [name for name, _ in self.fixed]
        object.__setattr__(
            self, "context", tuple(name for name in self.inner.context if name not in arguments)
        )

    @property
    def parts(self) -> tuple[Mod, ...]:
        return (self.inner,)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        return _part(self.inner, (b, h, q_idx, kv_idx), {**context, **dict(self.fixed)})

    def __repr__(self) -> str:
        return f"{self.inner!r}.bind({', '.join(f'{k}={v}' for k, v in self.fixed)})"


CONVERSIONS: list[Callable[[Any], Mask | None]] = []
"""Functions that make a Mask of another kind of object, None of any they do not know; its module adds one."""


def as_mask(value: Any) -> Mask:
    """`value` as a Mask: a mask, a variant (its defaults), any mask_mod, a BlockMap or a torch BlockMask.

    Raises InputError for anything else, score mods included.
    """
    value = settle(value)
    if isinstance(value, Mask):
        return value
    if isinstance(value, Mod):
        raise InputError(
            f"the {value.noun} {value!r} was given as a mask",
            "a mask_mod(b, h, q_idx, kv_idx), a fa4flex mask, or a block map",
            f"pass it as {value.role}=; scores are chained with >>, masks combined with & | ~",
        )
    if callable(value):
        return ModMask(value)
    result = next((mask for convert in CONVERSIONS if (mask := convert(value)) is not None), None)
    if result is None:
        raise InputError(
            f"{kind_of(value)} was given as a mask",
            "a mask_mod(b, h, q_idx, kv_idx), a fa4flex mask, or a torch BlockMask",
            "wrap a boolean tensor as a function: lambda b, h, q_idx, kv_idx: allowed[q_idx, kv_idx]",
        )
    return result


class MaskFamily(Family[Mask]):
    """A family of masks; bare, it is drawn with its defaults, too."""

    def plot(self, *sizes: Any, **which: Any) -> Figure:
        """`Mask.plot` of the mask with default parameters. Raises InputError where one has no default."""
        return self().plot(*sizes, **which)


def mask_family(make: Callable[..., MaskMod]) -> MaskFamily:
    """Decorator: a function from parameters to a mask_mod becomes a variant: a family of masks."""
    return MaskFamily(make, ModMask)
