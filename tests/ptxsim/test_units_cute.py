"""Layouts against those of CuTe, which the compiler's own atoms print: (thread, value) to places, for
fragments, transfers to and from tensor memory, accumulators, and swizzled operands in shared memory."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxsim.units import accumulators, fragments, swizzle, tensor, wgmma
from ptxsim.units.descriptors import MatrixDescriptor, operand

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl"
)

PRINTS = """
import cutlass, cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, TFloat32
from cutlass.cute.nvgpu import OperandMajorMode as Major, tcgen05, warp, warpgroup

def mma(name, op):
    tiled = cute.make_tiled_mma(op)
    print(name, tiled.tv_layout_A, tiled.tv_layout_B, tiled.tv_layout_C, sep="|")

def hopper():
    for k in (8, 16):
        mma(f"mma 16 {k}", warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, k)))
    source, major = warpgroup.OperandSource.RMEM, Major.K
    mma("wgmma 16", warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, 96, 16), source, major, major))
    mma("wgmma 8", warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (64, 64, 32), source, major, major))
    for kind in ("MN_SW128", "MN_SW64", "MN_SW32", "K_SW128", "K_SW64", "K_SW32"):
        atom = warpgroup.make_smem_layout_atom(getattr(warpgroup.SmemLayoutAtomKind, kind), BFloat16)
        print("shared " + kind, cute.tile_to_shape(atom, (128, 64), (0, 1)), sep="|")

def blackwell():
    for shape in ("16x256b", "16x128b", "16x64b", "32x32b", "16x32bx2"):
        for number in (1, 2, 8):
            for pack, type in ((tcgen05.Pack.NONE, Float32), (tcgen05.Pack.PACK_16b_IN_32b, Float16)):
                op = getattr(tcgen05, f"Ld{shape}Op")(getattr(tcgen05.Repetition, f"x{number}"), pack)
                print(f"ld {shape} {number} {type.width}", cute.make_copy_atom(op, type).layout_dst_tv,
                sep="|")
    groups = {1: tcgen05.CtaGroup.ONE, 2: tcgen05.CtaGroup.TWO}
    for group, m in ((1, 64), (1, 128), (2, 128), (2, 256)):
        source = tcgen05.OperandSource.TMEM
        op = tcgen05.MmaF16BF16Op(BFloat16, Float32, (m, 64, 16), groups[group], source, Major.K, Major.K)
        tiled = cute.make_tiled_mma(op)
        d = tiled.make_fragment_C(tiled.partition_shape_C((m, 64))).layout
        a = tiled.make_fragment_A(tiled.partition_shape_A((m, 16))).layout
        print(f"tmem {m} {group}", d, a, sep="|")

@cute.jit
def host():
    ARCH()

cute.compile(host)
"""


@cache
def printed(arch: str, function: str) -> dict[str, list[str]]:
    """Output of one half of PRINTS, by the first word of its lines; in a process of its own, as the compiler
    takes one architecture each."""
    environment = os.environ | {"CUTE_DSL_ARCH": arch}
    with tempfile.TemporaryDirectory() as folder:
        # from a file, because the compiler reads the source of what it traces
        script = Path(folder) / "prints.py"
        script.write_text(PRINTS.replace("ARCH()", f"{function}()"))
        run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = (line.split("|") for line in run.stdout.splitlines() if "|" in line)
    return {name: layouts for name, *layouts in lines}


def parse(layout: str) -> tuple[Any, Any]:
    shape, stride = layout.split(":")
    return ast.literal_eval(shape), ast.literal_eval(stride)


def size(shape: Any) -> int:
    return shape if isinstance(shape, int) else prod(size(part) for part in shape)


def at(shape: Any, stride: Any, index: int) -> int:
    """A layout's value at a linear index, the first mode fastest, through all nesting."""
    if isinstance(shape, int):
        return index % shape * stride
    total = 0
    for part, step in zip(shape, stride):
        total += at(part, step, index % size(part))
        index //= size(part)
    return total


def values(layout: str) -> Iterator[tuple[int, int, int]]:
    """(thread, value, place) for every entry of a (thread, value) layout."""
    shape, stride = parse(layout)
    for thread in range(size(shape[0])):
        for value in range(size(shape[1])):
            yield thread, value, at(shape[0], stride[0], thread) + at(shape[1], stride[1], value)


