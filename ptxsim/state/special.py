"""Special registers: what each gives for a warp, a scalar or 32 lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES

_LANE = np.arange(LANES, dtype=np.uint32)


def _thread(warp: Warp, axis: int) -> Any:
    linear = warp.index * LANES + _LANE
    x, y, _ = warp.cta.threads
    return (linear % x, linear // x % y, linear // (x * y))[axis]


SPECIAL: dict[str, Callable[[Warp], Any]] = {
    "%laneid": lambda w: _LANE,
    "%warpid": lambda w: w.index,
    "%nwarpid": lambda w: len(w.cta.warps),
    "%warpsize": lambda w: LANES,
    "WARP_SZ": lambda w: LANES,
    "%lanemask_eq": lambda w: np.uint32(1) << _LANE,
    "%lanemask_lt": lambda w: (np.uint32(1) << _LANE) - np.uint32(1),
    "%lanemask_le": lambda w: ((np.uint32(1) << _LANE) - np.uint32(1)) * np.uint32(2) + np.uint32(1),
    "%cluster_ctarank": lambda w: w.cta.rank,
    "%cluster_nctarank": lambda w: len(w.cta.cluster.ctas),
    "%is_explicit_cluster": lambda w: w.cta.launch.explicit_cluster,
    "%smid": lambda w: w.cta.cluster.processor + w.cta.rank,
    "%nsmid": lambda w: w.cta.launch.processors,
    "%dynamic_smem_size": lambda w: w.cta.launch.shared_bytes,
    "%clock": lambda w: w.cta.launch.clock() % 2**32,
    "%clock64": lambda w: w.cta.launch.clock(),
    "%globaltimer": lambda w: w.cta.launch.clock(),
}
VARYING = ("%clock", "%clock64", "%globaltimer")
"""Those that change while a warp runs."""


def _by_axis(axis: int) -> dict[str, Callable[[Warp], Any]]:
    return {
        "%tid": lambda w: _thread(w, axis),
        "%ntid": lambda w: w.cta.threads[axis],
        "%ctaid": lambda w: w.cta.index[axis],
        "%nctaid": lambda w: w.cta.launch.grid[axis],
        "%clusterid": lambda w: w.cta.index[axis] // w.cta.launch.cluster[axis],
        "%nclusterid": lambda w: w.cta.launch.grid[axis] // w.cta.launch.cluster[axis],
        "%cluster_ctaid": lambda w: w.cta.index[axis] % w.cta.launch.cluster[axis],
        "%cluster_nctaid": lambda w: w.cta.launch.cluster[axis],
    }


for _axis, _name in enumerate("xyz"):
    SPECIAL |= {f"{register}.{_name}": give for register, give in _by_axis(_axis).items()}
