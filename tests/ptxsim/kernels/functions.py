"""Instructions with one result that sweeps run: their PTX, formats and exact results.

Documented errors of approximations are those of the PTX ISA, section "Floating Point Instructions".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.case import BOTH
from kernels.formats import BF16, E4M3, E5M2, F16, F32, TF32, Format, added

MODES = ("rn", "rz", "rm", "rp")


@dataclass(frozen=True)
class Function:
    """One instruction. `takes` and `gives` name formats, with "x2" for two numbers in one register, the first
    in the low half; or s32, u32, f64; b32 is f32, of which `of` is given the bits. `of` maps values, float64
    or integers, to results, which may be off by `error` of the same values."""

    ptx: str
    takes: tuple[str, ...]
    gives: str
    of: Callable[..., Tensor]
    error: Callable[..., Tensor] | None = None
    archs: tuple[str, ...] = BOTH


FUNCTIONS: dict[str, Function] = {}
"""Functions by their names in tests."""


def _add(opcode: str, takes: tuple[str, ...], gives: str, of: Callable[..., Tensor], **more: object) -> None:
    operands = ", ".join(f"{{$r{i}}}" for i in range(len(takes)))
    name = opcode.replace(".", "_")
    name += "_3" if name in FUNCTIONS else ""
    FUNCTIONS[name] = Function(f"{opcode} {{$w0}}, {operands};", takes, gives, of, **more)  # type: ignore[arg-type]


def _positive(x: Tensor) -> Tensor:
    """ReLU; NaN stays."""
    return torch.where(x > 0, x, torch.where(x.isnan(), x, 0.0))


def _clamped(x: Tensor) -> Tensor:
    """.sat: to [0, 1]; NaN is 0."""
    return torch.where(x.isnan(), 0.0, x.clamp(0, 1)) + 0.0


def _tf32_away(bits: Tensor) -> Tensor:
    """Ties away from zero; NaN is cut off, so that one with nothing but low bits becomes infinity."""
    value = F32.values(bits)
    return torch.where(value.isnan(), F32.values(bits & ~0x1FFF), TF32.rounded(value, "rna"))


def _upper_first(a: Tensor, b: Tensor) -> Tensor:
    """The first operand of a packing conversion goes to the high half."""
    return torch.stack([b, a], -1)


# --- conversions --------------------------------------------------------------------------------------------


def _narrowing() -> None:
    for name, format in (("f16", F16), ("bf16", BF16)):
        for mode in ("rn", "rz"):
            _add(f"cvt.{mode}.{name}.f32", ("f32",), name, lambda x, f=format, m=mode: f.rounded(x, m))
            _add(
                f"cvt.{mode}.relu.{name}.f32",
                ("f32",),
                name,
                lambda x, f=format, m=mode: _positive(f.rounded(x, m)),
            )
            _add(
                f"cvt.{mode}.{name}x2.f32",
                ("f32", "f32"),
                f"{name}x2",
                lambda a, b, f=format, m=mode: f.rounded(_upper_first(a, b), m),
            )
        _add(
            f"cvt.rn.relu.{name}x2.f32",
            ("f32", "f32"),
            f"{name}x2",
            lambda a, b, f=format: _positive(f.rounded(_upper_first(a, b))),
        )
    for mode in ("rm", "rp"):
        _add(f"cvt.{mode}.f16.f32", ("f32",), "f16", lambda x, m=mode: F16.rounded(x, m))
    for mode in ("rn", "rz"):
        _add(f"cvt.{mode}.tf32.f32", ("f32",), "tf32", lambda x, m=mode: TF32.rounded(x, m))
    _add("cvt.rna.tf32.f32", ("b32",), "tf32", _tf32_away)
    for mode in MODES:
        _add(f"cvt.{mode}.f32.f64", ("f64",), "f32", lambda x, m=mode: F32.rounded(x, m))


def _eight_bits() -> None:
    for name, format in (("e4m3", E4M3), ("e5m2", E5M2)):

        def narrowed(x: Tensor, format: Format = format) -> Tensor:
            return format.rounded(x, saturate=True)

        for relu in ("", ".relu"):
            after = _positive if relu else (lambda x: x)
            _add(
                f"cvt.rn.satfinite{relu}.{name}x2.f32",
                ("f32", "f32"),
                f"{name}x2",
                lambda a, b, narrowed=narrowed, after=after: after(narrowed(_upper_first(a, b))),
            )
            _add(
                f"cvt.rn.satfinite{relu}.{name}x2.f16x2",
                ("f16x2",),
                f"{name}x2",
                lambda x, narrowed=narrowed, after=after: after(narrowed(x)),
            )
            _add(f"cvt.rn{relu}.f16x2.{name}x2", (f"{name}x2",), "f16x2", after)


def _widening() -> None:
    _add("cvt.f32.f16", ("f16",), "f32", lambda x: x)
    _add("cvt.f32.bf16", ("bf16",), "f32", lambda x: x)
    _add("cvt.f64.f32", ("f32",), "f64", lambda x: x)
    _add("cvt.ftz.f32.f16", ("f16",), "f32", lambda x: x)


def _integers() -> None:
    whole = {
        "rni": torch.round,
        "rzi": torch.trunc,
        "rmi": torch.floor,
        "rpi": torch.ceil,
    }
    ends = {"s32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1)}
    for mode, function in whole.items():
        for kind, (low, high) in ends.items():
            _add(
                f"cvt.{mode}.{kind}.f32",
                ("f32",),
                kind,
                lambda x, f=function, low=low, high=high: f(x).nan_to_num(0.0).clamp(low, high).long(),
            )
        _add(f"cvt.{mode}.f32.f32", ("f32",), "f32", lambda x, f=function: f(x))
    for mode in MODES:
        for kind in ends:
            _add(f"cvt.{mode}.f32.{kind}", (kind,), "f32", lambda x, m=mode: F32.rounded(x.double(), m))
    _add("cvt.rn.f16.s32", ("s32",), "f16", lambda x: F16.rounded(x.double()))
    _add(
        "cvt.rzi.s32.f16",
        ("f16",),
        "s32",
        lambda x: torch.trunc(x).nan_to_num(0.0, 2**31 - 1, -(2**31)).long(),
    )
    _add("cvt.sat.f32.f32", ("f32",), "f32", _clamped)


# --- arithmetic ---------------------------------------------------------------------------------------------


def _lesser(a: Tensor, b: Tensor) -> Tensor:
    """The smaller number, -0 being less than +0; of a number and NaN the number."""
    first = (a < b) | ((a == b) & a.signbit()) | b.isnan()
    return torch.where(first, a, b)


def _greater(a: Tensor, b: Tensor) -> Tensor:
    return -_lesser(-a, -b)


def _or_nan(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: torch.where(a.isnan() | b.isnan(), torch.nan, function(a, b))


def _added_zero(a: Tensor, b: Tensor, mode: str) -> Tensor:
    """a + b, where a sum of zero has the sign that the rounding mode gives it."""
    total = added(a, b)
    cancelled = (a == -b) & (a != 0)
    opposite = (a == 0) & (b == 0) & (a.signbit() != b.signbit())
    zero = torch.full_like(total, -0.0 if mode == "rm" else 0.0)
    return torch.where(cancelled & a.isfinite() | opposite, zero, total)


def _sums(format: Format, mode: str, flush: bool = False) -> dict[str, Callable[..., Tensor]]:
    """add, sub, mul and fma of one rounding."""
    clean = format.flushed if flush else (lambda x: x)

    def done(x: Tensor) -> Tensor:
        return clean(format.rounded(x, mode))

    return {
        "add": lambda a, b: done(_added_zero(clean(a), clean(b), mode)),
        "sub": lambda a, b: done(_added_zero(clean(a), -clean(b), mode)),
        "mul": lambda a, b: done(clean(a) * clean(b)),
        "fma": lambda a, b, c: done(_added_zero(clean(a) * clean(b), clean(c), mode)),
    }


def _arithmetic() -> None:
    for flush in ("", ".ftz"):
        for mode in MODES if not flush else ("rn", "rm"):
            for name, of in _sums(F32, mode, bool(flush)).items():
                takes = ("f32",) * (3 if name == "fma" else 2)
                _add(f"{name}.{mode}{flush}.f32", takes, "f32", of)
                pairs = ("f32x2",) * len(takes)
                _add(f"{name}.{mode}{flush}.f32x2", pairs, "f32x2", of, archs=("sm_100a",))
        for name, of in (("min", _lesser), ("max", _greater)):
            clean = F32.flushed if flush else (lambda x: x)

            def flushed(a: Tensor, b: Tensor, of=of, clean=clean) -> Tensor:  # type: ignore[no-untyped-def]
                return of(clean(a), clean(b))

            _add(f"{name}{flush}.f32", ("f32", "f32"), "f32", flushed)
            _add(f"{name}{flush}.NaN.f32", ("f32", "f32"), "f32", _or_nan(flushed))
    for name in ("add", "mul", "fma"):
        of = _sums(F32, "rn")[name]
        takes = ("f32",) * (3 if name == "fma" else 2)
        _add(f"{name}.rn.sat.f32", takes, "f32", lambda *x, of=of: _clamped(of(*x)))
    _add("abs.f32", ("f32",), "f32", torch.abs)
    _add("neg.f32", ("f32",), "f32", torch.neg)
    _add("neg.ftz.f32", ("f32",), "f32", lambda x: -F32.flushed(x))
    _add("copysign.f32", ("f32", "f32"), "f32", lambda a, b: torch.copysign(b, a))


def _three_operands() -> None:
    for name, of in (("min", _lesser), ("max", _greater)):
        for nan, pair in (("", of), (".NaN", _or_nan(of))):
            _add(
                f"{name}{nan}.f32",
                ("f32", "f32", "f32"),
                "f32",
                lambda a, b, c, of=pair: of(of(a, b), c),
                archs=("sm_100a",),
            )
    for name in ("f16", "bf16"):
        sums = _sums(F32, "rn")
        _add(f"fma.rn.f32.{name}", (name, name, "f32"), "f32", sums["fma"], archs=("sm_100a",))
        _add(f"add.rn.f32.{name}", (name, "f32"), "f32", sums["add"], archs=("sm_100a",))
        _add(f"sub.rn.f32.{name}", (name, "f32"), "f32", sums["sub"], archs=("sm_100a",))


def _halves() -> None:
    for kind, format in (("f16", F16), ("bf16", BF16)):
        for pack in ("", "x2"):
            name = kind + pack
            sums = _sums(format, "rn")
            for operation in ("add", "sub", "mul"):
                _add(f"{operation}.rn.{name}", (name, name), name, sums[operation])
            _add(f"fma.rn.{name}", (name,) * 3, name, sums["fma"])
            _add(f"fma.rn.relu.{name}", (name,) * 3, name, lambda *x, of=sums["fma"]: _positive(of(*x)))
            for operation, of in (("min", _lesser), ("max", _greater)):
                _add(f"{operation}.{name}", (name, name), name, of)
                _add(f"{operation}.NaN.{name}", (name, name), name, _or_nan(of))
            _add(f"neg.{name}", (name,), name, torch.neg)
            _add(f"abs.{name}", (name,), name, torch.abs)


def _comparisons() -> None:
    ordered = {"eq": torch.eq, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}
    ordered["ne"] = lambda a, b: (a < b) | (a > b)
    for name, of in ordered.items():
        _compare(name, lambda a, b, of=of: of(a, b).long())
        _compare(name + "u", lambda a, b, of=of: (of(a, b) | a.isnan() | b.isnan()).long())
    _compare("num", lambda a, b: (~(a.isnan() | b.isnan())).long())
    _compare("nan", lambda a, b: (a.isnan() | b.isnan()).long())


def _compare(name: str, of: Callable[[Tensor, Tensor], Tensor]) -> None:
    ptx = f"{{ .reg .pred p; setp.{name}.f32 p, {{$r0}}, {{$r1}}; selp.b32 {{$w0}}, 1, 0, p; }}"
    FUNCTIONS[f"setp_{name}_f32"] = Function(ptx, ("f32", "f32"), "s32", of)


# --- exactly rounded and approximate functions --------------------------------------------------------------


def _approximate(
    name: str, of: Callable[..., Tensor], error: Callable[..., Tensor], operands: int = 1, **more: object
) -> None:
    """`name`.approx with and without .ftz."""
    for flush in (False, True):
        clean = F32.flushed if flush else (lambda x: x)
        opcode = f"{name}{'.ftz' if flush else ''}.f32"

        def value(*x: Tensor, clean=clean) -> Tensor:  # type: ignore[no-untyped-def]
            return clean(F32.rounded(of(*map(clean, x))))

        def off(*x: Tensor, clean=clean) -> Tensor:  # type: ignore[no-untyped-def]
            return error(*map(clean, x)) + 2.0**-149

        _add(opcode, ("f32",) * operands, "f32", value, error=off, **more)


def _relative(of: Callable[..., Tensor], power: float) -> Callable[..., Tensor]:
    return lambda *x: of(*x).abs() * 2.0**power


def _functions() -> None:
    def reciprocal(x: Tensor) -> Tensor:
        return 1 / x

    def inverse_root(x: Tensor) -> Tensor:
        return 1 / x.sqrt()

    _approximate("ex2.approx", torch.exp2, _relative(torch.exp2, -22))
    _approximate("rcp.approx", reciprocal, _relative(reciprocal, -23))
    _approximate("sqrt.approx", torch.sqrt, _relative(torch.sqrt, -23))
    _approximate("rsqrt.approx", inverse_root, _relative(inverse_root, -22.9))

    def logarithm_error(x: Tensor) -> Tensor:
        near_one = (x > 0.5) & (x < 2)
        return torch.where(near_one, 1.0, x.log2().abs()) * 2.0**-22

    def angle_error(x: Tensor) -> Tensor:
        small = torch.where(x.abs() <= 2 * math.pi, 2.0**-20.5, 2.0**-14.7)
        return torch.where(x.abs() <= 100 * math.pi, small, 2.0)

    _approximate("lg2.approx", torch.log2, logarithm_error)
    _approximate("sin.approx", torch.sin, angle_error)
    _approximate("cos.approx", torch.cos, angle_error)
    _add(
        "tanh.approx.f32", ("f32",), "f32", torch.tanh, error=lambda x: x.tanh().abs() * 2.0**-11 + 2.0**-149
    )

    def quotient_error(a: Tensor, b: Tensor) -> Tensor:
        inside = (b.abs() >= 2.0**-126) & (b.abs() <= 2.0**126)
        return torch.where(inside, (a / b).abs() * 2.0**-22, torch.inf)

    def quotient(a: Tensor, b: Tensor) -> Tensor:
        """Divisors beyond 2^126 count as infinite, whose reciprocal zero then meets the dividend."""
        return torch.where(
            (b.abs() > 2.0**126) & b.isfinite(), a * torch.copysign(torch.zeros_like(b), b), a / b
        )

    _approximate("div.approx", quotient, quotient_error, operands=2)
    _approximate("div.full", torch.div, _relative(torch.div, -22), operands=2)
    for mode in MODES:
        _add(f"sqrt.{mode}.f32", ("f32",), "f32", lambda x, m=mode: F32.rounded(_odd_root(x), m))
        _add(
            f"rcp.{mode}.f32",
            ("f32",),
            "f32",
            lambda x, m=mode: F32.rounded(_odd_ratio(torch.ones_like(x), x), m),
        )
        _add(f"div.{mode}.f32", ("f32", "f32"), "f32", lambda a, b, m=mode: F32.rounded(_odd_ratio(a, b), m))
    _half_functions()


def _half_functions() -> None:
    for kind, format, exponential, tangent in (("f16", F16, -9.9, -10.987), ("bf16", BF16, -7, -8)):
        flush = ".ftz" if kind == "bf16" else ""
        clean = format.flushed if flush else (lambda x: x)
        tiny = 2.0 ** (format.lowest - format.precision + 1)
        for pack in ("", "x2"):
            name = kind + pack
            _add(
                f"ex2.approx{flush}.{name}",
                (name,),
                name,
                lambda x, clean=clean, format=format: clean(format.rounded(torch.exp2(clean(x)))),
                error=lambda x, power=exponential, tiny=tiny: torch.exp2(x) * 2.0**power + tiny,
            )
            _add(
                f"tanh.approx.{name}",
                (name,),
                name,
                torch.tanh,
                error=lambda x, power=tangent: torch.full_like(x, 2.0**power),
            )


def _odd_ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b of fp32 numbers, rounded to odd, as `added` does: a - q b is a float64 number where q is."""
    quotient = a / b
    rest = added(a, -_high(quotient) * b) - _low(quotient) * b
    return _nudged(quotient, torch.sign(rest) * torch.sign(b))


def _odd_root(x: Tensor) -> Tensor:
    root = x.sqrt()
    high, low = _high(root), _low(root)
    rest = ((x - high * high) - 2 * high * low) - low * low
    return _nudged(root, torch.sign(rest))


def _high(x: Tensor) -> Tensor:
    """The leading 26 bits, whose products with 27 more are exact."""
    return (x.view(torch.int64) & ~0x7FFFFFF).view(torch.float64)


def _low(x: Tensor) -> Tensor:
    return x - _high(x)


def _nudged(x: Tensor, direction: Tensor) -> Tensor:
    """`x`, whose exact value lies in `direction` of it, rounded to odd."""
    even = x.view(torch.int64) % 2 == 0
    towards = torch.where(direction > 0, torch.inf, -torch.inf).double()
    change = even & x.isfinite() & (x != 0) & (direction != 0) & ~direction.isnan()
    return torch.where(change, torch.nextafter(x, towards), x)


for _fill in (
    _narrowing,
    _eight_bits,
    _widening,
    _integers,
    _arithmetic,
    _three_operands,
    _halves,
    _comparisons,
    _functions,
):
    _fill()
