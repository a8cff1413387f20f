"""Literals and constant expressions. PTX ISA, sections 4.5.1 to 4.5.6.

Integers have 64 bits, signed or unsigned; floats are doubles, but 0f... holds the 32 bits of an fp32 number.
Comparisons, `?:`, `!` and casts are not read.
"""

from __future__ import annotations

import re
import struct
from functools import cache

from ptxsim.ptx.lex import Tokens
from ptxsim.ptx.nodes import Imm

_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)U?")
_FLOAT = re.compile(r"[0-9]+\.[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+")
_PRIORITY = {"|": 1, "^": 2, "&": 3, "<<": 4, ">>": 4, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6}


def starts_constant(word: str) -> bool:
    """True if a token can begin a constant expression."""
    return word[:1].isdigit() or word in ("-", "+", "~", "(") or (word[:1] == "." and word[1:2].isdigit())


def immediate(tokens: Tokens) -> Imm:
    """Reads a constant expression. Raises PtxError."""
    value = constant(tokens)
    return Imm(value) if isinstance(value, int) else _float(struct.pack(">d", value))


def integer(tokens: Tokens, what: str) -> int:
    """Reads a constant expression that has to be an integer. Raises PtxError that expects `what`."""
    start = tokens.at
    value = constant(tokens) if starts_constant(tokens.next) else None
    if not isinstance(value, int):
        tokens.at = start
        raise tokens.error(f"{tokens.shown()} is not an integer", what)
    return value


def constant(tokens: Tokens) -> int | float:
    """Reads a constant expression. Raises PtxError where it is none or does not fit 64 bits."""
    start = tokens.at
    if tokens.next[:2] in ("0f", "0F"):
        return _number(tokens)
    value = _expression(tokens, 0)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise tokens.error(f"{value} does not fit 64 bits", "an integer constant of 64 bits", start)
    return value


@cache
def _float(bits: bytes) -> Imm:
    """The same object for the same bits, so that modules that hold a NaN still compare equal."""
    return Imm(struct.unpack(">d", bits)[0])


def _expression(tokens: Tokens, floor: int) -> int | float:
    """Reads operators that bind tighter than `floor`."""
    left = _unary(tokens)
    while (priority := _PRIORITY.get(tokens.next, 0)) > floor:
        at, operator = tokens.at, tokens.take()
        right = _expression(tokens, priority)
        try:
            left = _apply(operator, left, right)
        except (ArithmeticError, TypeError, ValueError) as problem:
            raise tokens.error(f"{left} {operator} {right}: {problem}", "a constant expression", at) from None
    return left


def _unary(tokens: Tokens) -> int | float:
    at = tokens.at
    if tokens.accept("("):
        value = _expression(tokens, 0)
        tokens.expect(")", "in a constant expression")
        return value
    if tokens.accept("-"):
        return -_unary(tokens)
    if tokens.accept("+"):
        return _unary(tokens)
    if tokens.accept("~"):
        value = _unary(tokens)
        if isinstance(value, float):
            raise tokens.error(f"~ of the float {value}", "an integer", at)
        return ~value
    if tokens.next[:2] in ("0f", "0F"):
        raise tokens.error(
            f"{tokens.shown()} in an expression", "a 0f constant to stand alone (PTX ISA 4.5.2)"
        )
    return _number(tokens)


def _apply(operator: str, left: int | float, right: int | float) -> int | float:
    """Division and remainder truncate towards zero, as in C."""
    if isinstance(left, float) or isinstance(right, float):
        match operator:
            case "+":
                return left + right
            case "-":
                return left - right
            case "*":
                return left * right
            case "/":
                return left / right
        raise TypeError("not an operator of floats")
    quotient = abs(left) // abs(right) if operator in "/%" else 0
    if left < 0 < right or right < 0 < left:
        quotient = -quotient
    if operator in ("<<", ">>") and right > 63:
        raise ValueError("shifts by more than 63")
    match operator:
        case "|":
            return left | right
        case "^":
            return left ^ right
        case "&":
            return left & right
        case "<<":
            return left << right
        case ">>":
            return left >> right
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return quotient
    return left - right * quotient


def _number(tokens: Tokens) -> int | float:
    at, word = tokens.at, tokens.take()
    value = number(word)
    if value is None:
        raise tokens.error(
            f"`{word}` is not a number",
            "a decimal, 0x, 0b or octal integer, a decimal float, 0f and 8 hexadecimal digits or 0d and 16",
            at,
        )
    return value


def number(word: str) -> int | float | None:
    """The value of a literal without a sign; None if it is none."""
    if _INTEGER.fullmatch(word):
        digits = word.rstrip("U")
        return int(digits, 8) if digits.isdigit() and digits[0] == "0" else int(digits, 0)
    if _FLOAT.fullmatch(word):
        return float(word)
    kind, digits = word[:2].lower(), word[2:]
    if kind == "0d" and len(digits) == 16:
        return float(struct.unpack(">d", bytes.fromhex(digits))[0])
    if kind == "0f" and len(digits) == 8:
        bits = bytes.fromhex(digits)
        value = float(struct.unpack(">f", bits)[0])
        # a signalling NaN becomes a quiet one as a double: an Imm cannot hold it
        return value if struct.pack(">f", value) == bits else None
    return None
