"""Inputs and outputs of cases as they were on a GPU, in one .npz.xz: what the simulator is compared with."""

from __future__ import annotations

import io
import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.case import Tensors


def saved(name: str, inputs: Tensors, outputs: Tensors) -> dict[str, np.ndarray]:
    """Arrays of one case under names that `load` reads: "<case>/<in|out>/<number>/<torch dtype>"."""
    arrays = {}
    for side, tensors in (("in", inputs), ("out", outputs)):
        for number, tensor in enumerate(tensors):
            kind = str(tensor.dtype).removeprefix("torch.")
            arrays[f"{name}/{side}/{number}/{kind}"] = _numpy(tensor)
    return arrays


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An .npz compressed as a whole: sweeps repeat each other's inputs."""
    plain = io.BytesIO()
    np.savez(plain, **arrays)
    path.write_bytes(lzma.compress(plain.getvalue(), preset=9))


def load(path: Path) -> dict[str, tuple[Tensors, Tensors]]:
    """(inputs, outputs) of each recorded case."""
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        for key in arrays.files:
            name, side, number, kind = key.split("/")
            tensor = torch.from_numpy(arrays[key]).view(getattr(torch, kind))
            found.setdefault(name, {"in": {}, "out": {}})[side][int(number)] = tensor
    return {name: (_ordered(sides["in"]), _ordered(sides["out"])) for name, sides in found.items()}


def _ordered(tensors: dict[int, Tensor]) -> Tensors:
    return tuple(tensors[i] for i in range(len(tensors)))


def _numpy(tensor: Tensor) -> np.ndarray:
    """numpy has no bfloat16 nor 8-bit floats: their bits."""
    tensor = tensor.detach().cpu().contiguous()
    known = not tensor.dtype.is_floating_point or tensor.dtype in (
        torch.float16,
        torch.float32,
        torch.float64,
    )
    return (tensor if known else tensor.view({1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize])).numpy()
