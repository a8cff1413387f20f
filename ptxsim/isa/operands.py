"""Reading and writing an instruction's operands, decided once when the instruction is translated.

d, a = write(ins.operands[0], "f32"), read(ins.operands[1], "f32")
return lambda warp, mask: d(warp, np.sqrt(a(warp)), mask)
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.ptx.nodes import WIDTHS, Discard, Imm, Negated, Operand, Reg, Special, Symbol, Vector
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask
from ptxsim.state.special import SPECIAL, VARYING

Array = NDArray[Any]
Read = Callable[[Warp], Array]
"""The operand's 32 values. Never write to them: they may be the register itself or a shared constant."""
Write = Callable[[Warp, Any, Mask], None]
"""Sets the operand's lanes in the mask to values: an array [32] or a scalar of the operand's type."""

VIEWS = {"pred": "pred", "b8": "u16", "u8": "u16", "s8": "s16", "b128": "u128", "bf16": "u16"}
VIEWS |= {"f16x2": "u32", "bf16x2": "u32", "f32x2": "u64", "b16": "u16", "b32": "u32", "b64": "u64"}
"""Name of a warp's view that holds a type: its own name for u16 ... f64, the unsigned bits for the rest."""
_BITS = {"pred": 1, "u128": 128} | {f"{kind}{bits}": bits for kind in "usf" for bits in (16, 32, 64)}
"""Width of the file that a view belongs to."""
DTYPES = {"pred": np.bool_, "u128": np.uint64} | {
    f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}")
    for kind, letter in zip("usf", "uif")
    for bits in (16, 32, 64)
}


class WrongOperand(TypeError):
    """An operand that an instruction cannot have: a register of another width, or no value at all."""


def view_of(type: str) -> str:
    return VIEWS.get(type, type)


def read(operand: Operand, type: str) -> Read:
    """Reader of the operand as `type`, as np.uint16 ... np.float64 or bool lanes [32]."""
    view = view_of(type)
    match operand:
        case Reg():
            _same_file(operand, view)
            return _reader(view, operand.index)
        case Negated(register):
            index = register.index
            return lambda warp: ~warp.pred[index]
        case Imm(value):
            constant = np.full(LANES, literal(value, view))
            constant.flags.writeable = False
            return lambda warp: constant
        case Symbol(name, offset):
            return constant_of(operand, DTYPES[view], lambda warp: warp.cta.symbols[name] + offset)
        case Special(name):
            if name not in SPECIAL:
                raise WrongOperand(f"{name} is not known")
            give, dtype = SPECIAL[name], DTYPES[view]
            if name not in VARYING:
                return constant_of(operand, dtype, give)
            return lambda warp: np.broadcast_to(np.asarray(give(warp)), LANES).astype(dtype, copy=False)
    raise WrongOperand(f"a {operand.__class__.__name__} is not a value")


def _readers() -> dict[str, Callable[[int], Read]]:
    """Function of a register's index by view. An attribute that is named in code is found twice as quickly as
    by getattr, and kernels read registers by the million."""
    views = ("pred", "u128", *(f"{kind}{bits}" for kind in "usf" for bits in (16, 32, 64)))
    return {view: eval(f"lambda index: lambda warp: warp.{view}[index]") for view in views}


_READERS = _readers()


@functools.cache
def _reader(view: str, index: int) -> Read:
    """Reader of a register: the same for all instructions, and all kernels."""
    return _READERS[view](index)


def constant_of(operand: Operand, dtype: Any, give: Callable[[Warp], Any]) -> Read:
    """Reader of what never changes for a warp: `give` is asked once, for a scalar or 32 lanes."""
    key = operand, np.dtype(dtype)

    def get(warp: Warp) -> Array:
        found = warp.constants.get(key)
        if found is None:
            found = warp.constants[key] = np.full(LANES, give(warp), dtype)
            found.flags.writeable = False
        return found

    return get


def write(operand: Operand, type: str) -> Write:
    """Writer of the operand, a register or _, with values of `type`."""
    if isinstance(operand, Discard):
        return lambda warp, values, mask: None
    if not isinstance(operand, Reg):
        raise WrongOperand(f"a {operand.__class__.__name__} cannot be written")
    view = view_of(type)
    _same_file(operand, view)
    find = _reader(view, operand.index)

    def set(warp: Warp, values: Any, mask: Mask) -> None:
        register = find(warp)
        if mask is None:
            register[...] = values
        else:
            where = mask if register.ndim == 1 else mask[:, None]
            np.copyto(register, values, casting="unsafe", where=where)

    return set


def literal(value: int | float, view: str) -> Any:
    """A literal as a number of the view's type. Integers given for a float type are its bits, floats given
    for an untyped register are theirs, and negative integers wrap."""
    dtype = np.dtype(DTYPES[view])
    if dtype == np.bool_:
        return bool(value)
    if isinstance(value, float):
        number = np.dtype(f"f{dtype.itemsize}").type(value)
        return number if dtype.kind == "f" else number.view(dtype)
    bits = dtype.itemsize * 8
    return np.frombuffer((value % (1 << bits)).to_bytes(bits // 8, "little"), dtype)[0]


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """The values of a vector, or the operand itself."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def _same_file(register: Reg, view: str) -> None:
    if register.file != _BITS.get(view):
        raise WrongOperand(f"{register.name} has {WIDTHS[register.type]} bits and is used as {view}")


def as_bits(value: float) -> int:
    """The 32 bits of an fp32 number."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
