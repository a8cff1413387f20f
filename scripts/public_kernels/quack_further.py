"""Kernels of quack-kernels beyond its plain products and reductions: gradients of activations, split sums,
results of 8 bits, normalised products, Hadamard transforms, against float64."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from kernel_case import Case, Checks
from quack_kernels import BOUND, CHIPS, normal, quack


def cases() -> list[Case]:
    return [
        Case(f"quack, {chip}: {name}", arch, run)
        for arch, chip in CHIPS.items()
        for name, run in {**FURTHER, **(BLACKWELL if arch == "sm_100a" else {})}.items()
    ]


def gemm_gradient(activation: str, checks: Checks) -> None:
    """The product is what comes back to an activation."""
    gated = activation == "swiglu"
    a, b, before = normal(256, 128), normal(192, 128, scale=0.1).mT, normal(256, 192 * (1 + gated))
    dx, after = quack("gemm_interface").gemm_dact(a, b, before, activation=activation, tuned=False)
    x = before.double().requires_grad_()
    with torch.enable_grad():
        expected = F.silu(x[:, 0::2]) * x[:, 1::2] if gated else F.gelu(x, approximate="tanh")
        expected.backward(a.double() @ b.double())
    checks.compare(after, expected, 2 * BOUND)
    checks.compare(dx, x.grad, 2 * BOUND)


def gemm_split(mode: str, checks: Checks) -> None:
    a, b = normal(128, 1024), normal(192, 1024).mT
    module = quack("gemm_interface")
    out = module.gemm(a, b, tuned=False, split_k=2, split_k_mode=module.SplitKMode[mode])
    checks.compare(out, a.double() @ b.double(), BOUND)


def gemm_bias(checks: Checks) -> None:
    a, b, bias = normal(200, 128), normal(192, 128).mT, normal(192, dtype=torch.float32)
    out = quack("gemm_interface").gemm(a, b, bias=bias, alpha=0.5, tuned=False)
    checks.compare(out, 0.5 * (a.double() @ b.double()) + bias.double(), BOUND)


def gemm_of_depths(checks: Checks) -> None:
    """Products of three groups of columns of A and rows of B."""
    ends = [0, 64, 192, 320]
    a, b = normal(320, 256).mT, normal(320, 192)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32).to("cuda")
    out = quack("gemm_interface").gemm(a, b, cu_seqlens_k=cu_seqlens, tuned=False)
    for i, found in enumerate(out):
        mine = slice(ends[i], ends[i + 1])
        checks.compare(found, a[:, mine].double() @ b[mine].double(), BOUND)


def gemm_statistics(checks: Checks) -> None:
    """A product, and what RMSNorm divides its rows by."""
    a, b, weight = normal(256, 128), normal(256, 128).mT, normal(256, dtype=torch.float32)
    out, rstd = quack("gemm_interface").gemm_rms(a, b, norm_weight=weight, tuned=False)
    product = a.double() @ b.double()
    checks.compare(out, product * weight.double(), BOUND)
    checks.compare(rstd, (product.square().mean(-1) + 1e-6).rsqrt(), BOUND)


def gemm_normalised(checks: Checks) -> None:
    a, b, rstd = normal(256, 128), normal(192, 128).mT, normal(256, dtype=torch.float32).abs() / 10
    _, out = quack("gemm_interface").gemm_norm_act(a, b, rstd, activation="gelu_tanh_approx", tuned=False)
    expected = F.gelu((a.double() @ b.double()) * rstd.double()[:, None], approximate="tanh")
    checks.compare(out, expected, 2 * BOUND)


def rmsnorm_of_sums(checks: Checks) -> None:
    """The norm of what is added to a residual, which is kept."""
    x, residual, weight = normal(16, 1024), normal(16, 1024), normal(1024, dtype=torch.float32)
    out, kept, _ = quack("rmsnorm").rmsnorm_fwd(x, weight, residual=residual)
    total = x.double() + residual.double()
    checks.compare(kept, total, BOUND)
    checks.compare(out, F.rms_norm(total, (1024,), weight.double(), 1e-6), BOUND)


def hadamard(width: int, checks: Checks) -> None:
    x = normal(16, width)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    out = quack("transform.hadamard").hadamard_transform(x, scale=width**-0.5)
    checks.compare(out, x.double() @ matrix * width**-0.5, BOUND)


def gemm_rounded_at_random(checks: Checks) -> None:
    """Results are rounded up or down by chance."""
    a, b = normal(256, 128), normal(256, 128).mT
    module = quack("gemm_interface")
    out = module.gemm(a, b, tuned=False, rounding_mode=module.RoundingMode.RS, sr_seed=7)
    checks.compare(out, a.double() @ b.double(), 2 * BOUND)


def gemm_of_8_bits(checks: Checks) -> None:
    """Results are 8-bit numbers with a scale for each 32 of them."""
    a, b = normal(256, 128), normal(256, 128).mT
    out = quack("gemm_interface").gemm(a, b, out_dtype="mxfp8", tuned=False)
    checks.compare(out.dequantize(), a.double() @ b.double(), 2**-4)


FURTHER = {
    "GEMM, gradient of GELU": partial(gemm_gradient, "gelu_tanh_approx"),
    "GEMM, gradient of SwiGLU": partial(gemm_gradient, "swiglu"),
    "GEMM, split sums, serial": partial(gemm_split, "SERIAL"),
    "GEMM, split sums, parallel": partial(gemm_split, "PARALLEL"),
    "GEMM, bias": gemm_bias,
    "GEMM, groups of depths": gemm_of_depths,
    "GEMM, statistics of RMSNorm": gemm_statistics,
    "GEMM, normalised, GELU": gemm_normalised,
    "RMSNorm of sums": rmsnorm_of_sums,
    "Hadamard transform": partial(hadamard, 1024),
}
BLACKWELL = {
    "GEMM, rounded at random": gemm_rounded_at_random,
    "GEMM, results of 8 bits": gemm_of_8_bits,
}
