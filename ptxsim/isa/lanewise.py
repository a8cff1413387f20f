"""Instructions that compute every lane by itself: operands in, one function of arrays, a result out.

Packed types (two or four narrow values in one register) are arrays of all the narrow values, [64] or [128],
lane by lane, so that one function serves f32 and f32x2 alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptxsim.isa.operands import DTYPES, Array, Read, Write, read, view_of, write
from ptxsim.isa.table import Step, Unmodelled
from ptxsim.isa.together import Elementwise, kind_of, place_of
from ptxsim.ptx.nodes import Imm, Instruction, Operand, Reg
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, PACKED, Mask

Function = Callable[..., Any]


def require(condition: object, ins: Instruction, why: str = "") -> None:
    if not condition:
        raise Unmodelled(ins, why)


# --- operands -----------------------------------------------------------------------------------------------


def value(ins: Instruction, index: int, type: str) -> Read:
    """Reader of operand `index` as `type`; [64] or [128] elements for packed types. Raises WrongOperand."""
    return value_of(ins.operands[index], type)


def value_of(operand: Operand, type: str) -> Read:
    return _packed(operand, type) if type in PACKED else read(operand, type)


def target(ins: Instruction, index: int, type: str) -> Write:
    """Writer of operand `index`. Raises WrongOperand."""
    return target_of(ins.operands[index], type)


def target_of(operand: Operand, type: str) -> Write:
    return _store_packed(operand, type) if type in PACKED else write(operand, type)


def part_of(operand: Operand, type: str, part: int) -> Read:
    """Reader of the packed elements number `part` of all lanes: [32]. Raises WrongOperand."""
    return _packed(operand, type, part)


def _packed(operand: Operand, type: str, part: int | None = None) -> Read:
    """All packed elements, or one of each lane, in a view that is made when a warp first asks for it."""
    view, element = PACKED[type]
    whole = read(operand, view)
    count = elements(type) // LANES
    name = type if part is None else f"{type}.{part}"

    def select(register: Array) -> Array:
        every = register.view(element)
        return every if part is None else every[part::count]

    if not isinstance(operand, Reg):
        return lambda warp: select(whole(warp))
    index = operand.index

    def get(warp: Warp) -> Array:
        try:
            return getattr(warp, name)[index]
        except AttributeError:
            every = warp.table(type)
            if part is not None:
                warp.add_view(name, every[:, part::count])
            return get(warp)

    return get


def _store_packed(operand: Operand, type: str) -> Write:
    if not isinstance(operand, Reg):
        return write(operand, PACKED[type][0])
    get, each = _packed(operand, type), elements(type) // LANES

    def set(warp: Warp, values: Any, mask: Mask) -> None:
        if mask is None:
            get(warp)[...] = values
        else:
            np.copyto(get(warp), values, casting="unsafe", where=np.repeat(mask, each))

    return set


# --- steps --------------------------------------------------------------------------------------------------


def lanewise(
    ins: Instruction, result: str, sources: Sequence[str], function: Function, many: Function | None = None
) -> Step:
    """d = function(a, ...) for operands d, a, ... of these types. The function may return any type that
    casts. `many` is the same function of arrays [n, elements], where there is one; a ufunc is its own."""
    step = _alone(ins, result, sources, function)
    if many is None and isinstance(function, np.ufunc):
        many = function
    return step if many is None else elementwise(ins, step, result, sources, many)


def elementwise(ins: Instruction, step: Step, result: str, sources: Sequence[str], many: Function) -> Step:
    """The instruction as one that others can join, if its operands are registers and literals."""
    first, *others = ins.operands
    if not isinstance(first, Reg) or not all(isinstance(o, Reg | Imm) for o in others):
        return step
    nobody: Any = None  # literals need no warp
    return Elementwise(
        step,
        kind_of(ins),
        many,
        (place_of(first, result),),
        tuple(
            place_of(o, type) if isinstance(o, Reg) else value_of(o, type)(nobody)
            for o, type in zip(others, sources)
        ),
    )


def _alone(ins: Instruction, result: str, sources: Sequence[str], function: Function) -> Step:
    inputs = [value(ins, 1 + index, type) for index, type in enumerate(sources)]
    if (
        isinstance(function, np.ufunc)
        and isinstance(ins.operands[0], Reg)
        and _in_place(function, result, sources)
    ):
        return _ufunc(ins, result, inputs, function)
    d = target(ins, 0, result)
    match inputs:
        case [a]:
            return lambda warp, mask: d(warp, function(a(warp)), mask)
        case [a, b]:
            return lambda warp, mask: d(warp, function(a(warp), b(warp)), mask)
        case [a, b, c]:
            return lambda warp, mask: d(warp, function(a(warp), b(warp), c(warp)), mask)
    return lambda warp, mask: d(warp, function(*[x(warp) for x in inputs]), mask)


def _ufunc(ins: Instruction, result: str, inputs: list[Read], ufunc: np.ufunc) -> Step:
    """A single ufunc that writes straight into the register where all lanes take part."""
    d, register = target(ins, 0, result), value(ins, 0, result)
    if len(inputs) == 1:
        (a,) = inputs

        def one(warp: Warp, mask: Mask) -> None:
            if mask is None:
                ufunc(a(warp), out=register(warp))
            else:
                d(warp, ufunc(a(warp)), mask)

        return one
    a, b = inputs

    def two(warp: Warp, mask: Mask) -> None:
        if mask is None:
            ufunc(a(warp), b(warp), out=register(warp))
        else:
            d(warp, ufunc(a(warp), b(warp)), mask)

    return two


def _in_place(ufunc: Function, result: str, sources: Sequence[str]) -> bool:
    """True if the ufunc's own result type is the register's, so that it needs no cast."""
    types = [element_type(type) for type in (*sources, result)]
    if not isinstance(ufunc, np.ufunc) or ufunc.nin != len(sources) or ufunc.nout != 1:
        return False
    return bool(ufunc.resolve_dtypes((*types[:-1], None))[-1] == types[-1])


def element_type(type: str) -> np.dtype[Any]:
    """The numpy type of a type's lanes or packed elements."""
    return np.dtype(PACKED[type][1] if type in PACKED else DTYPES[view_of(type)])


def elements(type: str) -> int:
    """Number of values of a type in a warp's register: 32, or 64 and 128 for packed types."""
    if type not in PACKED:
        return LANES
    view, element = PACKED[type]
    return LANES * np.dtype(DTYPES[view]).itemsize // np.dtype(element).itemsize
