"""The simulator against a Hopper GPU: what the small kernels wrote there, from the same inputs.

`silicon_sm90.npz.xz` was written by scripts/record_silicon.py. Results are equal, but for numbers of which
the PTX ISA only bounds the error: sums of tensor cores, approximations, and which NaN it is. A run takes a
random sample; `-m exhaustive` takes every case.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

from kernels import gemm_sm90, small
from kernels.case import Case, Tensors, built, difference
from kernels.recording import load

from ptxsim import device

ARCH = "sm_90a"
RECORD = Path(__file__).parent / "silicon_sm90.npz.xz"
SAMPLE = 25
CASES = {case.name: case for case in (*gemm_sm90.CASES, *small.CASES) if ARCH in case.archs}


@cache
def recorded() -> dict[str, tuple[Tensors, Tensors]]:
    return load(RECORD)


def simulated(case: Case, inputs: Tensors, seed: int) -> Tensors:
    given, outputs = case.inputs(), case.outputs()  # strided as the kernel is compiled for
    for target, source in zip(given, inputs, strict=True):
        target.copy_(source)
    kernel = built(case, ARCH)
    with device(ARCH, seed=seed, timing="random") as gpu:
        kernel(*given, *outputs)
    assert not gpu.findings, gpu.findings[0]
    return outputs


def compare(case: Case, inputs: Tensors, silicon: Tensors, ours: Tensors) -> None:
    """Raises AssertionError unless both are what the ISA allows, and equal where that is one number; else
    they are no further from each other than the case's error."""
    case.check(inputs, silicon)
    case.check(inputs, ours)
    found = zip(case.decoded(silicon), case.decoded(ours), strict=True)
    errors = [None] * len(case.decoded(ours)) if case.error is None else case.error(*inputs)
    for number, ((want, got), error) in enumerate(zip(found, errors, strict=True)):
        wrong = difference(want, got, error)
        assert not wrong, f"{case.name}, {case.labels[number] if case.labels else number}: {wrong}"


def check(name: str, seed: int) -> None:
    inputs, silicon = recorded()[name]
    compare(CASES[name], inputs, silicon, simulated(CASES[name], inputs, seed))


def test_a_sample(seed: int) -> None:
    wrong = []
    for name in random.sample(sorted(recorded()), SAMPLE):
        print(name)
        try:
            check(name, seed)
        except AssertionError as differs:
            wrong.append(f"{name}: {differs}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str, seed: int) -> None:
    check(name, seed)


def test_every_case_is_recorded_as_it_stands() -> None:
    """Else record again: scripts/record_silicon.py."""
    assert set(recorded()) == set(CASES)
    for name, (inputs, _) in recorded().items():
        pairs = zip(inputs, CASES[name].inputs(), strict=True)
        bits = [[x.contiguous().view(torch.uint8) for x in pair] for pair in pairs]
        assert all(torch.equal(*pair) for pair in bits), name


@pytest.mark.parametrize("name", ["shuffles", "sweep_f32_to_32", "product_float8_e5m2_n8_k32_4"])
def test_a_flipped_bit_is_seen(name: str) -> None:
    inputs, silicon = recorded()[name]
    ours = tuple(output.clone() for output in silicon)
    compare(CASES[name], inputs, silicon, ours)
    bits = ours[0].view(torch.int32).view(-1)
    bits[3] ^= 1 << 30
    with pytest.raises(AssertionError, match="wrong"):
        compare(CASES[name], inputs, silicon, ours)
