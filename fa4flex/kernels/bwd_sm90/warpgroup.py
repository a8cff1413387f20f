"""Consumer warpgroup of the Hopper backward kernel, as its methods pass it on, and what they make of a
step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32, cute, pipeline

from fa4flex.kernels.bwd_sm90.resources import Mmas, Operands, Shared
from fa4flex.kernels.common.barriers import Pipes


@dataclass(frozen=True)
class Warpgroup:
    """Constants of a thread over all tiles of keys: its lane, the number of its warpgroup among consumers,
    the block's memory and barriers, and the warpgroup's products with their operands."""

    lane: Int32
    number: Int32
    shared: Shared
    pipes: Pipes
    mmas: Mmas
    operands: Operands


class Step(NamedTuple):
    """A tile of queries, and the number of steps that the warpgroup has taken before."""

    tile: Int32
    count: Int32


class Progress(NamedTuple):
    """Pipeline states of the rings of Q and dO, and the number of steps so far."""

    q: pipeline.PipelineState
    dout: pipeline.PipelineState
    count: Int32


class Made(NamedTuple):
    """P' and dS' of a step, as operands."""

    p: cute.Tensor
    ds: cute.Tensor


class LogSums(NamedTuple):
    """Log-sum-exps of a step's queries: all of them in shared memory, and in registers those of the columns
    that come first. deltas: numbers of all that dropout needs late."""

    rows: cute.Tensor
    first: cute.Tensor
    deltas: cute.Tensor | None = None
