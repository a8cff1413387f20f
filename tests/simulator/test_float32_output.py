"""Outputs that kernels do not round, on simulated GPUs: rounded, they are bit for bit those of kernels that
round, and nothing is found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Precision, Schedule, Sinks, Varlen
from fa4flex.variants import alibi, causal

TIMINGS = (("eager", 0), ("late", 1), ("random", 2))
HALVES = (torch.bfloat16, torch.float16)

SOFTMAX: dict[str, Any] = {"score_mod": alibi, "mask": causal, "sinks": Sinks(torch.randn(2))}
SPLIT = SOFTMAX | {"schedule": Schedule(split=64)}
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, int]]] = {
    "rows of Hopper": ("sm_90a", SOFTMAX, (150, 200), (64, 64)),
    "chunks of Blackwell": ("sm_100a", SOFTMAX, (150, 200), (96, 64)),
    "few rows of Hopper": ("sm_90a", SOFTMAX, (5, 200), (64, 64)),
    "few rows of Blackwell": ("sm_100a", SOFTMAX, (5, 200), (64, 64)),
    "parts of Hopper": ("sm_90a", SPLIT, (5, 200), (64, 64)),
    "parts of Blackwell": ("sm_100a", SPLIT, (5, 200), (64, 64)),
    "wide rows of Hopper": ("sm_90a", SOFTMAX, (70, 130), (192, 256)),
    "narrow chunks of Blackwell": ("sm_100a", SOFTMAX, (150, 200), (64, 40)),
    "rows of Blackwell": ("sm_100a", SOFTMAX, (150, 200), (192, 128)),
    "pairs of CTAs": ("sm_100a", {}, (520, 200), (128, 128)),
}
"""Chip, composition, queries and keys, widths of q and v."""
IN_EVERY_RUN = ("rows of Hopper", "chunks of Blackwell")


def written(name: str, dtype: torch.dtype, varlen: Varlen | None = None) -> None:
    chip, composition, (q_len, kv_len), (width, width_v) = CASES[name]
    shapes = (2, q_len, width), (1, kv_len, width), (1, kv_len, width_v)
    q, k, v = (torch.randn(1, *shape).to(dtype) for shape in shapes)
    if varlen is not None:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    wide, narrow = (
        partial(fa4flex.compile(**composition, precision=Precision(output=output)), q, k, v, varlen=varlen)
        for output in (torch.float32, None)
    )

    def simulated(attn: partial[Any], timing: str, seed: int) -> Tensor:
        with torch.no_grad(), ptxsim.device(chip, seed, timing, sms=2) as gpu:
            out: Tensor = attn()
        assert not gpu.findings, f"{timing} {seed}: {gpu.report()}"
        return out

    expected = simulated(narrow, "eager", 0)
    for timing, seed in TIMINGS:
        out = simulated(wide, timing, seed)
        assert out.dtype == torch.float32 and out.stride() == expected.stride()
        assert torch.equal(out.to(dtype), expected)
    assert (out != expected).float().mean() > 0.9, "it was rounded before"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in IN_EVERY_RUN else pytest.mark.exhaustive) for x in CASES],
)
def test_dense(name: str) -> None:
    written(name, HALVES[torch.randint(2, ()).item()])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_packed(name: str) -> None:
    ends = torch.tensor([0, 3, 150], dtype=torch.int32)
    written(name, torch.bfloat16, Varlen(ends, torch.tensor([0, 30, 200], dtype=torch.int32)))
