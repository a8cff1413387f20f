"""SGLang's real engine with fa4flex as its attention backend, on a CPU."""

from __future__ import annotations

import json
from typing import Any

from client_cases import MODS, MODS_FILE, NEW, Case, Served

NAME = "SGLang"
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "FA4FLEX_ABSENT": "torchvision,sgl_kernel"}
CASES = [
    Case("Llama: mixed lengths, prefill in chunks of 32, radix cache", again=True),
    Case("Llama: pages of 16", options={"page_size": 16}, again=True),
    Case("Llama: chunks and single tokens in one step", options={"enable_mixed_chunk": True}),
    Case(
        "Llama: mods by layer, by FA4FLEX_LAYERS and a file",
        attention="with_mods",
        environment={"FA4FLEX_LAYERS": MODS},
    ),
    Case(
        "Llama: mods by layer, by a file that json_model_override_args names",
        options={"json_model_override_args": json.dumps({"fa4flex": {"layers": MODS_FILE}})},
        attention="with_mods",
    ),
    Case("Mistral: SGLang's model passes no window", "mistral", reference={"sliding_window": None}),
    Case("Qwen2: biases", "qwen2"),
    Case("Qwen3: norms of queries and keys", "qwen3"),
    Case("Gemma 2: soft cap, a layer with a window", "gemma2", again=True),
    Case("Gemma 3: a layer with a window", "gemma3"),
    Case("GPT-OSS: sinks", "gpt_oss", refused="GptOssForCausalLM requires one of"),
    Case(
        "Llama: cache of 8 bits",
        options={"kv_cache_dtype": "fp8_e4m3"},
        refused="a cache of|FP8 KV cache requires",
    ),
]
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "attention_backend": "fa4flex",
    "disable_cuda_graph": True, "max_total_tokens": 2048, "max_running_requests": 4,
    "chunked_prefill_size": 32, "log_level": "warning",
}  # fmt: skip


def prepare() -> str:
    """Import SGLang before processes are forked. Returns its version."""
    import sglang

    assert sglang.Engine
    return str(sglang.__version__)


def serve(path: str, options: dict[str, Any], rounds: list[list[list[int]]]) -> Served:
    import sglang

    engine = sglang.Engine(model_path=path, **{**SETTINGS, **options})
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    outputs = [
        output
        for prompts in rounds
        for output in engine.generate(input_ids=prompts, sampling_params=sampling)
    ]
    cached = sum(output["meta_info"]["cached_tokens"] for output in outputs)
    engine.shutdown()
    return Served([output["output_ids"] for output in outputs], cached)
