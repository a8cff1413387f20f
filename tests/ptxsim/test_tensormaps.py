"""tensormap.replace and tensormap.cp_fenceproxy: bytes as an H100 wrote them (driver 580.159.04)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machine import at, execute, instruction, kinds, machine, reg, written

from ptxsim.isa.table import Unmodelled, translate
from ptxsim.ptx.nodes import Imm
from ptxsim.watch.findings import Fault

BEFORE = bytes.fromhex(
    "0000e0b34b7f0000400300000001000000400000008000000000010000000000"
    "ff0300003f0000000100000001000000010000000000003f0700000000000000"
)
"""A map of 1024 x 64 x 2 x 2 x 2 fp16 numbers, box 64 x 8, as the driver encodes it."""

WROTE: tuple[tuple[str, tuple[int, ...], dict[int, str]], ...] = (
    ("global_address", (0x123456789AB0,), {0: "b09a7856", 4: "34120000"}),
    ("rank", (0,), {8: "00030000"}),
    ("rank", (3,), {8: "30030000"}),
    ("box_dim", (0, 1), {52: "00000000"}),
    ("box_dim", (0, 256), {52: "000000ff"}),
    ("box_dim", (1, 7), {56: "06000000"}),
    ("box_dim", (4, 256), {56: "070000ff"}),
    ("global_dim", (0, 100), {32: "63000000"}),
    ("global_dim", (2, 4294967295), {40: "feffffff"}),
    ("global_dim", (4, 1), {48: "00000000"}),
    ("global_stride", (0, 16), {12: "01000000"}),
    ("global_stride", (0, 1099511627760), {12: "ffffffff", 28: "0f000000"}),
    ("global_stride", (2, 4096), {20: "00010000"}),
    ("global_stride", (3, 1099511627760), {24: "ffffffff", 28: "00f00000"}),
    ("element_stride", (0, 8), {52: "0700003f"}),
    ("element_stride", (2, 8), {52: "c001003f"}),
    ("element_stride", (4, 8), {52: "0070003f"}),
    ("elemtype", (0,), {8: "40000000"}),
    ("elemtype", (8,), {8: "40040000"}),
    ("elemtype", (10,), {8: "40050000"}),
    ("elemtype", (11,), {8: "c0030100"}),
    ("elemtype", (12,), {8: "40040100"}),
    ("interleave_layout", (2,), {8: "40130000"}),
    ("swizzle_mode", (3,), {8: "40630000"}),
    ("fill_mode", (1,), {8: "40830000"}),
)
"""Field, operands, and the words that changed, by their places."""
LITERAL = ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode", "swizzle_atomicity")


def replaced(name: str, given: tuple[int, ...], start: bytes = BEFORE) -> bytes:
    """The first half of a map in shared memory after the instruction, which one lane executes."""
    cluster = machine()
    written(cluster)
    warp, shared = cluster.warps[0], cluster.ctas[0].shared.data
    shared[256:320] = np.frombuffer(start, np.uint8)
    warp.u32[9][:] = 256
    wide = name in ("global_address", "global_stride")
    warp.u64[3][:], warp.u32[3][:] = given[-1] % 2**64, given[-1] % 2**32
    last = Imm(given[-1]) if name in LITERAL else reg("b64" if wide else "b32", 3)
    operands = (*(Imm(number) for number in given[:-1]), last)
    opcode = f"tensormap.replace.tile.{name}.shared::cta.b1024.{'b64' if wide else 'b32'}"
    execute(warp, opcode, at(reg("b32", 9)), *operands, mask=np.arange(32) == 5)
    assert kinds(cluster) == []
    return shared[256:320].tobytes()


@pytest.mark.parametrize(("name", "given", "changed"), WROTE)
def test_fields(name: str, given: tuple[int, ...], changed: dict[int, str]) -> None:
    expected = bytearray(BEFORE)
    for place, word in changed.items():
        expected[place : place + 4] = bytes.fromhex(word)
    assert replaced(name, given) == bytes(expected)


@pytest.mark.parametrize(
    ("name", "given"),
    (
        ("rank", (5,)),
        ("box_dim", (0, 257)),
        ("box_dim", (0, 0)),
        ("global_stride", (0, 24)),
        ("fill_mode", (2,)),
    ),
)
def test_values_that_are_illegal(name: str, given: tuple[int, ...]) -> None:
    with pytest.raises(Fault, match=f"sets .{name} of a tensor map to {given[-1]}"):
        replaced(name, given)


WORD, WIDE = reg("b32", 3), reg("b64", 3)


@pytest.mark.parametrize(
    ("opcode", "operands"),
    (
        ("tensormap.replace.tile.box_dim.shared::cta.b1024.b32", (Imm(5), WORD)),
        ("tensormap.replace.tile.global_stride.shared::cta.b1024.b64", (Imm(4), WIDE)),
        ("tensormap.replace.tile.rank.shared::cta.b1024.b64", (WIDE,)),
        ("tensormap.replace.tile.elemtype.shared::cta.b1024.b32", (WORD,)),
        ("tensormap.replace.tile.rank.shared::cluster.b1024.b32", (WORD,)),
        ("tensormap.replace.im2col.rank.shared::cta.b1024.b32", (WORD,)),
        ("multimem.ld_reduce.global.add.f32", (WIDE,)),
    ),
)
def test_what_is_not_modelled_raises(opcode: str, operands: tuple[Any, ...]) -> None:
    with pytest.raises(Unmodelled, match="several GPUs" if opcode.startswith("multimem") else None):
        translate(instruction(opcode, at(reg("b32", 9)), *operands))


COPY = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"


def test_copies() -> None:
    """All 128 bytes; nobody has to have written the upper half, which says nothing."""
    cluster = machine()
    warp, shared = cluster.warps[0], cluster.ctas[0].shared.data
    content = np.random.randint(0, 256, 128).astype(np.uint8)
    shared[256:384] = content
    warp.u32[9][:], target = 256, cluster.launch.memory.allocate("map", bytes(128))
    warp.u64[4][:], warp.u32[0][:] = target, 0
    for place in range(256, 320, 4):
        execute(warp, "st.shared.b32", at(Imm(place)), Imm(int(shared[place : place + 4].view(np.uint32)[0])))
    execute(warp, COPY, at(reg("b64", 4)), at(reg("b32", 9)), Imm(128))
    assert np.array_equal(cluster.launch.memory.window(target, 128), content)
    assert kinds(cluster) == []
    warp.u32[9][:] = 320
    with pytest.raises(Fault, match="no multiple of 128"):
        execute(warp, COPY, at(reg("b64", 4)), at(reg("b32", 9)), Imm(128))
    with pytest.raises(Unmodelled, match="128"):
        translate(instruction(COPY, at(reg("b64", 4)), at(reg("b32", 9)), Imm(64)))
