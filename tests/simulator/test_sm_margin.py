"""Persistent kernels leave multiprocessors to others: fewer blocks, the same results."""

from __future__ import annotations

import pytest
import torch
from helpers import gradients

import fa4flex
import ptxsim
from fa4flex import InputError, Schedule, UnsupportedError
from fa4flex.variants import causal

SMS, MARGIN = 3, 1


def launched(arch: str, schedule: Schedule, backward: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Results, and numbers of blocks of the attention kernels of a call with more tiles than blocks."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 512, 64).bfloat16().requires_grad_(backward) for _ in range(3))
    attn = fa4flex.compile(mask=causal, schedule=schedule)
    with ptxsim.device(arch, sms=SMS) as gpu:
        out = attn(q, k, v)
        found = [out, *(gradients((out,), [q, k, v], [torch.ones_like(out)]) if backward else [])]
    assert not gpu.findings, gpu.report()
    return found, [result.shape.grid[0] for result in gpu.results]


@pytest.mark.parametrize(
    ("arch", "next_tile", "backward"),
    [
        ("sm_90a", "in_turn", False),
        ("sm_90a", "counter", False),
        ("sm_100a", "in_turn", False),
        pytest.param("sm_90a", "auto", True, marks=pytest.mark.slow),
    ],
)
def test_grids_shrink(arch: str, next_tile: str, backward: bool) -> None:
    every, fewer = (
        launched(arch, Schedule(next_tile=next_tile, sm_margin=margin), backward)  # type: ignore[arg-type]
        for margin in (0, MARGIN)
    )
    for with_all, with_fewer in zip(every[1], fewer[1], strict=True):
        assert with_fewer == (SMS - MARGIN if with_all == SMS else with_all)
    assert every[1].count(SMS) == 1 + backward
    assert torch.equal(fewer[0][0], every[0][0])  # dQ is added up in any order


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="sm_margin=-1"):
        Schedule(sm_margin=-1)
    with pytest.raises(InputError, match="launch_control"):
        Schedule(sm_margin=1, next_tile="launch_control")
    with pytest.raises(UnsupportedError, match="sm_margin=3 on a GPU of 3"):
        launched("sm_90a", Schedule(sm_margin=SMS), False)
