"""Names of kernels, as profilers show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4flex.codegen.plan.problem import Problem

KERNELS = "fa4flex.kernels."
LETTERS = 8
"""Letters of a source's key that tell variants of one look apart."""


def kernel_name(module: str, problem: Problem, key: str) -> str:
    """Name of the kernel of a source with this key, whose hand-written part is in the package `module`:
    pipeline, dtype, widths, lengths, mask form and the first letters of the key, such as
    fa4flex_fwd_sm90_bfloat16_d128_dense_spans_1f2e3d4c."""
    pipeline = module.removeprefix(KERNELS).replace(".", "_")
    widths = dict.fromkeys((problem.head_dim, problem.head_dim_v))
    width = "d" + "_".join(map(str, widths))
    mask = {"none": "unmasked"}.get(problem.mask_form, problem.mask_form)
    parts = ("fa4flex", pipeline, problem.dtype, width, problem.lengths, mask, key[:LETTERS])
    return "_".join(parts)


def set_kernel_name(kernel: Any, problem: Problem, key: str) -> None:
    """Name what is compiled next: all kernel objects of a class share their device function."""
    own = type(kernel)
    name = kernel_name(own.__module__.removesuffix(".kernel"), problem, key)
    own.device.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
