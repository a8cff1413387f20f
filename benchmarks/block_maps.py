"""Maps of small blocks on a Hopper GPU, both passes, beside compiled flex_attention and cuDNN's block-sparse
attention, where they are installed.

    python benchmarks/block_maps.py [--blocks 64 128] [--densities 50 25 12.5 6] [--widths 128 64]
    python benchmarks/block_maps.py --kernels blocks usual two --rounds 2
    python benchmarks/block_maps.py --dry     # tiny maps and this library alone, on a CPU

Random maps, another for each head, of full blocks; batch 1, 16 heads, 16,384 tokens, bf16. Printed are
TFLOP/s over the blocks that are visited (4 head_dim FLOPs per pair forward, 10 backward), the ratio to the
best peer, and how far outputs are from float32 PyTorch's on one head, over how far bf16 PyTorch's are.

`--kernels` sets how this library's are planned, each in a process of its own: "blocks" as it does by itself,
"usual" by tiles that are made for any mask, "two" and "three" with so many blocks on a multiprocessor, where
they have room.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLES = 5
OWN, FLEX, CUDNN = "fa4flex", "flex_attention", "cuDNN BSA"
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "blocks": {},
    "usual": {"fa4flex.kernels.plan.specialize": {"BLOCK_KEYS": ()}},
    "two": {"fa4flex.kernels.fwd_sm90.tiles": {"SHARING": (2,)}},
    "three": {"fa4flex.kernels.fwd_sm90.tiles": {"SHARING": (3,)}},
}
"""Constants of planners, by module."""

FLOPS = {"forward": 4, "backward": 10}
"""FLOPs per pair and column of heads."""


@dataclass(frozen=True)
class Case:
    """Map of `edge` x `edge` blocks, of which this percentage is visited; heads so wide."""

    edge: int
    density: float
    width: int
    heads: int
    length: int
    device: str

    def tensors(self) -> list[Tensor]:
        shape = 1, self.heads, self.length, self.width
        return [torch.randn(shape, device=self.device).bfloat16() for _ in range(4)]

    def classes(self) -> Tensor:
        """Classes [1, heads, rows, columns]: full blocks in each row by the density, 1 at least."""
        rows = self.length // self.edge
        count = max(round(rows * self.density / 100), 1)
        places = torch.rand(1, self.heads, rows, rows, device=self.device).argsort(-1)[..., :count]
        listed = torch.zeros(1, self.heads, rows, rows, dtype=torch.uint8, device=self.device)
        return listed.scatter_(-1, places, 2)

    def flops(self, direction: str, classes: Tensor) -> float:
        pairs = int((classes > 0).sum()) * self.edge**2
        return FLOPS[direction] * pairs * self.width


Passes = dict[str, Callable[[], Any]]


def passes(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Passes:
    """Both passes of a function that autograd differentiates."""
    *qkv, dout = tensors
    inputs = [x.clone().requires_grad_() for x in qkv]
    with torch.enable_grad():
        out = attend(*inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*qkv)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True),
    }


def own(case: Case, classes: Tensor, tensors: list[Tensor]) -> Passes:
    import fa4flex

    attn = fa4flex.compile(blocks=fa4flex.BlockMap(classes, case.edge, case.length, case.length))
    return passes(attn, tensors)


def flex(case: Case, classes: Tensor, tensors: list[Tensor]) -> Passes:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    full = classes > 0
    counts = full.sum(-1, dtype=torch.int32)
    indices = full.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    none = torch.zeros_like(counts), torch.zeros_like(indices)
    lengths = case.length, case.length
    mask = BlockMask.from_kv_blocks(*none, counts, indices, BLOCK_SIZE=case.edge, seq_lengths=lengths)
    compiled = torch.compile(flex_attention, dynamic=False)
    return passes(lambda q, k, v: compiled(q, k, v, block_mask=mask), tensors)


def cudnn(case: Case, classes: Tensor, tensors: list[Tensor]) -> Passes:
    from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

    q, k, v, dout = tensors
    full = classes > 0
    counts = full.sum(-1, dtype=torch.int32)
    most = int(counts.max())
    indices = full.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    lists = {
        "q2k_block_index": indices[..., :most].contiguous(),
        "q2k_block_nums": counts.contiguous(),
        "sparse_block_size": case.edge,
        "softmax_scale": case.width**-0.5,
    }

    def forward() -> Any:
        return block_sparse_attention_forward(q, k, v, **lists)

    out, lse = tuple(forward().values())[:2]
    found: Passes = {"forward": lambda: next(iter(forward().values()))}

    def backward() -> Any:
        return block_sparse_attention_backward(dout, q, k, v, out, lse, **lists)

    try:
        backward()
    except (NotImplementedError, ValueError, RuntimeError) as error:
        print(f"  {CUDNN}, backward: {error}", file=sys.stderr)
    else:
        found["backward"] = backward
    return found


PEERS: dict[str, Callable[[Case, Tensor, list[Tensor]], Passes]] = {FLEX: flex, CUDNN: cudnn}


def everybody(case: Case, classes: Tensor, tensors: list[Tensor], peers: bool) -> dict[str, Passes]:
    """Passes by whose they are; those of peers that are not installed, or refuse, are left out."""
    found = {OWN: own(case, classes, tensors)}
    for name, make in PEERS.items() if peers else ():
        try:
            found[name] = make(case, classes, tensors)
            found[name]["forward"]()
        except Exception as error:  # whatever a peer raises, the others are timed
            found.pop(name, None)
            print(f"  {name}, {case}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return found


def error_of(case: Case, classes: Tensor, tensors: list[Tensor], out: Tensor) -> float:
    """Largest error of the last head's output, over that of the same maths in bf16 PyTorch."""
    q, k, v, _ = (x[0, -1] for x in tensors)
    allowed = (classes[0, -1] > 0).repeat_interleave(case.edge, 0).repeat_interleave(case.edge, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).float() * case.width**-0.5
        return scores.masked_fill_(~allowed, -math.inf).softmax(-1).to(q.dtype) @ v

    exact = attend(q.float(), k.float(), v.float())
    errors = [(x.float() - exact).abs().max().item() for x in (out[0, -1], attend(q, k, v))]
    return errors[0] / max(errors[1], 1e-9)


