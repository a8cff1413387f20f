"""A few small launches for compute-sanitizer, each printing one line:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1       # every tensor is an allocation, so that overruns show
    compute-sanitizer --tool memcheck  --error-exitcode 9 python tests/numeric/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/numeric/sanitize.py

Names of cases as arguments run only those. Status 9: the tool found something; 1: a result is not finite, or
differs from that of the CPU executor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda_cases import FEW, Draw, Sizes, cumulative, on_device
from torch import Tensor

import fa4flex
from fa4flex import Varlen

Launch = Callable[[torch.device], tuple[Tensor, Tensor]]


def dense(draw: Draw, given: Sizes) -> Launch:
    def launch(device: torch.device) -> tuple[Tensor, Tensor]:
        sizes = draw.sizes(given)
        with torch.device("cpu"):
            qkv, composition = sizes.qkv(), draw.make(sizes)
        q, k, v = (x.to(device) for x in qkv)
        moved = {name: _moved(part, device) for name, part in composition.items()}
        out, lse = fa4flex.compile(**moved)(q, k, v, return_lse=True)
        return out, lse

    return launch


def _moved(part: Any, device: torch.device) -> Any:
    return on_device(part, device) if callable(part) or isinstance(part, Tensor) else part


def _document(b: Any, h: Any, q_idx: Any, kv_idx: Any, ids: Tensor = torch.arange(300) // 70) -> Any:
    return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def _relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Tensor = torch.ones(2, 601)) -> Any:
    return score + bias[h, q_idx - kv_idx + 300]


def packed(device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = cumulative([70, 0, 130, 1]).to(device)
    q, k, v = (torch.randn(201, 2, 64, dtype=torch.bfloat16).to(device) for _ in range(3))
    composition = FEW["softcap window"].make(Sizes())
    out, lse = fa4flex.compile(**composition)(q, k, v, varlen=Varlen(lengths), return_lse=True)
    return out, lse


CASES: dict[str, Launch] = {
    "dense, ragged": dense(FEW["dense"], Sizes(1, 2, 2, 150, 201, 128, 128)),
    "causal, grouped heads": dense(FEW["causal"], Sizes(1, 4, 1, 201, 201)),
    "alibi, unequal head dims": dense(FEW["alibi causal"], Sizes(1, 2, 2, 130, 170, 192, 128)),
    "wide heads": dense(FEW["causal"], Sizes(1, 1, 1, 130, 140, 256, 256)),
    "documents": dense(Draw(lambda s: {"mask": _document}), Sizes(1, 2, 2, 300, 300)),
    "relative table": dense(Draw(lambda s: {"score_mod": _relative}), Sizes(1, 2, 2, 200, 300)),
    "packed, softcap, window": packed,
}


def main(names: Sequence[str]) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = set(names) - CASES.keys()
    if unknown:
        print(f"no case {sorted(unknown)}; there are {list(CASES)}")
        return 2
    failed = 0
    for name in names or CASES:
        torch.manual_seed(0)
        with torch.no_grad():
            out, lse = (x.cpu() for x in CASES[name](device))
            torch.manual_seed(0)
            same_out, same_lse = CASES[name](torch.device("cpu"))
        close = torch.allclose(out, same_out, atol=0.03, rtol=0.03) and torch.allclose(
            lse, same_lse, atol=0.03
        )
        good = bool(out.isfinite().all()) and close
        failed += not good
        print(f"{name:28} {'ok' if good else 'WRONG'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
