"""CPU: block maps of each head and single queries, beside dense causal, SDPA and compiled flex_attention.

    python benchmarks/cpu_sparsity.py [--length 2048] [--heads 8] [--dim 64] [--repeat 15]

float32, standard normal inputs, forward alone. All rows are timed in turns in one process: median
milliseconds, the least in parentheses. Maps are random, of each head its own. torch.compile needs a C++
compiler.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fa4flex
from fa4flex.primitives.blocks import FULL
from fa4flex.variants import causal

Run = Callable[[], Tensor]
MAPS = {64: 0.19, 16: 0.024}
"""Share of the blocks that are there, by their side."""


def causal_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def of_map(blocks: Tensor, side: int, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run]:
    """Runs over a map, bool [1, H, rows, columns] of blocks."""
    q_len, kv_len = q.shape[2], k.shape[2]
    blocks_of = fa4flex.BlockMap(blocks.to(torch.uint8) * FULL, (side, side), q_len, kv_len)
    attn = fa4flex.compile(blocks=blocks_of)
    whole = blocks.repeat_interleave(side, 2).repeat_interleave(side, 3)
    sizes = 1, q.shape[1], q_len, kv_len
    mask = create_block_mask(lambda b, h, i, j: whole[b, h, i, j], *sizes, device="cpu", BLOCK_SIZE=side)
    compiled = torch.compile(flex_attention)
    return {
        "fa4flex": lambda: attn(q, k, v),
        "SDPA, boolean mask": lambda: sdpa(q, k, v, whole),
        "flex_attention": lambda: compiled(q, k, v, block_mask=mask),
    }


def contestants(length: int, heads: int, dim: int) -> dict[str, dict[str, Run]]:
    q, k, v = (torch.randn(1, heads, length, dim) for _ in range(3))
    one, compiled = q[:, :, :1], torch.compile(flex_attention)
    plain, below = fa4flex.compile(), fa4flex.compile(mask=causal)
    triangle = create_block_mask(causal_mod, None, None, length, length, device="cpu")
    found: dict[str, dict[str, Run]] = {
        "causal": {
            "fa4flex": lambda: below(q, k, v),
            "SDPA": lambda: sdpa(q, k, v, is_causal=True),
            "flex_attention": lambda: compiled(q, k, v, block_mask=triangle),
        },
        "one query": {
            "fa4flex": lambda: plain(one, k, v),
            "fa4flex, causal": lambda: below(one, k, v),
            "SDPA": lambda: sdpa(one, k, v),
            "flex_attention": lambda: compiled(one, k, v),
        },
    }
    for side, density in MAPS.items():
        blocks = torch.rand(1, heads, length // side, length // side) < density
        found[f"blocks of {side}, {100 * density:.1f} %"] = of_map(blocks, side, q, k, v)
    return found


def timed(run: Run) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("length", 2048), ("heads", 8), ("dim", 64), ("repeat", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with torch.no_grad():
        runs = {
            (case, name): run
            for case, each in contestants(args.length, args.heads, args.dim).items()
            for name, run in each.items()
        }
        for run in [*runs.values()] * 2:
            run()
        times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for _ in range(args.repeat):
            for key, run in runs.items():
                run()
                times[key].append(min(timed(run) for _ in range(10 if key[0] == "one query" else 1)))
    print(f"{args.heads} heads, {args.length} tokens, dim {args.dim}, {torch.get_num_threads()} threads")
    for (case, name), found in times.items():
        print(f"{case:22} {name:20} {statistics.median(found):9.3f} ms ({min(found):.3f})")


if __name__ == "__main__":
    main()
