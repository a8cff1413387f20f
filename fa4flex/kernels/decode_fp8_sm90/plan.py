"""The plan of the Hopper kernel for few query rows over an e4m3 cache: tiles, stages, warps, registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.decode_fp8_sm90.config import KEYS, ROWS, WARPS, Config, query_bytes
from fa4flex.kernels.decode_fp8_sm90.topology import decode_topology
from fa4flex.kernels.decode_sm90 import plan as decode
from fa4flex.kernels.fwd_sm90.registers import ADDRESSES, LOADS, MOST_SCRATCH, Need
from fa4flex.kernels.fwd_sm90.registers import ROWS as THREAD_ROWS
from fa4flex.kernels.fwd_sm90.tiles import pad
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.few_rows import asks_for_order, blocks_and_stages, room_of, share_of, slice_rows
from fa4flex.kernels.plan.memory import Memory, lay_out, tile_bytes
from fa4flex.kernels.plan.pipeline import ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.plan.topology import Topology
from fa4flex.primitives.heads import ALIKE

ROW_WARPS = (1, 2, 4)
"""Sets of ROWS query rows of a tile."""

TILE_BYTES = 16 << 10
"""Bytes of a tile of keys, as far as KEYS of each warp at least and MOST_KEYS at most allow."""

MOST_KEYS = 256

WIDEST = {(False, False): 256, (False, True): 192, (True, False): 64, (True, True): 0}
"""The widest heads for which nothing spills, by whether there are more rows than a warp has, and whether
scales differ from key to key."""

MOST_SLICES = 4
"""Tiles of ROWS rows of heads that are too wide for several sets, at most, that each convert all keys."""

MOST_RESCALE = 8.0
"""Largest threshold, in log2 units, at which no probability overflows float16, whatever the queries are: see
`WEIGHT` in config.py."""


@dataclass(frozen=True, kw_only=True)
class DecodePlan(decode.DecodePlan):
    """The plan of `decode_fp8_sm90`: sets of query rows besides, see Config."""

    row_warps: int

    module: ClassVar[str] = "fa4flex.kernels.decode_fp8_sm90"
    purpose: ClassVar[str] = "few query rows over an 8-bit cache"

    @property
    def skip(self) -> float:
        """0: the kernel leaves out nothing."""
        return 0.0

    @property
    def tile(self) -> tuple[int, int]:
        return self.row_warps * ROWS, self.tile_n

    @cached_property
    def memory(self) -> Memory:
        """The shared-memory map of a block."""
        return _memory(self.problem, self.row_warps, self.tile_n, self.kv_stages, self.target)

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers; `.graph` is the networkx form."""
        several = self.config().steps > 1
        return decode_topology(*self.widths, self.tile_n, self.kv_stages, several, self.tile_copies)

    @property
    def need(self) -> Need:
        """Estimate of what a consumer thread keeps in registers: parts of two of a warp's ROWS rows."""
        work, by_key = self.work, ("page", "token")
        hooks = work.uniform + THREAD_ROWS * (work.row + work.row_ends + work.column)
        scales = sum(
            KEYS // 4 for per in (self.problem.keys.k_scales, self.problem.keys.v_scales) if per in by_key
        )
        parts = (
            ("queries", 0 if self.config().shares_queries else self.widths[0] // 4),
            ("scores", KEYS // 2),
            ("probabilities", KEYS // 4),
            ("output", self.widths[1] // 2),
            ("scales", scales),
            ("row state", 2 * THREAD_ROWS),
            ("hooks", hooks + min(work.element, MOST_SCRATCH)),
            ("loads", LOADS if work.loads >= 1 else 0),
            ("addresses", ADDRESSES),
        )
        return Need(parts)

    def config(self) -> Config:
        """Configuration of the hand-written kernel."""
        return Config(
            **vars(super().config()),
            row_warps=self.row_warps,
            k_scales=self.problem.keys.k_scales,
            v_scales=self.problem.keys.v_scales,
        )

    def check_threads(self) -> None:
        self.check_registers()
        if self.tile_n % (KEYS * WARPS // self.row_warps):
            raise PlanError(
                f"{self.tile_n} keys for {WARPS // self.row_warps} warps that share them",
                f"a multiple of {KEYS} for each",
                "use more keys per tile",
            )

    def check_threshold(self) -> None:
        if not 0 <= self.rescale_threshold <= MOST_RESCALE:
            raise UnsupportedError(
                f"rescale_threshold={self.rescale_threshold:g}: float16 probabilities would overflow",
                f"0 to {MOST_RESCALE:g}",
                "leave it out",
            )

    def explain_threads(self) -> list[str]:
        r = self.registers
        shared = WARPS // self.row_warps
        return [
            f"warpgroups: 1 producer, 1 consumer of {r.producer} and {r.consumer} registers",
            f"  a warp has {ROWS} rows, and "
            + (f"every {shared}th part of the keys of a tile" if shared > 1 else "all keys of a tile"),
            f"  a consumer needs about {self.need.explain()}",
            "products: float16 with float32 sums, whatever q is: e4m3 becomes float16 in registers, exactly;"
            " rows of q are multiplied by powers of two, so that they do too",
        ]


def _memory(problem: Problem, row_warps: int, tile_n: int, kv_stages: int, target: Target) -> Memory:
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    sizes = {"q": query_bytes(row_warps, *widths)}
    sizes |= {name: tile_bytes(tile_n, d, 1) * kv_stages for name, d in zip(("k", "v"), widths)}
    sizes["sums"] = 4 * WARPS * ROWS * widths[1]
    sizes["states"] = 4 * WARPS * ROWS * 4
    return lay_out(sizes, {"sums": "v", "states": "k"}, 4 * kv_stages, target)


def plan_decode(request: ForwardRequest) -> ForwardPlan:
    """Tiles and an order that a schedule asks for are refused: no other kernel takes such a cache."""
    problem, target = request.problem, request.target
    if asks_for_order(request.schedule):
        raise UnsupportedError(
            "an 8-bit cache, with tiles or an order that a schedule asks for",
            "a schedule without tile, order and next_tile",
            "nothing: the cache is dequantised first instead",
        )
    widths = pad(problem.head_dim), pad(problem.head_dim_v)
    row_warps = _row_warps(problem, request.sizes)
    rows, tile_n = row_warps * ROWS, tile_keys(max(widths))

    def fits(blocks: int, stages: int) -> bool:
        return _memory(problem, row_warps, tile_n, stages, target).total <= room_of(blocks, target)

    blocks, stages = blocks_and_stages(decode.STAGES, fits)
    return DecodePlan(
        target=target,
        problem=problem,
        row_warps=row_warps,
        tile_n=tile_n,
        kv_stages=stages,
        blocks=blocks,
        registers=decode.SPLITS[blocks],
        rescale_threshold=request.rescale_threshold,
        work=request.work,
        share=share_of(request, tile_n),
        slice_rows=slice_rows(request.sizes, rows),
    )


def tile_keys(width: int) -> int:
    """Keys of a tile of rows this wide: a power of two of at least KEYS for each warp."""
    keys = KEYS * WARPS
    while keys < MOST_KEYS and 2 * keys * width <= TILE_BYTES:
        keys *= 2
    return keys


def accepts(problem: Problem, target: Target, sizes: Sizes) -> bool:
    """True if the kernel for 16-bit keys accepts it, up to a width."""
    lse_alone = problem.statistics in ((), ("lse",))
    if problem.shares != ALIKE or not lse_alone or not decode.accepts(problem, target, sizes):
        return False
    if _fits(problem, several=True):
        return True
    # Each slice converts all keys anew: of many of them, a cache that is dequantised once takes less time.
    sliced = sizes.q.at_most(ROWS, right="no") and sizes.rows.at_most(MOST_SLICES * ROWS, right="no")
    return sliced and _fits(problem, several=False)


def _fits(problem: Problem, several: bool) -> bool:
    """True if heads are no wider than a tile of `several` sets of rows, or of one, has registers for."""
    by_key = bool({"page", "token"} & {problem.keys.k_scales, problem.keys.v_scales})
    return max(pad(problem.head_dim), pad(problem.head_dim_v)) <= WIDEST[several, by_key]


def _row_warps(problem: Problem, sizes: Sizes) -> int:
    """Fewest sets of ROWS query rows that hold all of them; one of wide heads."""
    if not _fits(problem, several=True):
        return 1
    *fewer, most = ROW_WARPS
    return next((n for n in fewer if sizes.rows.at_most(n * ROWS, right="no")), most)


DECODE_FP8_SM90 = Pipeline(
    "Hopper forward, few query rows over an 8-bit cache",
    "forward",
    accepts,
    plan_decode,
    kv_dtype="float8_e4m3fn",
)
