"""Arguments over the whole domain of a row of ops.py, and how far values are from torch's in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.ops import OPS, RISING, Cost, Domain, Formula, Operation

SMALLEST = 2.0**-126
"""Smallest float32 that is not subnormal."""
LARGEST = 3.4028234e38
STEPS = 2.0 ** -torch.arange(1.0, 25.0, dtype=torch.float64)
FEW = 96
"""Arguments each of a function of two."""


def asinh(formula: Formula) -> Operation:
    """The row of an operation that there is none of yet."""
    return Operation(
        "asinh", 1, "float", "float", Cost(3, 20), ("asinh", "arcsinh"), RISING,
        lambda y, x: (1.0 / (x * x + 1.0).sqrt(),), formula=formula, odd=True,
        domain=(Domain(hard=(1.0, 1e9)),), ulps=6,
    )  # fmt: skip


def stable(x: Any) -> Any:
    """asinh without cancellation near 0 and without squares that overflow."""
    size = x.abs()
    near = (size + size * size / (1.0 + (size * size + 1.0).sqrt())).log1p()
    return x.sign() * size.lt(1e9).where(near, size.log() + math.log(2))


def cancelling(x: Any) -> Any:
    """asinh as textbooks have it, which loses all digits near 0."""
    return (x + (x * x + 1.0).sqrt()).log()


def of_floats() -> list[Operation]:
    """Rows of functions of floats, rounded and unrounded."""
    others = ("detach", "with_grad")
    return [row for row in OPS.values() if row.takes == row.gives == "float" and row.name not in others]


def lacking(row: Operation) -> str:
    """Words for what the row of a function of floats does not declare; "" if it declares all."""
    if len(row.domain) != row.arity:
        return (
            f"the row of {row.name} declares {len(row.domain)} domains for {row.arity} arguments: "
            "domain=(Domain(low, high, hard places), ..) and ulps= say where it is compared with torch"
        )
    return ""


def arguments(domain: Domain) -> Tensor:
    """float32: of every size, close to ends and hard places, evenly spaced, and beyond the domain."""
    sizes = 2.0 ** torch.arange(-149.0, 128.0, dtype=torch.float64)
    extremes = torch.tensor([0.0, LARGEST, SMALLEST, 1e-40, math.inf], dtype=torch.float64)
    sizes = torch.cat([sizes, 1.37 * sizes[:-1], extremes])
    places = [x for x in (domain.low, domain.high, *domain.hard) if math.isfinite(x)]
    near = [place + sign * max(abs(place), 1.0) * STEPS for place in places for sign in (1, -1)]
    near.append(torch.tensor(places, dtype=torch.float64))
    even = torch.linspace(max(domain.low, -20.0), min(domain.high, 20.0), 499, dtype=torch.float64)
    wide = torch.linspace(max(domain.low, -130.0), min(domain.high, 130.0), 301, dtype=torch.float64)
    nan = torch.tensor([math.nan], dtype=torch.float64)
    return torch.cat([sizes, -sizes, *near, even, wide, nan]).float()


def inputs(row: Operation) -> list[Tensor]:
    """float32 [N] for each argument of the row; of two, many pairs."""
    each = [arguments(domain) for domain in row.domain]
    if row.arity == 1:
        return each
    few = [x[torch.randperm(len(x))[:FEW]] for x in each]
    return list(torch.tensor(list(itertools.product(*(x.tolist() for x in few)))).float().unbind(-1))


def wanted(row: Operation, xs: list[Tensor]) -> Tensor:
    exact: Tensor = getattr(torch, row.torch[0])(*(x.double() for x in xs))
    return exact


def worst(row: Operation, xs: list[Tensor], got: Tensor, spare: float = 0) -> str:
    """Words for the worst of these values; "" if all are within the error of the row, and `spare` ulps.

    What is outside of the domain counts where torch has no value. A value of 0 is right where the exact one
    is subnormal, and so is that of 0 where an argument is subnormal.
    """
    exact, got = wanted(row, xs), got.double()
    inside = torch.ones(exact.shape, dtype=torch.bool)
    for x, (low, high, _) in zip(xs, row.domain, strict=True):
        inside &= ((low <= x) & (x <= high)) | x.isnan()
    size = torch.stack([x.double().abs() for x in xs]).amax(0).nan_to_num(0, 0, 0)
    ulps = row.ulps + spare + row.growth * size
    right = ~(inside | exact.isnan())
    each = [(x, torch.where(x.abs() < SMALLEST, x * 0, x)) for x in xs]
    for value in (wanted(row, list(some)) for some in itertools.product(*each)):
        right |= (got - value).abs() <= ulps * unit(value)
        right |= (got == value.float().double()) | (got.isnan() & value.isnan())
        right |= (value.abs() < 2 * SMALLEST) & (got.abs() < 2 * SMALLEST)
        over = value.abs() * (1 + ulps * 2.0**-23) >= LARGEST
        right |= over & (got == value.sign() * math.inf)
    if right.all():
        return ""
    off = (got - exact).abs() / unit(exact)
    at = int(torch.where(right, -1.0, off.nan_to_num(math.inf)).argmax())
    given = ", ".join(str(x[at].item()) for x in xs)
    return (
        f"{row.name}({given}) gave {got[at].item()}, not {exact[at].item()}: {off[at].item():.3g} ulps where "
        f"its row allows {ulps[at].item():.3g}; {int((~right).sum())} of {len(right)} values are wrong"
    )


def unit(value: Tensor) -> Tensor:
    """Unit in the last place of float32 near a value in float64."""
    return 2.0 ** (value.abs().clamp(SMALLEST, LARGEST).log2().floor() - 23)
