"""The plan of a Blackwell backward kernel of pairs of CTAs. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fa4flex.errors import UnsupportedError
from fa4flex.kernels.bwd_sm100 import config as base
from fa4flex.kernels.bwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.bwd_sm100.plan import BlackwellBackwardPlan, padded
from fa4flex.kernels.bwd_sm100.topology import HALVES
from fa4flex.kernels.bwd_sm100.two_cta.config import CTAS, KEPT, PACKED, SPLIT, Config, Registers
from fa4flex.kernels.bwd_sm100.two_cta.roles import barrier_table
from fa4flex.kernels.bwd_sm100.two_cta.topology import pair_topology
from fa4flex.kernels.plan.memory import tile_bytes
from fa4flex.kernels.plan.pairs import of_one_cta
from fa4flex.kernels.plan.pipeline import EVERY, Pipeline
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import Request
from fa4flex.kernels.plan.sizes import Sizes
from fa4flex.kernels.plan.tensor_memory import Columns, Range
from fa4flex.kernels.plan.topology import Topology

WIDTHS = (64, 128)
"""Widths that a tile in shared memory may have: each CTA reads half of its columns, as blocks of 32 or 64."""

FEW_KEYS = 1024
"""Keys of a sequence up to which a CTA alone is as fast: tiles of pairs are twice as long."""


@dataclass(frozen=True)
class TwoCtaPlan(BlackwellBackwardPlan):
    """A backward kernel for `problem` on `target`, by pairs of CTAs."""

    registers: Registers = SPLIT

    module: ClassVar[str] = "fa4flex.kernels.bwd_sm100.two_cta"

    ctas = CTAS

    by = "a pair of CTAs"

    kind = Config

    part = " 0"

    @property
    def tile(self) -> tuple[int, int]:
        """Queries per step, and keys per pair."""
        return ROWS, CTAS * ROWS

    @cached_property
    def columns(self) -> Columns:
        """The tensor-memory map of a CTA: scores, dV, dP and dK. A compute warpgroup has two fragments of
        queries. Its probabilities, two in a column, lie over the first one's scores, and dS at the start of
        their dP; dQ lies over the last scores."""
        dv, dprob = ROWS, ROWS + self.head_dim_v
        fragments = [
            Range(f"{name} {half} {i}", first + half * by_half + i * by_fragment, count)
            for name, first, by_half, by_fragment, count in (
                ("S", 0, FRAGMENT, KEPT, FRAGMENT),
                ("P", 0, FRAGMENT, PACKED, PACKED),
                ("dP", dprob, FRAGMENT, KEPT, FRAGMENT),
                ("dS", dprob, FRAGMENT, KEPT, PACKED),
            )
            for half in HALVES
            for i in range(CTAS)
        ]
        width = self.head_dim // CTAS
        sums = (
            Range("dV", dv, self.head_dim_v),
            Range("dK", dprob + ROWS, self.head_dim),
            Range("dQ", ROWS - width, width),
        )
        return Columns((*fragments, *sums), self.target.tensor_columns)

    def operands(self, config: base.Config) -> dict[str, int]:
        size = self.problem.itemsize
        q, dout = (tile_bytes(ROWS, width, size) for width in (self.head_dim, self.head_dim_v))
        return {
            "q": q // CTAS * config.q_stages,
            "k": q,
            "v": dout,
            "dout": dout // CTAS * config.do_stages,
            "ds": tile_bytes(config.tile_n, KEPT, size),
            "q_t": q // CTAS * config.q_stages,
            "k_t": q,
            "dout_t": dout // CTAS * config.do_stages,
        }

    def barriers(self, config: base.Config) -> int:
        return barrier_table(config).count

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and barriers of both CTAs; `.graph` is the networkx form."""
        return pair_topology(self.config(), self.columns, self.problem.itemsize)

    @property
    def of_one_cta(self) -> Topology:
        return of_one_cta(self.topology)


def pays_in_pairs(problem: Problem, sizes: Sizes) -> bool:
    """True if a pair of CTAs pays, by the model of time (docs/model.md): a pair takes 4,578 clocks for a step
    at width 128, and a CTA alone 5,181, whatever the lengths and the order of sums; at width 64 both take
    3,500, and 96 would be padded. Dependences bound a pair: where scores are longer in the making than the
    products that are issued meanwhile, it is slower, 5,326 and 5,220 with a soft cap, 6,536 and 5,535 with a
    bias by key."""
    wide = all(96 < width <= WIDTHS[-1] for width in (problem.head_dim, problem.head_dim_v))
    alike = problem.met_alike and not problem.long_scores
    return wide and alike and sizes.usual_keys.more_than(FEW_KEYS, right="any")


def plan_two_cta(request: Request) -> TwoCtaPlan:
    """Raises UnsupportedError for what the kernel of pairs does not have."""
    problem = request.problem
    head_dim, head_dim_v = padded(problem, WIDTHS)
    if head_dim is None or head_dim_v is None:
        raise UnsupportedError(
            f"a backward kernel by pairs of CTAs for {problem.explain()}",
            f"heads of at most {WIDTHS[-1]}",
            "take the kernel of one CTA alone",
        )
    return TwoCtaPlan(request.target, problem, head_dim, head_dim_v)


TWO_CTA = Pipeline(
    "Blackwell backward by pairs of CTAs",
    "backward",
    lambda problem, target, sizes: (
        target.family == "sm100" and not problem.entropy and pays_in_pairs(problem, sizes)
    ),
    plan_two_cta,
    drops=True,
    weights=EVERY,
)