def measure(given: argparse.Namespace, kernel: str) -> dict[str, dict[str, float]]:
    """TFLOP/s, and errors, by row and by whose they are."""
    from importlib import import_module

    from fa4flex.bench.measure import DeviceClock, WallClock, interleave

    for module, constants in CHOICES[kernel].items():
        for name, value in constants.items():
            setattr(import_module(module), name, value)
    device, clock = ("cpu", WallClock()) if given.dry else ("cuda", DeviceClock())
    found: dict[str, dict[str, float]] = {}
    for width, edge, density in [
        (w, e, d) for w in given.widths for e in given.blocks for d in given.densities
    ]:
        torch.manual_seed(0)
        case = Case(edge, density, width, given.heads, given.length, device)
        classes, tensors = case.classes(), case.tensors()
        all_of = everybody(case, classes, tensors, peers=not given.dry and kernel == "blocks")
        for direction in FLOPS:
            calls = {name: one[direction] for name, one in all_of.items() if direction in one}
            with torch.no_grad():
                times = interleave(calls, clock, 1 if given.dry else SAMPLES)
            row = f"d{width} blocks of {edge}, {density:g} %, {direction}"
            flops = case.flops(direction, classes)
            found[row] = {name: flops / samples.median / 1e12 for name, samples in times.items()}
            if direction == "forward":
                out = all_of[OWN]["forward"]()
                found[row]["error"] = error_of(case, classes, tensors, out)
        del all_of, tensors
    return found


def in_processes(given: argparse.Namespace, options: list[str]) -> None:
    """Each choice in a process of its own, in turn; medians over the rounds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(given.rounds):
        for kernel in given.kernels:
            command = [sys.executable, __file__, *options, "--measure", kernel]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            for row, speeds in json.loads(done.stdout.splitlines()[-1]).items():
                for name, speed in speeds.items():
                    whose = f"{name}, {kernel}" if name in (OWN, "error") else name
                    found[row][whose].append(speed)
    for row, speeds in found.items():
        medians = {whose: statistics.median(x) for whose, x in speeds.items()}
        best = max((x for whose, x in medians.items() if whose in PEERS), default=0.0)
        told = [f"{whose} {x:.3g}" for whose, x in medians.items()]
        mine = medians.get(f"{OWN}, {given.kernels[0]}", 0.0)
        told += [f"over the best peer {mine / best:.2f}"] if best else []
        print(f"{row:<44} {'; '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--densities", type=float, nargs="+", default=[50, 25, 12.5, 6])
    parser.add_argument("--widths", type=int, nargs="+", default=[128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kernels", nargs="+", choices=CHOICES, default=["blocks"])
    parser.add_argument("--dry", action="store_true", help="tiny maps, on a CPU")
    parser.add_argument("--measure", choices=CHOICES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.dry:
        given.heads, given.length = 2, 512
    if given.measure:
        print(json.dumps(measure(given, given.measure)))
    else:
        in_processes(given, sys.argv[1:])


if __name__ == "__main__":
    main()
