"""Integer instructions with one result that sweeps run, added to `functions.FUNCTIONS`.

Values are int64; results are given modulo 2^32, or 2^64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.functions import FUNCTIONS, Function

U, S = "u32", "s32"
Of = Callable[..., Tensor]


def _add(opcode: str, takes: tuple[str, ...], gives: str, of: Of, immediate: str = "") -> None:
    operands = ", ".join(f"{{$r{i}}}" for i in range(len(takes))) + immediate
    name = opcode.replace(".", "_") + immediate.replace(", ", "_")
    FUNCTIONS[name] = Function(f"{opcode} {{$w0}}, {operands};", takes, gives, _wrapped(of, gives))


def _wrapped(of: Of, gives: str) -> Of:
    def wrapped(*x: Tensor) -> Tensor:
        result = of(*x)
        if gives == U:
            return result & 0xFFFFFFFF
        return result.to(torch.int32).long() if gives == S else result

    return wrapped


def _high(a: Tensor, b: Tensor) -> Tensor:
    """Bits 32 to 63 of a product of 32-bit numbers; that of unsigned ones may not fit int64, so by halves."""
    low, high = b & 0xFFFF, b >> 16
    return (a * high + (a * low >> 16)) >> 16


def _selected(a: Tensor, b: Tensor, numbers: Tensor) -> Tensor:
    """prmt: for each byte one of b:a, by number; 8 and more replicate its sign. numbers [n, 4]."""
    bytes = torch.stack([(x >> 8 * i) & 0xFF for x in (a, b) for i in range(4)], -1)
    picked = bytes.gather(-1, numbers & 7)
    signs = torch.where(picked > 127, 0xFF, 0)
    picked = torch.where(numbers & 8 > 0, signs, picked)
    return sum(picked[..., i] << 8 * i for i in range(4))  # type: ignore[return-value]


def _permutations() -> None:
    places = torch.arange(4)
    modes: dict[str, Callable[[Tensor], Tensor]] = {
        "": lambda c: c[:, None] >> 4 * places & 15,
        ".f4e": lambda c: (c[:, None] & 3) + places,
        ".b4e": lambda c: ((c[:, None] & 3) - places) % 8,
        ".rc8": lambda c: (c[:, None] & 3).expand(-1, 4),
        ".ecl": lambda c: torch.maximum(c[:, None] & 3, places),
        ".ecr": lambda c: torch.minimum(c[:, None] & 3, places),
        ".rc16": lambda c: (c[:, None] & 1) * 2 + places % 2,
    }
    for mode, numbers in modes.items():
        _add(f"prmt.b32{mode}", (U, U, U), U, lambda a, b, c, n=numbers: _selected(a, b, n(c)))


def _shifts() -> None:
    def left(a: Tensor, by: Tensor) -> Tensor:
        return torch.where(by > 31, 0, a << by.clamp(max=31))

    def right(a: Tensor, by: Tensor) -> Tensor:
        return a >> by.clamp(max=32)

    _add("shl.b32", (U, U), U, left)
    _add("shr.u32", (U, U), U, right)
    _add("shr.s32", (S, U), S, right)
    for mode, limit in (("clamp", lambda c: c.clamp(max=32)), ("wrap", lambda c: c & 31)):
        _add(f"shf.l.{mode}.b32", (U, U, U), U, lambda a, b, c, f=limit: (b << f(c)) | (a >> (32 - f(c))))
        _add(f"shf.r.{mode}.b32", (U, U, U), U, lambda a, b, c, f=limit: (a >> f(c)) | (b << (32 - f(c))))


def _fields() -> None:
    def field(a: Tensor, begin: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        begin, length = begin & 0xFF, length & 0xFF
        mask = (1 << length.clamp(max=32)) - 1
        return torch.where(begin > 31, 0, (a & 0xFFFFFFFF) >> begin.clamp(max=31)) & mask, begin, length

    def signed(a: Tensor, begin: Tensor, length: Tensor) -> Tensor:
        found, begin, length = field(a, begin, length)
        last = torch.minimum(begin + length - 1, torch.tensor(31)).clamp(min=0)
        negative = ((a >> last) & 1 > 0) & (length > 0)
        return torch.where(negative, found | (-1 << (last - begin + 1).clamp(0, 32)), found)

    def inserted(a: Tensor, b: Tensor, begin: Tensor, length: Tensor) -> Tensor:
        begin, length = begin & 0xFF, length & 0xFF
        mask = (
            torch.where(begin > 31, 0, ((1 << length.clamp(max=32)) - 1) << begin.clamp(max=31)) & 0xFFFFFFFF
        )
        return (b & ~mask) | (a << begin.clamp(max=31) & mask)

    _add("bfe.u32", (U, U, U), U, lambda *x: field(*x)[0])
    _add("bfe.s32", (S, U, U), S, signed)
    _add("bfi.b32", (U, U, U, U), U, inserted)


def _bits() -> None:
    def length(x: Tensor) -> Tensor:
        """Bits up to the highest that is set."""
        return sum((x >> i > 0).long() for i in range(32))  # type: ignore[return-value]

    def count(x: Tensor) -> Tensor:
        return sum(x >> i & 1 for i in range(32))  # type: ignore[return-value]

    def magnitude(x: Tensor) -> Tensor:
        return torch.where(x < 0, ~x, x)

    _add("popc.b32", (U,), U, count)
    _add("clz.b32", (U,), U, lambda x: 32 - length(x))
    _add("brev.b32", (U,), U, lambda x: sum((x >> i & 1) << 31 - i for i in range(32)))  # type: ignore[arg-type]
    for kind, of in ((U, length), (S, lambda x: length(magnitude(x)))):
        _add(f"bfind.{kind}", (kind,), U, lambda x, f=of: f(x) - 1)
        _add(f"bfind.shiftamt.{kind}", (kind,), U, lambda x, f=of: torch.where(f(x) > 0, 32 - f(x), -1))
    _add("not.b32", (U,), U, torch.bitwise_not)
    for name, two in (("and", torch.bitwise_and), ("or", torch.bitwise_or), ("xor", torch.bitwise_xor)):
        _add(f"{name}.b32", (U, U), U, two)
    for table in (0x1E, 0x96, 0xE8, 0x3A):
        _add("lop3.b32", (U, U, U), U, lambda a, b, c, t=table: _looked_up(a, b, c, t), f", {table:#x}")


def _looked_up(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    result = torch.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _arithmetic() -> None:
    for kind in (U, S):
        _add(f"add.{kind}", (kind, kind), kind, torch.add)
        _add(f"sub.{kind}", (kind, kind), kind, torch.sub)
        _add(f"mul.lo.{kind}", (kind, kind), kind, torch.mul)
        _add(f"mul.hi.{kind}", (kind, kind), kind, _high)
        _add(f"mad.lo.{kind}", (kind, kind, kind), kind, lambda a, b, c: a * b + c)
        _add(f"mad.hi.{kind}", (kind, kind, kind), kind, lambda a, b, c: _high(a, b) + c)
        _add(f"min.{kind}", (kind, kind), kind, torch.minimum)
        _add(f"max.{kind}", (kind, kind), kind, torch.maximum)
        _add(f"sad.{kind}", (kind, kind, kind), kind, lambda a, b, c: (a - b).abs() + c)
        _add(f"mul.wide.{kind}", (kind, kind), "s64", torch.mul)
    _add("abs.s32", (S,), S, torch.abs)
    _add("neg.s32", (S,), S, torch.neg)
    _add("add.sat.s32", (S, S), S, lambda a, b: (a + b).clamp(-(2**31), 2**31 - 1))
    _add("sub.sat.s32", (S, S), S, lambda a, b: (a - b).clamp(-(2**31), 2**31 - 1))


for _fill in (_permutations, _shifts, _fields, _bits, _arithmetic):
    _fill()
