"""The software exponential: the kernel's bits, on a simulated sm_100a, against numpy's reproduction of its
arithmetic and against fp64; its coefficients; and which scores it is for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

import torch
from cuda.bindings import driver as cuda
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_tensor
from kernels.case import Compiled, compile_for

from fa4flex.kernels.common import exponential
from fa4flex.kernels.common.exponential import POLYNOMIALS, emulated, exp2_pair
from fa4flex.kernels.common.math import exp2
from ptxsim import device

THREADS = 128
BOUNDS = {3: 1.72e-4, 4: 6.0e-6, 5: 3.1e-7}
"""Bounds by degree of the relative error where x >= -126: twice the largest in docs/notes/exponential.md."""
PUBLISHED = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)
"""FlashAttention-4's coefficients, and what a GB200 computed with them (its issue 2263)."""
ON_GB200 = {
    -10.221991: 0x3A5B8197,
    -12.691620: 0x391E7FB1,
    -12.472450: 0x39387F25,
    -18.084177: 0x3671807E,
    -8.411281: 0x3B407E45,
}


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "exponential.py"
    spec = importlib.util.spec_from_file_location("exponential_benchmark", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = _benchmark()


# --- on the simulator ---------------------------------------------------------------------------------------


class Exponentials:
    """y[0], y[1] = 2^x[0], 2^x[1] by polynomials; y[2] = 2^x[0] by the hardware."""

    def __init__(self, degree: int) -> None:
        self.degree = degree

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        blocks = cute.ceil_div(x.shape[1], THREADS)
        self.device(x, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def device(self, x: cute.Tensor, y: cute.Tensor) -> None:
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < x.shape[1]:
            y[0, i], y[1, i] = exp2_pair(x[0, i], x[1, i], self.degree)
            y[2, i] = exp2(x[0, i])


def build(degree: int) -> Compiled:
    def fake(rows: int, count: Any) -> Any:
        return make_fake_tensor(Float32, (rows, count), (cute.sym_int64(), 1))

    count = cute.sym_int32()
    with device("sm_100a"):
        return compile_for("sm_100a", Exponentials(degree), fake(2, count), fake(3, count))


def run(kernel: Compiled, x: np.ndarray) -> np.ndarray:
    """Three rows of results, as the kernel has them; -1 where it wrote nothing."""
    y = torch.full((3, x.shape[1]), -1.0)
    with device("sm_100a") as gpu:
        kernel(torch.from_numpy(x), y)
    assert not gpu.findings
    return y.numpy()


def sweep() -> np.ndarray:
    """[2, n] fp32 below 128: all exponents, integers and their neighbours, what softmax has, -inf; the second
    row is the first in another order."""
    random = np.random.default_rng(2)
    bits = np.arange(255)[:, None] << 23 | np.array([0, 1, 0x400000, 0x7FFFFF])
    powers = bits.astype(np.uint32).view(np.float32).ravel()
    whole = np.arange(-200, 128).astype(np.float32)
    near = [np.nextafter(whole, np.float32(end)) for end in (-np.inf, np.inf)]
    spread = [random.uniform(*ends, 2048) for ends in ((-24, 8), (-130, -120), (-200, 0), (-1, 0), (0, 1))]
    x = np.concatenate([-powers, powers[powers < 128], whole, *near, *spread, [-np.inf]]).astype(np.float32)
    return np.stack([x, random.permutation(x)])


def same_bits(x: np.ndarray, y: np.ndarray, degree: int) -> None:
    expected = benchmark.exp2(x, POLYNOMIALS[degree])
    wrong = y.view(np.int32) != expected.view(np.int32)
    assert not wrong.any(), f"{x[wrong][:3]} gave {y[wrong][:3]} for {expected[wrong][:3]}"


def within_bounds(x: np.ndarray, y: np.ndarray, degree: int) -> None:
    """Checks errors against fp64, powers of two and zeros exactly, and that results never fall."""
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(y[x >= -126] / exact[x >= -126] - 1).max()
    assert error <= BOUNDS[degree], f"error {error:.3e}"
    subnormal = (x > -127) & (x < -126)
    assert (exact - y)[subnormal].max() <= 2.0**-127 and (y <= exact)[subnormal].all()
    assert not y[x <= -127].view(np.int32).any(), "masked scores: +0, to the bit"
    whole = (x >= -126) & (x == np.floor(x))
    assert np.array_equal(y[whole], exact[whole])
    assert (np.diff(y[np.argsort(x, kind="stable")]) >= 0).all(), "falls"


@pytest.fixture(scope="module", params=sorted(POLYNOMIALS))
def simulated(request: pytest.FixtureRequest) -> tuple[int, Compiled, np.ndarray, np.ndarray]:
    """Degree, kernel, inputs, results."""
    kernel, x = build(request.param), sweep()
    return request.param, kernel, x, run(kernel, x)


def test_bits_and_errors(simulated: tuple[int, Compiled, np.ndarray, np.ndarray]) -> None:
    degree, _, x, y = simulated
    same_bits(x, y[:2], degree)
    within_bounds(x.ravel(), y[:2].ravel(), degree)
    assert y[0, x[0] == 0].tolist() == [1.0, 1.0, 1.0]  # 0 among the powers of both signs, and the integers
    assert (y[0, x[0] == -np.inf] == 0).all()


def test_hardware(simulated: tuple[int, Compiled, np.ndarray, np.ndarray]) -> None:
    """For the other scores: within 2 units in the last place, and 0 where ours is subnormal."""
    _, _, x, y = simulated
    normal = x[0] >= -126
    exact = np.exp2(x[0, normal].astype(np.float64))
    assert (np.abs(y[2, normal] - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    assert not y[2, ~normal].any()


def test_instructions(simulated: tuple[int, Compiled, np.ndarray, np.ndarray]) -> None:
    """d + 7 for a pair, where each shift by 23 comes with an addition."""
    degree, kernel, _, _ = simulated
    lines = [line.strip() for line in kernel.__ptx__.splitlines()]
    counts = {name: sum(line.startswith(name) for line in lines) for name in ("max", "add.rm", "sub", "fma")}
    assert counts == {"max": 2, "add.rm": 1, "sub": 2, "fma": degree}
    assert sum("f32x2" in line for line in lines) == degree + 3
    assert sum(line.startswith("shl.b32") and line.endswith(" 23;") for line in lines) == 2
    assert sum(line.startswith("ex2.approx.ftz.f32") for line in lines) == 1


def test_nan_does_not_become_zero(simulated: tuple[int, Compiled, np.ndarray, np.ndarray]) -> None:
    """Nor does it touch the other of its pair."""
    _, kernel, _, _ = simulated
    y = run(kernel, np.float32([[np.nan, 1.0], [1.0, np.nan]]))
    for bad, good in ((y[0, 0], y[1, 0]), (y[1, 1], y[0, 1])):
        assert torch.tensor(bad).bfloat16().isinf() and torch.tensor(bad).half().isinf()
        assert abs(good / 2 - 1) < 2e-7


def test_broken_coefficients_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place of a coefficient by the bits; what they cannot see, because kernel and numpy
    share the coefficients, by fp64."""
    x, degree = sweep(), 3
    first, second, *others = POLYNOMIALS[degree]
    with monkeypatch.context() as patch:
        nudged = float(np.nextafter(np.float32(second), np.float32(1)))
        patch.setattr(exponential, "POLYNOMIALS", {degree: (first, nudged, *others)})
        y = run(build(degree), x)
    with pytest.raises(AssertionError, match="gave"):
        same_bits(x, y[:2], degree)
    for broken, why in (((first, second - 3e-4, *others), "error"), ((1.0000001, second, *others), "masked")):
        with pytest.raises(AssertionError, match=why):
            within_bounds(x[0], benchmark.exp2(x[0], broken), degree)


# --- on paper -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", sorted(POLYNOMIALS))
def test_coefficients_are_the_best(degree: int) -> None:
    """Half a percent above the least error that any polynomial of the degree can have, at most."""
    found, grid = POLYNOMIALS[degree], np.linspace(0, 1, 100_001)
    assert len(found) == degree + 1 and found[0] == 1
    error = np.abs(benchmark.relative_error(np.float32(found).astype(float), grid)).max()
    assert error <= 1.005 * benchmark.minimax(degree)[1]
    assert sum(found) < 2


def test_numpy_does_what_a_gpu_did() -> None:
    x = np.float32(list(ON_GB200))
    assert benchmark.exp2(x, PUBLISHED).view(np.uint32).tolist() == list(ON_GB200.values())


def test_multiply_add_rounds_once() -> None:
    """Just off the middle between two fp32 numbers, which fp64 rounds to the middle, and then to even."""
    product = np.float32([2.0**24 + 2] * 2), np.float32([1.5, 1.5])  # 25165827
    assert benchmark.fma(*product, np.float32([2.0**-60, -(2.0**-60)])).tolist() == [25165828, 25165826]


def chosen(every: int, count: int, skip: int) -> list[int]:
    return [pair for pair in range(64) if emulated(pair, every, count, skip)]


def test_which_pairs_are_emulated() -> None:
    assert chosen(8, 2, 1) == [22, 23, 30, 31, 38, 39, 46, 47]
    assert chosen(4, 1, 0) == list(range(3, 48, 4))
    assert chosen(5, 1, 2) == [36, 41, 46]  # groups start anew in each fragment
    assert chosen(8, 0, 0) == []
    assert chosen(1, 1, 0) == list(range(48)), "never the last fragment"
    assert [pair for pair in range(32) if emulated(pair, 8, 2, 0, columns=64)] == [6, 7, 14, 15]
