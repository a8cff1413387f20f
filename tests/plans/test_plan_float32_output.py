"""Plans of kernels that write their output in float32, for both chips; which kernels do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_plans import plan_forward, sizes_of

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.errors import UnsupportedError
from fa4flex.kernels import dispatch
from fa4flex.kernels.fwd_sm90.plan import FWD_SM90
from fa4flex.kernels.fwd_sm100.plan import FWD_SM100
from fa4flex.kernels.mixed_sm90.plan import MIXED_SM90
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.keys import eight_bit, in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A, Target

WIDE = Problem(128, 128, out_dtype="float32")
ROWS, COLUMNS, BYTES = 128, 32, 4


def test_hopper_stages_no_float32_output() -> None:
    """Its rows go to global memory from registers, as those of ragged batches do."""
    wide, narrow = (
        plan_forward(Facts(), replace(WIDE, out_dtype=dtype), SM90A) for dtype in ("float32", "float16")
    )
    regions = [{region.name for region in plan.memory.regions} for plan in (wide, narrow)]
    assert regions[1] - regions[0] == {"out"} and wide.tile == narrow.tile
    assert wide.topology.staging == "none" != narrow.topology.staging


@pytest.mark.parametrize("width", (32, 64, 96, 128))
def test_blackwell_stages_chunks_of_32_columns(width: int) -> None:
    plan = plan_forward(Facts(), Problem(64, width, out_dtype="float32"), SM100A)
    (ring,) = (ring for ring in plan.topology.rings if ring.name == "out")
    assert ring.stage_bytes == ROWS * COLUMNS * BYTES and ring.stages > 0
    assert plan.memory["out"].size == ring.stages * ring.stage_bytes


def test_its_bytes_are_counted() -> None:
    size = Size(1, 1, 1 << 10, 1)
    times = [
        dict(plan_forward(Facts(), replace(WIDE, out_dtype=dtype), SM90A).bound(size).times)["HBM"]
        for dtype in ("float32", "bfloat16")
    ]
    moved = (times[0] - times[1]) * SM90A.hbm_bytes_per_second
    assert moved == pytest.approx((BYTES - 2) * WIDE.head_dim_v * size.q_len)


@pytest.mark.parametrize("target", (SM90A, SM100A), ids=str)
def test_no_backward_kernel_reads_it(target: Target) -> None:
    assert "float32 output" in WIDE.explain()
    with pytest.raises(UnsupportedError, match="float32 output"):
        dispatch.choose("backward", WIDE, target)
    dispatch.choose("backward", replace(WIDE, out_dtype="float16"), target)


def test_kernels_that_do_not_write_it() -> None:
    """Mixed batches get the kernel for many rows; 8-bit caches are dequantised."""
    mixed = Problem(128, 128, lengths="packed", keys=in_pages(64))
    assert dispatch.choose("forward", mixed, SM90A) is MIXED_SM90
    assert dispatch.choose("forward", replace(mixed, out_dtype="float32"), SM90A) is FWD_SM90
    assert dispatch.choose("forward", replace(mixed, out_dtype="float32"), SM100A) is FWD_SM100
    cache = Problem(128, 128, keys=eight_bit(0))
    dispatch.choose("forward", cache, SM90A, sizes_of(16))
    with pytest.raises(UnsupportedError, match="dequantised first"):
        dispatch.choose("forward", replace(cache, out_dtype="float32"), SM90A, sizes_of(16))
