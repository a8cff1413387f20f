"""CPU forward: blockwise against dense eager attention and against compiled FlexAttention, in one process.

    python benchmarks/cpu_forward.py [--length 8192] [--heads 8] [--dim 64] [--window 1024] [--repeat 5]

Each row is the best of `repeat` runs, taken in turns so that other load on the machine hits all alike.
Inputs are standard normal in fp32; query i sees keys i - window + 1 .. i. "extra MiB" is the peak
resident size during one run less the size before it (Linux). torch.compile needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.expr import Expr, apply, const, sym
from fa4flex.runtime.cpu import Inputs, forward

Run = Callable[[], Tensor]


def window_mask(window: int) -> Expr:
    """Causal, and at most `window` keys back."""
    gap = apply("sub", sym("q"), sym("kv"))
    return apply("and_", apply("le", sym("kv"), sym("q")), apply("lt", gap, const(window)))


def contestants(q: Tensor, k: Tensor, v: Tensor, window: int) -> dict[str, Run]:
    length, scale = q.shape[2], q.shape[3] ** -0.5
    facts, inputs = Facts(mask=window_mask(window)), Inputs(q, k, v, scale=scale)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window)

    i = torch.arange(length).view(-1, 1)
    dense = allowed(i, i, i, torch.arange(length))
    blocks = create_block_mask(allowed, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def eager() -> Tensor:
        scores = (q @ k.mT) * scale
        return scores.masked_fill_(~dense, -torch.inf).softmax(-1) @ v

    def sdpa() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dense)

    return {
        "fa4flex, blockwise": lambda: forward(facts, inputs).out,
        "compiled flex_attention": lambda: compiled(q, k, v, block_mask=blocks, scale=scale),
        "torch SDPA, boolean mask": sdpa,
        "matmul, softmax, matmul": eager,
    }


def extra_memory(run: Run) -> float:
    """Peak resident MiB during one run, beyond what was resident before."""
    status = Path("/proc/self/status")

    def read(field: str) -> int:
        return int(
            next(line for line in status.read_text().splitlines() if line.startswith(field)).split()[1]
        )

    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        return float("nan")
    before = read("VmRSS")
    run()
    return (read("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("length", 8192), ("heads", 8), ("dim", 64), ("window", 1024), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    q, k, v = (torch.randn(1, args.heads, args.length, args.dim) for _ in range(3))
    runs = contestants(q, k, v, args.window)
    with torch.no_grad():
        outputs = {name: run() for name, run in runs.items()}
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(args.repeat):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
        memory = {name: extra_memory(run) for name, run in runs.items()}
    mine, out = next(iter(best.values())), next(iter(outputs.values()))
    print(f"{args.heads} heads, {args.length} tokens, dim {args.dim}, window {args.window}, fp32, ", end="")
    print(f"{torch.get_num_threads()} threads")
    print(f"{'':26s}{'seconds':>9s}{'ratio':>8s}{'extra MiB':>11s}{'difference':>12s}")
    for name, seconds in best.items():
        difference = (outputs[name] - out).abs().max().item()
        print(f"{name:26s}{seconds:9.3f}{seconds / mine:8.2f}{memory[name]:11.0f}{difference:12.1e}")


if __name__ == "__main__":
    main()
