"""Warps of a block, and the barriers between them, as data."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fa4flex.kernels.plan.barriers import BarrierTable, NamedRow, Per, Row, tile_ring
from fa4flex.kernels.plan.topology import WARP, WARPGROUP

REDUCE, COMPUTE, MULTIPLY, LOAD = 0, 4, 12, 13
"""First warps: a warpgroup that hands on dQ, two that compute, and single warps."""

WARPS = 16

COMPUTING = 8
"""Warps that compute."""

ALLOCATED = NamedRow(
    "allocated",
    1,
    WARP * (WARPGROUP + COMPUTING + 1),
    "tensor memory is there, for warpgroups that reduce and compute, and the warp that multiplies",
)
FINISHED = NamedRow(
    "finished",
    2,
    WARP * (WARPGROUP + COMPUTING),
    "the warpgroups that reduce and compute have read the last of tensor memory",
)


class Loads(NamedTuple):
    """Operands that the load warp brings, in its order: before the first step, in each, and after the
    first one. Stages of a step's operands move on behind each group."""

    first: tuple[str, ...]
    step: tuple[tuple[str, ...], ...]
    late: tuple[str, ...] = ()


LOADS = Loads(("k", "v"), (("q", "lse2"), ("dout", "delta")))


class Sizes(Protocol):
    """Numbers of tiles of Q, and of dO, in flight."""

    @property
    def q_stages(self) -> int: ...
    @property
    def do_stages(self) -> int: ...


ROWS = (
    Row("k_full", 1, "load", "the block's keys have come", ring="k"),
    Row("v_full", 1, "load", "the block's values have come", ring="v"),
    Row("s_full", 1, "multiply", "scores are there, and all earlier products are done"),
    Row("p_full", COMPUTING, "compute", "probabilities are there, and scores read"),
    Row("dp_full", 1, "multiply", "dP is there, and all earlier products are done"),
    Row("ds_full", COMPUTING, "compute", "dS is there, in both memories, and dP read"),
    Row("dq_full", 1, "multiply", "dQ is there, and all earlier products are done"),
    Row("dq_empty", WARPGROUP, "reduce", "dQ is read"),
    Row("dv_full", 1, "multiply", "dV is complete"),
    Row("dk_full", 1, "multiply", "dK is complete"),
)


def with_rings(
    rows: tuple[Row, ...], sizes: Sizes, tiles: tuple[str, ...] = ("q", "dout"), first: bool = False
) -> BarrierTable:
    """Rows, and those of rings: of tiles, by the names of these, and of rows' numbers. first: of a pair of
    CTAs, both fill the first one's tiles."""
    q_stages, do_stages = sizes.q_stages, sizes.do_stages
    stages = {"q": q_stages, "q_t": q_stages, "dout": do_stages, "dout_t": do_stages}
    rings = [
        row for name in tiles for row in tile_ring(name, stages[name], 1, ("load", "multiply"), first=first)
    ]
    for name, per in (("lse2", Per(stages=q_stages)), ("delta", Per(stages=do_stages))):
        rings += [
            Row(f"{name}_full", 1, "load", "numbers of rows have come", per, name),
            Row(f"{name}_empty", COMPUTING, "compute", "they are read", per, name),
        ]
    return BarrierTable((*rows, *rings), (ALLOCATED, FINISHED))


def barrier_table(sizes: Sizes) -> BarrierTable:
    return with_rings(ROWS, sizes)
