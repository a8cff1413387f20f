"""Shared memory of a block, and what a consumer warpgroup has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from fa4flex.kernels.common.barriers import Pipes


@dataclass(frozen=True)
class Shared:
    """Shared memory: q (tile_m, width, stage), k (keys, width), lse2 float32 (tile_m, stage)."""

    q: cute.Tensor
    k: cute.Tensor
    lse2: cute.Tensor


@dataclass(frozen=True)
class Transfers:
    """TMA descriptors of q and k."""

    q: Any
    k: Any


@dataclass(frozen=True)
class Warpgroup:
    """Constants of a thread: its lane, the number of its warpgroup among consumers, the block's memory and
    barriers, the product S = K Q', and its operands, q by stage."""

    lane: Int32
    number: Int32
    shared: Shared
    pipes: Pipes
    mma: cute.TiledMma
    k: cute.Tensor
    q: cute.Tensor


@dataclass(frozen=True)
class Step:
    """A tile of queries: log-sum-exps of its rows, scores (key, query), and a thread's first query."""

    lse2: cute.Tensor
    scores: cute.Tensor
    q_first: Int32
