"""y = f(x) over a sweep of inputs, bits in and bits out, for every instruction of `functions`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from cuda.bindings import driver as cuda
from cutlass import Int16, Int32, Int64, cute, range_constexpr
from cutlass.cute.runtime import make_fake_tensor
from torch import Tensor

from kernels import integer_functions  # noqa: F401  adds to FUNCTIONS
from kernels.case import Case, Compiled, compile_for, generator
from kernels.formats import FORMATS
from kernels.functions import FUNCTIONS, Function

THREADS = 128
COUNT = 4096
"""Elements of a sweep."""
REGISTERS = {16: (Int16, torch.int16), 32: (Int32, torch.int32), 64: (Int64, torch.int64)}
"""Integers as wide as a register."""


def sweep(arch: str, *names: str) -> Compiled:
    """A kernel for functions that take the same formats and give equally wide ones: called as (x
    [operands, n], y [functions, n]), integers as wide as the widest operand, and as the results."""
    return build(arch, tuple(FUNCTIONS[name] for name in names))


def build(arch: str, functions: tuple[Function, ...]) -> Compiled:
    takes = max(map(width, functions[0].takes))
    count = cute.sym_int32()
    x = _fake(takes, len(functions[0].takes), count)
    return compile_for(arch, Sweep(functions), x, _fake(width(functions[0].gives), len(functions), count))


def _fake(bits: int, rows: int, count: Any) -> Any:
    return make_fake_tensor(REGISTERS[bits][0], (rows, count), (cute.sym_int64(), 1))


def width(kind: str) -> int:
    """Bits of the register that holds a format."""
    if kind.endswith("x2"):
        return 2 * FORMATS[kind[:-2]].width
    return {"s32": 32, "u32": 32, "b32": 32, "f64": 64, "s64": 64}.get(kind) or FORMATS[kind].width


class Sweep:
    def __init__(self, functions: tuple[Function, ...]) -> None:
        self.functions = functions

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream) -> None:
        blocks = cute.ceil_div(x.shape[1], THREADS)
        self.device(x, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def device(self, x: cute.Tensor, y: cute.Tensor) -> None:
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < x.shape[1]:
            takes = self.functions[0].takes
            given = [x[j, i].to(REGISTERS[width(takes[j])][0]) for j in range(len(takes))]
            for j in range_constexpr(len(self.functions)):
                y[j, i] = cute.arch.inline_ptx(
                    self.functions[j].ptx, write_only_types=[y.element_type], read_only_args=given
                )


# --- bits to values -----------------------------------------------------------------------------------------


def values(bits: Tensor, kind: str) -> Tensor:
    """[n] integers to float64 [n], or [n, 2] for two numbers in a register; int64 for integer formats."""
    if kind == "f64":
        return bits.view(torch.float64)
    if kind == "s64":
        return bits
    if kind == "s32":
        return bits.int().long()
    if kind in ("u32", "b32"):
        return bits.long() & 0xFFFFFFFF
    if kind.endswith("x2"):
        format = FORMATS[kind[:-2]]
        return torch.stack([format.values(bits), format.values(bits >> format.width)], -1)
    return FORMATS[kind].values(bits)


# --- inputs -------------------------------------------------------------------------------------------------

SPECIAL = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40000000]
SPECIAL += [0x3F000000, 0x3EFFFFFF, 0x3F000001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF]
SPECIAL += [0x477FE000, 0x477FF000, 0x477FEFFF, 0x38800000, 0x33800000, 0x33000000, 0x43E00000, 0x43E80000]
SPECIAL += [0x4F000000, 0x4EFFFFFF, 0x4F800000, 0x40490FDB, 0x3FC90FDB, 0x43000000, 0x42FE0000, 0x3B000000]
"""Bits of special fp32 numbers: ends of formats, ones, halves, NaNs, integers at the ends of int32, pi."""


def given(kind: str, operand: int) -> Tensor:
    """The sweep of a format as bits, [COUNT]: another order and selection for each operand."""
    random = generator(100 + operand)
    if kind == "b32":
        return given("f32", operand)
    if kind in ("e4m3x2", "e5m2x2"):
        low = torch.arange(COUNT) % 256
        return low | low[torch.randperm(COUNT, generator=random)] << 8
    if kind == "f32x2":
        return given("f32", operand) & 0xFFFFFFFF | given("f32", operand + 3) << 32
    if kind == "f64":
        return _doubles(given("f32", operand), random)
    if kind.endswith("x2"):
        return given(kind[:-2], operand) & 0xFFFF | given(kind[:-2], operand + 3) << 16
    if kind in ("f16", "bf16"):
        bits = torch.arange(COUNT) * (65536 // COUNT)
        bits += torch.randint(65536 // COUNT, (COUNT,), generator=random) * (torch.arange(COUNT) % 4 > 0)
        return bits[torch.randperm(COUNT, generator=random)] if operand else bits
    bits = _singles(random) if kind == "f32" else torch.randint(2**32, (COUNT,), generator=random)
    if kind != "f32":
        bits >>= torch.randint(32, (COUNT,), generator=random)
        bits[:8] = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 2**24 + 1, -(2**24) - 1, 2**25 + 2])
    return _related(bits, random) if operand and kind == "f32" else bits


def _singles(random: torch.Generator) -> Tensor:
    """fp32 bits: special ones, any, those close to halfway between narrower numbers, and ordinary values."""
    special = torch.tensor(SPECIAL)
    parts = [special, special | 1 << 31, torch.randint(2**32, (1024,), generator=random)]
    for dropped in (13, 16, 20, 21):
        bits = torch.randint(2**23, (384,), generator=random) >> dropped << dropped
        bits += (1 << dropped - 1) + torch.randint(-1, 2, (384,), generator=random)
        exponent = torch.randint(127 - 30, 127 + 18, (384,), generator=random)
        parts.append(bits | exponent << 23 | torch.randint(2, (384,), generator=random) << 31)
    for reach, count in ((8.0, 640), (100.0, 416), (320.0, COUNT - sum(map(len, parts)) - 1056)):
        numbers = (torch.rand(count, generator=random) * 2 - 1) * reach
        parts.append(numbers.view(torch.int32).long() & 0xFFFFFFFF)
    return torch.cat(parts)


def _related(bits: Tensor, random: torch.Generator) -> Tensor:
    """A second operand: the first sweep in another order, but for a quarter that is close to its negative."""
    first = given("f32", 0)
    close = (first ^ 1 << 31) + torch.randint(-2, 3, (COUNT,), generator=random)
    shuffled = bits[torch.randperm(COUNT, generator=random)]
    return torch.where(torch.rand(COUNT, generator=random) < 0.25, close, shuffled) & 0xFFFFFFFF


def _doubles(singles: Tensor, random: torch.Generator) -> Tensor:
    """float64 bits: on, close to and halfway between fp32 numbers."""
    bits = values(singles, "f32").view(torch.int64)
    offsets = torch.tensor([0, 1, -1, 1 << 28, (1 << 28) - 1, (1 << 28) + 1])
    return bits + offsets[torch.randint(len(offsets), (COUNT,), generator=random)]


# --- cases --------------------------------------------------------------------------------------------------


def case(names: tuple[str, ...]) -> Case:
    functions = tuple(FUNCTIONS[name] for name in names)
    takes, gives = functions[0].takes, functions[0].gives
    integers = REGISTERS[max(map(width, takes))][1]

    def decoded(x: Tensor) -> list[Tensor]:
        return [values(bits, kind) for bits, kind in zip(x, takes)]

    def errors(x: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(f.error and f.error(*decoded(x)) for f in functions)

    return Case(
        name=f"sweep_{'_'.join(takes)}_to_{width(gives)}"
        + ("_sm100" if len(functions[0].archs) == 1 else ""),
        archs=functions[0].archs,
        build=lambda arch: build(arch, functions),
        inputs=lambda: (torch.stack([given(kind, i) for i, kind in enumerate(takes)]).to(integers),),
        outputs=lambda: (torch.full((len(names), COUNT), -1, dtype=REGISTERS[width(gives)][1]),),
        expected=lambda x: tuple(f.of(*decoded(x)) for f in functions),
        error=errors,
        decoded=lambda outputs: tuple(values(bits, f.gives) for bits, f in zip(outputs[0], functions)),
        labels=names,
    )


def _grouped() -> list[tuple[str, ...]]:
    """Names of functions that one kernel can run."""
    groups = defaultdict(list)
    for name, function in FUNCTIONS.items():
        groups[function.takes, width(function.gives), function.archs].append(name)
    return [tuple(names) for names in groups.values()]


CASES = tuple(map(case, _grouped()))