def check_fragment(fragment: fragments.Fragment, layout: str, rows: int) -> None:
    """A layout whose places are row + rows * column; threads of several warps are 16 rows apart."""
    per = 32 // fragment.bits
    seen = 0
    for thread, value, place in values(layout):
        row, column = place % rows, place // rows
        register, element = divmod(value, per)
        assert fragment.rows[register, thread % 32, element] + 16 * (thread // 32) == row
        assert fragment.columns[register, thread % 32, element] == column
        seen += 1
    assert seen == prod(fragment.shape) * (rows // fragment.shape[0])


@pytest.mark.parametrize("k", (8, 16))
def test_mma_sync(k: int) -> None:
    a, b, c = printed("sm_90a", "hopper")[f"mma 16 {k}"]
    check_fragment(fragments.multiplicand_a(k, 16), a, 16)
    check_fragment(fragments.multiplicand_b(k, 16), b, 8)
    check_fragment(fragments.accumulator(8, 32), c, 16)


@pytest.mark.parametrize(("bits", "n"), ((16, 96), (8, 64)))
def test_wgmma(bits: int, n: int) -> None:
    a, _, c = printed("sm_90a", "hopper")[f"wgmma {bits}"]
    check_fragment(wgmma.multiplicand(bits), a, 64)
    check_fragment(wgmma.accumulator(n, 32), c, 64)


SHARED = {
    "MN_SW128": ("MN", swizzle.B128),
    "MN_SW64": ("MN", swizzle.B64),
    "MN_SW32": ("MN", swizzle.B32),
    "K_SW128": ("K", swizzle.B128),
    "K_SW64": ("K", swizzle.B64),
    "K_SW32": ("K", swizzle.B32),
}
"""Atoms of 8 lines, tiled to 128 x 64 of 16 bits, along M first."""


@pytest.mark.parametrize("kind", SHARED)
def test_operands_in_shared_memory(kind: str) -> None:
    (text,) = printed("sm_90a", "hopper")[f"shared {kind}"]
    swizzled, _, layout = text.split(" o ")
    bits, base, shift = ast.literal_eval(swizzled[1:].replace("<", "(").replace(">", ")"))
    shape, stride = parse(layout)
    major, mode = SHARED[kind]
    atom = 8 * mode.span
    # K-major: 8 further rows are an atom on. MN-major: the atoms of 256 bytes of M, then 8 further k.
    leading, step = (16, atom) if major == "K" else (atom, 8 * 256)
    memory = np.arange(128 * 64, dtype=np.uint16)
    found = operand(
        MatrixDescriptor(0, leading, step, mode), major, 128, 16, np.dtype("u2"), memory.view(np.uint8)
    )
    for row in range(128):
        for k in range(16):
            place = 2 * (at(shape[0], stride[0], row) + at(shape[1], stride[1], k))
            place ^= ((place >> (base + shift)) & ((1 << bits) - 1)) << base
            assert found[row, k] == place // 2


@pytest.mark.parametrize("bits", (32, 16))
@pytest.mark.parametrize("number", (1, 2, 8))
@pytest.mark.parametrize("shape", ("16x256b", "16x128b", "16x64b", "32x32b", "16x32bx2"))
def test_transfers(shape: str, number: int, bits: int) -> None:
    (layout,) = printed("sm_100a", "blackwell")[f"ld {shape} {number} {bits}"]
    height = int(shape[:2])
    entries = list(values(layout))
    width = len(entries) // height  # elements of a lane; CuTe numbers them lane after lane
    per = 32 // bits
    split = width // 2 if shape == "16x32bx2" else None
    move = tensor.transfer(shape, number, packed=per == 2, split=split)
    assert move.registers * 32 * per == len(entries)
    for thread, value, place in entries:
        lane, column = divmod(place, width)
        register, half = divmod(value, per)
        assert move.lanes[register, thread] == lane
        assert move.columns[register, thread] + half == column


@pytest.mark.parametrize(("m", "group"), ((64, 1), (128, 1), (128, 2), (256, 2)))
def test_accumulators_and_a_in_tensor_memory(m: int, group: int) -> None:
    d, a = printed("sm_100a", "blackwell")[f"tmem {m} {group}"]
    rows, cells = m // group, np.zeros((128, 512), np.uint32)
    numbers = np.arange(rows * 64).reshape(rows, 64).astype(np.int32)
    accumulators.Accumulator(0, m, 64, "s32", group).write(cells, numbers)
    shape, stride = (part[0] for part in parse(d))
    for row in range(rows):
        for column in range(64):
            address = at(shape[0], stride[0], row) + at(shape[1], stride[1], column)
            assert cells[tensor.split_address(address)] == numbers[row, column]
    # A's addresses count elements of 16 bits: twice the columns
    cells.view(np.uint16)[:] = np.arange(128 * 1024).reshape(128, 1024) % 65521
    copies = accumulators.multiplicand(cells, 0, m, group)
    found = np.ascontiguousarray(np.concatenate(copies)).view(np.uint16)
    shape, stride = (part[0] for part in parse(a))
    assert size(shape[0]) == len(found)
    for row in range(len(found)):
        for k in range(16):
            address = at(shape[0], stride[0], row) + at(shape[1], stride[1], k)
            assert found[row, k] == cells.view(np.uint16)[address >> 17, address & 0x1FFFF]
