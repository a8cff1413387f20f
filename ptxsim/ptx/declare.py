"""Reading declarations of registers, variables and parameters. PTX ISA, sections 5.1 to 5.4."""

from __future__ import annotations

import struct
from math import prod

from ptxsim.ptx.lex import Tokens
from ptxsim.ptx.literals import constant, integer, starts_constant
from ptxsim.ptx.nodes import WIDTHS, Variable
from ptxsim.ptx.scopes import Names

SPACES = (".shared", ".global", ".const", ".local")
_POINTED = (".const", ".global", ".local", ".shared")


def registers(tokens: Tokens, names: Names) -> None:
    """Reads what follows .reg, up to the semicolon: perhaps .v2 or .v4, a type and names, of which `r<10>`
    means r0 ... r9."""
    lanes = int(tokens.take()[2:]) if tokens.next in (".v2", ".v4") else 1
    type = _type(tokens)
    while True:
        at, name = tokens.at, tokens.name("the name of a register")
        if lanes > 1:
            names.vector(name, type, lanes, tokens, at)
        elif tokens.accept("<"):
            count = integer(tokens, "how many registers")
            tokens.expect(">", "after a number of registers")
            for number in range(count):
                names.register(f"{name}{number}", type, tokens, at)
        else:
            names.register(name, type, tokens, at)
        if not tokens.accept(","):
            break
    tokens.expect(";", "after .reg")


def variables(tokens: Tokens, names: Names, space: str, linkage: str = "") -> list[Variable]:
    """Reads what follows ".shared" and such, up to the semicolon. Raises PtxError."""
    align, type, lanes = _layout(tokens)
    found = []
    while True:
        at = tokens.at
        name = names.variable(tokens.name(f"the name of a .{space} variable"), tokens, at)
        shape = _dimensions(tokens) + [lanes][: lanes > 1]
        initial = b""
        if tokens.accept("="):
            if space not in ("global", "const") or linkage == ".extern":
                raise tokens.error(
                    f"an initial value in .{space} memory", "one for .global or .const only", at
                )
            initial = _values(tokens, type, shape)
        unsized = bool(shape) and shape[0] is None
        if linkage == ".extern" and not (unsized and space == "shared"):
            raise tokens.error(
                f"`{name}` is defined in another module", "one module with all definitions", at
            )
        if unsized and not initial and linkage != ".extern":
            raise tokens.error(f"`{name}` has no size", "its length or initial values", at)
        size = len(initial) if unsized else prod(n for n in shape if n is not None) * WIDTHS[type] // 8
        found.append(Variable(name, space, align, size, initial))
        if not tokens.accept(","):
            break
    tokens.expect(";", "after a variable")
    return found


def parameter(tokens: Tokens, names: Names) -> Variable:
    """Reads one kernel parameter, .param included."""
    tokens.expect(".param", "in the parameters")
    align, type, lanes = _layout(tokens)
    at = tokens.at
    name = names.variable(tokens.name("the name of a parameter"), tokens, at)
    shape = _dimensions(tokens)
    if None in shape:
        raise tokens.error(f"`{name}` has no size", "its length", at)
    size = prod(n for n in shape if n is not None) * lanes * WIDTHS[type] // 8
    return Variable(name, "param", align, size)


def _layout(tokens: Tokens) -> tuple[int, str, int]:
    """Reads alignment in bytes, type, and the length of its vectors: .align 16 .v4 .b32. What a pointer
    points to (.ptr .global .align 16) is left out: a simulator does not need it."""
    align, lanes, type = 0, 1, ""
    while not type:
        if tokens.accept(".align"):
            align = _alignment(tokens)
        elif tokens.next in (".v2", ".v4", ".v8"):
            lanes = int(tokens.take()[2:])
        else:
            type = _type(tokens)
            if type == "pred":
                tokens.at -= 1
                raise tokens.error("predicates do not lie in memory", "a type of at least 8 bits")
    if tokens.accept(".ptr"):
        if tokens.next in _POINTED:
            tokens.take()
        if tokens.accept(".align"):
            _alignment(tokens)
    return align or WIDTHS[type] * lanes // 8, type, lanes


def _alignment(tokens: Tokens) -> int:
    at, align = tokens.at, integer(tokens, "an alignment in bytes")
    if align < 1 or align & (align - 1):
        raise tokens.error(f"the alignment {align}", "a power of two", at)
    return align


def _type(tokens: Tokens) -> str:
    type = tokens.next[1:]
    if tokens.next[:1] != "." or type not in WIDTHS:
        raise tokens.error(f"{tokens.shown()} is not a type", f"one of {' '.join('.' + t for t in WIDTHS)}")
    tokens.at += 1
    return type


def _dimensions(tokens: Tokens) -> list[int | None]:
    """Reads [2][3]; None for [], which only the first may be."""
    shape: list[int | None] = []
    while tokens.accept("["):
        if tokens.accept("]"):
            if shape:
                raise tokens.error("[] after another dimension", "a length", tokens.at - 1)
            shape.append(None)
            continue
        at, length = tokens.at, integer(tokens, "a length")
        if length < 0:
            raise tokens.error(f"the length {length}", "one of at least 0", at)
        shape.append(length)
        tokens.expect("]", "after a length")
    return shape


def _values(tokens: Tokens, type: str, shape: list[int | None]) -> bytes:
    """Reads initial values, nested as the shape is; what is left out is 0. PTX ISA 5.4.4."""
    if not shape:
        return _element(tokens, type)
    length, inner = shape[0], shape[1:]
    tokens.expect("{", "before initial values")
    values: list[bytes] = []
    while not tokens.accept("}"):
        if values:
            tokens.expect(",", "between initial values")
        if length is not None and len(values) >= length:
            raise tokens.error(f"more than {length} initial values", "no more than the array holds")
        values.append(_values(tokens, type, inner))
    rest = 0 if length is None else length - len(values)
    return b"".join(values) + bytes(rest * prod(n for n in inner if n is not None) * WIDTHS[type] // 8)


def _element(tokens: Tokens, type: str) -> bytes:
    """One initial value. Integers wrap, and floats given for .b32 and .b64 are stored as fp32 and fp64 (what
    ptxas 13.0 does). Addresses of variables are not read."""
    at, word, bits = tokens.at, tokens.next, WIDTHS[type]
    if not starts_constant(word):
        raise tokens.error(f"{tokens.shown()} is not a number", "a number as initial value")
    value = constant(tokens)
    if isinstance(value, int) and type[0] in "bsu" and type != "bf16":
        return (value % (1 << bits)).to_bytes(bits // 8, "little")
    if isinstance(value, float) and type in ("f32", "b32"):
        return struct.pack("<f", value)
    if isinstance(value, float) and type in ("f64", "b64") and word[:2] not in ("0f", "0F"):
        return struct.pack("<d", value)
    raise tokens.error(f"`{word}` for a .{type}", "an initial value of the variable's type", at)
