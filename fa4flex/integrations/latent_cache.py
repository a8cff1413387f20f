"""Caches of latent rows for Hugging Face models with multi-head latent attention: DeepSeek-V2 and V3, Kimi K2
(which is a DeepSeek-V3), GLM-4.7-Flash and others whose layers have `expand_kv`.

    register()
    model.set_attn_implementation("fa4flex")
    model.generate(ids, past_key_values=LatentCache(model))

transformers caches latents, too, and makes keys and values of all heads from all of them at each step. Here
decoded tokens attend to the rows themselves. Rows are one tensor, of 16 bits or of a `LatentFormat`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fa4flex.appending import append
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.integrations.latent_keys import LatentKeys, absorbs
from fa4flex.integrations.paged_cache import Batch
from fa4flex.integrations.patching import patch
from fa4flex.integrations.transformers import registered
from fa4flex.primitives.latent import Latent, LatentFormat
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.append_checks import refuse_gradients

__all__ = ["LatentCache", "PagedLatentCache"]


class _Rows:
    """Storage of a model's rows: columns, format and scale."""

    def __init__(self, model: Any, form: LatentFormat | None, scale: Tensor | None) -> None:
        self.layers = _layers_of(model)
        first = self.layers[0]
        self.value_dim, self.rope_dim = first.kv_lora_rank, first.qk_rope_head_dim
        self.form, self.scale = form, scale
        if form is not None and form.width != self.width:
            raise InputError(
                f"a format of {form.width} columns for rows of {self.value_dim} + {self.rope_dim}",
                "a format of the model's rows",
                "describe its segments: fa4flex.LatentFormat((first, second))",
            )

    @property
    def width(self) -> int:
        return self.value_dim + self.rope_dim

    def empty(self, places: tuple[int, int], like: Tensor) -> Tensor:
        """Memory [*places, 1, columns]."""
        columns, dtype = (self.width, like.dtype) if self.form is None else (self.form.row_bytes, torch.uint8)
        return torch.zeros(*places, 1, columns, dtype=dtype, device=like.device)

    def latent(self, cache: Tensor) -> Latent:
        scale = None if self.scale is None else self.scale.to(cache.device)
        return Latent(cache, self.value_dim, self.rope_dim, self.form, scale)


def _layers_of(model: Any) -> list[Any]:
    """Attention modules in the order of their layers. Raises UnsupportedError for a model that has others."""
    found = [x for x in model.modules() if hasattr(x, "kv_b_proj") and hasattr(x, "layer_idx")]
    found.sort(key=lambda x: x.layer_idx)
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    if not found or len(found) < count or [x.layer_idx for x in found] != list(range(len(found))):
        raise UnsupportedError(
            f"a cache of latent rows for {type(model).__name__}, {len(found)} of whose {count} layers have"
            " multi-head latent attention",
            "a model in which all layers do, as DeepSeek-V2 and V3",
            "leave past_key_values out: the model makes a cache that fits",
        )
    for layer in found:
        _check(layer)
        patch(type(layer), "expand_kv", _expanded)
    return found


def _check(layer: Any) -> None:
    """Raise UnsupportedError for a layer that cannot be absorbed."""
    name, projection = type(layer).__name__, layer.kv_b_proj
    if not hasattr(layer, "expand_kv"):
        raise UnsupportedError(
            f"{name} of transformers {transformers.__version__}, which caches keys and values of each head",
            "a version that caches latents, such as 5.19",
            "pip install --upgrade transformers",
        )
    if getattr(layer, "indexer", None) is not None:
        raise UnsupportedError(
            f"{name}, which selects keys by an indexer with keys of its own",
            "a model whose layers attend to all rows, as DeepSeek-V3",
            "leave past_key_values out: the model makes a cache that fits",
        )
    plain = type(projection) is torch.nn.Linear and projection.bias is None
    if not plain or not projection.weight.is_floating_point() or projection.weight.itemsize == 1:
        raise UnsupportedError(
            f"{name} whose kv_b_proj is {type(projection).__name__} of {projection.weight.dtype}",
            "a torch.nn.Linear without bias, of 16 bits or more: its weight is absorbed",
            "dequantise kv_b_proj, or leave past_key_values out",
        )


def _expanded(original: Any, layer: Any, kv_nope: Any, k_rot: Any) -> Any:
    """Keys and values of a layer: the rows where attention is absorbed, else those of each head."""
    if not isinstance(kv_nope, LatentKeys):
        return original(layer, kv_nope, k_rot)
    ours = registered(layer.config._attn_implementation)
    if ours and absorbs(layer, kv_nope):
        return kv_nope, kv_nope
    if kv_nope.batch is not None:
        raise UnsupportedError(
            f"pages of latent rows under attn_implementation={layer.config._attn_implementation!r}",
            '"fa4flex", which reads them',
            'call fa4flex.integrations.transformers.register() and model.set_attn_implementation("fa4flex")',
        )
    return original(layer, *kv_nope.parts())


# --- one batch --------------------------------------------------------------------------------------------

LEAST_LENGTH = 64
"""Rows of a sequence that are allocated at first."""


