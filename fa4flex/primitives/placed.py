"""Mods that are asked about the positions of tokens in their sequences, where tokens lie in another order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fa4flex.primitives.base import Mod, call_with
from fa4flex.primitives.mask import Mask
from fa4flex.primitives.score import ScoreMod


@dataclass(frozen=True, eq=False, repr=False)
class _Placed:
    """inner      a mask or a score mod
    positions  the position of each query and key, int32 [S]
    length     what the mod is told of q_len and kv_len
    """

    inner: Any
    positions: Tensor
    length: int
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        needed = [name for name in self.inner.context if name not in ("q_len", "kv_len")]
        object.__setattr__(self, "context", tuple(needed))

    @property
    def parts(self) -> tuple[Mod, ...]:
        return (self.inner,)

    def __call__(self, *indices: Any, **context: Any) -> Any:
        *rest, q_idx, kv_idx = indices
        placed = *rest, self.positions[q_idx], self.positions[kv_idx]
        lengths = {"q_len": self.length, "kv_len": self.length}
        return call_with(self.inner, placed, self.inner.context, {**context, **lengths})

    def __repr__(self) -> str:
        return f"at_positions({self.inner!r})"


class PlacedMask(_Placed, Mask):
    """A mask at positions."""


class PlacedScore(_Placed, ScoreMod):
    """A score mod at positions."""
