"""Models compiled as a whole with use_cache at its default, where every layer fills a cache made inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from fa4flex.integrations.transformers import register  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 6},
    "GptOss": {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_compiles_as_a_whole_with_the_cache_that_it_makes(family: str) -> None:
    register()
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind._from_config(config, attn_implementation="fa4flex").eval()
    assert config.use_cache
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        expected = model(ids)
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids)
        torch.testing.assert_close(found.logits, expected.logits)
        caches = found.past_key_values, expected.past_key_values
        for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
            torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values))
        step = torch.tensor([[7]])
        after = [model(step, past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*after)
