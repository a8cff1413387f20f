"""Cost: what a step of the Hopper backward kernel asks of each unit, from its configuration. Data only.

Operands of a warpgroup's product come from shared memory whole, 128 bytes per clock: 64 rows of the first
one, where it is not in registers, and all of the second. Per 64 x 64 pairs at 128, in steps of 80 queries,
that is 947 clocks, which the simulator counted, too (docs/notes/backward_sm90.md).
"""

from __future__ import annotations

from functools import lru_cache

from fa4flex.kernels.bwd_sm90.config import KEYS, Config
from fa4flex.kernels.plan.model import SHARED_BYTES, Units
from fa4flex.kernels.plan.problem import MMA_K
from fa4flex.kernels.plan.target import Target

SIZE, SUM = 2, 4
"""Bytes of an operand's element, and of a sum's."""

ARITHMETIC = 12
"""fp32 slots of a score: softmax, dS, two conversions of pairs."""


@lru_cache(maxsize=256)
def backward_units(config: Config, target: Target) -> Units:
    """Clocks of each unit for a step of one block."""
    m, n, d, dv = config.tile_m, config.block_keys, config.head_dim, config.head_dim_v
    depth, depth_v = (
        width if k is None else k * MMA_K for k, width in zip(config.depths, (d, dv), strict=True)
    )
    # Scores and dP are multiplied along the tensors' widths, the other three make whole tiles.
    flops = 2 * m * n * (depth + depth_v + dv + 2 * d)
    added, read = SUM * m * d // config.ctas, SIZE * m * (d + dv)
    staged = SIZE * m * n * (1 if config.split == "keys" else 2) + added
    if config.split == "products":
        staged += SUM * m * n
    shared = SIZE * _operands(config) + read + added + staged
    return Units(
        tensor=flops / target.tensor_flops,
        special=m * n / target.special_results,
        fp32=ARITHMETIC * m * n / target.fp32_results,
        shared=shared / SHARED_BYTES,
        read=read,
        added=0 if config.stores_dq else added,
    )


def _operands(config: Config) -> int:
    """Elements that the five products of all warpgroups read in shared memory."""
    m, d, dv, warpgroups = config.tile_m, config.head_dim, config.head_dim_v, config.consumers
    for_dq = sum((rows + columns) * config.tile_n for rows, columns in config.dq_shapes)
    if config.split == "products":
        # Each of scores and of the sums is one warpgroup's, whose first operand is in registers.
        k = 0 if config.keeps_k else KEYS * d
        return k + 2 * m * (d + dv) + (warpgroups // config.ctas) * for_dq
    if config.split == "columns":
        scores = (KEYS + config.queries) * (d + dv)
        sums = 2 * KEYS * m + m * (d + dv) // warpgroups
        return warpgroups * (scores + sums + for_dq)
    return warpgroups * ((KEYS + m) * (d + dv) + m * (d + dv) + for_dq)
