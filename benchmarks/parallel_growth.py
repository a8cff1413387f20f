"""Attention over more GPUs with as many tokens on each, beside one GPU's rate and torch's ways.

    torchrun --nproc-per-node 4 benchmarks/parallel_growth.py [--rounds 5] [--rows causal] [--out times.json]
    torchrun --nproc-per-node 4 benchmarks/parallel_growth.py --rows "causal" --profile spans.json
    torchrun --nproc-per-node 2 benchmarks/parallel_growth.py --device cpu --scale 1024    # tiny, over gloo

Forward and backward, 32:8 heads of 128, bf16. "one GPU" has as many tokens as each of several, and the same
mask of these. Efficiency: query-key pairs that a GPU computes per second, over those of one GPU; pairs are
those of the mask's tiles of 128 that are not empty. "predicted" is the planner's time, from one GPU's rate as
measured here and the rate of links that is given, beside the measured one.

A profile has the spans of kernels on each GPU, in microseconds from the first one, and how much of the time
in which an exchange is in flight attention runs as well; benchmarks/draw_spans.py draws them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from draw_spans import Span, joined
from parallel import Bench, Row, Way, begin, measured, table

import fa4flex
from fa4flex import variants as v
from fa4flex.parallel import plan
from fa4flex.parallel.predict import PASSES, Machine, Model, estimates

WAYS = "fa4flex", "fa4flex, heads", "torch"
NAMES = "causal", "16 documents", "sliding 4k", "ALiBi-causal"
LINK = 281e9
"""Bytes per second that an H200 receives from others of its host, measured by an all-to-all of two."""


def rows(tokens: int, ranks: int, scale: int, device: str) -> list[tuple[Row, Row]]:
    """(row of all ranks, the same of one GPU), `tokens` on each."""
    total, window = tokens * ranks, max(4096 // scale, 1)
    cuts = sorted(random.Random(16).sample(range(1, total), 15))
    ids = torch.bucketize(torch.arange(total), torch.tensor(cuts), right=True).to(torch.int32).to(device)

    def in_documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (ids[q] == ids[kv])

    def in_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < window)

    def both(name: str, of: Any, **options: Any) -> tuple[Row, Row]:
        row, alone = (Row(name, n, of(n), **options) for n in (total, tokens))
        return row, alone

    return [
        both(NAMES[0], lambda n: {"mask": v.causal}, causal=True),
        both(NAMES[1], lambda n: {"mask": v.causal & v.document(ids[:n])}, flex=in_documents),
        both(NAMES[2], lambda n: {"mask": v.causal & v.sliding_window(window)}, flex=in_window),
        both(NAMES[3], lambda n: {"score_mod": v.alibi, "mask": v.causal}, tilted=True),
    ]


def asked(name: str, wanted: list[str]) -> bool:
    """True for a row of one of these names, or whose name has a part that is none's."""
    return name in wanted or any(part in name for part in wanted if part not in NAMES)


def judge(bench: Bench, ranks: int, found: dict[str, dict[str, Any]], link: float) -> str:
    """Add efficiencies, and say what the planner predicts."""
    row, alone = bench.row, bench.alone
    (one,) = plan(fa4flex.compile(**alone.variant), alone.tokens, 1, heads=alone.heads).placement.loads
    kinds = (None, "contiguous", "head-tail")
    plans = [plan(bench.attn, row.tokens, ranks, heads=row.heads, placement=kind) for kind in kinds]
    each, ms = sum(plans[0].placement.loads) / ranks, found["one GPU"]["ms"]
    for name, x in found.items():
        if "ms" in x and "one GPU" not in name:
            x["efficiency"] = each / x["ms"] * ms / one
    model = Model(row.heads, row.kv_heads)
    flops = 2 * PASSES * model.heads * (model.dim + model.dim_v) * one / (ms / 1e3)
    estimate = estimates(plans[0], Machine(flops, link), model, plans[1], plans[2])[0]
    (low, high), took = (1e3 * x for x in estimate.seconds), found["fa4flex"]["ms"]
    found["fa4flex"] |= {"predicted": (low, high), "tflops": flops / 1e12}
    return (
        f"  predicted {low:.2f} (all hidden) to {high:.2f} ms (nothing hidden), measured {took:.2f}: "
        f"{took / low:.3f} and {took / high:.3f} of these"
    )


# --- a profile ----------------------------------------------------------------------------------------------


def spans_of(way: Way, bench: Bench) -> list[Span]:
    """Spans of the kernels of one pass on this GPU."""
    from torch.profiler import ProfilerActivity, profile

    bench.seconds(way)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.seconds(way)
    every = [x for x in profiler.events() if x.device_type.name == "CUDA"]
    found = [(x.time_range.start, x.time_range.end, kind_of(x.name)) for x in every]
    first = min((lo for lo, _, kind in found if kind == "attention"), default=0.0)
    return sorted((lo - first, hi - first, kind) for lo, hi, kind in found)


def kind_of(kernel: str) -> str:
    """Kind of a kernel, by its name."""
    if "nccl" in kernel.lower():
        return "exchange"
    return "attention" if "fwd_sm" in kernel or "bwd_sm" in kernel else "other"


def overlap(spans: list[Span]) -> tuple[float, float]:
    """Microseconds of exchanges, and those of them in which attention runs as well."""
    moving, working = (joined([x for x in spans if x[2] == kind]) for kind in ("exchange", "attention"))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moving for b in working)
    return sum(hi - lo for lo, hi in moving), both


def profiled(bench: Bench, out: dict[str, Any]) -> str:
    spans = spans_of(bench.ours(), bench)
    every: list[Any] = [None] * bench.ranks
    dist.all_gather_object(every, spans)
    out[bench.row.name] = every
    moving, both = (sum(x) for x in zip(*map(overlap, every), strict=True))
    return f"  exchanges {moving / 1e3:.2f} ms over all ranks, of which attention runs in {both / 1e3:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 131072], help="of each GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="parts of names, with commas between them; all by default")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="names, or parts")
    parser.add_argument("--row-seconds", type=float, default=1e9, help="no further round after so long")
    parser.add_argument("--scale", type=int, default=1, help="what lengths and windows are divided by")
    parser.add_argument("--link", type=float, default=LINK, help="bytes that a GPU receives per second")
    parser.add_argument("--out", type=Path, help="where to write all numbers, as JSON")
    parser.add_argument("--profile", type=Path, help="where to write spans of kernels, as JSON")
    given = parser.parse_args()
    device, mesh = begin(given.device)
    ranks = dist.get_world_size()
    wanted = [x for x in given.rows.split(",") if x]
    every: dict[str, Any] = {}
    spans: dict[str, Any] = {}
    for tokens in given.tokens:
        for row, alone in rows(tokens // given.scale, ranks, given.scale, str(device)):
            if wanted and not asked(row.name, wanted):
                continue
            start = time.perf_counter()
            bench = Bench(row, mesh, device, {"tile": max(128 // given.scale, 8)}, alone)
            found = measured(bench, given.rounds, given.row_seconds, list(given.ways), [])
            said = [judge(bench, ranks, found, given.link)]
            if given.profile is not None:
                said.append(profiled(bench, spans))
            every[f"{row.name}, {tokens} tokens on each of {ranks}"] = found
            if dist.get_rank() == 0:
                print(table(row, found, time.perf_counter() - start), *said, sep="\n", flush=True)
                # After each row: what a run that is cut off has measured is kept.
                for path, what in ((given.out, every), (given.profile, spans)):
                    if path is not None:
                        path.write_text(json.dumps(what, indent=1))
            del bench
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
