"""Folded sequences in Hugging Face models: the mask of a prefix tree, which a model hands on to its layers.

transformers passes a 4-D mask on untouched, to layers of all kinds: what a layer adds to causal attention,
its sliding window, is added where it computes, from the positions of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.model_mask import MaskFunction, ModelMask
from fa4flex.variants import prefix_tree

_READ = {"full_attention", "sliding_attention"}
"""Kinds of layers whose masks are causal, or causal within a window that the layer names."""


class TreeMask(ModelMask):
    """The mask of folded sequences, for layers that compute causal attention."""

    def __init__(self, leave: Tensor, positions: Tensor) -> None:
        """leave and positions [T], as `fa4flex.trees.fold` makes them."""
        tokens = len(leave)
        mod = prefix_tree(leave)
        source = {"q_offset": 0, "kv_offset": 0, "mask_function": mod, "attention_mask": None}
        source["device"] = leave.device
        super().__init__(mod, (1, tokens, tokens), source)
        self.leave, self.positions = leave, positions

    def at_layer(self, module: Any, causal: bool, window: int | None) -> MaskFunction:
        """The mask_mod of a layer, with its sliding window. Raises UnsupportedError for layers that are
        neither causal nor causal within a window."""
        kind = _kind(module)
        if not causal or kind not in _READ or (kind == "sliding_attention" and window is None):
            raise UnsupportedError(
                f"folded sequences in a layer of {type(module).__name__}, of kind {kind!r}",
                "causal attention, with a sliding window or without, that names its window",
                "run the sequences of this model one by one, or padded",
            )
        tree: MaskFunction = self.mask_mod
        if window is None:
            return tree
        positions = self.positions

        def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return tree(b, h, q_idx, kv_idx) & (positions[q_idx] - positions[kv_idx] < window)

        return within


def _kind(module: Any) -> str:
    """The kind that a layer's config gives it; full attention where it has none."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return "full_attention" if not kinds or index is None else kinds[index]


def inputs_of(tokens: Tensor, positions: Tensor, leave: Tensor) -> dict[str, Any]:
    """Arguments of a model's call, for folded sequences [T] of each."""
    return {
        "input_ids": tokens.unsqueeze(0).long(),
        "position_ids": positions.unsqueeze(0),
        "attention_mask": TreeMask(leave, positions.to(torch.int32)),
        "use_cache": False,
    }
