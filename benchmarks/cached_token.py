"""Time of a cached greedy token of a tiny Llama on a CPU: fa4flex against transformers' sdpa, in one process.

    python benchmarks/cached_token.py [--layers 4] [--heads 4] [--kv-heads 2] [--prompt 64] [--tokens 40]

A model this small does almost no arithmetic: what is timed is what a step costs beside it. Runs are taken in
turns, so that other load on the machine hits both alike; a time is the lower quartile of all steps, in ms.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
from torch import Tensor

import fa4flex.integrations.transformers

IMPLEMENTATIONS = ("sdpa", "fa4flex")
VOCABULARY, WIDTH = 128, 64
WARM_UP = 5
"""Steps that are not timed: the first ones make masks and allocate."""


def model(implementation: str, given: argparse.Namespace) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


@torch.no_grad()
def steps(llama: transformers.LlamaForCausalLM, prompt: Tensor, count: int) -> list[float]:
    """Seconds of each of `count` steps after the prompt."""
    out = llama(prompt, use_cache=True)
    seconds = []
    for _ in range(WARM_UP + count):
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        out = llama(token, past_key_values=out.past_key_values, use_cache=True)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    counts = {"layers": 4, "heads": 4, "kv-heads": 2, "prompt": 64, "tokens": 40, "repeat": 10}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    fa4flex.integrations.transformers.register()
    models = {name: model(name, given) for name in IMPLEMENTATIONS}
    prompt = torch.randint(0, VOCABULARY, (1, given.prompt))
    found: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for _ in range(given.repeat):
        for name, llama in models.items():
            found[name] += steps(llama, prompt, given.tokens)
    low = {name: sorted(seconds)[len(seconds) // 4] * 1e3 for name, seconds in found.items()}
    for name, milliseconds in low.items():
        print(f"{name:8} {milliseconds:6.2f} ms  {milliseconds / low['sdpa']:.2f}x")


if __name__ == "__main__":
    main()
