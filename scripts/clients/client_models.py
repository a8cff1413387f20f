"""Tiny random models, and the tokens that eager transformers decodes greedily with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from client_cases import NEW
from torch import Tensor

COMMON = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", WINDOW),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {
            **WINDOW,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 32,
            "hidden_act": "gelu_pytorch_tanh",  # SGLang reads it; published configurations have it
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
    ),
    "gpt_oss": ("GptOss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
}
PROMPTS = [[(7 * i * j + 3) % 250 + 3 for j in range(n)] for i, n in enumerate((5, 50, 33, 1, 90), 1)]
LONGER = [[*prompt, 5, 6, 7] for prompt in PROMPTS]
"""Prompts that begin like the first ones, whose keys an engine may have kept."""


def make(name: str, folder: Path) -> str:
    """Path of the saved model, which is made unless it is there."""
    path = folder / name
    if not (path / "config.json").exists():
        family, changes = MODELS[name]
        torch.manual_seed(0)
        model = getattr(transformers, _model(family))(
            getattr(transformers, f"{family}Config")(**{**COMMON, **changes}, dtype="float32")
        )
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                if value.ndim > 1 or parameter.endswith(("bias", "sinks")):
                    value.normal_(0, 1.0 if parameter.endswith("sinks") else 0.15)
        model.save_pretrained(path)
    return str(path)


def _model(family: str) -> str:
    return f"{family.removesuffix('Text')}ForCausalLM"


def expected(
    path: str, prompts: list[list[int]], attention: str = "eager", **changes: Any
) -> list[list[int]]:
    """Greedy tokens of each prompt alone. attention: a name as in Case; changes: of the model's settings."""
    logging.disable(logging.WARNING)
    for name, function in (("with_mods", attention_with_mods), ("rounded", attention_rounded)):
        transformers.AttentionInterface.register(name, function)
        transformers.AttentionMaskInterface.register(
            name, transformers.AttentionMaskInterface._global_mapping["eager"]
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=attention, dtype=torch.float32, **changes
    )
    made = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        for _ in range(NEW):  # the whole sequence each time: no cache takes part
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax().view(1, 1)], 1)
        made.append(tokens[0, len(prompt) :].tolist())
    logging.disable(logging.NOTSET)
    return made


def attention_with_mods(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention with MODS, by definition."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores, i, j = q @ k.mT * scaling, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if module.layer_idx == 0:
        scores = scores - 0.1 * (i - j)
    else:
        scores = (2.0 * torch.tanh(scores / 2.0)).masked_fill(j <= i - 9, -torch.inf)
    weights = (scores + attention_mask).softmax(-1)
    return (weights @ v).transpose(1, 2), None


def attention_rounded(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention over a cache of e4m3 whose scales are 1, by definition."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.to(torch.float8_e4m3fn).to(q.dtype).repeat_interleave(ratio, 1) for x in (k, v))
    weights = (q @ k.mT * scaling + attention_mask).softmax(-1)
    return (weights @ v).transpose(1, 2), None
