"""The plan of a Hopper forward kernel of codes. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.fwd_8bit_sm90.config import Config
from fa4flex.kernels.fwd_sm90 import plan as forward
from fa4flex.kernels.fwd_sm90.registers import apart, promotes
from fa4flex.kernels.plan.keys import TILE, Codes
from fa4flex.kernels.plan.pipeline import Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.primitives.heads import ALIKE

STEP = 32
"""Keys of one instruction of a product of 8 bits."""

LOST = 34 * 2.0**-13
"""Error of one such instruction, at most, over the largest of its terms and its result: each of 33 terms is
truncated to 13 fraction bits of the largest, and so is the result."""


@dataclass(frozen=True)
class CodesPlan(forward.HopperPlan):
    """The plan of `fwd_sm90` for q, k and v that are codes."""

    module: ClassVar[str] = "fa4flex.kernels.fwd_8bit_sm90"

    @property
    def codes(self) -> Codes:
        assert self.problem.keys.codes is not None
        return self.problem.keys.codes

    @property
    def sure_error(self) -> float | None:
        """Relative error of sums of P v over values of one sign, at most; None where it grows with the keys,
        0.0 where sums are float32."""
        if not self.codes.transposed:
            return 0.0
        return self.tiles.tile_n // STEP * LOST if promotes(self.codes) else None

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        codes, width = self.codes, self.tiles.head_dim_v
        promote = promotes(codes)
        columns = apart(width) if promote else width
        base = vars(super().config())
        return Config(**base, qk=codes.qk, pv=codes.pv, promote=promote, apart=columns)

    def check_resources(self) -> None:
        """Errors as of a forward kernel; UnsupportedError for tiles that have several scales."""
        if TILE % self.tiles.tile_n:
            raise UnsupportedError(
                f"tiles of {self.tiles.tile_n} codes of keys, of which {TILE} share a scale",
                f"a divisor of {TILE}",
                f"use tile=({self.tiles.tile_m}, {TILE}), or leave it at None",
            )
        super().check_resources()

    def explain_products(self) -> list[str]:
        codes = self.codes
        sums = "int32" if codes.qk == "int8" else "float32 of 13 fraction bits"
        told = [f"products: q.k of {codes.qk}, summed as {sums}; P v of {codes.pv}"]
        if not codes.transposed:
            return told
        if self.sure_error is None:
            each = "sums have 13 fraction bits: errors of 1.6e-5 for every key where values have one sign"
            return [*told, f"  {each}; center them, or promote"]
        return [
            *told,
            f"  sums of {self.tiles.tile_n} keys have 13 fraction bits, of all keys they are float32:",
            f"  errors of at most {self.sure_error:.3g} of a tile's largest sum, for any number of keys",
        ]


def plan_codes(request: ForwardRequest) -> CodesPlan:
    plan = forward.plan_hopper(request, CodesPlan)
    assert isinstance(plan, CodesPlan)
    return plan


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True where a forward kernel would be taken, whose keys have heads where values have."""
    codes, taken = problem.keys.codes, forward.accepts(problem, target, sizes)
    return codes is not None and taken and not problem.skip and problem.shares == ALIKE


FWD_8BIT_SM90 = Pipeline(
    "Hopper forward of codes",
    "forward",
    accepts,
    plan_codes,
    kv_dtype="codes",
    writes_float32=True,
    applies_output=True,
)
