"""Tiles of keys that a cache in planes leaves out, and errors of outputs beside the tolerance, on a CPU.

    python benchmarks/planes.py [--cases 1000] [--keys 8192]

Random cases take turns among the distributions of `fa4flex accuracy`, near-by heads (ALiBi) and tolerances.
One query, 4 heads over 2 of width 128, bfloat16. Errors are those of float32 outputs against attention in
float64, over the tolerance times the range of the values of their channel.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex import Precision
from fa4flex.accuracy.tensors import Drawn, drawn
from fa4flex.variants import alibi, causal

HEADS, KV_HEADS, WIDTH = 4, 2, 128
TOLERANCES = (1e-3, 1e-2, 5e-2)
PLAIN = ("normal", "outlier", "one sign", "drift", "sink", "needle", "offset channels")
NAMES = (*PLAIN, "near by, 1/64", "near by, 1/8")


def case(name: str, keys: int, seed: int) -> tuple[list[Tensor], Any]:
    """q, k and v, and a score mod."""
    mod = None
    if name.startswith("near by"):
        name, slope = PLAIN[seed % len(PLAIN)], 1 / int(name.rpartition("/")[2])
        mod = alibi(torch.full((HEADS,), slope))
    q, k, v = drawn(name, Drawn(1, keys, HEADS, WIDTH, seed))
    return [q, k[:, :KV_HEADS].contiguous(), v[:, :KV_HEADS].contiguous()], mod


def error_of(x: list[Tensor], mod: Any, out: Tensor) -> float:
    """Largest error of an element, over the range of its channel."""
    q, k, v = (t.double() for t in x)
    exact = fa4flex.reference.attention(q, k, v, mod, causal)[0]
    span = (v.amax(2) - v.amin(2)).repeat_interleave(HEADS // KV_HEADS, 1)[:, :, None]
    return float(((out.double() - exact).abs() / span).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    given = parser.parse_args()
    found: dict[tuple[str, float], list[tuple[float, float, float]]] = defaultdict(list)
    for n in range(given.cases):
        name, tolerance = NAMES[n % len(NAMES)], TOLERANCES[n // len(NAMES) % len(TOLERANCES)]
        x, mod = case(name, given.keys, given.seed + n)
        planes = fa4flex.planes(x[1], x[2])
        precision = Precision(tolerance=tolerance, output=torch.float32)
        attn = fa4flex.compile(mod, causal, precision=precision)
        reads = attn.reads(x[0], planes)
        error = error_of(x, mod, attn(x[0], planes)) / tolerance
        found[name, tolerance].append((float(reads.share.mean()), reads.bytes / reads.whole_bytes, error))
    print(f"{given.cases} cases of {given.keys} keys, seed {given.seed}")
    heads = " | ".join(f"{t:g}" for t in TOLERANCES)
    print(f"| | {heads} | bytes at 1e-2 |\n|" + "---|" * 5)
    for name in NAMES:
        row = []
        for tolerance in TOLERANCES:
            cases = found[name, tolerance]
            row.append(f"{sum(c[0] for c in cases) / len(cases):.2f} / {max(c[2] for c in cases):.3f}")
        of_bytes = [c[1] for c in found[name, 1e-2]]
        print(f"| {name} | " + " | ".join(row) + f" | {sum(of_bytes) / len(of_bytes):.2f} |")
    worst = max(c[2] for cases in found.values() for c in cases)
    print(f"largest error of all: {worst:.3f} of the tolerance")


if __name__ == "__main__":
    main()
