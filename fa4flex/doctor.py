"""Facts that a report of a problem needs beside versions: GPUs, kernel cache, variables, and a self-check."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import fa4flex
from fa4flex import check
from fa4flex.bench.environment import environment
from fa4flex.bench.suites import MOST_ERROR
from fa4flex.compiler import cache
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.flex.choice import choose
from fa4flex.variants import alibi, sliding_window
from fa4flex.view.backend import in_words

VARIABLES = (
    "FA4FLEX_CACHE", "FA4FLEX_CACHE_DIR", "FA4FLEX_DEBUG", "FA4FLEX_LAYERS", "FA4FLEX_VALIDATE",
    "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "PYTORCH_CUDA_ALLOC_CONF", "CUTE_DSL_ARCH", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
)  # fmt: skip
"""Variables that change what runs. No others are printed: they may hold what nobody should read."""

LENGTH, HEADS, HEAD_DIM, WINDOW = 256, 2, 64, 100


def devices() -> list[str]:
    """One line per device: what runs there and why, and the driver of NVIDIA GPUs."""
    lines = [f"CPU           {_backend(torch.device('cpu'))}"]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        driver = environment(device).get("driver_version", "unknown")
        lines.append(f"GPU           driver {driver}, CUDA {torch.version.cuda} in torch: {_backend(device)}")
    if torch.xpu.is_available():
        lines.append(f"XPU           {_backend(torch.device('xpu'))}")
    if not torch.accelerator.is_available():
        lines.append("GPU           none visible; kernels for sm_90a and sm_100a compile here, simulated")
    return [*lines, 'any device    torch\'s flex_attention, by fa4flex.compile(..., backend="flex")']


def _backend(device: torch.device) -> str:
    return in_words(choose("auto", device))


def kept_kernels() -> str:
    """Directory of the kernel cache, and number and size of its files; or the reason why it is not used."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = cache.directory()
    if folder is None:
        return str(caught[0].message) if caught else "turned off by FA4FLEX_CACHE; kernels are compiled anew"
    sizes = [path.stat().st_size for path in folder.iterdir() if path.suffix in cache.SUFFIXES]
    return f"{folder}: {len(sizes)} of at most {cache.MOST_ENTRIES} kernels, {sum(sizes) / 1e6:.1f} MB"


def variables() -> list[str]:
    """NAME=value of the variables that are set and change what runs."""
    return [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]


def self_checks() -> list[tuple[str, Callable[[], bool | str]]]:
    """Name of each check, and a function that returns True or what is wrong, or raises."""
    results: list[tuple[str, Callable[[], bool | str]]] = [("CPU, float32", on_cpu), ("compiler", compiles)]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return results + [(f"{device}, bfloat16", lambda device=device: in_16_bits(device)) for device in devices]


def run_self_checks() -> bool:
    """Run and print all checks; True if none failed. What is refused in words did not fail; any other error
    did, and is printed."""
    results = [_verdict(name, function) for name, function in self_checks()]
    return all(results)


def _verdict(name: str, function: Callable[[], bool | str]) -> bool:
    started = time.perf_counter()
    try:
        result = function()
    except UnsupportedError as error:
        print(f"self-check    {name}: not run: {error}")
        return True
    except Exception as error:  # a broken installation may raise anything
        result = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    print(f"self-check    {name}: {f'ok in {seconds:.1f} s' if result is True else f'FAILED: {result}'}")
    return result is True


def on_cpu() -> bool | str:
    """ALiBi in a window in float32, both passes, against the float64 formula."""
    report = check.check(fa4flex.compile(score_mod=alibi, mask=sliding_window(WINDOW)), LENGTH)
    return report.passed or "; ".join(str(each) for each in report.comparisons if not each.passed)


def compiles() -> bool | str:
    """A forward kernel is compiled, for the GPU at hand or for sm_90a; nothing is launched."""
    ptx = fa4flex.compile(mask=sliding_window(WINDOW)).source("ptx", head_dim=HEAD_DIM)
    return ".entry" in ptx or "the compiler wrote no kernel"


def in_16_bits(device: torch.device) -> bool | str:
    """ALiBi in a window in bfloat16 on `device`, both passes: errors against float64 are at most MOST_ERROR
    times those of the same maths by PyTorch operations in bfloat16."""
    made = torch.Generator().manual_seed(0)
    shape = (1, HEADS, LENGTH, HEAD_DIM)
    *qkv, d_out = (torch.randn(shape, generator=made).to(device, torch.bfloat16) for _ in range(4))
    attn = fa4flex.compile(score_mod=alibi, mask=sliding_window(WINDOW))
    ours = _results(attn, qkv, d_out)
    exact = _results(_formula, [x.double() for x in qkv], d_out.double())
    plain = _results(_formula, qkv, d_out)
    wrong = []
    for name, result, right, rounded in zip(("out", "dq", "dk", "dv"), ours, exact, plain):
        error, usual = ((x.double() - right).abs().max().item() for x in (result, rounded))
        if not error <= MOST_ERROR * usual:  # NaN fails
            wrong.append(f"{name} is off by {error:.1e}, PyTorch's operations by {usual:.1e}")
    return not wrong or "; ".join(wrong)


def _results(function: Callable[..., Tensor], qkv: list[Tensor], d_out: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def _formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The dense formula in the dtype of its inputs."""
    heads = torch.arange(1, HEADS + 1, device=q.device)
    distance = torch.arange(LENGTH, device=q.device) - torch.arange(LENGTH, device=q.device)[:, None]
    bias = (2.0 ** (-8 * heads / HEADS)).view(-1, 1, 1) * distance
    hidden = (distance > 0) | (distance <= -WINDOW)
    scores = (q @ k.mT / HEAD_DIM**0.5 + bias.to(q.dtype)).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v
