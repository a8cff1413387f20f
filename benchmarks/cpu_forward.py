"""CPU forward beside PyTorch's SDPA and compiled flex_attention, case by case, in one run.

    python benchmarks/cpu_forward.py [--lengths 2048 8192] [--dtypes float32 bfloat16] [--turns 7]
        [--cases causal window ...] [--threads N] [--processor-time]

One batch entry, 8 heads of 64, standard normal inputs, without gradients. Contestants of a case take turns; a
row has the least milliseconds of each, and fa4flex's time over the best peer's: of the least times, and the
median over turns. SDPA gets is_causal where that says it, else a boolean mask as users would write it, "-" if
the mask would take more than 512 MB as float32. flex_attention has its BlockMask, made beforehand. "first" is
fa4flex's first call, which proves the tiles of the mask; "extra MB" is what it adds to the resident size at
most (Linux).

--processor-time counts seconds of one thread's processor time: on a loaded machine the only clock that others
do not move. torch.compile needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import fa4flex
from fa4flex.primitives.blocks import FULL
from fa4flex.variants import causal, document, sliding_window

Run = Callable[[], Any]
HEADS, WIDTH = 8, 64
DOCUMENTS = 8
MAPS = {64: 0.19, 16: 0.024}
"""Share of the blocks that are there, by their side; each head has blocks of its own."""
MOST_MASK = 1 << 29
"""Bytes of a float32 mask that SDPA makes of a boolean one."""


@dataclass(frozen=True)
class Case:
    """A mask said three ways. `dense` makes the boolean mask, `mod` is flex_attention's."""

    variant: dict[str, Any]
    mod: Callable[..., Tensor] | None = None
    dense: Callable[[], Tensor] | None = None
    side: int = 128
    heads: int = 1
    queries: int | None = None
    sdpa: dict[str, bool] = field(default_factory=dict)


def at_all_pairs(mod: Callable[..., Tensor], length: int) -> Callable[[], Tensor]:
    rows = torch.arange(length)
    return lambda: mod(0, 0, rows[:, None], rows[None, :])


def of_map(length: int, side: int, density: float) -> Case:
    blocks = torch.rand(1, HEADS, length // side, length // side) < density
    variant = {"blocks": fa4flex.BlockMap(blocks.to(torch.uint8) * FULL, (side, side), length, length)}

    def mod(b: Any, h: Any, q: Any, kv: Any) -> Tensor:
        return blocks[0, h, q // side, kv // side]

    def dense() -> Tensor:
        return blocks.repeat_interleave(side, 2).repeat_interleave(side, 3)

    return Case(variant, mod, dense, side, HEADS)


def cases(length: int) -> dict[str, Case]:
    window = length // 8
    ends = torch.randint(1, length, (DOCUMENTS - 1,)).sort().values
    ids = torch.searchsorted(ends, torch.arange(length), right=True)

    def below(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < window)

    def same(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ids[q] == ids[kv]

    def packed(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (ids[q] == ids[kv])

    def of_mod(mod: Callable[..., Tensor], mask: Any) -> Case:
        return Case({"mask": mask}, mod, at_all_pairs(mod, length))

    return {
        "causal": Case({"mask": causal}, below, sdpa={"is_causal": True}),
        "window": of_mod(near, sliding_window(window)),
        "documents": of_mod(same, document(ids)),
        "documents, causal": of_mod(packed, causal & document(ids)),
        **{f"blocks of {side}": of_map(length, side, share) for side, share in MAPS.items()},
        "one query": Case({}, queries=1),
        "one query, causal": Case({"mask": causal}, queries=1),
    }


def contestants(case: Case, length: int, dtype: torch.dtype) -> dict[str, Run]:
    q, k, v = (torch.randn(1, HEADS, n, WIDTH).to(dtype) for n in (case.queries or length, length, length))
    attn = fa4flex.compile(**case.variant)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    blocks = None
    if case.mod is not None:
        sizes = case.heads, length, length
        blocks = create_block_mask(case.mod, 1, *sizes, device="cpu", BLOCK_SIZE=case.side)
    runs: dict[str, Run] = {
        "fa4flex": lambda: attn(q, k, v),
        "flex_attention": lambda: compiled(q, k, v, block_mask=blocks),
    }
    if case.dense is None:
        runs["SDPA"] = lambda: scaled_dot_product_attention(q, k, v, **case.sdpa)
    elif 4 * case.heads * length * length <= MOST_MASK:
        mask = case.dense()
        runs["SDPA"] = lambda: scaled_dot_product_attention(q, k, v, mask)
    return runs


def first_call(run: Run, clock: Callable[[], float]) -> tuple[float, float]:
    """Milliseconds of a run, and peak resident MB during it, beyond what was resident before."""

    def read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        return timed(run, clock, 1), math.nan
    before = read("VmRSS")
    time_taken = timed(run, clock, 1)
    return time_taken, (read("VmHWM") - before) / 1024


def timed(run: Run, clock: Callable[[], float], times: int) -> float:
    start = clock()
    for _ in range(times):
        run()
    return 1000 * (clock() - start) / times


def rows(args: argparse.Namespace, clock: Callable[[], float]) -> Iterator[str]:
    for length in args.lengths:
        for name, case in cases(length).items():
            if args.cases and name not in args.cases:
                continue
            for dtype in args.dtypes:
                torch.compiler.reset()
                runs = contestants(case, length, getattr(torch, dtype))
                first, memory = first_call(runs["fa4flex"], clock)
                for run in [*runs.values()] * 2:
                    run()
                times: dict[str, list[float]] = {key: [] for key in runs}
                repeats = 20 if case.queries else 1
                for _ in range(args.turns):
                    for key, run in runs.items():
                        times[key].append(timed(run, clock, repeats))
                yield line(f"{length:6} {dtype:9} {name:18}", times) + f" {first:9.1f} {memory:9.0f}"


def line(head: str, times: dict[str, list[float]]) -> str:
    least = {key: min(found) for key, found in times.items()}
    peers = [key for key in times if key != "fa4flex"]
    best = min(least[key] for key in peers)
    turns = [
        mine / min(others)
        for mine, *others in zip(times["fa4flex"], *(times[key] for key in peers), strict=True)
    ]
    columns = [f"{least[key]:9.2f}" if key in least else f"{'-':>9}" for key in COLUMNS]
    ratio = f"{least['fa4flex'] / best:7.2f} {statistics.median(turns):7.2f}"
    return f"{head} {' '.join(columns)} {ratio}"


COLUMNS = "fa4flex", "SDPA", "flex_attention"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.processor_time else args.threads)
    clock = time.process_time if args.processor_time else time.perf_counter
    print(f"1 x {HEADS} heads of {WIDTH}, milliseconds, {torch.get_num_threads()} threads, {clock.__name__}")
    names = " ".join(f"{x[:9]:>9}" for x in COLUMNS)
    columns = f"{'ratio':>7} {'median':>7} {'first':>9} {'extra MB':>9}"
    print(f"{'length':>6} {'dtype':9} {'mask':18} {names} {columns}")
    with torch.no_grad():
        for row in rows(args, clock):
            print(row, flush=True)


if __name__ == "__main__":
    main()
