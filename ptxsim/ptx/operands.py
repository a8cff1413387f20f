"""Reading instructions and their operands. PTX ISA, sections 4.3.2, 6.4 and 9.3."""

from __future__ import annotations

import re

from ptxsim.ptx.lex import Tokens
from ptxsim.ptx.literals import immediate, integer, starts_constant
from ptxsim.ptx.nodes import (
    Address,
    Discard,
    Imm,
    Instruction,
    Label,
    Negated,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    Vector,
)
from ptxsim.ptx.scopes import SPECIAL, UNRESOLVED, Names

_OPCODE = re.compile(r"[a-z]\w*(?:(?:\.|::)\w+)*")
_DISCARD = Discard()
PRINTING = "vprintf"
"""The function that the system has for kernels."""


def instruction(tokens: Tokens, names: Names, index: int, source: str | None) -> Instruction:
    """Reads a statement up to its semicolon; it becomes number `index` of the body. Raises PtxError."""
    at = tokens.at
    guard, unless = _guard(tokens, names) if tokens.accept("@") else (None, False)
    opcode = tokens.take()
    if not _OPCODE.fullmatch(opcode):
        raise tokens.error(f"`{opcode}` is not an opcode", "a directive, label or instruction", tokens.at - 1)
    while tokens.next[:1] == "." and not starts_constant(tokens.next):
        opcode += tokens.take()
    name = opcode.partition(".")[0]
    if name == "call":
        operands = _call(tokens, names, at)
    elif name in ("bra", "brx"):
        operands = _branch(tokens, names, name)
        names.branches(index, at)
    else:
        operands = _operands(tokens, names)
    return Instruction(opcode, operands, tokens.line(at), guard, unless, source)


def _call(tokens: Tokens, names: Names, at: int) -> tuple[Operand, ...]:
    """Reads (results), vprintf, (arguments)."""
    results = _handed_over(tokens, names) if tokens.next == "(" and tokens.accept("(") else Vector(())
    function = tokens.next
    if function != PRINTING:
        raise tokens.error(
            "functions cannot be called",
            f"a kernel without calls but of {PRINTING} (all functions inlined)",
            at,
        )
    tokens.take()
    tokens.expect(",", "after a function")
    tokens.expect("(", "before arguments")
    operands = results, Symbol(function), _handed_over(tokens, names)
    tokens.expect(";", "after the operands")
    return operands


def _handed_over(tokens: Tokens, names: Names) -> Vector:
    """Reads variables up to the closing parenthesis, and a comma behind it."""
    found = [operand(tokens, names)]
    while not tokens.accept(")"):
        tokens.expect(",", "between variables")
        found.append(operand(tokens, names))
    tokens.accept(",")
    return Vector(tuple(found))


def _guard(tokens: Tokens, names: Names) -> tuple[Reg, bool]:
    """Reads the predicate after an @."""
    unless = tokens.accept("!")
    return _predicate(tokens, names, "a declared predicate after @"), unless


def _predicate(tokens: Tokens, names: Names, what: str) -> Reg:
    found = names.find(tokens.next)
    if not isinstance(found, Reg) or found.type != "pred":
        raise tokens.error(f"{tokens.shown()} is not a predicate", what)
    tokens.at += 1
    return found


def _branch(tokens: Tokens, names: Names, name: str) -> tuple[Operand, ...]:
    """Reads the operands of bra, a label, or brx, a register and the name of its .branchtargets."""
    if name == "bra":
        operands: tuple[Operand, ...] = (Label(tokens.name("the label to branch to"), UNRESOLVED),)
    else:
        register = operand(tokens, names)
        tokens.expect(",", "between the operands of brx")
        table = names.find_table(tokens.next)
        if table is None:
            raise tokens.error(
                f"{tokens.shown()} is not declared", "a label of .branchtargets declared before"
            )
        tokens.at += 1
        operands = (register, table)
    tokens.expect(";", "after the operands")
    return operands


def _operands(tokens: Tokens, names: Names) -> tuple[Operand, ...]:
    if tokens.accept(";"):
        return ()
    operands = [operand(tokens, names)]
    while not tokens.accept(";"):
        if not tokens.accept(","):
            raise tokens.error(f"{tokens.shown()} after an operand", "`,` and an operand, or `;`")
        operands.append(operand(tokens, names))
    return tuple(operands)


def operand(tokens: Tokens, names: Names) -> Operand:
    """Reads one operand. Raises PtxError."""
    word = tokens.next
    found = names.find(word)
    if isinstance(found, Reg):
        tokens.at += 1
        return _pair(found, tokens, names) if tokens.next == "|" else found
    if found is not None:
        tokens.at += 1
        return Symbol(found.name, integer(tokens, "bytes")) if tokens.next == "+" else found
    if word == "{":
        return Vector(_vector(tokens, names))
    vector = names.find_vector(word)
    if vector is not None:
        tokens.at += 1
        return vector
    if word == "[":
        return _address(tokens, names)
    if starts_constant(word):
        return immediate(tokens)
    if word in SPECIAL:
        tokens.at += 1
        return Special(word)
    if word == "_":
        tokens.at += 1
        return _pair(_DISCARD, tokens, names) if tokens.next == "|" else _DISCARD
    if word == "!":
        tokens.at += 1
        return Negated(_predicate(tokens, names, "a declared predicate after !"))
    if word[:1].isalpha() or word[:1] in ("%", "$", "_"):
        raise tokens.error(f"`{word}` is not declared", "a declared register, variable or special register")
    raise tokens.error(f"{tokens.shown()} is not an operand", "an operand")


def _pair(first: Operand, tokens: Tokens, names: Names) -> Pair:
    """Reads |second."""
    tokens.expect("|", "between two results")
    if tokens.accept("_"):
        return Pair(first, _DISCARD)
    second = names.find(tokens.next)
    if not isinstance(second, Reg):
        raise tokens.error(f"{tokens.shown()} is not declared", "a declared register, or _, after |")
    tokens.at += 1
    return Pair(first, second)


def _vector(tokens: Tokens, names: Names) -> tuple[Operand, ...]:
    """Reads { a, b, ... }."""
    tokens.expect("{", "before the items of a vector")
    items = [operand(tokens, names)]
    while not tokens.accept("}"):
        if not tokens.accept(","):
            raise tokens.error(f"{tokens.shown()} in a vector", "`,` and an operand, or `}`")
        items.append(operand(tokens, names))
    return tuple(items)


def _address(tokens: Tokens, names: Names) -> Address:
    """Reads [base], [base+bytes], [bytes] or [base, {coordinates}]."""
    tokens.expect("[", "before an address")
    base: Reg | Symbol | Imm | None = names.find(tokens.next)
    offset = 0
    if base is not None:
        tokens.at += 1
        if tokens.next in ("+", "-"):
            offset = integer(tokens, "bytes to add to the address")
    elif starts_constant(tokens.next):
        base = Imm(integer(tokens, "an address in bytes"))
    else:
        raise tokens.error(
            f"{tokens.shown()} is not declared", "an address: a declared register or variable, or a number"
        )
    coords = _vector(tokens, names) if tokens.accept(",") else ()
    tokens.expect("]", "in an address")
    return Address(base, offset, coords)
