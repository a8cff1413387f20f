"""The test kernels give the right numbers on the simulated GPUs, whatever the timing, and nothing is found.

By default a sample of them runs that has every kind of instruction in it; `-m exhaustive` runs the others, on
both targets, and GEMMs under more seeds.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

from kernels import gemm_sm90, gemm_sm100, small
from kernels.case import Case, Compiled, built

from ptxsim import device

TIMINGS = ("eager", "late", "random")
SEEDS = 5
GEMMS = (*gemm_sm90.CASES, *gemm_sm100.CASES)
SAMPLE = """
gemm_sm90_edges gemm_sm90_registers gemm_sm90_e4m3 gemm_sm90_multicast
gemm_sm100_edges gemm_sm100_a_mn_b_mn_64b gemm_sm100_pair_m128 gemm_sm100_pair_share_a
tma_load_bf16_128 tma_load_bf16_64 tma_load_bf16_32 tma_load_bf16_0 tma_load_u8_128 tma_load_1d tma_load_5d
tma_store_f32_128 tma_store_f16_64 tma_store_bf16_32 tma_store_f32_0 tma_store_4d tma_add_bf16 tma_max_s32
bulk_copies bulk_add_f32 bulk_xor_b32 cp_async cp_async_zeros cp_async_barrier
multicast remote_stores asynchronous_stores bulk_to_other remote_atomics
mbarriers named_barriers message locked shared_atomics_32 shared_atomics_64 global_atomics_32
global_atomics_64 shuffles shuffles_by_lane votes matches reductions load_matrices store_matrices
product_bfloat16_n64_k64_4 product_float16_n16_k16_5 product_float8_e5m2_n8_k32_4
tensor_memory_16x64b_x4_to_32x32b_x32 tensor_memory_16x256b_x2_to_32x32b_x8 tensor_memory_product_n32_k32
tensor_copy_128x256b tensor_copy_64x128b_warpx2_01_23 tensor_copy_32x128b_warpx4
sweep_f32_to_32 sweep_f32_to_16 sweep_f32_f32_to_16 sweep_e4m3x2_to_32 sweep_e5m2x2_to_32 sweep_f16_to_16
sweep_bf16x2_to_32 sweep_f64_to_32 sweep_s32_to_32 sweep_u32_u32_u32_to_32 sweep_f32x2_f32x2_f32x2_to_64_sm100
"""
"""Cases that each run takes, on the first of their targets."""


def cases() -> list[object]:
    """(case, arch), marked exhaustive where not in the sample."""
    found, sample = [], SAMPLE.split()
    for case in (*GEMMS, *small.CASES):
        for arch in case.archs:
            sampled = case.name in sample and arch == case.archs[0]
            marks = () if sampled else (pytest.mark.exhaustive,)
            found.append(pytest.param(case, arch, id=f"{case.name}-{arch}", marks=marks))
    return found


def right_and_clean(case: Case, arch: str, function: Compiled, timing: str, seed: int) -> None:
    inputs, outputs = case.inputs(), case.outputs()
    with device(arch, seed=seed, timing=timing) as gpu:
        function(*inputs, *outputs)
    assert len(gpu.results) == 1
    assert not gpu.findings, f"{timing} {seed}: {gpu.findings[0]}"
    case.check(inputs, outputs)


@pytest.mark.parametrize(("case", "arch"), cases())
def test_kernel(case: Case, arch: str, seed: int) -> None:
    function = built(case, arch)
    for timing in TIMINGS:
        right_and_clean(case, arch, function, timing, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in GEMMS])
def test_gemm_under_many_seeds(case: Case, seed: int) -> None:
    (arch,) = case.archs
    function = built(case, arch)
    for timing in ("late", "random"):
        for more in range(SEEDS):
            right_and_clean(case, arch, function, timing, seed + more)


def test_the_sample_names_cases() -> None:
    assert set(SAMPLE.split()) <= {case.name for case in (*GEMMS, *small.CASES)}
