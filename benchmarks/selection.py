"""Selections of units on a GPU: the k best of rows of scores, and a step of block attention that selects.

    python benchmarks/selection.py [--smoke]

A time is the median of several replays of a CUDA graph. Selections are compared with a stable sort of the
same scores. `torch.topk` sorts nothing, and of equal scores it takes any."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex.select import Scores, pool, score, topk
from fa4flex.variants import causal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS, REPLAYS = 8, 7

ROWS: dict[str, tuple[int, int, int]] = {
    "64 x 128k, 2048": (64, 1 << 17, 2048),
    "64 x 1M, 2048": (64, 1 << 20, 2048),
    "4096 x 64k, 2048": (4096, 1 << 16, 2048),
    "16384 x 128, 8": (16384, 128, 8),
    "65536 x 1024, 64": (65536, 1024, 64),
}
"""Rows, units, selected."""


def microseconds(call: Callable[[], Any]) -> float:
    call()
    if DEVICE == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    side, graph, times = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(REPLAYS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        graph.replay()
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3 / CALLS)
    return statistics.median(times)


def wrong_rows(values: Tensor, ids: Tensor, k: int) -> int:
    """Rows of the first ones whose selection is not that of a stable sort."""
    wrong = 0
    for row, found in zip(values[:8], ids[:8], strict=True):
        wanted = row.sort(descending=True, stable=True).indices[:k].sort().values
        wrong += int(not torch.equal(found.long(), wanted))
    return wrong


def selections(smoke: bool) -> None:
    for name, (rows, units, k) in ROWS.items():
        if smoke:
            rows, units, k = 2, min(units, 3000), min(k, 40)
        for kind in ("random", "ReLU"):
            values = torch.randn(rows, units, device=DEVICE)
            values = values if kind == "random" else torch.where(values > 2.5, values, 0.0)
            scores = Scores(values.view(1, 1, rows, units), 1, 1, rows, units)
            found = topk(scores, k).ids.view(rows, k)
            took = microseconds(lambda scores=scores, k=k: topk(scores, k))
            torchs = microseconds(lambda values=values, k=k: values.topk(k, sorted=False))
            print(
                f"{name:20} {kind:8} {took:9.1f} us  {4 * rows * units / took / 1e6:5.2f} TB/s   torch.topk"
                f" {torchs:9.1f} us   wrong rows {wrong_rows(values, found, k)}",
                flush=True,
            )


def step(smoke: bool) -> None:
    """Mixture of block attention at 64k: mean keys of blocks of 512, the best 8 of each query block."""
    length, heads, block = (512, 2, 64) if smoke else (65536, 8, 512)
    q, k, v = (
        torch.randn(1, heads, length, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        for _ in "qkv"
    )
    attn = fa4flex.compile(mask=causal)

    def select() -> Any:
        with torch.no_grad():
            pooled = pool(q, block)
            return topk(score(pooled, pool(k, block)).causal(), 8, own=1)

    def attend(lists: Any) -> None:
        attn(q, k, v, blocks=lists.map()).sum().backward()

    lists = select()
    both, selecting = microseconds(lambda: attend(lists)), microseconds(select)
    print(f"selecting {selecting:.1f} us, forward and backward {both:.1f} us: {selecting / both:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    given = parser.parse_args()
    selections(given.smoke)
    step(given.smoke)


if __name__ == "__main__":
    sys.exit(main())
