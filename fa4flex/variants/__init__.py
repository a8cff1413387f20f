"""Published attention variants, one per file; each runs alone: `python -m fa4flex.variants.sliding_window`.

Masks combine with `&`, `|` and `~`, score mods with `>>`; bare names stand for their defaults. Masks that
compare positions (causal, windows, ...) align bottom-right, as FlashAttention does; masks over packed rows
and canvases (document, natten, ...) take indices as they are. Each docstring says which.

A variant is imported when its name is first used.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fa4flex.primitives.blocks  # noqa: F401  (masks combine with block maps once these are known)

if TYPE_CHECKING:  # written by scripts/documentation/variant_tables.py
    from fa4flex.variants.alibi import alibi as alibi
    from fa4flex.variants.bigbird import bigbird as bigbird
    from fa4flex.variants.block_diffusion import block_diffusion as block_diffusion
    from fa4flex.variants.causal import causal as causal
    from fa4flex.variants.checkerboard import checkerboard as checkerboard
    from fa4flex.variants.chunked_local import chunked_local as chunked_local
    from fa4flex.variants.differential import differential as differential
    from fa4flex.variants.dilated_window import dilated_window as dilated_window
    from fa4flex.variants.document import document as document
    from fa4flex.variants.flashmask import flashmask as flashmask
    from fa4flex.variants.gated import gated as gated
    from fa4flex.variants.global_window import global_window as global_window
    from fa4flex.variants.gpt_oss_sinks import gpt_oss_sinks as gpt_oss_sinks
    from fa4flex.variants.graphormer import graphormer as graphormer
    from fa4flex.variants.head_scale import head_scale as head_scale
    from fa4flex.variants.learned_bias import learned_bias as learned_bias
    from fa4flex.variants.mla import mla as mla
    from fa4flex.variants.moba import moba as moba
    from fa4flex.variants.natten import natten as natten
    from fa4flex.variants.nsa import nsa as nsa
    from fa4flex.variants.prefix_lm import prefix_lm as prefix_lm
    from fa4flex.variants.prefix_tree import prefix_tree as prefix_tree
    from fa4flex.variants.quest import quest as quest
    from fa4flex.variants.relative_position import relative_position as relative_position
    from fa4flex.variants.relu_squared import relu_squared as relu_squared
    from fa4flex.variants.sandwich import sandwich as sandwich
    from fa4flex.variants.shared_prefix import shared_prefix as shared_prefix
    from fa4flex.variants.sigmoid_attention import sigmoid_attention as sigmoid_attention
    from fa4flex.variants.silu_attention import silu_attention as silu_attention
    from fa4flex.variants.sliding_tile import sliding_tile as sliding_tile
    from fa4flex.variants.sliding_window import sliding_window as sliding_window
    from fa4flex.variants.softcap import softcap as softcap
    from fa4flex.variants.softmax_plus import softmax_plus as softmax_plus
    from fa4flex.variants.softpick import softpick as softpick
    from fa4flex.variants.streaming_llm import streaming_llm as streaming_llm
    from fa4flex.variants.symmetric_window import symmetric_window as symmetric_window
    from fa4flex.variants.t5_bias import t5_bias as t5_bias
    from fa4flex.variants.tree import tree as tree
    from fa4flex.variants.vertical_slash import vertical_slash as vertical_slash
    from fa4flex.variants.video_blocks import video_blocks as video_blocks
    from fa4flex.variants.vision_cross import vision_cross as vision_cross
    from fa4flex.variants.xattention import xattention as xattention

__all__ = sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_"))
"""Names of the files in this folder."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        near = get_close_matches(name.lower(), __all__, 1)
        instead = f"did you mean {near[0]}?" if near else f"it has {', '.join(__all__)}"
        raise AttributeError(f"module 'fa4flex.variants' has no attribute {name!r}; {instead}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Variants(ModuleType):
    """Importing fa4flex.variants.causal binds the submodule to the name `causal` of this package.

    The variant takes that place; otherwise `variants.causal` would be a function or a module, depending on
    what was imported before.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Variants
