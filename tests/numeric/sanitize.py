"""A few small launches, forward and backward, over pages too, for compute-sanitizer, each printing one line:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1       # every tensor is an allocation, so that overruns show
    sanitizer="compute-sanitizer --report-api-errors no --error-exitcode 9"
    $sanitizer --tool memcheck  python tests/numeric/sanitize.py
    $sanitizer --tool synccheck python tests/numeric/sanitize.py

Names of cases as arguments run only those. Status 9: the tool found something; 1: a result is not finite, or
differs from that of the CPU executor. Refused calls of the driver are no errors: Python's bindings ask it for
every function that they know of, and an older driver does not have them all. What racecheck says of backward
kernels, and why it is wrong, stands in docs/notes/backward_sm90.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1]))

import captured_cases
import sanitized_pages
import torch
from cuda_cases import FEW, Draw, Sizes, cumulative, on_device
from torch import Tensor

import fa4flex
from fa4flex import Schedule, Varlen
from fa4flex.runtime.cuda.device import faults

Results = list[Tensor]
"""out, lse, dq, dk, dv, and gradients of captured tensors."""
Launch = Callable[[torch.device], Results]


def results(attn: Callable[..., Any], qkv: Sequence[Tensor], leaves: Sequence[Tensor] = ()) -> Results:
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    out, lse = attn(q, k, v, return_lse=True)
    total = (out.float() * torch.arange(out.shape[-1], device=q.device).sin()).sum() + lse.sum()
    return [out, lse, *torch.autograd.grad(total, [q, k, v, *leaves])]


def dense(draw: Draw, given: Sizes, **options: Any) -> Launch:
    def launch(device: torch.device) -> Results:
        sizes = draw.sizes(given)
        with torch.device("cpu"):
            qkv, composition = sizes.qkv(), draw.make(sizes)
        moved = {name: on_device(part, device) for name, part in composition.items()}
        return results(fa4flex.compile(**moved, **options), [x.to(device) for x in qkv])

    return launch


def captured(name: str, given: Sizes) -> Launch:
    grid = captured_cases.Grid(given.batch, given.heads, given.q_len, given.kv_len)

    def launch(device: torch.device) -> Results:
        qkv = [x.to(device) for x in given.qkv()]
        _, drawn = captured_cases.CASES[name](grid)
        with torch.device(device):
            composition, leaves = captured_cases.CASES[name](grid)
        for x, same in zip(leaves, drawn, strict=True):
            x.data.copy_(same)
        return results(fa4flex.compile(**composition), qkv, leaves)

    return launch


def _document(b: Any, h: Any, q_idx: Any, kv_idx: Any, ids: Tensor = torch.arange(300) // 70) -> Any:
    return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def _relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Tensor = torch.ones(2, 601)) -> Any:
    return score + bias[h, q_idx - kv_idx + 300]


def packed(device: torch.device) -> Results:
    lengths = cumulative([70, 0, 130, 1]).to(device)
    qkv = [torch.randn(201, 2, 64, dtype=torch.bfloat16).to(device) for _ in range(3)]
    attn = fa4flex.compile(**FEW["softcap window"].make(Sizes()))
    return results(lambda *x, **options: attn(*x, varlen=Varlen(lengths), **options), qkv)


def wrong_lengths(device: torch.device) -> Results:
    """Lengths that point past all tensors: results are those of the lengths that kernels make of them, and
    the fault is told."""
    qkv = [torch.randn(201, 2, 64, dtype=torch.bfloat16).to(device) for _ in range(3)]
    wrong = device.type == "cuda"
    given = [0, 900000, -70, 130, 201] if wrong else [0, 201, 201, 201, 201]
    lengths = torch.tensor(given, dtype=torch.int32, device=device)
    attn = fa4flex.compile(**FEW["causal"].make(Sizes()), schedule=Schedule(order="longest_first"))
    with patch.object(faults, "check", lambda: None):  # or the backward pass would tell
        found = results(lambda *x, **options: attn(*x, varlen=Varlen(lengths), **options), qkv)
    try:
        fa4flex.synchronize()
    except fa4flex.InputError:
        return found
    return [] if wrong else found


CASES: dict[str, Launch] = {
    "dense, ragged": dense(FEW["dense"], Sizes(1, 2, 2, 150, 201, 128, 128)),
    "causal, grouped heads": dense(FEW["causal"], Sizes(1, 4, 1, 201, 201)),
    "alibi, unequal head dims": dense(FEW["alibi causal"], Sizes(1, 2, 2, 130, 170, 192, 128)),
    "wide heads": dense(FEW["causal"], Sizes(1, 1, 1, 130, 140, 256, 256)),
    "documents": dense(Draw(lambda s: {"mask": _document}), Sizes(1, 2, 2, 300, 300)),
    "relative table": dense(Draw(lambda s: {"score_mod": _relative}), Sizes(1, 2, 2, 200, 300)),
    "packed, softcap, window": packed,
    "packed, wrong lengths": wrong_lengths,
    "ordered": dense(FEW["causal"], Sizes(1, 2, 1, 201, 201), schedule=Schedule(deterministic=True)),
    "captured slopes": captured("slopes under a cap", Sizes(1, 2, 2, 150, 201)),
    "captured by distance": captured("by distance", Sizes(1, 2, 2, 150, 201, 128, 128)),
    "captured dense": captured("dense, hidden tiles", Sizes(1, 2, 2, 150, 280)),
    **sanitized_pages.CASES,
}


def _close(found: Tensor, same: Tensor) -> bool:
    largest = same[same.isfinite()].abs().max().item()
    return torch.allclose(found.float(), same.float(), rtol=0.03, atol=0.03 * max(1.0, largest))


def main(names: Sequence[str]) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = set(names) - CASES.keys()
    if unknown:
        print(f"no case {sorted(unknown)}; there are {list(CASES)}")
        return 2
    failed = 0
    for name in names or CASES:
        torch.manual_seed(0)
        found = [x.cpu() for x in CASES[name](device)]
        torch.manual_seed(0)
        same = CASES[name](torch.device("cpu"))
        good = len(found) == len(same) and all(map(_close, found, same))
        failed += not good
        print(f"{name:28} {'ok' if good else 'WRONG'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
