"""Models of the time of a kernel: what those of both passes are made of. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa4flex.kernels.plan.model import Units
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.walks import Form

HALF = 2
"""Bytes of an element of a tensor."""


class Heads(NamedTuple):
    """A call as the models of both passes see it: sequences, query heads, KV heads, and lengths, of packed
    sequences their average."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int


MANY = 64
"""Batch entries of the calls that choices are settled for, of as many queries as keys: tiles of all
multiprocessors, many times over."""


def many(heads: int, group: int, length: int) -> Heads:
    """Such a call, with `group` query heads per KV head."""
    return Heads(MANY, heads, max(heads // group, 1), length, length)


@dataclass(frozen=True)
class KernelTime:
    """The model of the time of a kernel, but for sizes.

    form    which pairs the mask allows
    tile    queries and keys of a step
    widths  of q and k, and of v and the output
    units   of a step
    """

    target: Target
    form: Form
    tile: tuple[int, int]
    widths: tuple[int, int]
    units: Units
