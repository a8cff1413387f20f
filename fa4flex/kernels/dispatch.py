"""The table of pipelines, and the choice among them."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.hoist import reads_by_blocks
from fa4flex.codegen.plan.few_rows import asks_for_order
from fa4flex.codegen.plan.pipeline import BackwardPlan, Direction, ForwardPlan, Pipeline
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.request import ForwardRequest, Request
from fa4flex.codegen.plan.target import SM90A, Target
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.bwd_sm90.plan import BWD_SM90
from fa4flex.kernels.bwd_sm100.one_cta.plan import ONE_CTA
from fa4flex.kernels.bwd_sm100.two_cta.plan import TWO_CTA
from fa4flex.kernels.bwd_sm100.wide_heads.plan import WIDE_HEADS
from fa4flex.kernels.decode_fp8_sm90.plan import DECODE_FP8_SM90
from fa4flex.kernels.decode_sm90.plan import DECODE_SM90
from fa4flex.kernels.decode_sm100.plan import DECODE_SM100
from fa4flex.kernels.fwd_sm90.plan import FWD_SM90
from fa4flex.kernels.fwd_sm100.plan import FWD_SM100
from fa4flex.kernels.mixed_sm90.plan import MIXED_SM90
from fa4flex.primitives.schedule import Schedule

PIPELINES: tuple[Pipeline, ...] = (
    *(DECODE_SM90, DECODE_FP8_SM90, MIXED_SM90, FWD_SM90, DECODE_SM100, FWD_SM100),
    *(BWD_SM90, TWO_CTA, WIDE_HEADS, ONE_CTA),
)
"""All pipelines, in the order in which they are asked. What is ready to launch stays as it is: one put in
front serves calls of looks that have not been seen before."""


def choose(direction: Direction, problem: Problem, target: Target) -> Pipeline:
    """The first pipeline that accepts the problem. Raises UnsupportedError where none does."""
    for pipeline in PIPELINES:
        reads = pipeline.direction == direction and pipeline.kv_dtype == problem.kv_dtype
        writes = pipeline.writes_float32 or not problem.wide_output
        if reads and writes and pipeline.accepts(problem, target):
            return pipeline
    raise UnsupportedError(
        f"a {direction} kernel for {target.name}: {problem.explain()}",
        "a problem and a chip that one of the pipelines accepts: "
        + ", ".join(pipeline.name for pipeline in PIPELINES if pipeline.direction == direction),
        "nothing: "
        + ("the cache is dequantised first" if problem.kv_dtype else "it is computed in PyTorch operations")
        + " instead",
    )


def by_pairs(facts: Facts, problem: Problem, target: Target, schedule: Schedule) -> Problem:
    """The same forward problem, its mask asked of every pair where that is better than block tables, else as
    it is.

    Kernels for few rows wait for keys, which a mask need not be quick beside: they need no tables, whose
    launches take longer than a step does, split keys, and read pages in place. Tables stay where they leave
    out keys that need not be read: a map's blocks, documents.
    """
    if problem.mask_form != "tables" or asks_for_order(schedule):
        return problem
    in_place = problem.page_rows > 0 or problem.kv_dtype
    if not in_place and (problem.row_ends or reads_by_blocks(facts.mask)):
        return problem
    asked = replace(problem, mask_form="pairs", row_ends=0)
    try:
        choose("forward", asked, target)
    except UnsupportedError:
        return problem
    return asked


def plan_forward(
    facts: Facts,
    problem: Problem,
    target: Target = SM90A,
    schedule: Schedule = Schedule(),
    rescale_threshold: float | None = None,
) -> ForwardPlan:
    """The checked plan of a forward kernel. For `rescale_threshold` see ForwardRequest.

    Raises UnsupportedError for what the chip or kernel does not have, InputError where facts and problem
    contradict each other.
    """
    request = ForwardRequest(facts, problem, target, schedule, rescale_threshold)
    plan: ForwardPlan = choose("forward", problem, target).plan(request)
    plan.check()
    return plan


def plan_backward(
    facts: Facts, problem: Problem, target: Target, schedule: Schedule = Schedule()
) -> BackwardPlan:
    """The checked plan of a backward kernel. Raises UnsupportedError where there is no kernel."""
    plan: BackwardPlan = choose("backward", problem, target).plan(Request(facts, problem, target, schedule))
    plan.check()
    return plan
