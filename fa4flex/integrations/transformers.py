"""Hugging Face transformers: `attn_implementation="fa4flex"`.

`register()` adds two functions to the library's registries. The mask function (model_mask.py) hands on the
model's own mask_function (causal, sliding, chunked, packed, padded ...) as a fa4flex mask instead of
evaluating it. The attention function adds what the model asks for at the layer: scaling, soft cap, attention
sinks, position bias. Continuous batching (paged.py) runs the same two under the name "fa4flex_flash", to
which models under "fa4flex" switch for its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fa4flex.api import attention
from fa4flex.errors import UnsupportedError
from fa4flex.integrations.latent_keys import Absorption, LatentKeys, refuse_weights
from fa4flex.integrations.model_mask import ModelMask, attention_mask, from_table, with_bias, within_sequences
from fa4flex.integrations.paged import PagedLayer, in_batch, latent_pages, paged_attention
from fa4flex.integrations.paged_cache import reads_pages
from fa4flex.integrations.patching import patch
from fa4flex.integrations.tree_mask import TreeMask, inputs_of
from fa4flex.trees import Folded
from fa4flex.weights import probabilities

__all__ = ["attention_forward", "attention_mask", "check", "folded_inputs", "register"]

NAME = "fa4flex"
PAGED_NAME = "fa4flex_flash"
"""Continuous batching takes an implementation for one without dense masks if its name contains "flash"."""

OLDEST = (5, 5)
"""First version whose masks are described by lengths and offsets."""

_names: set[str] = set()
_paged_names: dict[str, str] = {}
"""Registered names, and the name that continuous batching switches to from each that does not serve it."""


def register(name: str = NAME, paged_name: str = PAGED_NAME) -> None:
    """Make `attn_implementation=name` known to transformers (5.5 or later), and `paged_name`, which must
    contain "flash", to which its continuous batching (5.19 or later) switches. From then on, a model that
    would ignore them is refused when it is made (see `check`). Calling it again is harmless."""
    _check_version()
    for each in (name, paged_name):
        AttentionInterface.register(each, attention_forward)
        AttentionMaskInterface.register(each, attention_mask)
        _names.add(each)
    _paged_names[name] = paged_name
    patch(PreTrainedModel, "_check_and_adjust_attn_implementation", _adjusted)
    _serve_continuous_batching()


def registered(name: str | None) -> bool:
    """True if models under this name run here."""
    return name in _names


def _check_version() -> None:
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise UnsupportedError(
            f"transformers {version}",
            "5.5 or later: earlier versions describe masks by other arguments",
            "pip install 'transformers>=5.5'",
        )


def check(model: torch.nn.Module) -> None:
    """Raise UnsupportedError if the model, or a model inside it, computes attention itself and would ignore
    attn_implementation="fa4flex", as DeBERTa, BLOOM, Falcon and MPT do."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            _check_class(type(part))


def folded_inputs(model: torch.nn.Module, folded: Folded) -> dict[str, Any]:
    """Keyword arguments of a causal language model's call on folded sequences.

    `model(**folded_inputs(model, folded)).logits[0]` are those of the folded tokens, [T, vocabulary]. Pass no
    labels: a token that several continue has several; `Folded.log_probs` knows them. Raises UnsupportedError
    for a model that does not run under this library.
    """
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name not in _names:
        raise UnsupportedError(
            f"folded sequences in a model with attn_implementation={name!r}",
            f"{NAME!r}, which has a mask for them",
            f'call register(), and model.set_attn_implementation("{NAME}")',
        )
    return inputs_of(folded.tokens, folded.positions, folded.leave)


def _check_class(cls: type) -> None:
    if not cls._can_set_attn_implementation():  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"{cls.__name__} with attn_implementation={NAME!r}",
            f"a model whose layers call transformers' attention interface; {cls.__module__} computes its "
            "attention itself and would ignore what is asked for",
            'load it with attn_implementation="eager", or, inside a larger model, with a dict: '
            f'attn_implementation={{"": "{NAME}", "<its config\'s name>": "eager"}}',
        )


