"""Engines' adapters refuse, when they are made, all that they cannot do: no server starts that fails at its
first request."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fa4flex.errors import UnsupportedError

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


# --- SGLang ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """RadixAttention, as far as the adapter reads it."""

    def __init__(self, **asked: Any) -> None:
        super().__init__()
        usual = {
            "layer_id": 0, "scaling": 0.1, "tp_q_head_num": 4, "qk_head_dim": 64, "v_head_dim": 64,
            "sliding_window_size": -1, "logit_cap": 0.0, "is_cross_attention": False,
            "attn_type": SimpleNamespace(value="decoder"), "pos_encoding_mode": "NONE",
            "logit_capping_method": "tanh", "xai_temperature_len": -1, "use_irope": False,
        }  # fmt: skip
        vars(self).update(usual | asked)


def runner(*layers: Layer, settings: dict[str, Any] | None = None, **asked: Any) -> Any:
    """A model runner whose model has these layers; `asked` are attributes of the runner or of its config."""
    config = {"is_encoder_decoder": False, "attention_arch": SimpleNamespace(name="MHA")}
    usual = {"dtype": BF16, "kv_cache_dtype": BF16, "page_size": 1, "use_mla_backend": False}
    usual_settings = {
        "kv_cache_dtype": "auto", "attention_backend": "fa4flex", "prefill_attention_backend": None,
        "decode_attention_backend": None, "speculative_algorithm": None, "dllm_algorithm": None,
        "speculative_attention_mode": "prefill", "attn_cp_size": 1, "dcp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, 8, dtype=torch.int32)),
        token_to_kv_pool=SimpleNamespace(dtype=asked.get("kv_cache_dtype", BF16)),
        model=nn.ModuleList(layers or [Layer()]),
        server_args=SimpleNamespace(**usual_settings | (settings or {})),
        model_config=SimpleNamespace(**config | {k: v for k, v in asked.items() if k in config}),
        **usual | {k: v for k, v in asked.items() if k not in config},
    )


def test_ordinary_models_start(sglang: ModuleType) -> None:
    sliding = Layer(layer_id=1, sliding_window_size=127, logit_cap=30.0, qk_head_dim=256, v_head_dim=128)
    assert sglang.Backend(runner(Layer(), sliding)).page_size == 1
    bare = runner()
    del bare.server_args, bare.model_config, bare.model, bare.dtype, bare.kv_cache_dtype
    assert sglang.Backend(bare).page_size == 1


RUNNERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "8-bit cache": (
        {"kv_cache_dtype": torch.float8_e5m2},
        {"kv_cache_dtype": "fp8_e5m2"},
        r"float8_e5m2 \(kv_cache_dtype='fp8_e5m2'\) for a model of torch\.bfloat16",
    ),
    "8-bit cache with scales of blocks": (
        {"kv_cache_dtype": E4M3},
        {"kv_cache_dtype": "mxfp8"},
        r"float8_e4m3fn \(kv_cache_dtype='mxfp8'\) for a model of torch\.bfloat16",
    ),
    "8-bit cache that the pool alone tells": (
        {"kv_cache_dtype": "auto"},
        {},
        r"a cache of torch\.uint8",
    ),
    "cache of another dtype": ({"kv_cache_dtype": BF16, "dtype": torch.float32}, {}, "set kv_cache_dtype"),
    "8-bit model": ({"dtype": E4M3, "kv_cache_dtype": E4M3}, {}, "a model of torch.float8"),
    "drafts": ({}, {"speculative_algorithm": "EAGLE"}, r"speculative decoding \(EAGLE\)"),
    "diffusion": ({}, {"dllm_algorithm": "LowConfidence"}, "a diffusion model"),
    "encoder-decoder": ({"is_encoder_decoder": True}, {}, "an encoder-decoder model"),
    "chunks": ({"attention_chunk_size": 8192}, {}, "attention within chunks of 8192"),
    "MLA": ({"attention_arch": SimpleNamespace(name="MLA")}, {}, "multi-head latent attention"),
    "MLA by the runner": ({"use_mla_backend": True}, {}, "multi-head latent attention"),
    "context parallel": ({}, {"attn_cp_size": 2}, "keys that are spread over ranks"),
    "context parallel decoding": ({}, {"dcp_size": 2}, "keys that are spread over ranks"),
}


def test_caches_of_8_bits_start(sglang: ModuleType) -> None:
    asked = {"kv_cache_dtype": E4M3, "settings": {"kv_cache_dtype": "fp8_e4m3"}}
    assert sglang.Backend(runner(**asked))._of_8_bits and not sglang.Backend(runner())._of_8_bits
    with pytest.raises(UnsupportedError, match="heads of 64, 72 in a cache"):
        sglang.Backend(runner(Layer(qk_head_dim=72), **asked))


@pytest.mark.parametrize("name", RUNNERS)
def test_settings_of_sglang_are_refused(sglang: ModuleType, name: str) -> None:
    asked, settings, words = RUNNERS[name]
    made = runner(settings=settings, **asked)
    if asked.get("kv_cache_dtype") == "auto":
        made.token_to_kv_pool.dtype = torch.uint8
    with pytest.raises(UnsupportedError, match=words):
        sglang.Backend(made)


def test_drafts_that_another_backend_verifies_are_not_refused(sglang: ModuleType) -> None:
    both = {"prefill_attention_backend": "fa4flex", "decode_attention_backend": "triton"}
    drafting = {"speculative_algorithm": "EAGLE", **both}
    sglang.Backend(runner(settings={**drafting, "speculative_attention_mode": "decode"}))
    with pytest.raises(UnsupportedError, match="speculative decoding"):
        sglang.Backend(runner(settings={**drafting, "speculative_attention_mode": "prefill"}))


LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "cross attention": ({"is_cross_attention": True}, "not a decoder's own"),
    "encoder": ({"attn_type": SimpleNamespace(value="encoder_only")}, "not a decoder's own"),
    "images": ({"attn_type": SimpleNamespace(value="decoder_bidirectional")}, "not a decoder's own"),
    "temperature": ({"xai_temperature_len": 4}, "xai_temperature_len"),
    "chunks": ({"use_irope": True}, "use_irope"),
    "positions": ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode=ROPE"),
    "cap": ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "logit_capping_method=sigmoid"),
    "wide heads": ({"qk_head_dim": 512, "v_head_dim": 512}, "heads of 512\n"),
    "odd heads": ({"v_head_dim": 100}, "heads of 64 and 100\n"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_sglang_are_refused(sglang: ModuleType, name: str) -> None:
    asked, words = LAYERS[name]
    with pytest.raises(UnsupportedError, match=words):
        sglang.Backend(runner(Layer(), Layer(layer_id=1, **asked)))


def test_sglang_is_told_of_the_name_as_it_asks_plugins_to(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import server_args

    known: list[str] = []
    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", known)
    monkeypatch.setattr(server_args, "add_attention_backend_choices", known.extend, raising=False)
    sglang.register()
    sglang.register()
    assert known == ["fa4flex"]


# --- vLLM -----------------------------------------------------------------------------------------------

IMPLS: dict[str, tuple[dict[str, Any], str]] = {
    "8-bit cache": ({"kv_cache_dtype": "fp8_e5m2"}, "a cache of fp8_e5m2"),
    "4-bit cache": ({"kv_cache_dtype": "nvfp4"}, "a cache of nvfp4"),
    "cross attention": ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
    "chunks": ({"chunk_lookback": 2}, "chunk_lookback"),
    "unknown": ({"q_lora_rank": 512}, "q_lora_rank"),
    "wide heads": ({"head_size": 512}, "heads of 512\n"),
    "odd heads": ({"head_size": 100}, "heads of 100\n"),
    "groups": ({"num_kv_heads": 3}, "4 query heads over 3 KV heads"),
    "slopes": ({"alibi_slopes": [0.5, 0.25]}, r"ALiBi slopes of shape \[2\] for 4 heads"),
    "sinks": ({"sinks": torch.zeros(8)}, r"sinks of shape \[8\] for 4 heads"),
    "sinks per query": ({"sinks": torch.zeros(4, 2)}, r"sinks of shape \[4, 2\]"),
}


@pytest.mark.parametrize("name", IMPLS)
def test_layers_of_vllm_are_refused(vllm: ModuleType, name: str) -> None:
    asked, words = IMPLS[name]
    usual = {"num_heads": 4, "head_size": 64, "scale": 0.1, "num_kv_heads": 2}
    impl = vllm.Backend.get_impl_cls()
    ordinary = {"alibi_slopes": [0.5] * 4, "sinks": torch.zeros(4), "sliding_window": 4}
    assert impl(**usual, **ordinary).num_kv_heads == 2
    with pytest.raises(UnsupportedError, match=words):
        impl(**usual | asked)
