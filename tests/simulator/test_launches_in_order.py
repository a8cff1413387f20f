"""Kernels that begin before the one before is over: each waits for its results, and a wait less is found."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

import fa4flex
import ptxsim
from ptxsim.doors.device import Gpu

WAIT = "griddepcontrol.wait;"


def decode(arch: str, without: str = "") -> list[ptxsim.Result]:
    """Launches of one query row over keys that are divided; `without` the waits of kernels so named."""
    run = Gpu.run

    def changed(gpu: Gpu, captured: Any) -> None:
        if without and without in captured.kernel:
            captured = dataclasses.replace(captured, ptx=captured.ptx.replace(WAIT, ""))
        run(gpu, captured)

    q = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 512, 64, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad(), patch.object(Gpu, "run", changed), ptxsim.device(arch) as gpu:
        fa4flex.compile()(q, k, v)
    return gpu.results


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_combining_waits_for_the_parts(arch: str) -> None:
    first, second = decode(arch)
    assert second.shape.early and not first.findings and not second.findings
    _, second = decode(arch, without=second.kernel)
    assert {finding.kind for finding in second.findings} == {"launch order"}
    assert all("reads what an earlier launch writes" in str(finding) for finding in second.findings)