def _adjusted(original: Any, model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """transformers asks a model's class about every implementation by name, but lets any registered name pass
    and looks for a package behind those with "flash"."""
    name = (attn_implementation or "").removeprefix("paged|")  # as earlier versions named them
    if name not in _names:
        return original(model, attn_implementation, *args, **kwargs)
    _check_class(type(model))
    return name


def _serve_continuous_batching() -> None:
    """Continuous batching knows implementations by their names: it takes those with "flash", and gives block
    tables to FlashAttention 2 and 3 alone."""
    try:
        from transformers.generation.continuous_batching import continuous_api, initialization
    except ImportError:  # versions that ask elsewhere: there, models are made under the second name
        return
    patch(continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switched)
    tables = functools.partial(_with_tables, initialization)
    patch(initialization, "ensure_decode_fast_path_is_available", tables)


def _switched(original: Any, manager: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    name = model.config._attn_implementation
    if name in _paged_names:
        model.set_attn_implementation(_paged_names[name])
        manager._original_attn_impl = name  # which the manager sets again when it stops
    return original(manager, model, *args, **kwargs)


def _with_tables(
    initialization: Any, original: Any, config: Any, cb_config: Any, user_requested: bool
) -> None:
    types = initialization.group_layers_by_attn_type(config)
    tables = all(initialization.ATTN_TYPE_TO_ALLOCATOR[each].supports_block_table for each in types)
    if not (config._attn_implementation in _names and tables and reads_pages()):
        original(config, cb_config, user_requested)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | LatentKeys,
    value: Tensor | LatentKeys,
    attention_mask: ModelMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D], or latent rows in place of both; returns out
    [B, Sq, Hq, Dv], and with output_attentions=True the weights [B, Hq, Sq, Skv] in the dtype of the queries,
    else None."""
    _refuse(options)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    shown, absorption = bool(options.get("output_attentions")), None
    if isinstance(key, LatentKeys):
        refuse_weights(shown)
        absorption = Absorption.of(module)
        query = absorption.queries(query)
        if key.batch is not None:
            _refuse_dropout(dropout)
            layer = PagedLayer(module.layer_idx, scaling, softcap, s_aux)  # type: ignore[arg-type]
            return absorption.output(latent_pages(layer, query, key, attention_mask, options)), None
    if in_batch(cache, options):
        _refuse_dropout(dropout)
        if shown:
            raise UnsupportedError(
                "output_attentions=True in continuous batching",
                "a batch of padded or packed sequences, whose keys are no pages",
                "call the model itself, or fa4flex.probabilities on queries and gathered keys",
            )
        layer = PagedLayer(module.layer_idx, scaling, softcap, s_aux)  # type: ignore[arg-type]
        qkv = query, cast(Tensor, key), cast(Tensor, value)
        return paged_attention(cache, layer, qkv, attention_mask, options), None
    qk, positions = (query, key), options.get("position_ids")
    if isinstance(attention_mask, TreeMask):
        _check_lengths(attention_mask, *qk)
        mask: Any = attention_mask.at_layer(module, bool(causal), options.get("sliding_window"))
        bias = None
    else:
        mask, bias = _from_model(attention_mask, qk, bool(causal) and query.shape[2] > 1, positions)
    score = None if softcap is None else _capped(softcap)
    starts = options.get("cu_seq_lens_q")
    if starts is not None:
        mask = within_sequences(mask, (starts, options.get("cu_seq_lens_k", starts)), (query, key))
    for each in (bias, position_bias):
        score = score if each is None else with_bias(score, each)
    composition = {"score_mod": score, "mask": mask, "scale": scaling}
    kv = (key.latent,) if isinstance(key, LatentKeys) else (key, value)
    made = attention(query, *kv, **composition, sinks=s_aux, dropout=dropout, return_lse=shown)
    if not shown:
        made = made.transpose(1, 2)
        return (made.contiguous() if absorption is None else absorption.output(made)), None
    if dropout:
        raise UnsupportedError(
            f"output_attentions=True with attention dropout {dropout}: eager's weights are dropped ones",
            "weights in evaluation mode, or without dropout",
            "call model.eval(), or set attention_dropout=0 in the model's config",
        )
    out, lse = made
    weights = probabilities(query, cast(Tensor, key), lse, **composition)
    return out.transpose(1, 2).contiguous(), weights.to(query.dtype)


_UNREAD = ("indices", "block_indices", "sinks", "head_mask")
"""Arguments that change the result and are not read here: chosen keys, sinks per query, weights per head."""


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise UnsupportedError(
            f"attention dropout {dropout} in continuous batching, which only infers",
            "a model in evaluation mode",
            "call model.eval()",
        )


def _refuse(options: dict[str, Any]) -> None:
    for name in _UNREAD:
        if options.get(name) is not None:
            raise UnsupportedError(
                f"a model whose layers pass {name}= to their attention",
                "masks, padding, scaling, soft cap, position bias and sinks per head",
                'load the model with attn_implementation="eager"',
            )


def _capped(softcap: float) -> Callable[..., Any]:
    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return capped


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _from_model(
    mask: ModelMask | Tensor | None, qk: tuple[Tensor, Tensor | LatentKeys], causal: bool, positions: Any
) -> tuple[Callable[..., Any] | None, Tensor | None]:
    """The layer's mask_mod and additive bias. Without a mask, causal is top-left, as in sdpa."""
    if isinstance(mask, ModelMask):
        _check_lengths(mask, *qk)
        return mask.within_documents(positions), None
    if isinstance(mask, Tensor):
        return (from_table(mask), None) if mask.dtype == torch.bool else (None, mask)
    if mask is not None:
        raise UnsupportedError(
            f"an attention_mask of type {type(mask).__name__}",
            "None, a tensor, or what fa4flex's mask function made",
            "pass padding as a [batch, tokens] tensor, or any mask as a [batch, heads, queries, keys] tensor",
        )
    return (_causal if causal else None), None


def _check_lengths(mask: ModelMask, query: Tensor, key: Tensor | LatentKeys) -> None:
    """A mask says nothing about keys past its end, which some models append. Lengths that a compiler does not
    know, because the model computes them from contents, are not compared."""
    _, q_len, kv_len = mask.sizes
    if guard_or_false(query.shape[2] != q_len) or guard_or_false(key.shape[2] > kv_len):
        raise UnsupportedError(
            f"{query.shape[2]} queries and {key.shape[2]} keys under a mask for {q_len} and {kv_len}",
            "a mask for all queries and keys of the layer",
            'load the model with attn_implementation="eager"',
        )
