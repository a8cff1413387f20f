"""SGLang: an attention backend by the name fa4flex, over its pools of tokens.

`register()` is this package's entry point for SGLang's plugins: SGLang calls it in each of its processes.
Mods of layers are given with fa4flex.integrations.layers. Importing this module imports SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.assignments import Assignment, check_all_fit, of_engine
from fa4flex.integrations.layers import LayerAttention, LayerSettings
from fa4flex.integrations.paged_cache import (
    INVARIANT,
    Batch,
    Caches,
    attend,
    check_widths,
    on_hopper,
    reads_pages,
    write,
)
from fa4flex.primitives.kv_scales import E4M3, KVScales
from fa4flex.runtime.checks import DTYPES

NAME = "fa4flex"


def register() -> None:
    """Make `--attention-backend fa4flex` known to SGLang, also with `--enable-deterministic-inference`."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(Backend)
    for kind in ("ATTENTION", "DETERMINISTIC_ATTENTION"):
        choices = getattr(server_args, f"{kind}_BACKEND_CHOICES", [])
        if NAME not in choices:
            getattr(server_args, f"add_{kind.lower()}_backend_choices", choices.extend)([NAME])


@dataclass(frozen=True, eq=False)
class _Step:
    """One forward pass: its sequences over the pool of all layers, and over that of sliding layers alone."""

    full: Batch
    sliding: Batch | None


