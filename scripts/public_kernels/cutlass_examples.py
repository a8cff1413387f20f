"""Examples of CUTLASS, run as their command lines are: each checks its results by itself."""

from __future__ import annotations

import contextlib
import io
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

from kernel_case import Case, Checks

ROOT = "examples/python/CuTeDSL"
CONVERSIONS = ("_convert_kernel",)
"""Kernels of CuTe DSL that examples fill their tensors with."""
VERIFIED = ("Results verified successfully!", "PASS")
"""Success messages of examples that compare without torch.testing."""

GEMM = "--mma_tiler_mn 128,128 --cluster_shape_mn 1,1"
STORES = "--use_2cta_instrs --use_tma_store"
PAIR = "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1"
GROUPS = "--num_groups 2 --problem_sizes_mnkl '(128,128,256,1),(256,128,256,1)'"
HALVES = "--ab_dtype Float16 --c_dtype Float16"
BLACKWELL, HOPPER = "cute/blackwell/kernel", "cute/hopper/kernel"
DENSE, SCALED = f"{BLACKWELL}/dense_gemm", f"{BLACKWELL}/blockscaled_gemm"
ATTENTION = f"{BLACKWELL}/attention"

EXAMPLES: dict[str, tuple[str, str]] = {
    "dense GEMM, fp16": (f"{DENSE}/dense_gemm.py", f"--mnkl 256,256,128,1 {GEMM} {HALVES}"),
    "dense GEMM, bf16, pairs": (
        f"{DENSE}/dense_gemm.py",
        f"--mnkl 256,256,128,1 {PAIR} {STORES} --ab_dtype BFloat16 --c_dtype BFloat16",
    ),
    "dense GEMM, fp8": (
        f"{DENSE}/dense_gemm.py",
        f"--mnkl 256,256,128,1 {GEMM} --ab_dtype Float8E4M3FN --c_dtype Float16",
    ),
    "dense GEMM, tf32": (f"{DENSE}/dense_gemm.py", f"--mnkl 256,256,128,1 {GEMM} --ab_dtype TFloat32"),
    "dense GEMM, int8": (
        f"{DENSE}/dense_gemm.py",
        f"--mnkl 256,256,128,1 {GEMM} --ab_dtype Int8 --c_dtype Int32 --acc_dtype Int32",
    ),
    "dense GEMM, tf32, MN-major": (
        f"{DENSE}/dense_gemm.py",
        f"--mnkl 256,256,128,1 {GEMM} --ab_dtype TFloat32 --a_major m --b_major n",
    ),
    "dense GEMM, software pipeline": (
        f"{DENSE}/dense_gemm_software_pipeline.py",
        f"--mnkl 256,256,256,1 {GEMM} {HALVES}",
    ),
    "persistent GEMM, fp16": (f"{DENSE}/dense_gemm_persistent.py", f"--mnkl 256,256,128,2 {GEMM} {HALVES}"),
    "persistent GEMM, bf16, pairs": (
        f"{DENSE}/dense_gemm_persistent.py",
        f"--mnkl 512,256,128,1 {PAIR} {STORES} --ab_dtype BFloat16 --c_dtype BFloat16",
    ),
    "persistent GEMM, fp8": (
        f"{DENSE}/dense_gemm_persistent.py",
        f"--mnkl 512,256,128,1 {GEMM} --ab_dtype Float8E4M3FN --c_dtype Float16",
    ),
    "persistent GEMM, tf32": (
        f"{DENSE}/dense_gemm_persistent.py",
        f"--mnkl 256,256,128,1 {GEMM} --ab_dtype TFloat32",
    ),
    "persistent GEMM, alpha and beta": (
        f"{DENSE}/dense_gemm_alpha_beta_persistent.py",
        f"--mnkl 256,256,128,1 {GEMM}",
    ),
    "persistent GEMM, prefetch": (
        f"{DENSE}/dense_gemm_persistent_prefetch.py",
        f"--mnkl 256,256,256,1 {GEMM} {HALVES}",
    ),
    "dynamic GEMM (cluster launch control)": (
        f"{DENSE}/dense_gemm_persistent_dynamic.py",
        f"--mnkl 512,256,128,1 {GEMM} {HALVES}",
    ),
    "grouped GEMM": (f"{BLACKWELL}/grouped_gemm/grouped_gemm.py", f"{GROUPS} {GEMM}"),
    "grouped GEMM, maps in global memory, pairs": (
        f"{BLACKWELL}/grouped_gemm/grouped_gemm.py",
        f"{GROUPS} {PAIR} --use_2cta_instrs --tensormap_update_mode GMEM",
    ),
    "blockwise GEMM": (f"{BLACKWELL}/blockwise_gemm/blockwise_gemm.py", f"--mnkl 256,256,256,1 {GEMM}"),
    "blockwise GEMM, contiguous groups": (
        f"{BLACKWELL}/blockwise_gemm/contiguous_grouped_gemm.py",
        f"--mnkl 256,256,256,2 {GEMM}",
    ),
    "blockwise GEMM, masked groups": (
        f"{BLACKWELL}/blockwise_gemm/masked_grouped_gemm.py",
        f"--mnkl 256,256,256,2 {GEMM}",
    ),
    "block-scaled GEMM, nvfp4": (
        f"{SCALED}/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,256,1 {GEMM}",
    ),
    "block-scaled GEMM, nvfp4, pairs": (
        f"{SCALED}/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 512,256,256,1 {PAIR}",
    ),
    "block-scaled GEMM, mxfp8": (
        f"{SCALED}/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,256,1 {GEMM} --a_dtype Float8E4M3FN --b_dtype Float8E5M2"
        " --sf_dtype Float8E8M0FNU --sf_vec_size 32",
    ),
    "block-scaled GEMM, mxfp4": (
        f"{SCALED}/dense_blockscaled_gemm_persistent.py",
        "--mnkl 256,192,256,1 --mma_tiler_mn 128,192 --cluster_shape_mn 1,1"
        " --sf_dtype Float8E8M0FNU --sf_vec_size 32",
    ),
    "block-scaled GEMM, fp8 x fp4": (
        f"{SCALED}/dense_blockscaled_gemm_persistent.py",
        f"--mnkl 256,256,256,1 {GEMM} --a_dtype Float8E4M3FN --sf_dtype Float8E8M0FNU --sf_vec_size 32",
    ),
    "block-scaled GEMM, amax": (
        f"{SCALED}/dense_blockscaled_gemm_persistent_amax.py",
        f"--mnkl 256,256,256,1 {GEMM}",
    ),
    "block-scaled GEMM, prefetch": (
        f"{SCALED}/dense_blockscaled_gemm_persistent_prefetch.py",
        f"--mnkl 256,256,256,1 {GEMM}",
    ),
    "block-scaled grouped GEMM": (
        f"{BLACKWELL}/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py",
        f"{GROUPS} {GEMM}",
    ),
    "mixed-input GEMM, int4 x bf16": (f"{BLACKWELL}/mixed_input_gemm/mixed_input_gemm.py", ""),
    "mixed-input GEMM, int8 x bf16": (
        f"{BLACKWELL}/mixed_input_gemm/mixed_input_gemm.py",
        "--a_dtype Int8 --a_major k --scale_granularity_m 0 --scale_granularity_k 0",
    ),
    "mixed-input grouped GEMM": (f"{BLACKWELL}/mixed_input_gemm/grouped_mixed_input_gemm.py", ""),
    "mixed-input grouped GEMM, scaled sums": (
        f"{BLACKWELL}/mixed_input_gemm/grouped_mixed_input_gemm_acc_scale.py",
        "",
    ),
    "attention forward": (
        f"{ATTENTION}/fmha/fmha.py",
        "--q_shape 1,256,2,64 --k_shape 1,256,2,64 --skip_softmax_threshold 0",
    ),
    "attention forward, causal, head width 128": (
        f"{ATTENTION}/fmha/fmha.py",
        "--q_shape 1,256,2,128 --k_shape 1,256,1,128 --skip_softmax_threshold 0 --is_causal --is_persistent",
    ),
    "attention backward": (f"{ATTENTION}/fmha/fmha_bwd.py", "--s_q 256 --s_k 256 --h_q 2 --h_k 2 --d 64"),
    "attention backward, causal, head width 128": (
        f"{ATTENTION}/fmha/fmha_bwd.py",
        "--s_q 128 --s_k 256 --h_q 2 --h_k 1 --d 128 --is_causal --bottom_right_align",
    ),
    "MLA decode, fp16": (f"{ATTENTION}/mla/mla_decode_fp16.py", "--seq_len_k 256 --page_size 128"),
    "MLA decode, fp8": (f"{ATTENTION}/mla/mla_decode_fp8.py", "--seq_len_k 256 --page_size 128"),
    "mixed-input attention, decode": (f"{ATTENTION}/mixed_input_fmha/mixed_input_fmha_decode.py", ""),
    "mixed-input attention, width 256": (
        f"{ATTENTION}/mixed_input_fmha/mixed_input_fmha_prefill_d256.py",
        "--q_shape 1,2,256,256 --k_shape 1,1,256,256",
    ),
    "mamba2 SSD": (f"{ATTENTION}/mamba2_ssd/mamba2_ssd.py", "--gbehcdln 1,1,2,2,2,64,128,128"),
    "RMSNorm": (f"{BLACKWELL}/rmsnorm/rmsnorm.py", "--M 16 --N 1024"),
    "Hopper dense GEMM": (f"{HOPPER}/dense_gemm/dense_gemm.py", "--mnkl 256,256,128,1"),
    "Hopper persistent GEMM": (f"{HOPPER}/dense_gemm/dense_gemm_persistent.py", "--mnkl 512,256,128,1"),
    "Hopper GEMM, fp8, two accumulators": (
        f"{HOPPER}/dense_gemm/dense_gemm_fp8_2xacc.py",
        "--mnkl 256,256,256,1",
    ),
    "Hopper GEMM, fp8 and GELU": (
        f"{HOPPER}/dense_gemm/dense_gemm_fp8_gelu_persistent.py",
        "--mnkl 256,256,256,1",
    ),
    "Hopper grouped GEMM": (f"{HOPPER}/grouped_gemm/grouped_gemm.py", GROUPS),
    "Hopper attention forward": (f"{HOPPER}/attention/fmha.py", "--q_shape 1,256,2,64 --k_shape 1,256,2,64"),
    "Hopper attention forward, causal": (
        f"{HOPPER}/attention/fmha.py",
        "--q_shape 1,256,2,128 --k_shape 1,256,1,128 --is_causal --is_persistent",
    ),
    "Hopper layer norm": (f"{HOPPER}/cta_norm/cta_norm.py", "--M 8 --N 1024"),
}
"""File and arguments by name."""

