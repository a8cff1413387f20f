"""Configuration of the Hopper forward kernel of codes, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.fwd_sm90 import config as forward
from fa4flex.kernels.plan.keys import QueryCodes, ValueCodes

HEADROOM = 8.0
"""Logarithm of base 2 of the largest probability before it is rounded to e4m3, whose largest number is 448:
small ones keep their digits (FlashAttention-3, Shah et al. 2024, its published kernels)."""


@dataclass(frozen=True)
class Config(forward.Config):
    """The forward kernel's, and

    qk         of q and k
    pv         of v and of probabilities; e4m3 values are transposed
    promote    the output of a tile of keys is summed up apart, and added to the others as float32
    apart      columns of it that are at once; all of them where nothing is apart
    """

    qk: QueryCodes = "int8"
    pv: ValueCodes = "float8_e4m3fn"
    promote: bool = True
    apart: int = 128

    @property
    def parts(self) -> int:
        """Number of products with a tile of values, each of `apart` of its columns."""
        return self.head_dim_v // self.apart

    @property
    def transposed(self) -> bool:
        """True if v has one row of keys per channel."""
        return self.pv == "float8_e4m3fn"
