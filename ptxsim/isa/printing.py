"""Printing in kernels: calls of vprintf, the one function that the system has for them (PTX ISA, "Control
Flow Instructions: call"; CUDA C++ Programming Guide, "Formatted Output").
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.isa.access import Accessor
from ptxsim.isa.operands import WrongOperand, items_of
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Step, Unmodelled, translates
from ptxsim.ptx.nodes import Instruction, Operand, Symbol
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask

_FIELD = re.compile(
    rb"%(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?P<precision>(?:\.(?:\*|\d*))?)"
    rb"(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXcspfFeEgG%])"
)
Take = Callable[[int], bytes]
"""Function that takes so many bytes of the arguments, the next ones at a multiple of their number."""


@translates("call")
def call(instruction: Instruction, form: Form) -> Step:
    """call (returned), vprintf, (format, arguments): every lane's text, one after the other."""
    results, name, given = instruction.operands
    format, arguments = _symbols(given)
    (returned,) = _symbols(results)
    if name != Symbol("vprintf"):
        raise Unmodelled(instruction, "a function other than vprintf")
    access = Accessor(instruction, "")

    def step(warp: Warp, mask: Mask) -> None:
        symbols, local, launch = warp.cta.symbols, warp.local, warp.cta.launch
        formats = local.load(symbols[format], 8, 1)[:, 0]
        starts = local.load(symbols[arguments], 8, 1)[:, 0]

        def bytes_at(address: int, size: int) -> bytes:
            return access.load(warp, np.array([address], np.int64), size, 1).tobytes()

        for lane in range(LANES) if mask is None else np.flatnonzero(mask).tolist():
            text = _string(bytes_at, int(formats[lane]))
            launch.printed.append(formatted(text, _taking(bytes_at, int(starts[lane])), bytes_at))
        whole = symbols[returned] if mask is None else symbols[returned][mask]
        local.store(whole, np.zeros((len(whole), 1), np.uint32))

    return step


def _symbols(operand: Operand) -> list[str]:
    names = [item.name for item in items_of(operand) if isinstance(item, Symbol)]
    if len(names) != len(items_of(operand)):
        raise WrongOperand("other arguments than a format and where its arguments lie")
    return names


def _taking(bytes_at: Callable[[int, int], bytes], start: int) -> Take:
    """Arguments as C passes them on: each at a multiple of its size."""
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at = -(-at // size) * size + size
        return bytes_at(start + at - size, size)

    return take


def _string(bytes_at: Callable[[int, int], bytes], address: int) -> bytes:
    """Bytes from this address up to a zero."""
    found = b""
    while not found.endswith(b"\0"):
        found += bytes_at(address + len(found), 1)
    return found[:-1]


def formatted(text: bytes, take: Take, bytes_at: Callable[[int, int], bytes]) -> str:
    """Output of C's printf for a format. What is no conversion stands for itself."""

    def one(match: re.Match[bytes]) -> bytes:
        kind = match["kind"].decode()
        if kind == "%":
            return b"%"
        width, precision = (
            re.sub(rb"\*", lambda _: str(*struct.unpack("<i", take(4))).encode(), match[part])
            for part in ("width", "precision")
        )
        how = "%" + (match["flags"] + width + precision).decode()
        if kind == "s":
            address = int.from_bytes(take(8), "little")
            return _shown(how, "s", _string(bytes_at, address) if address else b"(null)")
        return _shown(how, *_value(kind, match["length"] or b"", take))

    return _FIELD.sub(one, text).decode("utf-8", "replace")


def _value(kind: str, length: bytes, take: Take) -> tuple[str, Any]:
    """Python's conversion for this one, and the value to convert."""
    if kind in "fFeEgG":
        return kind, struct.unpack("<d", take(8))[0]
    if kind == "p":
        return "s", hex(int.from_bytes(take(8), "little")).encode()
    size = 8 if length in (b"l", b"ll", b"j", b"z", b"t") else 4
    number = int.from_bytes(take(size), "little", signed=kind in "di")
    if kind == "c":
        return "s", bytes([number & 0xFF])
    kept = {b"hh": 8, b"h": 16}.get(length, 8 * size)
    number &= (1 << kept) - 1
    return kind, number - (number >> kept - 1 << kept) if kind in "di" else number


def _shown(how: str, kind: str, value: Any) -> bytes:
    if isinstance(value, float) and not math.isfinite(value):
        # C pads these with spaces.
        how = re.sub(r"^%([-+ #0]*)", lambda flags: f"%{flags[1].replace('0', '')}", how)
    shown: bytes = operator.mod((how + kind).encode(), (value,))
    return shown
