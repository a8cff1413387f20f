"""The time of a forward pass. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fa4flex.kernels.plan.constants import Constants, constants_of
from fa4flex.kernels.plan.kernel_time import HALF, Heads, KernelTime
from fa4flex.kernels.plan.l2 import sections_of_keys
from fa4flex.kernels.plan.model import Launch, Predicted, Step, predict, step_of
from fa4flex.kernels.plan.walks import by_queries


@dataclass(frozen=True)
class ForwardTime(KernelTime):
    """The model of the time of a forward kernel, but for sizes.

    exposed        share of its exponentials and arithmetic that no product hides
    least          tiles of a section of few keys
    packed_heads   query heads whose rows share tiles
    """

    exposed: float
    least: int
    packed_heads: int = 1

    def predict(self, size: Heads) -> Predicted:
        """The time of a call."""
        return _predict(self, size)

    @cached_property
    def kernel(self) -> tuple[Constants, Step]:
        """The chip's constants, and the kernel's step."""
        constants = constants_of(self.target)
        return constants, step_of(self.units, self.exposed, constants.adding)


def _predict(time: ForwardTime, size: Heads) -> Predicted:
    constants, step = time.kernel
    batch, heads, kv_heads, q_len, kv_len = size
    group = time.packed_heads
    walk = by_queries(time.form, q_len * group, kv_len, *time.tile)
    ratio, bytes_of_key = heads // max(kv_heads, 1), HALF * sum(time.widths)
    sections = sections_of_keys(batch * kv_heads, kv_len, bytes_of_key, walk.tiles * ratio, time.least)
    even = time.form != "causal"
    rows = batch * (heads * q_len + kv_heads * kv_len)
    moved = rows * bytes_of_key  # q and the output are as wide as k and v together
    launch = Launch(batch * heads // group, walk, sections=sections, even=even, moved=moved)
    return predict(launch, step, constants.forward, constants, time.target.multiprocessors)
