"""A machine whose GPU is simulated: code that asks for CUDA tensors gets CPU tensors.

Within `machine`, tensors asked for on "cuda" are made on the CPU at addresses that TMA takes, copies to and
from the GPU are copies, and products of float32 and of smaller types are made in float64: the references
that examples compute for themselves.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from fa4flex.simulator.doors.device import Gpu, device
from fa4flex.simulator.doors.tensors import aligned

PRODUCTS = {torch.einsum, torch.matmul, torch.bmm, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__}
"""Functions that references are made of."""


class OnCpu(TorchFunctionMode):
    """Calls that name CUDA devices use the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.device and str(args[0]).startswith("cuda"):
            return torch.device("cpu")
        if function in (torch.Tensor.cuda, torch.Tensor.cpu):
            return aligned(args[0].clone())
        copies = function is torch.Tensor.to and any(map(_on_cuda, (*args[1:], kwargs.get("device"))))
        args = tuple(torch.device("cpu") if _on_cuda(arg) else arg for arg in args)
        kwargs = {name: torch.device("cpu") if _on_cuda(arg) else arg for name, arg in kwargs.items()}
        kwargs.pop("pin_memory", None)
        if copies:
            kwargs["copy"] = True
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
    if result.requires_grad or result.is_sparse or not result.numel():
        return False
    given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    return result.untyped_storage().data_ptr() not in given


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
"""Numbers of e2m1 by their code."""


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


def _in_double(function: Any, args: Any, kwargs: Any) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not tensors or not all(arg.is_floating_point() for arg in tensors):
        return function(*args, **kwargs)
    wide = tuple(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args)
    return function(*wide, **kwargs).to(tensors[0].dtype)


@contextlib.contextmanager
def machine(arch: str, timing: str, seed: int, sms: int) -> Iterator[Gpu]:
    """A simulated GPU of `arch`, and torch's functions answering as if it were there."""
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(device(arch, seed, timing, sms))
        for owner, name, value in _answers():
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(OnCpu())
        yield gpu


def _answers() -> Iterator[tuple[Any, str, Any]]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    yield torch.Tensor, "is_cuda", True
    yield torch.cuda, "is_available", lambda: True
    yield torch.cuda, "device_count", lambda: 1
    yield torch.cuda, "manual_seed", nothing
    yield torch.cuda, "manual_seed_all", nothing
    yield torch.cuda, "empty_cache", nothing
    yield torch.cuda, "set_device", nothing
    event = SimpleNamespace(record=nothing, synchronize=nothing, elapsed_time=lambda _: 1.0)
    yield torch.cuda, "Event", lambda *args, **kwargs: event
    yield torch.cuda, "Stream", lambda *args, **kwargs: torch.cuda.current_stream()
    yield torch.cuda, "stream", lambda stream: contextlib.nullcontext()
    for name in ("cutlass.cute.testing", "cutlass.testing"):
        with contextlib.suppress(ImportError):
            yield importlib.import_module(name), "benchmark", lambda *args, **kwargs: 1.0
