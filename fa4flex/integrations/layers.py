"""Mods of the layers of a serving engine: those of the model, and those assigned by layer.

    assign("softcap(30.0) >> alibi", layers=[0, 2])
    assign(score_mod=distance, mask=blocks, layers="*.self_attn.attn")

Engines run models in processes of their own: FA4FLEX_LAYERS="0,2-4=softcap(30.0); *=path/to/mods.py:distance"
assigns in all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from fa4flex import variants
from fa4flex.api import Attention, compile
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.mask import as_mask
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.score import as_score
from fa4flex.selection import Selection, select

__all__ = ["assign", "assigned", "clear"]

_assigned: list[tuple[frozenset[int] | str, Selection]] = []
_changes = 0
"""Number of calls of `assign` and `clear`: attention that was made before the last one is stale."""


def assign(
    variant: str | None = None,
    *,
    layers: int | str | Iterable[int] = "*",
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
) -> None:
    """Assign layers a score mod, applied after the model's own, and a mask, combined with the model's by `&`.

    variant  in place of score_mod and mask, a VARIANT as on the command line: "softcap(30.0)",
             "alibi, sliding_window(64)", "path/to/file.py:function"
    layers   numbers, or a pattern of names as vLLM's "model.layers.3.self_attn.attn"; a later assignment
             takes the place of an earlier one

    Raises InputError.
    """
    global _changes
    selection: Selection = {"score_mod": score_mod, "mask": mask}
    if variant is not None:
        if score_mod is not None or mask is not None:
            raise InputError(
                f"both {variant!r} and functions", "one of them", "pass the functions as score_mod= and mask="
            )
        selection = select(variant)
    chosen = {role: mod for role, mod in selection.items() if mod is not None}
    if "normalizer" in chosen:
        raise UnsupportedError(
            f"the normaliser {chosen['normalizer']!r} of an engine's layers",
            "score mods and masks: engines merge parts of their own by log-sum-exps of the softmax",
            "attend with fa4flex.compile(normalizer=...) in the model",
        )
    if "output_mod" in chosen:
        raise UnsupportedError(
            f"the output function {chosen['output_mod']!r} of an engine's layers",
            "score mods and masks: an engine's model gates its attention's output itself",
            "apply it in the model, after the layer",
        )
    if not chosen:
        raise InputError("no mod to assign", "a score_mod, a mask, or a VARIANT", "e.g. assign('alibi')")
    which = layers if isinstance(layers, str) else frozenset([layers] if isinstance(layers, int) else layers)
    _assigned.append((which, chosen))
    _changes += 1


def clear() -> None:
    """Forget all assignments."""
    global _changes
    _assigned.clear()
    _changes += 1


def assigned(name: str) -> Selection:
    """Selection that the layer of this name was given last; its number is the first one in its name."""
    digits = re.search(r"(?<![^.])\d+(?![^.])", name)
    number = None if digits is None else int(digits[0])
    for which, selection in reversed(_assigned):
        if fnmatchcase(name, which) if isinstance(which, str) else number in which:
            return selection
    return {}


@dataclass(frozen=True, eq=False)
class LayerSettings:
    """Parameters of an engine's or a model's layer, besides its sinks.

    window   keys that a query sees, itself among them; None: all before it
    slopes   [Hq] ALiBi slopes, or None
    softcap  applied before the slopes, as FlashAttention does
    schedule that of its calls
    """

    scale: float | None
    window: int | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    schedule: Schedule = Schedule()

    def attention(self, selection: Selection) -> Attention:
        """Causal attention of this layer, with what was assigned to it."""
        scores = [] if self.softcap is None else [variants.softcap(self.softcap)]
        scores += [] if self.slopes is None else [variants.alibi(self.slopes)]
        scores += [as_score(selection["score_mod"])] if "score_mod" in selection else []
        score = None
        for each in scores:
            score = each if score is None else score >> each
        mask = as_mask(variants.causal if self.window is None else variants.sliding_window(self.window))
        mask = mask & selection["mask"] if "mask" in selection else mask
        return compile(score, mask, scale=self.scale, schedule=self.schedule)


class LayerAttention:
    """Attention of one layer, made at its first call, and anew after mods were assigned."""

    def __init__(self, settings: LayerSettings) -> None:
        self.settings = settings
        self._made: tuple[int, str, Attention] | None = None

    def named(self, name: str) -> Attention:
        made = self._made  # read once: threads may ask at the same time
        if made is None or made[:2] != (_changes, name):
            self._made = made = _changes, name, self.settings.attention(assigned(name))
        return made[2]


def assign_text(text: str) -> None:
    """`assign` what FA4FLEX_LAYERS says: "LAYERS=VARIANT; ...", where LAYERS are numbers and ranges, as in
    0,2-4, or a pattern of names."""
    for part in filter(None, map(str.strip, text.split(";"))):
        layers, equals, variant = part.partition("=")
        if not equals or not variant.strip():
            raise InputError(
                f"FA4FLEX_LAYERS with {part!r}", "LAYERS=VARIANT; ...", 'e.g. "0,2-4=softcap(30.0); *=alibi"'
            )
        assign(variant.strip(), layers=_numbers(layers.strip()))


def _numbers(layers: str) -> str | list[int]:
    """The numbers of "0,2-4", or the pattern itself."""
    if not re.fullmatch(r"\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*", layers):
        return layers
    bounds = [[int(x) for x in each.split("-")] for each in layers.split(",")]
    return [number for each in bounds for number in range(each[0], each[-1] + 1)]


assign_text(os.environ.get("FA4FLEX_LAYERS", ""))
