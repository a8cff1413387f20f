"""The plan of a Blackwell forward kernel of codes. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_8bit_sm100.config import HEADROOM, RESCALE, Config
from fa4flex.kernels.fwd_sm100 import plan as forward
from fa4flex.kernels.fwd_sm100.config import Exponential
from fa4flex.kernels.fwd_sm100.tiles import narrow
from fa4flex.kernels.plan.keys import Codes
from fa4flex.kernels.plan.pipeline import Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import SM100A, Target
from fa4flex.primitives.heads import ALIKE

POLYNOMIALS: dict[str, Exponential] = {
    "float8_e4m3fn": Exponential(every=4, count=2, skip=0),
    "int8": Exponential(every=4, count=2, skip=1),
}
"""Share of exponentials on FMA units by codes of q and k, where special functions take longer than products
of 16 bits: they take twice as long as those of 8 bits. FMA units make numbers of integers as well."""


MOVED = 16
"""Registers of the correction warpgroup that it has more than beside numbers, for scales and offsets of
channels: half of them from each softmax warpgroup, whose probabilities are half as wide."""


@dataclass(frozen=True)
class CodesPlan(forward.BlackwellPlan):
    """The plan of `fwd_sm100` for q, k and v that are codes."""

    module: ClassVar[str] = "fa4flex.kernels.fwd_8bit_sm100"

    @property
    def codes(self) -> Codes:
        assert self.problem.keys.codes is not None
        return self.problem.keys.codes

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        codes = self.codes
        return Config(**vars(super().config()), qk=codes.qk, pv=codes.pv, offset=codes.offset)

    def check_threshold(self) -> None:
        """UnsupportedError where probabilities would pass what e4m3 holds."""
        if not self.codes.transposed:
            super().check_threshold()
        elif not 0 <= self.rescale_threshold <= RESCALE:
            raise UnsupportedError(
                f"rescale_threshold={self.rescale_threshold} with e4m3 probabilities",
                f"0 to {RESCALE:g}: the largest is 2^{HEADROOM:g} where the maximum in use is the true one",
                "leave it at None",
            )

    def explain_products(self) -> list[str]:
        sums = "int32" if self.codes.qk == "int8" else "float32"
        return [f"products: q.k of {self.codes.qk}, summed as {sums}; P v of {self.codes.pv}, as float32"]


def plan_codes(request: ForwardRequest) -> CodesPlan:
    plan = forward.plan_blackwell(request, CodesPlan)
    assert isinstance(plan, CodesPlan)
    if plan.exponential.count:
        plan = replace(plan, exponential=POLYNOMIALS[plan.codes.qk])
    if plan.codes.transposed:
        r = plan.registers
        moved = replace(r, softmax=r.softmax - MOVED // 2, correction=r.correction + MOVED)
        plan = replace(plan, registers=moved)
    lazily = request.threshold is None and "max_scores" not in request.problem.statistics
    if plan.codes.transposed and lazily:
        return replace(plan, rescale_threshold=RESCALE)
    return plan


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True where a forward kernel would be taken, of heads that are not wide, whose keys have heads where
    values have. Tensor cores of later chips than sm_100a have no products of int8 at such a rate."""
    codes = problem.keys.codes
    if codes is None or not forward.accepts(problem, target, sizes) or not narrow(problem):
        return False
    multiplied = codes.qk != "int8" or target.capability == SM100A.capability
    return multiplied and not problem.skip and problem.shares == ALIKE


FWD_8BIT_SM100 = Pipeline(
    "Blackwell forward of codes",
    "forward",
    accepts,
    plan_codes,
    kv_dtype="codes",
    writes_float32=True,
    applies_output=True,
)
