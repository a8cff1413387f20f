"""Case of a test kernel: how to compile it, its inputs, where it writes, and what it should write."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream
from torch import Tensor

from ptxsim import device

Compiled = Any
"""Result of cute.compile: called with the inputs, then the outputs. `__ptx__` is the PTX text."""
Build = Callable[[str], Compiled]
Tensors = tuple[Tensor, ...]
BOTH = ("sm_90a", "sm_100a")


@dataclass(frozen=True)
class Case:
    """One kernel, launched once as `build(arch)(*inputs(), *outputs())`, with tensors on the CPU or a GPU.

    `inputs` makes the same tensors every time. `outputs` are what the kernel writes, or adds to, as they are
    before the launch. `expected(*inputs)` is what they then are once `decoded`: exactly, or within
    `error(*inputs)`, absolute and element by element, where that is not None. Any NaN is as good as another.
    `labels` name the outputs.
    """

    name: str
    archs: tuple[str, ...]
    build: Build
    inputs: Callable[[], Tensors]
    outputs: Callable[[], Tensors]
    expected: Callable[..., Tensors]
    error: Callable[..., tuple[Tensor | None, ...]] | None = None
    decoded: Callable[[Tensors], Tensors] = lambda outputs: outputs
    labels: tuple[str, ...] = ()

    def check(self, inputs: Tensors, outputs: Tensors) -> None:
        """Raises AssertionError, with the first wrong elements, unless outputs are what they should be."""
        wants, got = self.expected(*inputs), self.decoded(outputs)
        errors = (None,) * len(wants) if self.error is None else self.error(*inputs)
        labels = self.labels or tuple(f"output {i}" for i in range(len(wants)))
        found = [difference(*each) for each in zip(wants, got, errors, strict=True)]
        wrong = [f"{self.name}, {label}: {what}" for label, what in zip(labels, found, strict=True) if what]
        assert not wrong, "\n".join(wrong)


@functools.cache
def built(case: Case, arch: str) -> Compiled:
    """The kernel for simulated GPUs of `arch`, which tests of several files launch."""
    with device(arch):
        return case.build(arch)


def difference(want: Tensor, got: Tensor, error: Tensor | None) -> str:
    """Message with the first wrong elements; empty if nothing is wrong."""
    if want.shape != got.shape:
        return f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    good = same(want, got)
    if error is not None:
        good |= (want - got).abs() <= error
    places = (~good).nonzero()[:4].tolist()
    if not places:
        return ""
    shown = [f"{place}: {got[tuple(place)].item()!r} for {want[tuple(place)].item()!r}" for place in places]
    return f"{int((~good).sum())} of {want.numel()} wrong, the first at {'; '.join(shown)}"


def same(want: Tensor, got: Tensor) -> Tensor:
    """True where two tensors are equal, sign of zero included; all NaNs are."""
    if not want.is_floating_point():
        return want == got
    return ((want == got) & (want.signbit() == got.signbit())) | (want.isnan() & got.isnan())


def compile_for(arch: str, function: Any, *arguments: Any) -> Compiled:
    """The host function compiled for `arch`, which a GPU is not needed for. Its last argument is a stream,
    which callers of the result leave out."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --dump-dir={folder}"
        compiled = cute.compile(function, *arguments, stream, options=options)
        assert "\n" in compiled.__ptx__, "the PTX text, not its path"
    return compiled


def generator(seed: int) -> torch.Generator:
    """Random numbers that do not depend on the run."""
    return torch.Generator().manual_seed(seed)
