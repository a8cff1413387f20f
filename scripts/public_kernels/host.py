"""A machine whose GPU is simulated: code that asks for CUDA tensors gets CPU tensors.

Within `machine`, tensors asked for on "cuda" are made on the CPU at addresses that TMA takes, copies to and
from the GPU are copies, and products of floating-point numbers, of which examples make their references, are
made in float64.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from timings import Runner
from torch.overrides import TorchFunctionMode

from ptxsim.active import simulated
from ptxsim.doors.capture import capturing
from ptxsim.doors.tensors import aligned

PRODUCTS = {torch.einsum, torch.matmul, torch.bmm, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
"""Numbers of e2m1 by their code."""


@contextlib.contextmanager
def machine(runner: Runner, sms: int) -> Iterator[None]:
    """A simulated GPU whose launches `runner` executes; torch's functions answer as if it were there."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(capturing(runner.arch, runner.run, sms))
        stack.enter_context(simulated(runner.arch))
        for owner, name, value in _answers():
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(OnCpu())
        yield


def _answers() -> Iterator[tuple[Any, str, Any]]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    yield torch.Tensor, "is_cuda", True
    yield torch.cuda, "is_available", lambda: True
    yield torch.cuda, "device_count", lambda: 1
    for name in ("manual_seed", "manual_seed_all", "empty_cache", "set_device"):
        yield torch.cuda, name, nothing
    event = SimpleNamespace(record=nothing, synchronize=nothing, elapsed_time=lambda _: 1.0)
    yield torch.cuda, "Event", lambda *args, **kwargs: event
    yield torch.cuda, "Stream", lambda *args, **kwargs: torch.cuda.current_stream()
    yield torch.cuda, "stream", lambda stream: contextlib.nullcontext()
    yield torch.cuda, "device", lambda index: contextlib.nullcontext()
    for name in ("cutlass.cute.testing", "cutlass.testing"):
        yield importlib.import_module(name), "benchmark", _benchmark


def _benchmark(function: Any, *, kernel_arguments: Any = None, **_: Any) -> float:
    """Nothing is timed; an example that launches here alone, with arguments of its own, launches once."""
    if kernel_arguments is not None:
        function(*kernel_arguments.args, **kernel_arguments.kwargs)
    return 1.0


class OnCpu(TorchFunctionMode):
    """Calls that name CUDA devices use the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.cpu):
            return aligned(args[0].clone())
        named = [*args[1:], kwargs.get("device")]
        if function is torch.Tensor.to and any(map(_on_cuda, named)):
            kwargs["copy"] = True
        args = tuple(torch.device("cpu") if _on_cuda(arg) else arg for arg in args)
        kwargs = {name: torch.device("cpu") if _on_cuda(arg) else arg for name, arg in kwargs.items()}
        kwargs.pop("pin_memory", None)
        if function in PRODUCTS:
            return _in_double(function, args, kwargs)
        if function is torch._scaled_mm:
            return scaled_product(*args, **kwargs)
        result = function(*args, **kwargs)
        return aligned(result) if isinstance(result, torch.Tensor) and _fresh(result, args) else result


def _on_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _fresh(result: torch.Tensor, args: Any) -> bool:
    """True if a function returned memory of its own: no view, and nothing that autograd knows."""
    if type(result) is not torch.Tensor or result.requires_grad or not result.numel():
        return False
    if result.is_sparse or result.device.type != "cpu":
        return False
    given = {arg.untyped_storage().data_ptr() for arg in args if type(arg) is torch.Tensor}
    return result.untyped_storage().data_ptr() not in given


# --- references in float64 ----------------------------------------------------------------------------------


def _in_double(function: Any, args: Any, kwargs: Any) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not tensors or not all(arg.is_floating_point() for arg in tensors):
        return function(*args, **kwargs)
    wide = tuple(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args)
    return function(*wide, **kwargs).to(tensors[0].dtype)


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> torch.Tensor:
    """torch._scaled_mm with block scaling, in float64: factors lie in tiles of 128 rows by 4 blocks."""
    assert bias is None
    left, right = unscaled(a) * blocks(scale_a, a.shape[0]), unscaled(b.T) * blocks(scale_b, b.shape[1])
    return (left @ right.T).to(out_dtype)


def unscaled(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of e4m3, e5m2 or pairs of e2m1, in float64."""
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return matrix.double()
    pairs = matrix.contiguous().view(torch.uint8).long()
    return FP4[torch.stack((pairs & 15, pairs >> 4), dim=-1)].flatten(1)


def blocks(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Factors of every element, [rows, K]: each counts for 16 where it is e4m3, else for 32."""
    size = 16 if scales.dtype == torch.float8_e4m3fn else 32
    width = scales.numel() // (-(-rows // 128) * 128)
    row, block = torch.arange(rows)[:, None], torch.arange(width)[None]
    tile = (row // 128) * (width // 4) + block // 4
    place = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    return scales.flatten().float().double()[place].repeat_interleave(size, dim=1)
