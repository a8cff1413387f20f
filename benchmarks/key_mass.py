"""Time of sums of probabilities per key, beside the backward pass and the forward pass of the same call.

    python benchmarks/key_mass.py [--length 8192] [--dim 128] [--rounds 11] [--device cuda]

Batch 2, 16 query heads, 4 heads of keys, bf16 (float32 on a CPU), with no mask, causal, ALiBi with a window,
and documents. Medians of samples taken in turns. "off" is how far the sums of a head are from the number of
its queries, at most: each query's probabilities add up to one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import fa4flex
from fa4flex.bench.measure import clock_for, interleave
from fa4flex.variants import alibi, causal, document, sliding_window

BATCH, HEADS, KV_HEADS = 2, 16, 4


def variants(length: int, device: torch.device) -> dict[str, dict[str, Any]]:
    ids = torch.arange(length, device=device) // 1000
    return {
        "no mask": {},
        "causal": {"mask": causal},
        "ALiBi, window": {"score_mod": alibi, "mask": causal & sliding_window(1024)},
        "documents": {"mask": document(ids) & causal},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(given.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shapes = [(BATCH, n, given.length, given.dim) for n in (HEADS, KV_HEADS, KV_HEADS)]
    qkv = [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    for name, options in variants(given.length, device).items():
        report(name, fa4flex.compile(**options), qkv, given.rounds)


def report(name: str, attn: fa4flex.Attention, qkv: list[torch.Tensor], rounds: int) -> None:
    q, k, v = qkv
    out, lse = attn(q, k, v, return_lse=True)
    rows, dout = lse.detach(), torch.randn_like(out)
    with torch.no_grad():
        off = (attn.key_mass(q, k, rows).sum(-1) - q.shape[2]).abs().max().item()
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: attn(q.detach(), k.detach(), v.detach()),
        "backward": lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True),
        "key_mass": lambda: attn.key_mass(q, k, rows),
    }
    times = interleave(calls, clock_for(q.device), rounds)
    parts = [f"{key} {times[key].median * 1e3:.3f} ms" for key in calls]
    ratio = times["key_mass"].median / times["backward"].median
    print(f"{name:14} {' | '.join(parts)} | {ratio:.2f}x of the backward, off {off:.1e}", flush=True)


if __name__ == "__main__":
    main()
