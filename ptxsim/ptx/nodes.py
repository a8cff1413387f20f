"""A PTX module as frozen data: what the parser makes and every later stage reads.

Names follow the PTX ISA, release 9: a statement is an Instruction with an opcode, operands and perhaps a
guard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

WIDTHS = {"pred": 1, "b8": 8, "s8": 8, "u8": 8, "b16": 16, "s16": 16, "u16": 16, "f16": 16, "bf16": 16}
WIDTHS |= {
    "b32": 32,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "b64": 64,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "b128": 128,
}
WIDTHS |= {"f16x2": 32, "bf16x2": 32, "f32x2": 64}
"""Bits of a type."""

# --- operands -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reg:
    """A virtual register. `index` counts registers of the same file: pred, 16, 32, 64 or 128 bits wide (8-bit
    registers live in the file of 16 bits)."""

    name: str
    type: str
    index: int

    @cached_property
    def file(self) -> int:
        """Width of the register's file in bits; 1 for predicates."""
        width = WIDTHS[self.type]
        return 16 if width == 8 else width

    @cached_property
    def key(self) -> tuple[int, int]:
        """The register by its file and index: names and types may be several."""
        return self.file, self.index


@dataclass(frozen=True)
class Imm:
    """A literal. `value` is an int, or the float that 0f/0d or a decimal point spells."""

    value: int | float


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or kernel parameter, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Special:
    """A read-only register such as %tid.x or %clock64."""

    name: str


@dataclass(frozen=True)
class Label:
    """Branch target: an index into Kernel.body."""

    name: str
    target: int


@dataclass(frozen=True)
class Address:
    """[base + offset]; `coords` are the tensor coordinates of [base, {c0, c1}], else empty."""

    base: Reg | Symbol | Imm
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """first|second, two results of one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    """!p, a predicate read inverted."""

    register: Reg


@dataclass(frozen=True)
class Discard:
    """_, a result that nobody wants."""


Operand = Reg | Imm | Symbol | Special | Label | Address | Vector | Pair | Negated | Discard

# --- statements ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One statement. `guard` is its predicate (@p), read inverted where `unless` (@!p).

    `line` counts from 1 in the PTX text; `source` is "file:line" of the program it was compiled from, where
    .loc directives tell.
    """

    opcode: str
    operands: tuple[Operand, ...]
    line: int
    guard: Reg | None = None
    unless: bool = False
    source: str | None = None

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode at its dots: ("ld", "shared", "v4", "b32"). "shared::cta" and such stay whole."""
        return tuple(self.opcode.split("."))

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return self.parts[1:]

    def has(self, *modifiers: str) -> bool:
        """True if all of these are among the modifiers."""
        return all(m in self.parts[1:] for m in modifiers)

    def __str__(self) -> str:
        return f"{self.opcode} (PTX line {self.line}{f', {self.source}' if self.source else ''})"


@dataclass(frozen=True)
class Variable:
    """A .shared, .global, .const, .local or .param declaration. `initial` holds its bytes where given.

    `size` is in bytes, and 0 for an extern array whose length the launch decides (dynamic shared memory).
    """

    name: str
    space: str
    align: int
    size: int
    initial: bytes = b""


@dataclass(frozen=True)
class Kernel:
    """An entry. `parameters` lie in the order of the launch; `registers` counts registers by file width."""

    name: str
    parameters: tuple[Variable, ...]
    variables: tuple[Variable, ...]
    registers: dict[int, int]
    body: tuple[Instruction, ...]
    threads: tuple[int, int, int] | None = None
    """.reqntid"""
    cluster: tuple[int, int, int] | None = None
    """.reqnctapercluster"""
    resident: int = 1
    """.minnctapersm: CTAs that a multiprocessor has room for."""


@dataclass(frozen=True)
class Module:
    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: tuple[Variable, ...] = ()
    text: str = field(default="", repr=False)
