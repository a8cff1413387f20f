"""Decoding with mods and masks beside causal decoding, over a contiguous cache and over pages.

    python benchmarks/decode_variants.py [--sizes 16x8k 1x64k] [--pages 16]

Times are medians of replays of CUDA graphs, in turns, which go round among so many caches that the L2 cache
holds none of them. The speed is in keys and values read per second, of the causal one's with as many queries;
a window reads the keys in its tiles alone, and the last row is causal decoding over no more keys than these.
Drafted tokens are 16 queries, a tree for each sequence.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from decode import CALLS, Case, Size, graph_of, microseconds
from serving import paged
from torch import Tensor

import fa4flex
from fa4flex import Paging, Sinks
from fa4flex.variants import alibi, causal, sliding_window, softcap, tree
from fa4flex.variants.tree import ancestors_of

HEADS, KV_HEADS, WIDTH, NODES, WINDOW, TILE = 32, 8, 128, 16, 1024, 64
SHORT = "causal over a window's keys"


def variants(batch: int, keys: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Queries, and the pieces of a variant, by name; those of as many queries are compared with the first."""
    bias = torch.randn(HEADS, keys + NODES, device="cuda")
    drawn = [[random.randrange(-1, n) if n else -1 for n in range(NODES)] for _ in range(batch)]
    above = torch.stack([ancestors_of(parents) for parents in drawn]).cuda()
    one = torch.tensor(drawn[0], device="cuda")

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, kv_idx]

    return {
        "causal": (1, {"mask": causal}),
        "alibi": (1, {"mask": causal, "score_mod": alibi}),
        "soft cap": (1, {"mask": causal, "score_mod": softcap(20.0)}),
        "a table's elements": (1, {"mask": causal, "score_mod": relative}),
        "sinks": (1, {"mask": causal, "sinks": Sinks(torch.zeros(HEADS, device="cuda"))}),
        "window": (1, {"mask": causal & sliding_window(WINDOW)}),
        "causal, 16 queries": (NODES, {"mask": causal}),
        "a tree": (NODES, {"mask": tree(one)}),
        "a tree for each sequence": (NODES, {"mask": tree(ancestors=above)}),
        "a tree and a soft cap": (NODES, {"mask": tree(one), "score_mod": softcap(20.0)}),
        SHORT: (1, {"mask": causal}),
    }


def caches_of(case: Case, page_size: int) -> list[Any]:
    """Queries and caches: (q, k, v), and over pages a table and lengths besides."""
    used = torch.full((case.size.batch,), case.size.keys, dtype=torch.int32, device="cuda")
    drawn = case.drawn()
    if not page_size:
        return drawn
    pools = [(q, *paged(k, v, page_size)) for q, k, v in drawn]
    return [(q, k, v, Paging(table, used)) for q, k, v, table in pools]


def report(size: Size, page_size: int) -> None:
    """All variants over one kind of cache; page_size 0: contiguous."""
    every = variants(size.batch, size.keys)
    cases = {n: Case(size, HEADS, KV_HEADS, WIDTH, n) for n in (1, NODES)}
    caches = {n: caches_of(case, page_size) for n, case in cases.items()}
    short = Case(Size(size.batch, WINDOW + TILE), HEADS, KV_HEADS, WIDTH, 1)
    others = {SHORT: caches_of(short, page_size)}
    calls = max(CALLS // len(caches[1]), 1) * len(caches[1])
    graphs = {}
    for name, (queries, pieces) in every.items():
        attn = fa4flex.compile(**pieces)

        def call(q: Tensor, k: Tensor, v: Tensor, paging: Paging | None = None, a: Any = attn) -> Any:
            return a(q, k, v, paging=paging)

        with torch.no_grad():
            graphs[name] = graph_of(call, others.get(name, caches[queries]), calls)
    times = microseconds(graphs, calls)
    cache = f"pages of {page_size}" if page_size else "contiguous"
    print(f"{size.batch} x {size.keys} keys, {cache}, {HEADS}:{KV_HEADS} d{WIDTH}")
    rates: dict[int, float] = {}
    for name, (queries, _) in every.items():
        seen = WINDOW + TILE if name in ("window", SHORT) else size.keys
        rate = cases[queries].bytes * seen / size.keys / times[name] / 1e6
        over = rate / rates.setdefault(queries, rate)
        print(f"  {name:28} {times[name]:8.1f} us {rate:6.2f} TB/s {over:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=["16x8k", "1x64k"])
    parser.add_argument("--pages", nargs="*", type=int, default=[16])
    given = parser.parse_args()
    for text in given.sizes:
        for page_size in (0, *given.pages):
            report(Size.of(text), page_size)


if __name__ == "__main__":
    main()
