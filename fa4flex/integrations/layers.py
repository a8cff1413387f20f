"""Mods of the layers of a serving engine: those of the model, and those assigned by layer.

    assign("softcap(30.0) >> alibi", layers=[0, 2])
    assign(score_mod=distance, mask=blocks, layers="*.self_attn.attn")

Engines run models in processes of their own: FA4FLEX_LAYERS="0,2-4=softcap(30.0); *=path/to/mods.py:distance"
assigns in all of them, and FA4FLEX_LAYERS=layers.json what a file says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fa4flex import variants
from fa4flex.api import Attention, compile
from fa4flex.integrations.assignments import Assignment, assignments_of, last_of, layers_of, selected
from fa4flex.primitives.mask import Mask, as_mask
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.score import as_score
from fa4flex.selection import Selection

__all__ = ["assign", "assign_from", "assigned", "clear"]

_assigned: list[Assignment] = []
_changes = 0
"""Number of changes of assignments: attention that was made before the last one is stale."""


def assign(
    variant: str | None = None,
    *,
    layers: int | str | Iterable[int] = "*",
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
) -> None:
    """Assign layers a score mod, applied after the model's own, and a mask, combined with the model's by `&`.

    variant  in place of score_mod and mask, a VARIANT as on the command line: "softcap(30.0)",
             "alibi, sliding_window(64)", "path/to/file.py:function", "module:function"
    layers   numbers, or a pattern of names as vLLM's "model.layers.3.self_attn.attn"; a later assignment
             takes the place of an earlier one

    Raises InputError, and UnsupportedError for normalisers and output functions.
    """
    which = layers if isinstance(layers, str) else layers_of(layers)
    _add([Assignment(which, selected(variant, score_mod, mask))])


def assign_from(said: Any, by: str = "assignments") -> None:
    """`assign` what a text, a dictionary, or a .json or .py file says: "LAYERS=VARIANT; ..." where LAYERS are
    numbers and ranges, as in "0,2-4", or a pattern of names; or {LAYERS: VARIANT}, or {LAYERS: {"score_mod":
    ..., "mask": ...}}. A Python file defines LAYERS. by: who says so, for errors.

    Raises InputError, with the file's line where that is known, and UnsupportedError.
    """
    _add(assignments_of(said, by))


def clear() -> None:
    """Forget all assignments."""
    _assigned.clear()
    _add([])


def _add(more: list[Assignment]) -> None:
    global _changes
    _assigned.extend(more)
    _changes += 1


def assigned(name: str) -> Selection:
    """Selection that the layer of this name was given last; its number is the first one in its name."""
    return last_of(_assigned, name) or {}


@dataclass(frozen=True, eq=False)
class LayerSettings:
    """Parameters of an engine's or a model's layer, besides its sinks.

    window   keys that a query sees, itself among them; None: all before it
    slopes   [Hq] ALiBi slopes, or None
    softcap  applied before the slopes, as FlashAttention does
    schedule that of its calls
    causal   False: queries see keys after them, too, and a window is of so many keys to either side
    """

    scale: float | None
    window: int | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    schedule: Schedule = Schedule()
    causal: bool = True

    def attention(self, selection: Selection) -> Attention:
        """Attention of this layer, with what was assigned to it."""
        scores = [] if self.softcap is None else [variants.softcap(self.softcap)]
        scores += [] if self.slopes is None else [variants.alibi(self.slopes, symmetric=not self.causal)]
        scores += [as_score(selection["score_mod"])] if "score_mod" in selection else []
        score = None
        for each in scores:
            score = each if score is None else score >> each
        mask, assigned = self._mask(), selection.get("mask")
        if assigned is not None:
            mask = as_mask(assigned) if mask is None else mask & assigned
        return compile(score, mask, scale=self.scale, schedule=self.schedule)

    def _mask(self) -> Mask | None:
        if self.causal:
            return as_mask(variants.causal if self.window is None else variants.sliding_window(self.window))
        return None if self.window is None else as_mask(_either_side(self.window))


def _either_side(window: int) -> Callable[..., Any]:
    """A mask of `window` keys up to and with the query, and as many from it on."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = q_idx + kv_len - q_len
        return (kv_idx > position - window) & (kv_idx < position + window)

    return mask


class LayerAttention:
    """Attention of one layer, made at its first call, and anew after mods were assigned.

    own  assignments of the engine that has the layer, which those of `assign` come before
    """

    def __init__(self, settings: LayerSettings, own: list[Assignment] | None = None) -> None:
        self.settings, self.own = settings, own or []
        self._made: tuple[int, str, Attention] | None = None

    def named(self, name: str, alias: str = "") -> Attention:
        """Attention of the layer of this name; it may have another one, too."""
        made = self._made  # read once: threads may ask at the same time
        if made is None or made[:2] != (_changes, name):
            selection = last_of(_assigned, name, alias) or last_of(self.own, name, alias) or {}
            self._made = made = _changes, name, self.settings.attention(selection)
        return made[2]


assign_from(os.environ.get("FA4FLEX_LAYERS", ""), "FA4FLEX_LAYERS")
