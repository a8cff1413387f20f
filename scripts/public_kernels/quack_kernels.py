"""Kernels of quack-kernels by its Python functions, against float64."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from kernel_case import Case, Checks
from torch import Tensor

BOUND = 2**-8
CHIPS = {"sm_90a": "Hopper", "sm_100a": "Blackwell"}


MODULES = ("gemm_interface", "blockscaled", "rmsnorm", "softmax", "cross_entropy", "topk", "rotary")
MODULES += ("transform.hadamard",)


def cases() -> list[Case]:
    found = []
    for arch, chip in CHIPS.items():
        for name, run in {**GEMMS, **(SCALED if arch == "sm_100a" else {}), **REDUCTIONS}.items():
            in_order = arch == "sm_100a" and run in CANCELLING
            found.append(Case(f"quack, {chip}: {name}", arch, run, in_order=in_order))
    return found


def load() -> None:
    """Import quack once, for all processes. Its operators, which are registered for CUDA tensors alone, take
    those of the CPU as well, and nothing goes through torch.compile."""
    torch._dynamo.config.disable = True
    original = torch.library.custom_op

    def custom_op(*args: Any, device_types: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    with patch.object(torch.library, "custom_op", custom_op):
        for module in MODULES:
            quack(module)


def quack(module: str) -> Any:
    return importlib.import_module(f"quack.{module}")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(dtype).to("cuda")


# --- products -----------------------------------------------------------------------------------------------


def gemm(dtype: torch.dtype, batch: int, checks: Checks) -> None:
    lead = (batch,) if batch else ()
    a, b = normal(*lead, 256, 128, dtype=dtype), normal(*lead, 256, 128, dtype=dtype).mT
    out = quack("gemm_interface").gemm(a, b, tuned=False)
    checks.compare(out, a.double() @ b.double(), BOUND)


def gemm_of_groups(checks: Checks) -> None:
    """Rows of A in three groups, each with a B of its own."""
    ends = [0, 100, 164, 300]
    a, b = normal(300, 128), normal(3, 256, 128).mT
    cu_seqlens = torch.tensor(ends, dtype=torch.int32).to("cuda")
    out = quack("gemm_interface").gemm(a, b, cu_seqlens_m=cu_seqlens, tuned=False)
    for i, group in enumerate(b.double()):
        checks.compare(out[ends[i] : ends[i + 1]], a[ends[i] : ends[i + 1]].double() @ group, BOUND)


def gemm_gathered(checks: Checks) -> None:
    """Rows of A in two groups, by index."""
    ends, index = [0, 130, 260], torch.randperm(400)[:260]
    a, b = normal(400, 128), normal(2, 256, 128).mT
    cu_seqlens, rows = torch.tensor(ends, dtype=torch.int32).to("cuda"), index.int().to("cuda")
    out = quack("gemm_interface").gemm(a, b, cu_seqlens_m=cu_seqlens, A_idx=rows, tuned=False)
    for i, group in enumerate(b.double()):
        mine = slice(ends[i], ends[i + 1])
        checks.compare(out[mine], a[index[mine]].double() @ group, BOUND)


def gemm_add(checks: Checks) -> None:
    a, b, c = normal(256, 128), normal(192, 128).mT, normal(256, 192)
    out = quack("gemm_interface").gemm_add(a, b, c, alpha=0.5, beta=2.0, tuned=False)
    checks.compare(out, 0.5 * (a.double() @ b.double()) + 2 * c.double(), BOUND)


def gemm_act(checks: Checks) -> None:
    a, b = normal(256, 128), normal(192, 128, scale=0.1).mT
    before, after = quack("gemm_interface").gemm_act(a, b, activation="gelu_tanh_approx", tuned=False)
    product = a.double() @ b.double()
    checks.compare(before, product, BOUND)
    checks.compare(after, F.gelu(product, approximate="tanh"), BOUND)


def gemm_gated(checks: Checks) -> None:
    a, b = normal(256, 128), normal(384, 128, scale=0.1).mT
    before, after = quack("gemm_interface").gemm_act(a, b, activation="swiglu", tuned=False)
    product = a.double() @ b.double()
    checks.compare(before, product, BOUND)
    checks.compare(after, F.silu(product[:, 0::2]) * product[:, 1::2], 2 * BOUND)


def gemm_symmetric(checks: Checks) -> None:
    a = normal(256, 128)
    out = quack("gemm_interface").gemm_symmetric(a, a.mT)
    checks.compare(out, a.double() @ a.double().mT, BOUND)


def gemm_scaled(name: str, checks: Checks) -> None:
    operand = quack("blockscaled").BlockScaledOperand
    left, right = (operand.quantize(normal(256, 256), name) for _ in range(2))
    out = quack("gemm_interface").gemm(left, right.mT, tuned=False)
    checks.compare(out, left.dequantize().double() @ right.dequantize().double().mT, BOUND)


GEMMS = {
    "GEMM, bf16": partial(gemm, torch.bfloat16, 0),
    "GEMM, fp16, batches": partial(gemm, torch.float16, 2),
    "GEMM, groups of rows": gemm_of_groups,
    "GEMM, groups of gathered rows": gemm_gathered,
    "GEMM + C": gemm_add,
    "GEMM, GELU": gemm_act,
    "GEMM, SwiGLU": gemm_gated,
    "GEMM, symmetric": gemm_symmetric,
}
CANCELLING = (gemm_of_groups, gemm_gathered)
"""Kernels that give up when a cluster that they cancelled has no work: those after it would have none either.
quack says so, and that chips were never seen to cancel in another order."""
SCALED = {
    f"GEMM, {name}": partial(gemm_scaled, name) for name in ("nvfp4", "mxfp8", "mxfp4", "mxfp6_e2m3_packed")
}


# --- reductions ---------------------------------------------------------------------------------------------


def rmsnorm(checks: Checks) -> None:
    x, weight, gradient = normal(16, 1024), normal(1024, dtype=torch.float32), normal(16, 1024)
    module = quack("rmsnorm")
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    with torch.enable_grad():
        expected = F.rms_norm(x64, (1024,), w64, 1e-6)
        expected.backward(gradient.double())
    out, _, rstd = module.rmsnorm_fwd(x, weight, store_rstd=True)
    checks.compare(out, expected, BOUND)
    dx, dw, *_ = module.rmsnorm_bwd(x, weight, gradient, rstd)
    checks.compare(dx, x64.grad, BOUND)
    checks.compare(dw, w64.grad, BOUND)


def layernorm(checks: Checks) -> None:
    x, weight, bias = normal(16, 1024), normal(1024, dtype=torch.float32), normal(1024, dtype=torch.float32)
    out = quack("rmsnorm").layernorm_fwd(x, weight, bias)
    checks.compare(out, F.layer_norm(x.double(), (1024,), weight.double(), bias.double(), 1e-6), BOUND)


def softmax(checks: Checks) -> None:
    x, gradient = normal(16, 1024), normal(16, 1024)
    module, x64 = quack("softmax"), x.double().requires_grad_()
    with torch.enable_grad():
        expected = x64.softmax(-1)
    out = module.softmax_fwd(x)
    checks.compare(out, expected, BOUND)
    rounded = out.double()
    inner = (rounded * gradient.double()).sum(-1, keepdim=True)
    checks.compare(module.softmax_bwd(gradient, out), rounded * (gradient.double() - inner), BOUND)


def softmax_of_clusters(checks: Checks) -> None:
    """Rows so long that clusters share them."""
    x = normal(4, 65536)
    checks.compare(quack("softmax").softmax_fwd(x), x.double().softmax(-1), BOUND)


def cross_entropy(checks: Checks) -> None:
    x, target = normal(16, 4096), torch.randint(0, 4096, (16,)).to("cuda")
    module, x64 = quack("cross_entropy"), x.double().requires_grad_()
    with torch.enable_grad():
        expected = F.cross_entropy(x64, target, reduction="none")
        expected.sum().backward()
    loss, lse = module.cross_entropy_fwd(x, target, return_lse=True)[:2]
    checks.compare(loss, expected, 1e-5)
    dx = module.cross_entropy_bwd(x, target, torch.ones(16).to("cuda"), lse)
    checks.compare(dx, x64.grad, BOUND)


def topk(checks: Checks) -> None:
    """Values come without their last bits, where the kernel keeps their places while it sorts."""
    x = normal(16, 1024, dtype=torch.float32)
    values, indices = quack("topk").topk_fwd(x, 16)
    expected = x.double().topk(16)
    checks.compare(values, expected.values, 2**-12)
    checks.compare(x.gather(1, indices.long()), expected.values, 1e-6)


def rotary(checks: Checks) -> None:
    x, cos, sin = normal(2, 64, 4, 128), normal(64, 64), normal(64, 64)
    out = quack("rotary").apply_rotary_emb(x, cos, sin)
    low, high = x.double().chunk(2, -1)
    c, s = (y.double()[None, :, None] for y in (cos, sin))
    checks.compare(out, torch.cat((low * c - high * s, low * s + high * c), -1), BOUND)


REDUCTIONS = {
    "RMSNorm, both passes": rmsnorm,
    "layer norm": layernorm,
    "softmax, both passes": softmax,
    "softmax, rows shared by clusters": softmax_of_clusters,
    "cross entropy, both passes": cross_entropy,
    "top 16": topk,
    "rotary embedding": rotary,
}