PRIMITIVES = {
    "barrier that counts predicates": "barrier_cta_red",
    "named barriers": "barrier_cta_sync",
    "cp.async with mbarriers": "cp_async_mbarrier_arrive_cta",
    "cp.async with mbarriers of a cluster": "cp_async_mbarrier_arrive_cluster",
    "cp.async, swizzled": "cp_async_shared_global_swizzled",
    "sums of a block": "reduction/block_smem_reduce",
    "sums of a cluster": "reduction/cluster_smem_reduce",
    "sums of a cluster, tensor memory": "reduction/cluster_tmem_reduce",
    "redux": "redux_sync",
    "TMA loads and stores": "tma/tma_load_store",
    "TMA and ldmatrix": "tma/tma_load_to_ldmatrix",
    "TMA, swizzles": "tma/tma_swizzle_modes",
    "TMA, multicast": "tma/tma_multicast",
    "TMA, two stages": "tma/tma_pipeline_count2",
    "TMA, two buffers in turn": "tma/tma_pipeline_pingpong",
    "TMA, a warp for it": "tma/tma_pipeline_warpspec",
    "TMA, a pipeline in one warp": "tma/tma_pipeline_single_warp",
    "tcgen05, MN-major": "tcgen05/1cta_mma_mn_major",
    "tcgen05, pipeline": "tcgen05/1cta_mma_pipeline",
    "tcgen05, A in tensor memory": "tcgen05/1cta_mma_a_from_tmem",
    "tcgen05, narrow A in tensor memory": "tcgen05/cp_narrow_a_to_tmem_mma",
    "tcgen05, K in slices": "tcgen05/slicek_m32n8k128",
    "tcgen05, bytes transposed by stmatrix": "tcgen05/tmem_ld_to_stmatrix_transpose",
    "tcgen05, pairs": "tcgen05/2cta_mma_basic",
    "tcgen05, pairs, stores by TMA": "tcgen05/2cta_mma_tma_store",
    "tcgen05, clusters of pairs": "tcgen05/clusterMxN_2cta_mma",
    "tcgen05, multicast": "tcgen05/mcast_clusterMxN_1cta_mma",
    "tcgen05, multicast, clusters of pairs": "tcgen05/mcast_clusterMxN_2cta_mma",
}
"""Small examples of single instructions, by name: their files in experimental/primitives."""
EXAMPLES |= {name: (f"experimental/primitives/{file}.py", "") for name, file in PRIMITIVES.items()}


def cases(checkout: Path) -> list[Case]:
    return [
        Case(
            f"CUTLASS: {name}",
            "sm_90a" if HOPPER in file else "sm_100a",
            partial(run, checkout / ROOT, file, shlex.split(arguments)),
            plain=CONVERSIONS,
        )
        for name, (file, arguments) in EXAMPLES.items()
    ]


def run(root: Path, file: str, arguments: list[str], checks: Checks) -> None:
    """The example's own check decides; its output is kept from the terminal."""
    path, said = root / file, io.StringIO()
    folders = [str(path.parent), str(root / "cute"), str(root)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(sys, "path", [*folders, *sys.path]))
        stack.enter_context(patch.object(sys, "argv", [str(path), *arguments]))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.suppress(SystemExit))
        runpy.run_path(str(path), run_name="__main__")
    if any(words in said.getvalue() for words in VERIFIED):
        checks.errors.append(0.0)
