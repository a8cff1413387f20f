"""CPU tensors where compiled code expects CUDA tensors: their addresses serve as global memory.

CuTe DSL gives tensors of the CPU another address space, and with it other code. So they are made to look
like CUDA tensors where it reads their device: in the DLPack capsule that it makes a tensor from, and in the
check of device types that compiled code does at each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

CPU, CUDA = 1, 2
"""DLDeviceType"""

_DEVICE_AT = {b"dltensor": 8, b"dltensor_versioned": 40}
"""Offset of DLTensor.device.device_type in what a capsule points to, by the capsule's name: DLManagedTensor
begins with the DLTensor, DLManagedTensorVersioned has it at 32."""

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class OnDevice:
    """A CPU tensor that says that it lies on CUDA device 0."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()  # without a stream, which CPU tensors do not have
        name = _capsule_name(capsule)
        address = _capsule_pointer(capsule, name) + _DEVICE_AT[name]
        ctypes.c_int32.from_address(address).value = CUDA
        return capsule


def on_device(tensor: Any) -> Any:
    """The tensor, as one of CUDA device 0 if it is one of the CPU."""
    device = getattr(tensor, "__dlpack_device__", None)
    if device is None or not hasattr(tensor, "__dlpack__") or device()[0] != CPU:
        return tensor
    return OnDevice(tensor)


def taking_cpu_tensors(init: Callable[..., None]) -> Callable[..., None]:
    """cutlass.cute.runtime._Tensor.__init__, for tensors of the CPU as for those of a GPU."""

    def __init__(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        init(self, on_device(tensor), *args, **kwargs)

    return __init__


class DeviceCheck:
    """Replaces two methods of TVMFFIFunctionBuilder, so that code which expects a CUDA tensor takes a CPU
    tensor for one. Parameters that are meant to lie in host memory are checked as always."""

    def __init__(self, decode: Callable[..., Any], load: Callable[..., Any]) -> None:
        self._decode, self._load = decode, load
        self._expected = CPU

    def methods(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """decode_param_tensor and load_dltensor_device_type."""

        def decode(builder: Any, block: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
            self._expected = int(param.dlpack_device_type)
            return self._decode(builder, block, param, *args, **kwargs)

        def load(builder: Any, tensor: Any) -> Any:
            from cutlass._mlir.dialects import llvm

            found = self._load(builder, tensor)
            if self._expected != CUDA:
                return found
            return llvm.select(builder.equal(found, builder.i32(CPU)), builder.i32(CUDA), found)

        return decode, load


ALIGNMENT = 128
"""Bytes; torch gives CPU tensors 64, GPUs at least 256. Kernels keep tensor maps in tensors, at multiples of
128."""


def aligned(tensor: torch.Tensor, to: int = ALIGNMENT) -> torch.Tensor:
    """The tensor, moved to memory of its own at a multiple of `to` bytes unless it lies at one.

    Shape, strides and numbers stay; other tensors that shared its memory do not follow.
    """
    if tensor.data_ptr() % to == 0:
        return tensor
    size = tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    memory = torch.empty(extent * size + to, dtype=torch.uint8)
    start = -memory.data_ptr() % to
    moved = memory[start : start + extent * size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    tensor.data = moved.copy_(tensor.detach())
    return tensor