class Backend(AttentionBackend):
    """Decoding and (chunked) prefill of decoders: windows, soft caps, sinks, and any mods that are assigned.

    SGLang's tables are of tokens: pages of one token, or of runner.page_size where its pool keeps such runs
    together. What a runner, its settings and the layers of its model say that this cannot do is refused when
    it is made.
    """

    def __init__(self, runner: Any) -> None:
        _check_runner(runner)
        super().__init__()
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.page_size = int(getattr(runner, "page_size", 1) or 1)
        self._own = _own_layers(runner)
        self._of_8_bits = E4M3 in (
            getattr(x, name, None)
            for x, name in ((runner, "kv_cache_dtype"), (self.token_to_kv_pool, "dtype"))
        )
        self.schedule = INVARIANT if _deterministic(runner) else None
        self._layers: dict[tuple[int, float, int, float], LayerAttention] = {}
        self._step: _Step | None = None
        self._captured: dict[int, _Step] = {}
        self._buffers: tuple[Tensor, Tensor | None, Tensor] | None = None

    # --- metadata -----------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The sequences of one pass, before its layers run."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self._step = None
            return
        _check_mode(mode)
        lengths, longest = forward_batch.seq_lens, getattr(forward_batch, "seq_lens_cpu", None)
        table = self._tokens(forward_batch.req_pool_indices, longest)
        if mode.is_decode():
            full = Batch.decoding(self._pages(table), lengths)
        else:
            starts = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).int()
            on_host = torch.tensor([0, *forward_batch.extend_seq_lens_cpu]).cumsum(0)
            pages, alone = self._pages(table), self.schedule is not None
            full = Batch.of_starts(pages, lengths, starts, on_host, invariant=alone)
        self._step = _Step(full, self._in_sliding_pool(full, table))

    def _tokens(self, requests: Tensor, lengths: Any) -> Tensor:
        """Slots in the pool of each sequence's tokens, [N, longest]; all that there may be where the host
        does not know the lengths."""
        width = self.req_to_token.shape[1]
        if lengths is not None:
            longest = max(int(torch.as_tensor(lengths).max()), 1)
            width = min(-(-longest // self.page_size) * self.page_size, width)
        return self.req_to_token[requests, :width]

    def _pages(self, tokens: Tensor) -> Tensor:
        return (tokens[:, :: self.page_size] // self.page_size).int()

    @property
    def _to_sliding(self) -> Callable[[Tensor], Tensor] | None:
        """Slots in the pool of sliding layers, from those in the other; None where one pool serves all."""
        return getattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa", None)

    def _in_sliding_pool(self, full: Batch, tokens: Tensor) -> Batch | None:
        """The same sequences where sliding layers have a pool of their own. What it has dropped, which is
        behind all windows, becomes its first slot."""
        if self._to_sliding is None:
            return None
        return full.with_table(self._pages(self._to_sliding(tokens.long()).clamp(min=0)))

    # --- CUDA graphs: buffers of fixed addresses, which replays find filled anew ---------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if not reads_pages() or (self._of_8_bits and torch.cuda.is_available() and not on_hopper()):
            raise UnsupportedError(
                "captured graphs over pages on this GPU, where they are gathered",
                "a GPU whose kernels read them in place: Hopper, or without 8 bits Blackwell",
                "serve with --disable-cuda-graph",
            )
        pages = -(-self.req_to_token.shape[1] // self.page_size)
        table = torch.zeros(max_bs, pages, dtype=torch.int32, device=self.req_to_token.device)
        sliding = None if self._to_sliding is None else table.clone()
        lengths = torch.zeros(max_bs, dtype=torch.int32, device=table.device)
        self._buffers, self._captured = (table, sliding, lengths), {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the buffers before a graph is captured or replayed. SGLang calls this from 0.5.13 on."""
        batch, size = forward_batch, forward_batch.batch_size
        if in_capture:
            self._capture(size, batch.forward_mode, batch.spec_info)
        self._fill(size, batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Make the step of a captured graph. SGLang up to 0.5.12 calls this, and before replays the next."""
        self._capture(bs, forward_mode, spec_info)
        self._fill(bs, req_pool_indices, seq_lens, None)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Tensor | None = None,
    ) -> None:
        self._fill(bs, req_pool_indices[:bs], seq_lens[:bs], seq_lens_cpu)

    def _capture(self, bs: int, mode: Any, spec_info: Any) -> None:
        if not mode.is_decode() or spec_info is not None or self._buffers is None:
            raise UnsupportedError(
                "a captured graph of other passes than decoding", "decoding", "disable CUDA graphs for it"
            )
        table, sliding, lengths = self._buffers
        full = Batch.decoding(table[:bs], lengths[:bs])
        self._captured[bs] = _Step(full, None if sliding is None else replace(full, table=sliding[:bs]))

    def _fill(self, bs: int, requests: Tensor, lengths: Tensor, on_host: Tensor | None) -> None:
        step = self._step = self._captured[bs]
        tokens = self._tokens(requests, None if on_host is None else on_host[:bs])
        pages = self._pages(tokens)
        step.full.table[:, : pages.shape[1]].copy_(pages)
        step.full.lengths.copy_(lengths)
        if step.sliding is not None:
            translated = self._in_sliding_pool(step.full, tokens)
            assert translated is not None
            step.sliding.table[:, : pages.shape[1]].copy_(translated.table)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # SGLang may run rows of padding as chunks of one token

    # --- layers -------------------------------------------------------------------------------------------

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """q [T, Hq * D], k and v [T, Hkv, D] of the new tokens, None where the cache has them. Returns
        [T, Hq * Dv]; rows of padding are zeros."""
        _check_layer(layer, options)
        caches = self._caches(layer.layer_id, q.dtype)
        scales = _scales(layer, caches)
        if save_kv_cache and k is not None:
            self._store(layer, caches, (k, v), forward_batch.out_cache_loc, scales)
        heads, step = layer.tp_q_head_num, self._step
        if step is None:
            return q.new_zeros(len(q), heads * layer.v_head_dim)
        rows, batch = q.reshape(-1, heads, layer.qk_head_dim), self._sequences(step, layer.layer_id)
        options = {"sinks": sinks, "kv_scales": scales}
        return attend(self._attention(layer), rows, caches, batch, **options).flatten(1)

    forward_extend = forward_decode

    def support_triton(self) -> bool:
        return False

    def _store(
        self, layer: Any, caches: Caches, new: tuple[Tensor, Any], slots: Tensor, scales: KVScales | None
    ) -> None:
        """Write new keys and values to their slots: by SGLang's pool, or, with scales, here, where numbers
        past those of 8 bits become the largest of them."""
        if scales is None:
            self.token_to_kv_pool.set_kv_buffer(layer, self._places(slots), *new)
            return
        if self._is_sliding(layer.layer_id) and self._to_sliding is not None:
            slots = self._to_sliding(slots)
        widths = layer.qk_head_dim, layer.v_head_dim
        k, v = (x.reshape(len(slots), caches[0].shape[2], width) for x, width in zip(new, widths))
        write(caches, (k, v), slots, scales)

    def _places(self, slots: Tensor) -> Any:
        """Slots to write to; SGLang from 0.5.14 on wants those of the pool of sliding layers along."""
        try:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc
        except ImportError:
            return slots
        return slots if self._to_sliding is None else KVWriteLoc(slots, self._to_sliding(slots))

    def _sequences(self, step: _Step, layer_id: int) -> Batch:
        return step.sliding if self._is_sliding(layer_id) and step.sliding is not None else step.full

    def _is_sliding(self, layer_id: int) -> bool:
        """True for a layer whose keys are in the pool of sliding layers."""
        mapping = getattr(self.token_to_kv_pool, "layers_mapping", None)
        return mapping is not None and bool(mapping[layer_id][1])

    def _caches(self, layer_id: int, dtype: torch.dtype) -> Caches:
        pool = self.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        if keys.dtype not in (dtype, E4M3):
            raise UnsupportedError(
                f"a cache of {keys.dtype} for queries of {dtype}", "one dtype", 'set kv_cache_dtype="auto"'
            )
        pages = len(keys) // self.page_size
        k, v = (x[: pages * self.page_size].unflatten(0, (pages, self.page_size)) for x in (keys, values))
        return k, v

    def _attention(self, layer: Any) -> Any:
        """SGLang's windows count the keys before the query."""
        key = layer.layer_id, float(layer.scaling), layer.sliding_window_size, float(layer.logit_cap)
        if key not in self._layers:
            _, scale, window, cap = key
            settings = LayerSettings(scale, window + 1 if window >= 0 else None, cap if cap > 0 else None)
            settings = replace(settings, schedule=self.schedule or settings.schedule)
            self._layers[key] = LayerAttention(settings, self._own)
        return self._layers[key].named(*_names(layer))


def _check_runner(runner: Any) -> None:
    """Raise for what no forward pass of this runner could do."""
    settings, config = getattr(runner, "server_args", None), getattr(runner, "model_config", None)
    unsupported = [words for words, here in _unsupported(runner, settings, config).items() if here]
    if unsupported:
        raise UnsupportedError(
            f"SGLang with {', '.join(unsupported)}",
            "decoders that keep keys and values of their own for all tokens",
            "leave that out, or serve with another attention backend",
        )
    _check_dtypes(runner, settings, config)
    _check_chunks(runner, settings)
    for layer in _layers(runner):
        _check_layer(layer, {})


def _deterministic(runner: Any) -> bool:
    """True if results must not depend on what else is in a batch."""
    return bool(getattr(getattr(runner, "server_args", None), "enable_deterministic_inference", False))


def _names(layer: Any) -> tuple[str, str]:
    """Names of a layer in patterns: of its number alone, as SGLang's layers have none, and vLLM's."""
    name = f"layers.{layer.layer_id}"
    return name, f"model.{name}.self_attn.attn"


def _layers(runner: Any) -> list[Any]:
    """Attention layers of a runner's model."""
    model = getattr(runner, "model", None)
    modules = [] if model is None else model.modules()
    return [layer for layer in modules if hasattr(layer, "tp_q_head_num") and hasattr(layer, "qk_head_dim")]


def _own_layers(runner: Any) -> list[Assignment]:
    """Mods of layers that --json-model-override-args assigns: {"fa4flex": {"layers": ...}}. Raises for layers
    that the model does not have."""
    settings = getattr(runner, "server_args", None)
    said = getattr(settings, "json_model_override_args", None)
    own = of_engine(json.loads(said), "json_model_override_args") if said else []
    if own and (getattr(settings, "pp_size", 1) or 1) == 1:
        check_all_fit(own, [name for layer in _layers(runner) for name in _names(layer)])
    return own


def _check_chunks(runner: Any, settings: Any) -> None:
    """Raise where results must not depend on the batch, and other requests decide where prompts are cut."""
    size = getattr(settings, "chunked_prefill_size", None)
    if _deterministic(runner) and size is not None and size > 0:
        raise UnsupportedError(
            f"deterministic inference with chunked_prefill_size={size}: where a prompt is cut then depends on"
            " other requests, and bits of results on where it is cut",
            "prompts in one piece",
            "serve with --chunked-prefill-size -1, or with another attention backend",
        )


def _unsupported(runner: Any, settings: Any, config: Any) -> dict[str, bool]:
    mode = getattr(settings, "speculative_attention_mode", "prefill")
    verifies = getattr(settings, f"{mode}_attention_backend", None) or getattr(
        settings, "attention_backend", NAME
    )
    drafts, diffusion = (getattr(settings, x, None) for x in ("speculative_algorithm", "dllm_algorithm"))
    chunk = getattr(runner, "attention_chunk_size", None)
    arch = getattr(getattr(config, "attention_arch", None), "name", "")
    return {
        f"speculative decoding ({drafts})": bool(drafts) and verifies == NAME,
        f"a diffusion model ({diffusion})": bool(diffusion),
        "an encoder-decoder model": bool(getattr(config, "is_encoder_decoder", False)),
        f"attention within chunks of {chunk}": chunk is not None,
        "multi-head latent attention": arch == "MLA" or bool(getattr(runner, "use_mla_backend", False)),
        "keys that are spread over ranks": any(
            (getattr(settings, name, 1) or 1) > 1 for name in ("attn_cp_size", "dcp_size")
        ),
    }


def _check_dtypes(runner: Any, settings: Any, config: Any) -> None:
    """Raise unless the cache has the model's dtype, or e4m3 with a scale for each layer."""
    model = getattr(runner, "dtype", None) or getattr(config, "dtype", None)
    pool = runner.token_to_kv_pool
    cache = getattr(runner, "kv_cache_dtype", None)
    if not isinstance(cache, torch.dtype):
        cache = getattr(pool, "dtype", None)
    if not isinstance(model, torch.dtype):
        return
    if model not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise UnsupportedError(f"a model of {model}", known, 'set dtype="bfloat16"')
    name = getattr(settings, "kv_cache_dtype", None)
    of_8_bits = cache == E4M3 and name in ("auto", "fp8_e4m3") and not hasattr(pool, "get_kv_scale_buffer")
    if isinstance(cache, torch.dtype) and cache != model and not of_8_bits:
        raise UnsupportedError(
            f"a cache of {cache} (kv_cache_dtype={name!r}) for a model of {model}",
            "one dtype for both, or fp8_e4m3 with a scale for each layer",
            'set kv_cache_dtype="auto", or serve with another attention backend',
        )
    widths = [width for layer in _layers(runner) for width in (layer.qk_head_dim, layer.v_head_dim)]
    if of_8_bits and any(width % 16 for width in widths):
        raise UnsupportedError(
            f"heads of {', '.join(map(str, sorted(set(widths))))} in a cache of {cache}",
            "widths that are multiples of 16",
            'set kv_cache_dtype="auto"',
        )


def _scales(layer: Any, caches: Caches) -> KVScales | None:
    """Scales of each KV head of a cache of 8 bits, of which a layer has one for all, or none for 1."""
    if caches[0].dtype != E4M3:
        return None
    given = (getattr(layer, name, None) for name in ("k_scale", "v_scale"))
    k, v = (None if x is None else x.detach().float().reshape(-1).expand(caches[0].shape[2]) for x in given)
    return KVScales(k, v)


def _check_mode(mode: Any) -> None:
    """Raise for passes of trees of tokens, and of tokens that see later ones."""
    for name, value in (
        ("is_target_verify", "verification of drafted tokens"),
        ("is_dllm_extend", "blocks of a diffusion model"),
    ):
        if getattr(mode, name, bool)():
            raise UnsupportedError(value, "decoding and prefill", "serve with another attention backend")


def _check_layer(layer: Any, options: dict[str, Any]) -> None:
    kind = getattr(layer, "attn_type", None)
    unsupported = sorted(name for name, value in options.items() if value is not None)
    if layer.is_cross_attention or getattr(kind, "value", "decoder") != "decoder":
        unsupported.append("attention that is not a decoder's own")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        unsupported.append("xai_temperature_len")
    if getattr(layer, "use_irope", False):
        unsupported.append("attention within chunks (use_irope)")
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        unsupported.append(f"pos_encoding_mode={layer.pos_encoding_mode}")
    if getattr(layer, "logit_capping_method", None) not in (None, "", "tanh"):
        unsupported.append(f"logit_capping_method={layer.logit_capping_method}")
    if unsupported:
        raise UnsupportedError(
            f"a layer that asks for {', '.join(unsupported)}",
            "causal decoders with windows, soft caps and sinks",
            "choose another attention backend for this model; mods are assigned with integrations.layers",
        )
    check_widths(layer.qk_head_dim, layer.v_head_dim)
