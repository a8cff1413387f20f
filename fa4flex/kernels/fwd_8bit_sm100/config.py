"""Configuration of the Blackwell forward kernel of codes, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.fwd_sm100 import config as forward
from fa4flex.kernels.plan.keys import QueryCodes, ValueCodes

HEADROOM = 4.0
"""Logarithm of base 2 of the largest probability, while the maximum in use is the true one, before it is
rounded to e4m3: small ones keep their digits."""

RESCALE = 4.0
"""Log2 units by which a score may pass the maximum in use: probabilities are then at most 2^8, where e4m3
ends at 448."""


@dataclass(frozen=True)
class Config(forward.Config):
    """The forward kernel's, and

    qk       of q and k
    pv       of v and of probabilities; e4m3 values are transposed
    offset   channels of these have a part that is the same for all keys
    """

    qk: QueryCodes = "int8"
    pv: ValueCodes = "float8_e4m3fn"
    offset: bool = False

    @property
    def transposed(self) -> bool:
        """True if v has one row of keys per channel."""
        return self.pv == "float8_e4m3fn"

    @property
    def clears(self) -> bool:
        """Transposed values have zeros past the end of a sequence."""
        return super().clears and not self.transposed

    @property
    def last_numbers(self) -> int:
        """Two beside transposed values: the output's factor, and the sum of the row's probabilities."""
        return 2 if self.transposed else 1
