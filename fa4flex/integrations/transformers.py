"""Hugging Face transformers: `attn_implementation="fa4flex"`.

`register()` adds two functions to the library's registries. The mask function hands on the model's own
mask_function (causal, sliding, chunked, packed, padded ...) as a fa4flex mask instead of evaluating it, so
the model's mask is analysed and no batch x heads x S x S tensor exists. The attention function adds what the
model asks for at the layer: scaling, soft cap, attention sinks, position bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa4flex.api import Attention, compile
from fa4flex.errors import UnsupportedError
from fa4flex.primitives.mask import Mask, ModMask
from fa4flex.primitives.score import ScoreMod
from fa4flex.variants import softcap as softcap_family

NAME = "fa4flex"


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to transformers (5.0 or later). Calling it again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


@dataclass(frozen=True, eq=False)
class ModelMask:
    """The mask of one forward pass, and what was compiled with it: all layers with one mask share that."""

    mask: Mask
    compiled: dict[tuple[Any, ...], Attention] = field(default_factory=dict, repr=False)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> ModelMask:
    """The model's mask as a fa4flex mask over this call's query and key positions.

    attention_mask  [batch, tokens seen so far] bool or 0/1, False where a token is padding, or None
    """
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask

    function = causal_mask_function if mask_function is None else mask_function
    padding = None if attention_mask is None else prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and bool(padding.all()):
        padding = None
    mask_mod = _positioned(function, q_offset, kv_offset, padding)
    return ModelMask(ModMask(mask_mod, f"transformers({function.__name__})"))


def _positioned(
    function: Callable[..., Any], q_offset: int | Tensor, kv_offset: int | Tensor, padding: Tensor | None
) -> Callable[..., Any]:
    """`function` at absolute token positions, without the padded keys."""
    real = None if padding is None else padding.to(torch.bool)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        allowed = function(b, h, q_idx + q_offset, kv_idx + kv_offset)
        return allowed if real is None else allowed & real[b, kv_idx + kv_offset]

    return mask_mod


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D]; returns (out [B, Sq, Hq, Dv], None)."""
    if dropout:
        raise UnsupportedError(
            f"attention dropout {dropout}",
            "no dropout inside attention",
            "set attention_dropout=0 in the model's config, or call model.eval()",
        )
    if options.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions=True",
            "attention that never stores its weights",
            'load the model with attn_implementation="eager" to see the weights',
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    compiled = attention_mask.compiled if isinstance(attention_mask, ModelMask) else {}
    layer = (softcap, scaling, id(s_aux), id(position_bias))
    if layer not in compiled:
        mask, score = _from_model(attention_mask, softcap, bool(causal) and query.shape[2] > 1)
        if position_bias is not None:
            score = _with_bias(score, position_bias)
        compiled[layer] = compile(score, mask, scale=scaling, sinks=s_aux)
    out = compiled[layer](query, key, value)
    return out.transpose(1, 2).contiguous(), None


def _from_model(
    mask: ModelMask | Tensor | None, softcap: float | None, causal: bool
) -> tuple[Mask | None, Callable[..., Any] | None]:
    """The layer's mask and score mod. Without a mask, a causal layer is top-left causal, as in sdpa."""
    score: ScoreMod | Callable[..., Any] | None = None if softcap is None else softcap_family(softcap)
    if isinstance(mask, ModelMask):
        return mask.mask, score
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            return None, _with_bias(score, mask)
        return _from_table(mask), score
    return (ModMask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "causal") if causal else None), score


def _from_table(allowed: Tensor) -> Mask:
    """A ready-made boolean [B or 1, H or 1, Sq, Skv] mask."""
    batches, heads = allowed.shape[0] > 1, allowed.shape[1] > 1

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return allowed[b if batches else 0, h if heads else 0, q_idx, kv_idx]

    return ModMask(mask_mod, "attention_mask")


def _with_bias(score: Callable[..., Any] | None, bias: Tensor) -> Callable[..., Any]:
    """`score`, then an additive [B or 1, H or 1, Sq, Skv] bias."""
    batches, heads = bias.shape[0] > 1, bias.shape[1] > 1

    def biased(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        before = s if score is None else score(s, b, h, q_idx, kv_idx)
        return before + bias[b if batches else 0, h if heads else 0, q_idx, kv_idx]

    return biased
