"""Divisions of floats as mods use them: roundings, remainders and comparisons of quotients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa4flex
import ptxsim
from fa4flex import reference

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")


def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.fmod(score, 0.75) + (score // 0.375) * 0.1 + torch.floor(q / 41) * (kv / (h + 41)).round()


def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (torch.floor(q / 41) == torch.floor(kv / 41)) | ((q * 0.5) % 3 == (kv * 0.5) % 3)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_jumps_are_where_torch_has_them(arch: str) -> None:
    """Scores of few significant bits, so that no rounding of q.k moves one across a jump."""
    grid = torch.randint(-2, 3, (3, 1, 2, 130, 64)) / 2.0
    q, k, v = grid.bfloat16()
    composition = {"score_mod": score_mod, "mask": mask_mod, "scale": 0.125}
    with ptxsim.device(arch) as gpu:
        out, lse = fa4flex.compile(**composition)(q, k, v, return_lse=True)
    exact, exact_lse = reference.attention(*(x.double() for x in (q, k, v)), **composition)
    assert not gpu.findings, gpu.report()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
