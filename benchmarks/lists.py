"""Attention over listed keys beside dense causal attention of the same library, on a GPU.

    python benchmarks/lists.py [--rows blocks tokens ...] [--backward] [--smoke]

Microseconds of a call, TFLOP/s of the products over listed keys, TB/s of the keys and values that are
gathered, and the time of the dense call over it. Calls follow each other in a CUDA graph; a time is the
median of several replays. Some rows of each output are compared with float64. Lists ascend, but for
"shuffled" ones, whose entries are looked up for repeated ones. `--backward`: both passes of calls with
gradients of q, k and v. `--smoke`: tiny sizes, on a CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fa4flex
from fa4flex import Lists
from fa4flex.variants import causal

os.environ.setdefault("FA4FLEX_BACKGROUND", "0")  # times are those of the best kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPLAYS = 5
WRONG = 0.02
"""Relative error above which a result is reported."""


@dataclass(frozen=True)
class Row:
    """A call: query and KV heads, sequences, queries and keys of each, width; entries of a list, keys of one,
    and of a window; whether entries are in no order; and queries next to each other that list the same."""

    heads: int
    kv_heads: int
    batch: int
    q_len: int
    kv_len: int
    entries: int
    unit: int
    window: int = 0
    width: int = 128
    shuffled: bool = False
    alike: int = 1

    @property
    def listed(self) -> int:
        """Keys that a query attends to, where all entries fit."""
        return min(self.entries * self.unit + self.window, self.kv_len)

    @property
    def products(self) -> float:
        """Floating-point operations over listed keys."""
        return 4.0 * self.batch * self.heads * self.q_len * self.listed * self.width

    @property
    def gathered(self) -> float:
        """Bytes of keys and values, once for each query and KV head."""
        return 4.0 * self.batch * self.kv_heads * self.q_len * self.listed * self.width

    def small(self) -> Row:
        entries = min(self.entries, 16 if self.unit == 1 else 4)
        sizes = {"batch": min(self.batch, 2), "q_len": min(self.q_len, 64), "kv_len": 512}
        return replace(self, entries=entries, window=min(self.window, 32), **sizes)


ROWS = {
    "blocks": Row(64, 4, 1, 65536, 65536, 16, 64, 512),
    "blocks, alike": Row(64, 4, 1, 65536, 65536, 16, 64, 512, alike=4),
    "blocks 16k": Row(64, 4, 1, 16384, 16384, 16, 64, 512),
    "tokens 64:1": Row(64, 1, 1, 4096, 65536, 2048, 1),
    "tokens 128:1": Row(128, 1, 1, 4096, 65536, 2048, 1),
    "tokens 128:1 shuffled": Row(128, 1, 1, 4096, 65536, 2048, 1, shuffled=True),
    "units of 4, 24:2": Row(24, 2, 1, 4096, 65536, 512, 4, 3, 256),
    "decode 64:1": Row(64, 1, 64, 1, 131072, 2048, 1),
    "decode 128:1": Row(128, 1, 64, 1, 131072, 2048, 1),
    "decode 64:4, blocks": Row(64, 4, 64, 1, 131072, 32, 64),
    "decode 64:1 shuffled": Row(64, 1, 64, 1, 131072, 2048, 1, shuffled=True),
    "decode 1 x 64:1": Row(64, 1, 1, 1, 131072, 2048, 1),
}


def drawn(row: Row) -> tuple[list[Tensor], Lists]:
    """Tensors, and lists of units up to each query's own, spread evenly over these."""
    shapes = (row.batch, row.heads, row.q_len), *[(row.batch, row.kv_heads, row.kv_len)] * 2
    qkv = [torch.randn(*s, row.width, dtype=torch.bfloat16, device=DEVICE) for s in shapes]
    place = torch.arange(row.q_len, device=DEVICE) + row.kv_len - row.q_len
    units = (place // row.unit + 1).view(1, 1, -1, 1)
    step = torch.arange(row.entries, device=DEVICE)
    shape = row.batch, row.kv_heads, -(-row.q_len // row.alike), row.entries
    chosen = torch.rand(shape, device=DEVICE).repeat_interleave(row.alike, 2)[:, :, : row.q_len]
    spread = ((step + chosen) / row.entries * units).long().clamp(max=units - 1)
    ids = torch.where(units >= row.entries, spread, torch.where(step < units, step, -1)).int()
    if row.shuffled:
        ids = ids[..., torch.randperm(row.entries, device=DEVICE)].contiguous()
    return qkv, Lists(ids, kv_len=row.kv_len, unit=row.unit, window=row.window)


def error(out: Tensor, qkv: list[Tensor], lists: Lists) -> float:
    """The largest difference from float64 of some rows, relative to their largest output."""
    (q, k, v), worst = qkv, 0.0
    group = q.shape[1] // k.shape[1]
    for b, h, i in ((0, 0, q.shape[2] - 1), (q.shape[0] - 1, q.shape[1] - 1, q.shape[2] // 2)):
        at, row = torch.arange(k.shape[2], device=DEVICE), lists.ids[b, h // group, i]
        own = i + k.shape[2] - q.shape[2]
        seen = torch.isin(at // lists.unit, row) | (at > own - lists.window)
        seen &= at <= own
        keys, values = (x[b, h // group, seen].double() for x in (k, v))
        exact = (keys @ q[b, h, i].double() * q.shape[-1] ** -0.5).softmax(0) @ values
        worst = max(worst, float((out[b, h, i].double() - exact).abs().max() / exact.abs().max()))
    return worst


def microseconds(call: Callable[[], Tensor], calls: int) -> float:
    """Time of one of so many calls of a CUDA graph, or on a CPU of a call."""
    call()
    if DEVICE == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(REPLAYS):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start_event.record()
        graph.replay()
        end_event.record()
        torch.cuda.synchronize()
        times.append(start_event.elapsed_time(end_event) * 1e3 / calls)
    return statistics.median(times)


def report(name: str, row: Row) -> None:
    attn = fa4flex.compile(mask=causal)
    qkv, lists = drawn(row)
    calls = 1 if row.q_len > 8192 else 4 if row.q_len > 1 else 24
    with torch.no_grad():
        wrong = error(attn(*qkv, blocks=lists), qkv, lists)
        took = microseconds(lambda: attn(*qkv, blocks=lists), calls)
        dense = microseconds(lambda: attn(*qkv), calls)
    fa4flex.synchronize()
    print(
        f"{name:>24} {row.heads}:{row.kv_heads} d{row.width} {row.batch} x {row.q_len} of {row.kv_len},"
        f" {row.listed} keys | {took:10.1f} us {row.products / took / 1e6:6.1f} TFLOP/s"
        f" {row.gathered / took / 1e6:5.2f} TB/s | dense {dense:10.1f} us, {dense / took:5.2f} x"
        + f" WRONG {wrong:.1e}"
        * (wrong > WRONG),
        flush=True,
    )


def report_both(name: str, row: Row) -> None:
    """Both passes, of seven products of which the forward pass has two."""
    attn = fa4flex.compile(mask=causal)
    qkv, lists = drawn(row)
    inputs, dout = [x.requires_grad_() for x in qkv], torch.randn_like(qkv[0])
    calls = 1 if row.q_len > 8192 else 4

    def both(**more: Lists) -> Tensor:
        return torch.autograd.grad(attn(*inputs, **more), inputs, dout)[0]

    took = microseconds(lambda: both(blocks=lists), calls)
    dense = microseconds(both, calls)
    fa4flex.synchronize()
    print(
        f"{name:>24} {row.heads}:{row.kv_heads} d{row.width}, both passes | {took:10.1f} us"
        f" {3.5 * row.products / took / 1e6:6.1f} TFLOP/s | dense {dense:10.1f} us, {dense / took:5.2f} x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="*", default=[], help="rows whose names begin with one of these")
    parser.add_argument("--backward", action="store_true", help="both passes")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    given = parser.parse_args()
    for name, row in ROWS.items():
        if not given.rows or name.startswith(tuple(given.rows)):
            shown = report_both if given.backward else report
            shown(name, row.small() if given.smoke else row)
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
