"""Continuous batching of Hugging Face transformers: tokens per second of a random Llama with several
implementations of attention, and whether the tokens are sdpa's.

    python benchmarks/continuous_batching.py [--requests 32] [--new 128] [--longest 2048] [--rounds 3]
                                             [--names fa4flex,sdpa]
    python benchmarks/continuous_batching.py --smoke          # tiny sizes, also on a CPU

8 layers of 32 heads of 128 over 8 KV heads, bf16; prompts of 16 tokens up to the longest, log-uniform;
medians of whole batches, from the prompts to the last token, capture of transformers' graphs included. Beside
fa4flex and sdpa: FlashAttention-3, where fa3-fwd is installed, and flash-attn-4, where transformers takes it.

A random model's tokens often have logits that are nearly equal, and rounding decides. So each token is looked
at in float32, behind the same tokens: it counts as right if no token has a logit that is larger by more than
twice the largest error of sdpa's logits in bf16.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


def offer_flash_attention_3() -> None:
    """Have transformers find fa3-fwd, which is FlashAttention-3's forward pass under another name."""
    if importlib.util.find_spec("fa3_fwd_interface") is None:
        return
    folder = Path(tempfile.mkdtemp(prefix="fa3-"))
    (folder / "flash_attn_interface.py").write_text("from fa3_fwd_interface import *\n")
    about = folder / "flash_attn_3-3.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn_3\nVersion: 3.0.0\n")
    (about / "top_level.txt").write_text("flash_attn_interface\n")
    sys.path.append(str(folder))


offer_flash_attention_3()  # transformers looks for packages when it is imported

import transformers  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402

from fa4flex.integrations.transformers import register  # noqa: E402

NAMES = "fa4flex", "sdpa", "flash_attention_3", "flash_attention_4"
Tokens = list[list[int]]


class Sizes(NamedTuple):
    """Sizes of a model and its cache."""

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    dtype: torch.dtype
    page_size: int
    pages: int
    batch_tokens: int


FULL = Sizes(4096, 32, 8, 8, 4096, torch.bfloat16, 256, 512, 4096)
SMOKE = Sizes(64, 4, 2, 2, 64, torch.bfloat16, 8, 256, 48)


def model_of(sizes: Sizes, device: str) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, vocab_size=sizes.vocabulary,
        max_position_embeddings=1 << 15,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device, sizes.dtype).eval()


def prompts_of(count: int, longest: int, vocabulary: int) -> Tokens:
    """Prompts of random tokens and log-uniform lengths."""
    draw = torch.Generator().manual_seed(1)
    least = min(16, longest)
    lengths = (least * (longest / least) ** torch.rand(count, generator=draw)).long().tolist()
    return [torch.randint(3, vocabulary, (n,), generator=draw).tolist() for n in lengths]


def generated(model: Any, prompts: Tokens, new: int, sizes: Sizes) -> Tokens:
    """New tokens of each prompt. fa3-fwd is built without pages: keys are gathered for it."""
    greedy = transformers.GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    cache = ContinuousBatchingConfig(
        page_size=sizes.page_size, num_blocks=sizes.pages, max_batch_tokens=sizes.batch_tokens,
        auto_switch_to_flash=False,
    )  # fmt: skip
    if model.config._attn_implementation == "flash_attention_3":
        cache.max_blocks_per_request = 0
    made = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=cache, progress_bar=False
    )
    found = [made[key].generated_tokens for key in sorted(made, key=lambda key: int(key.split("_")[-1]))]
    if [len(tokens) for tokens in found] != [new] * len(prompts):
        raise RuntimeError("requests without all of their tokens")
    return found


@torch.no_grad()
def logits_of(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Logits [new, vocabulary] in front of each of the tokens, float32."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    found: Tensor = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return found


def told_of_tokens(models: tuple[Any, Any], prompts: Tokens, found: Tokens, wanted: Tokens) -> str:
    """Comparison of tokens with sdpa's, in words. models: sdpa's in float32, and in the dtype at hand."""
    exact, rounded = models
    behind, error = [], 0.0
    for prompt, tokens in zip(prompts, found, strict=True):
        logits, theirs = (logits_of(model, prompt, tokens) for model in (exact, rounded))
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        behind.append((logits.amax(1) - chosen).max().item())
        error = max(error, (theirs - logits).abs().max().item())
    same = sum(a == b for mine, theirs in zip(found, wanted) for a, b in zip(mine, theirs, strict=True))
    verdict = "right" if max(behind) <= 2 * error else "WRONG"
    total = sum(map(len, wanted))
    return f"{same} of {total} tokens as sdpa's; {verdict}: {max(behind):.1e} behind, allowed {2 * error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--names", default=",".join(NAMES), help="implementations")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU")
    given = parser.parse_args()
    sizes, new, longest = (SMOKE, 6, 40) if given.smoke else (FULL, given.new, given.longest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    register()
    model, prompts = model_of(sizes, device), prompts_of(given.requests, longest, sizes.vocabulary)
    model.set_attn_implementation("sdpa")
    exact, rounded = copy.deepcopy(model).float(), copy.deepcopy(model)
    wanted = generated(model, prompts, new, sizes)
    print(f"{given.requests} requests, {sum(map(len, prompts))} tokens of prompts, {new} new ones each")
    for name in given.names.split(","):
        try:
            model.set_attn_implementation(name)
            found = generated(model, prompts, new, sizes)
        except (ImportError, ValueError, RuntimeError) as error:
            print(f"  {name:18} -- {' '.join(str(error).split())[-120:]}")
            continue
        seconds = []
        for _ in range(given.rounds):
            start = time.perf_counter()
            generated(model, prompts, new, sizes)
            seconds.append(time.perf_counter() - start)
        speed = new * given.requests / statistics.median(seconds)
        words = told_of_tokens((exact, rounded), prompts, found, wanted)
        print(f"  {name:18} {speed:8.0f} tokens/s   {words}", flush=True)


if __name__ == "__main__":
    main()
