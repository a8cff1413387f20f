"""Time and memory of a mask plan at 131,072 x 131,072, beside torch's create_block_mask.

    python benchmarks/mask_plan.py

Each measurement runs in a process of its own. Time is the best of several cold plans: tables are prepared
anew in each. Memory is how far the first plan raises the process's peak resident set, so all allocators
count. create_block_mask is measured at lengths that fit and extrapolated by the number of elements.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LENGTH = 131_072
TORCH_LENGTHS = (4_096, 8_192, 16_384)
TILE = 128
DOCUMENTS = 64
REPEATS = 7
MASKS = (
    "causal",
    "window",
    "prefix",
    "document",
    "causal & window",
    "causal & document",
    "causal & window & document",
    "document & (prefix | causal)",
)


def main() -> None:
    print(f"mask plan at {LENGTH:,} x {LENGTH:,}, tile {TILE}, {os.cpu_count()} cores, B = H = 1")
    header = f"{'mask':30} {'by intervals':>22} {'by bounds':>22} {'create_block_mask, extrapolated':>34}"
    print(
        header
        + f"\n{'':30} {'ms':>11} {'MB':>10} {'ms':>11} {'MB':>10} {'s':>17} {'at most measured, ms':>16}"
    )
    for name in MASKS:
        intervals = _in_process("intervals", name, LENGTH)
        squares = _in_process("bounds", name, LENGTH)
        torch_seconds = [(n, _in_process("torch", name, n)[0]) for n in TORCH_LENGTHS]
        longest, seconds = torch_seconds[-1]
        guess = seconds * (LENGTH / longest) ** 2
        ours = "".join(f" {1e3 * s:11.1f} {mb:10.1f}" for s, mb in (intervals, squares))
        measured = ", ".join(f"{1e3 * s:.0f} ms at {n:,}" for n, s in torch_seconds)
        print(f"{name:30}{ours} {guess:17.1f}   {measured}")


def _in_process(how: str, name: str, length: int) -> tuple[float, float]:
    """(seconds, MB) of one kind of plan, measured in a fresh interpreter."""
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, how, name, str(length)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds, megabytes = done.stdout.split()[-2:]
    return float(seconds), float(megabytes)


def _measure(how: str, name: str, length: int) -> None:
    plan = (_torch_plan if how == "torch" else _plan)(how, name, length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = _seconds(plan)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for _ in range(REPEATS if how != "torch" else 0):
        best = min(best, _seconds(plan))
    print(best, grown / 1024)  # ru_maxrss is in KiB


def _seconds(plan: Callable[[], object]) -> float:
    from fa4flex.codegen.analyze.tiles import remembered

    remembered.cache_clear()  # the time of making a plan, not of finding one
    start = time.perf_counter()
    plan()
    return time.perf_counter() - start


def _plan(how: str, name: str, length: int) -> Callable[[], object]:
    import torch

    from fa4flex.codegen.analyze.intervals import key_intervals
    from fa4flex.codegen.analyze.tiles import Shape, tile_map
    from fa4flex.codegen.evaluate import Captured
    from fa4flex.codegen.expr import Expr, apply, const, load, scalar, sym

    q, kv = sym("q"), sym("kv")
    masks = {
        "causal": apply("le", kv, q),
        "window": apply("le", apply("abs", apply("sub", q, kv)), scalar(0, "int")),
        "prefix": apply("lt", kv, scalar(1, "int")),
        "document": apply("eq", load(0, (q,), "int"), load(0, (kv,), "int")),
    }
    masks["(prefix | causal)"] = apply("or_", masks["prefix"], masks["causal"])
    mask: Expr = const(True)
    for part in name.split(" & "):
        mask = apply("and_", mask, masks[part])
    captured = Captured((_documents(length),), (4096, 1000))
    # The first operations of a process load code that is no part of a plan.
    tile_map(
        mask,
        None,
        Shape(1, 1, 256, 256),
        Captured((torch.zeros(256, dtype=torch.int32),), (40, 10)),
        (64, 64),
    )
    shape = Shape(1, 1, length, length)
    if how == "bounds":
        return lambda: tile_map(mask, None, shape, captured, (TILE, TILE))
    return lambda: tile_map(mask, key_intervals(mask), shape, captured, (TILE, TILE))


def _torch_plan(how: str, name: str, length: int) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask

    ids = _documents(length)
    masks: dict[str, Callable[..., object]] = {
        "causal": lambda q, kv: q >= kv,
        "window": lambda q, kv: (q - kv).abs() <= 4096,
        "prefix": lambda q, kv: kv < 1000,
        "document": lambda q, kv: ids[q] == ids[kv],
    }
    masks["(prefix | causal)"] = lambda q, kv: (kv < 1000) | (q >= kv)

    def mask_mod(b: object, h: object, q: object, kv: object) -> object:
        first, *rest = (masks[part](q, kv) for part in name.split(" & "))
        for other in rest:
            first = first & other
        return first

    return lambda: create_block_mask(mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=TILE)


def _documents(length: int) -> object:
    """Sorted document ids, int32 [length]: DOCUMENTS documents of random lengths."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, DOCUMENTS, (length,), generator=generator).sort().values.to(torch.int32)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