class LatentLayer(CacheLayerMixin):
    """Rows of a layer, [B, capacity, 1, columns], which doubles when it is full."""

    is_sliding = False
    is_croppable = True

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self.rows, self.length = rows, 0
        self.cache: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        batch, _, length, _ = key_states.shape
        self.cache = self.rows.empty((batch, max(length, LEAST_LENGTH)), key_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Rows of all tokens so far, after latents [B, 1, S, value_dim] and rotated columns
        [B, 1, S, rope_dim]."""
        if self.cache is None:
            self.lazy_initialization(key_states)
        new, before = key_states.shape[2], self.length
        self.length += new
        rows = torch.cat((key_states, value_states), -1).transpose(1, 2)
        refuse_gradients(rows)
        cache = self._with_room(before)
        latent = self.rows.latent(cache[:, : self.length])
        if latent.format is not None:
            rows = latent.format.encoded(rows, latent.scale)
        cache[:, before : self.length] = rows
        keys = LatentKeys(latent, new, self.length, key_states.dtype)
        return keys, keys

    def _with_room(self, used: int) -> Tensor:
        """Memory for `length` rows, the first of which are used."""
        assert self.cache is not None
        batch, capacity, _, columns = self.cache.shape
        if self.length > capacity:
            grown = self.cache.new_zeros(batch, max(self.length, 2 * capacity), 1, columns)
            grown[:, :used] = self.cache[:, :used]
            self.cache = grown
        return self.cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many tokens, given as a number below 0. One above is the number of those to keep, as
        transformers had it."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.length = max(0, min(self.length, kept))

    def _select(self, select: Any) -> None:
        if self.cache is not None:
            self.cache = select(self.cache)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda x: x[indices])


class LatentCache(Cache):
    """Rows of a batch of sequences, dense or padded, for `model(...)` and `model.generate(...)`.

    model   the model that it is for: one whose layers all have multi-head latent attention
    format  how rows are stored: a fa4flex.LatentFormat of the model's columns, or None for the model's dtype
    scale   with a format, a float32 number [] that all of it is multiplied by

    Under attn_implementation="fa4flex" few new tokens attend to the rows themselves, many to keys and values
    that the model makes of them; under other implementations all do. No gradients pass. Raises
    UnsupportedError for other models, formats with planes, and what append refuses.
    """

    def __init__(self, model: Any, format: LatentFormat | None = None, scale: Tensor | None = None) -> None:
        if format is not None and format.planes:
            raise UnsupportedError(
                f"a cache of {format!r}, whose scales follow the rows of a page",
                "rows that hold their scales, or pages",
                "use PagedLatentCache, or a format without planes",
            )
        rows = _Rows(model, format, scale)
        super().__init__(layers=[LatentLayer(rows) for _ in rows.layers])


# --- pages ------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """Sequences of a call, their pages and lengths before it, and its tokens."""

    batch: Batch
    before: Paging
    new: Varlen

    @staticmethod
    def of(batch: Batch) -> _Step:
        lengths, starts = batch.lengths, batch.starts
        if starts is None:
            starts = torch.arange(batch.tokens + 1, device=lengths.device)
        starts = starts.to(lengths.dtype)
        return _Step(batch, Paging(batch.table, lengths - starts.diff()), Varlen(starts))


class PagedLatentLayer(CacheLayerMixin):
    """Pages of a layer, [pages, page_size, 1, columns]."""

    is_sliding = False

    def __init__(self, rows: _Rows, places: tuple[int, int], like: Tensor) -> None:
        super().__init__()
        self.latent = rows.latent(rows.empty(places, like))
        self.now: _Step | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Pages are allocated with the cache."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Pages after latents [1, 1, T, value_dim] and rotated columns [1, 1, T, rope_dim] of the batch's
        tokens, one sequence after the other."""
        now, (batch, _, length, _) = self.now, key_states.shape
        if now is None or batch != 1 or length < now.batch.tokens:
            raise InputError(
                f"tokens {[batch, length]} for pages of"
                f" {'no batch' if now is None else f'a batch of {now.batch.tokens} tokens'}",
                "the new tokens of all sequences in one row, [1, T]",
                "call cache.step(batch) before the model",
            )
        rows = torch.cat((key_states, value_states), -1)[0].transpose(0, 1)
        moved = now.batch.moved  # sequences may stand in another order than in the call
        rows = rows[: now.batch.tokens] if moved is None else rows[moved[1]]
        append(rows, self.latent, now.before, varlen=now.new)
        keys = LatentKeys(self.latent, length, length, key_states.dtype, now.batch)
        return keys, keys

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class PagedLatentCache(Cache):
    """Rows of many requests in pages, for continuous batching: before each call of the model, `step` says
    which tokens of which sequences it is for. The model is called with these in one row, and their positions.

        cache = PagedLatentCache(model, pages=512, page_size=64)
        cache.step(Batch.of_starts(table, lengths, starts, starts))
        model(tokens[None], position_ids=positions[None], past_key_values=cache, use_cache=True)

    model, format, scale  as for LatentCache; formats with planes as well
    pages, page_size      memory of each layer. Who has which pages is kept by the caller, in page tables

    All layers have the same tables. Each sequence is causal from its last token. The model runs under
    attn_implementation="fa4flex"; its tokens attend to the rows themselves. Raises as LatentCache does.
    """

    def __init__(
        self,
        model: Any,
        pages: int,
        page_size: int = 64,
        format: LatentFormat | None = None,
        scale: Tensor | None = None,
    ) -> None:
        rows, places = _Rows(model, format, scale), (pages, page_size)
        super().__init__(layers=[PagedLatentLayer(rows, places, x.kv_b_proj.weight) for x in rows.layers])

    def step(self, batch: Batch) -> None:
        """Set the sequences of the next call: `batch.lengths` are those with the new tokens."""
        now = _Step.of(batch)
        for layer in self.layers:
            layer.now = now
