"""Printing in kernels."""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

import cutlass
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

import ptxsim
from ptxsim.isa.printing import _taking, formatted


@cute.kernel
def prints(x: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    if thread < 2:
        cute.printf("{} of {}: {}, {}", thread, cta, x[thread], cutlass.Int64(thread) << 40)
    if thread == 31:
        cute.printf("%5.2f|%-4d|%x, 100%\n", x[31], thread, thread)


@cute.jit
def launch(x: cute.Tensor) -> None:
    prints(x).launch(grid=[2, 1, 1], block=[32, 1, 1])


EXPECTED = """0 of {cta}: 0.500000, 0
1 of {cta}: 1.500000, 1099511627776
31.50|31  |1f, 100%

"""


def test_lines_of_a_kernel(capfd: pytest.CaptureFixture[str]) -> None:
    with ptxsim.device("sm_90a") as gpu:
        launch(from_dlpack(torch.arange(32) + 0.5))
    (result,) = gpu.results
    assert not gpu.findings
    assert result.printed == EXPECTED.format(cta=0) + EXPECTED.format(cta=1)
    assert capfd.readouterr().out == result.printed


SIZES = {"": "i", "l": "q", "ll": "q", "z": "q", "hh": "i", "h": "i"}


def drawn_conversion() -> tuple[str, bytes, Any]:
    """A conversion, its argument as it lies in memory, and as C takes it."""
    how = random.choice(["", "-", "+", " ", "0", "-+"]) + random.choice(["", "3", "12"])
    kind = random.choice("diuxXcfeEgGs")
    if kind in "feEgG":
        number = random.choice([0.0, -1.5, random.gauss(0, 1e3), 1e30, float("inf"), float("-inf")])
        exact = random.choice(["", ".0", ".3"])
        return f"%{how}{exact}{kind}", struct.pack("<d", number), ctypes.c_double(number)
    if kind == "s":
        return "%" + how.strip("+ 0") + "s", struct.pack("<q", 1), ctypes.c_char_p(b"abc")
    if kind == "c":
        return "%c", struct.pack("<i", 65), ctypes.c_int(65)
    length = random.choice(list(SIZES))
    size = SIZES[length]
    number = random.choice([0, -1, 300, random.randrange(-(1 << 31), 1 << 31)])
    plain = how if kind in "di" else how.replace("+", "").replace(" ", "")
    taken = ctypes.c_longlong(number) if size == "q" else ctypes.c_int(number)
    return f"%{plain}{length}{kind}", struct.pack(f"<{size}", number), taken


def test_formats_are_those_of_c() -> None:
    """Any conversions, in any order."""
    memory = b"\0abc\0"
    for _ in range(300):
        fields = [drawn_conversion() for _ in range(random.randint(0, 4))]
        text = "|".join(["a%%b", *(field for field, _, _ in fields)]).encode()
        given = [packed for _, packed, _ in reversed(fields)]
        buffer = ctypes.create_string_buffer(1024)
        ctypes.CDLL(None).snprintf(buffer, ctypes.c_size_t(1024), text, *(c for _, _, c in fields))
        found = formatted(
            text, lambda size, given=given: given.pop(), lambda at, size: memory[at : at + size]
        )
        assert found.encode() == buffer.value, text


def test_arguments_lie_at_multiples_of_their_sizes() -> None:
    memory = struct.pack("<iiqiid", 1, 0, 2, 3, 0, 0.5)
    take = _taking(lambda at, size: memory[at : at + size], 0)
    assert formatted(b"%d %lld %d %g", take, lambda at, size: b"") == "1 2 3 0.5"
