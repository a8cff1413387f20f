"""Backward pass of wide heads on a Hopper GPU, by what its warpgroups share out, beside flash-attn-4.

    python benchmarks/wide_backward.py [--widths 160 192] [--length 4096] [--rounds 4] [--kernels pairs ...]

Products are shared out by pairs of CTAs or by each alone, or columns are. Batch 4, 8 heads, bf16, with and
without a causal mask. Each kernel is chosen in a process of its own, whose planner is told so; processes take
turns, and each takes samples of all rows, and of flash-attn-4 beside them where it is installed. Printed are
medians over the rounds: milliseconds of a backward pass, and the speed of each kernel over flash-attn-4's in
the same process. The first round compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

BATCH, HEADS, SAMPLES = 4, 8, 5
CHOICES = {
    "pairs": {"PRODUCTS_APART": 192, "PAIRED": 192},
    "products": {"PRODUCTS_APART": 192, "PAIRED": 0},
    "columns": {"PRODUCTS_APART": 0, "PAIRED": 0},
}
"""Constants of the planner, by the name of what is timed: products shared out by pairs of CTAs, or by each
CTA for itself, and columns."""
PEER = "flash-attn-4"


def choose(kernel: str) -> None:
    """Tells the planner, before anything is planned, which kernel wide heads have."""
    from fa4flex.kernels.bwd_sm90 import plan

    for constant, value in CHOICES[kernel].items():
        setattr(plan, constant, value)


def passes(width: int, length: int, causal: bool) -> dict[str, Callable[[], Any]]:
    """Backward passes of this library and of flash-attn-4, by name."""
    import torch

    import fa4flex
    from fa4flex.variants import causal as below

    tensors = [torch.randn(BATCH, HEADS, length, width, device="cuda").bfloat16() for _ in range(3)]
    dout = torch.randn_like(tensors[0])

    def backward(attend: Callable[..., Any], layout: Callable[[Any], Any]) -> Callable[[], Any]:
        inputs = [layout(x).clone(memory_format=torch.contiguous_format).requires_grad_() for x in tensors]
        with torch.enable_grad():
            out = attend(*inputs)
        given = layout(dout).contiguous()
        return lambda: torch.autograd.grad(out, inputs, given, retain_graph=True)

    found = {"fa4flex": backward(fa4flex.compile(mask=below if causal else None), lambda x: x)}
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return found

    def peer(q: Any, k: Any, v: Any) -> Any:
        return flash_attn_func(q, k, v, causal=causal)[0]

    return {**found, PEER: backward(peer, lambda x: x.transpose(1, 2))}


def measure(kernel: str, widths: list[int], length: int) -> dict[str, dict[str, float]]:
    """Seconds of a pass, by row and by whose it is."""
    from fa4flex.bench.measure import DeviceClock, interleave

    choose(kernel)
    found = {}
    for width in widths:
        for causal in (False, True):
            calls = passes(width, length, causal)
            times = interleave(calls, DeviceClock(), SAMPLES)
            row = f"{width} {'causal' if causal else 'full'}"
            found[row] = {name: samples.median for name, samples in times.items()}
    return found


def report(rounds: dict[str, list[dict[str, dict[str, float]]]]) -> None:
    for row in next(iter(rounds.values()))[0]:
        parts = []
        for kernel, results in rounds.items():
            mine = [result[row]["fa4flex"] for result in results]
            parts.append(f"{kernel} {statistics.median(mine) * 1e3:.3f} ms")
            theirs = [result[row][PEER] for result in results if PEER in result[row]]
            if theirs:
                ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
                parts[-1] += f", {ratio:.3f} of {PEER}'s speed"
        print(f"{row:12} " + " | ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[160, 192])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kernels", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--kernel", choices=CHOICES, help="time this one alone, and print seconds as JSON")
    given = parser.parse_args()
    if given.kernel:
        print(json.dumps(measure(given.kernel, given.widths, given.length)))
        return
    rounds: dict[str, list[dict[str, dict[str, float]]]] = defaultdict(list)
    for _ in range(given.rounds):
        for kernel in given.kernels:
            command = [sys.executable, __file__, "--kernel", kernel, "--length", str(given.length)]
            done = subprocess.run(
                [*command, "--widths", *map(str, given.widths)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(done.stderr)
            rounds[kernel].append(json.loads(done.stdout.splitlines()[-1]))
    report(rounds)


if __name__ == "__main__":
    main()
