"""Rounds q, k and v to codes: sums over sequences where means or scales need some, then all codes at once,
then what is added back to values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4flex.kernels.quantize.codes import CodeArguments, Codes
from fa4flex.kernels.quantize.config import Config
from fa4flex.kernels.quantize.sums import MeanArguments, Means, OffsetArguments, Offsets, SumArguments, Sums


class Quantize:
    direction = "quantize"
    """Schema of its arguments."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def launches(self) -> list[tuple[Callable[..., None], Any]]:
        """Kernels in the order in which they are launched, and the named tuples that they are called with."""
        config = self.config
        found: list[tuple[Callable[..., None], Any]] = []
        if config.sums:
            found += [(Sums(config), SumArguments), (Means(config), MeanArguments)]
        found.append((Codes(config), CodeArguments))
        if config.offset:
            found.append((Offsets(config), OffsetArguments))
        return found
