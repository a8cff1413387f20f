"""vLLM's real engine with fa4flex as its attention backend, on a CPU."""

from __future__ import annotations

import os
from typing import Any

from client_cases import MODS, MODS_FILE, NEW, Case, Served

NAME = "vLLM"
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
INVARIANT = {**IN_PROCESS, "VLLM_BATCH_INVARIANT": "1"}
IN_ONE_PIECE = {
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 256,
}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
CASES = [
    Case("Llama: mixed lengths, prefill in chunks of 32", environment=IN_PROCESS),
    Case("Llama: prefix caching, pages of 32",
         options={"block_size": 32}, environment=IN_PROCESS, again=True),
    Case("Llama: 12 pages of 16, requests preempted",
         options={"num_gpu_blocks_override": 12, "max_model_len": 128}, environment=IN_PROCESS),
    Case("Llama: mods by layer, by FA4FLEX_LAYERS and a file; engine in processes of its own",
         attention="with_mods", environment={"FA4FLEX_LAYERS": MODS}),
    Case("Llama: mods by layer, by a file that additional_config names", attention="with_mods",
         options={"additional_config": {"fa4flex": {"layers": MODS_FILE}}}, environment=IN_PROCESS),
    *[Case("Llama: batch-invariant, prompts in one piece", environment=INVARIANT, options=IN_ONE_PIECE)]
    * ("TRITON_INTERPRET" in os.environ),  # vLLM's other layers then have kernels of Triton alone
    Case("Llama: batch-invariant, prompts in chunks", environment=INVARIANT,
         refused="VLLM_BATCH_INVARIANT with enable_chunked_prefill"),
    Case("Mistral: sliding window", "mistral", environment=IN_PROCESS),
    Case("Qwen2: biases", "qwen2", environment=IN_PROCESS),
    Case("Qwen3: norms of queries and keys", "qwen3", environment=IN_PROCESS),
    Case("Gemma 2: soft cap, a layer with a window", "gemma2", environment=IN_PROCESS, again=True),
    Case("Gemma 3: a layer with a window", "gemma3", environment=IN_PROCESS),
    Case("GPT-OSS: sinks, a layer with a window", "gpt_oss", environment=IN_PROCESS),
    Case("BLOOM: ALiBi", "bloom", environment=IN_PROCESS),
    Case("Llama: cache of 8 bits", attention="rounded", options={"kv_cache_dtype": "fp8_e4m3"},
         environment=IN_PROCESS),
    Case("Llama: traced by torch.compile, attention as an operator",
         options={"enforce_eager": False}, environment={**IN_PROCESS, "VLLM_CPU_CI_ENV": "1"}),
    Case("Llama: drafted tokens are verified",
         options={"speculative_config": DRAFTS, "enable_prefix_caching": False}, environment=IN_PROCESS),
]  # fmt: skip
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "dtype": "float32",
    "attention_backend": "CUSTOM", "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 4,
    "enable_prefix_caching": True, "enable_chunked_prefill": True, "disable_log_stats": True,
}  # fmt: skip


def prepare() -> str:
    """Import vLLM before processes are forked. Returns version, build and model runner."""
    import vllm

    own = "" if "FA4FLEX_CPU_OPERATORS" in os.environ else ", built for CPUs"
    runner = ", model runner V2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else ""
    return str(vllm.__version__).partition("+")[0] + own + runner


def serve(path: str, options: dict[str, Any], rounds: list[list[list[int]]]) -> Served:
    from vllm import LLM, SamplingParams

    engine = LLM(model=path, **{**SETTINGS, **options})
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    answers = [
        engine.generate([{"prompt_token_ids": each} for each in prompts], sampling) for prompts in rounds
    ]
    outputs = [output for answer in answers for output in answer]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return Served([list(output.outputs[0].token_ids) for output in outputs], cached)
