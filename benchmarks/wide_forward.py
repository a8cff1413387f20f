"""Forward pass and decoding of wide heads on a Hopper GPU, beside torch's flex_attention and SDPA.

    python benchmarks/wide_forward.py [--widths 512 320] [--heads 8:4] [--length 8192] [--caches 1x8k 16x8k]
    python benchmarks/wide_forward.py --smoke          # tiny sizes

Rows of many queries are causal, with and without a window; times are TFLOP/s of the pairs that the mask
allows. Rows of one query are TB/s of keys and values, which go round among so many caches that the L2 cache
holds none of them. A time is the median of several calls between events, in turns with the others'. Outputs
are compared with float64 in the first and last head; what cannot run prints why.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fa4flex
from fa4flex.variants import causal, sliding_window

WINDOW = 1024
CACHE_BYTES = 160 << 20
"""Caches of a measurement take at least so much together: three times the L2 cache."""
ROUNDS = 7
WRONG = 0.02
"""Relative error above which a result is reported."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """Query heads, KV heads, width of heads; batch, queries and keys; keys that a query sees, at most."""

    heads: int
    kv_heads: int
    width: int
    batch: int
    q_len: int
    kv_len: int
    window: int | None = None

    @property
    def name(self) -> str:
        kind = "decode" if self.q_len == 1 else "causal" if self.window is None else f"window {self.window}"
        return f"d{self.width} {self.heads}:{self.kv_heads} {self.batch} x {self.kv_len} {kind}"

    @property
    def pairs(self) -> int:
        """Pairs of a head that the mask allows."""
        most = self.kv_len if self.window is None else self.window
        return sum(min(self.kv_len - self.q_len + q + 1, most) for q in range(self.q_len))

    def rate(self, seconds: float) -> str:
        """TB/s of keys and values of one query, else TFLOP/s."""
        if self.q_len == 1:
            moved = self.batch * self.kv_heads * self.kv_len * 2 * self.width * 2
            return f"{moved / seconds / 1e12:.2f} TB/s"
        return f"{4 * self.pairs * self.width * self.batch * self.heads / seconds / 1e12:.0f} TFLOP/s"

    def drawn(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Inputs, without end: of one query, as many caches as the L2 cache does not hold, in turns."""
        b, d = self.batch, self.width
        bytes_of = 4 * b * self.kv_heads * self.kv_len * d
        count = -(-CACHE_BYTES // bytes_of) if self.q_len == 1 else 1
        shapes = (b, self.heads, self.q_len, d), *[(b, self.kv_heads, self.kv_len, d)] * 2
        sets = [tuple(torch.randn(x, device="cuda").bfloat16() for x in shapes) for _ in range(count)]
        return itertools.cycle(sets)  # type: ignore[arg-type]


def contenders(row: Row) -> dict[str, Attend]:
    mask = causal if row.window is None else causal & sliding_window(row.window)
    attn = fa4flex.compile(mask=mask)
    found: dict[str, Attend] = {"fa4flex": lambda q, k, v: attn(q, k, v)}
    if row.window is None:
        alone = row.q_len == 1
        found["SDPA"] = lambda q, k, v: scaled_dot_product_attention(
            q, k, v, is_causal=not alone, enable_gqa=row.heads != row.kv_heads
        )
    found["flex_attention"] = flex(row)
    return found


def flex(row: Row) -> Attend:
    """torch's flex_attention, compiled: blocks of a size that its kernel has shared memory for."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, later = torch.compile(flex_attention), row.kv_len - row.q_len

    def allowed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        below = q_idx + later >= kv_idx
        return below if row.window is None else below & (q_idx + later - kv_idx < row.window)

    mask = create_block_mask(allowed, None, None, row.q_len, row.kv_len, device="cuda")
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1}
    return lambda q, k, v: compiled(
        q, k, v, block_mask=mask, enable_gqa=row.heads != row.kv_heads, kernel_options=sizes
    )


def error(out: Tensor, row: Row, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Relative error of the worst element of the first and last head of the first entry."""
    worst = 0.0
    for h in (0, row.heads - 1):
        one = [x[0, h * x.shape[1] // row.heads].double() for x in (q, k, v)]
        rows = slice(max(row.q_len - 512, 0), None)  # the last ones see most keys
        scores = one[0][rows] @ one[1].mT / row.width**0.5
        at = torch.arange(row.kv_len - scores.shape[0], row.kv_len, device=q.device)[:, None]
        keys = torch.arange(row.kv_len, device=q.device)
        hidden = keys > at if row.window is None else (keys > at) | (at - keys >= row.window)
        truth = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ one[2]
        worst = max(worst, ((out[0, h, rows].double() - truth).abs().max() / truth.abs().max()).item())
    return worst


def seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds of a call, of several in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def measure(row: Row, calls: int) -> None:
    inputs = row.drawn()
    running: dict[str, Attend] = {}
    for name, attend in contenders(row).items():
        first = next(inputs)
        try:
            off = error(attend(*first), row, *first)
        except Exception as reason:  # another library's: it may raise anything
            print(f"{row.name:34}{name:16}{type(reason).__name__}: {str(reason).splitlines()[0][:90]}")
            continue
        if off > WRONG:
            print(f"{row.name:34}{name:16}WRONG by {off:.3f}")
        running[name] = attend
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, attend in running.items():
            times[name].append(seconds(lambda attend=attend: attend(*next(inputs)), calls))  # type: ignore[misc]
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{row.name:34}{name:16}{median * 1e6:10.1f} us  {row.rate(median)}", flush=True)


def rows_of(given: argparse.Namespace) -> Iterator[Row]:
    for heads, width in itertools.product(given.heads, given.widths):
        of_queries, of_keys = map(int, heads.split(":"))
        for window in (None, WINDOW):
            yield Row(of_queries, of_keys, width, 1, given.length, given.length, window)
        for cache in given.caches:
            batch, keys = cache.split("x")
            length = int(keys.removesuffix("k")) * (1024 if keys.endswith("k") else 1)
            yield Row(of_queries, of_keys, width, int(batch), 1, length)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 384, 320])
    parser.add_argument("--heads", nargs="+", default=["8:4"])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--caches", nargs="+", default=["1x8k", "16x8k", "1x64k"])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    given = parser.parse_args()
    if given.smoke:
        given.widths, given.length, given.caches = [512], 256, ["1x300"]
    if not torch.cuda.is_available():
        print("a Hopper GPU is needed: none was found", file=sys.stderr)
        return 1
    with torch.no_grad():
        for row in rows_of(given):
            measure(row, 2 if given.smoke else 10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
