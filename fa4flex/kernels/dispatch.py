"""The table of pipelines, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.hoist import reads_by_blocks
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.few_rows import asks_for_order, few_queries
from fa4flex.kernels.plan.pipeline import BackwardPlan, Direction, ForwardPlan, Pipeline
from fa4flex.kernels.plan.problem import WIDEST, Problem
from fa4flex.kernels.plan.request import ForwardRequest, Request
from fa4flex.kernels.plan.sizes import UNKNOWN, Sizes
from fa4flex.kernels.plan.target import SM90A, Target
from fa4flex.primitives.schedule import Schedule


def _always(problem: Problem, sizes: Sizes) -> bool:
    return True


def _latent(problem: Problem, sizes: Sizes) -> bool:
    return problem.keys.latent


def _listed(problem: Problem, sizes: Sizes) -> bool:
    return problem.keys.listed


def _listed_rows(problem: Problem, sizes: Sizes) -> bool:
    return problem.keys.listed and problem.keys.latent


def _packed_pages(problem: Problem, sizes: Sizes) -> bool:
    return problem.lengths == "packed" and problem.keys.loaded


def _wide(problem: Problem, sizes: Sizes) -> bool:
    return problem.width > WIDEST


def _codes(problem: Problem, sizes: Sizes) -> bool:
    return problem.keys.codes is not None


class Unloaded(NamedTuple):
    """A pipeline of one direction and one family of chips, by the package and the name that its plan has it
    under. Its modules are imported when a problem is first planned for which `may` is true, as it is for all
    that the pipeline accepts: a process's first call waits for imports.
    """

    direction: Direction
    family: str
    package: str
    name: str
    may: Callable[[Problem, Sizes], bool] = _always

    def load(self) -> Pipeline:
        plans = import_module(f"fa4flex.kernels.{self.package}.plan")
        pipeline: Pipeline = getattr(plans, self.name)
        return pipeline


Entry = Pipeline | Unloaded

PIPELINES: tuple[Entry, ...] = (
    Unloaded("forward", "sm90", "lists_sm90", "LISTS_SM90", _listed),
    Unloaded("forward", "sm90", "mla_lists_sm90", "MLA_LISTS_SM90", _listed_rows),
    Unloaded("forward", "sm90", "mla_decode_sm90", "MLA_DECODE_SM90", _latent),
    Unloaded("forward", "sm90", "fwd_wide_sm90", "FWD_WIDE_SM90", _wide),
    Unloaded("forward", "sm90", "decode_sm90", "DECODE_SM90", few_queries),
    Unloaded("forward", "sm90", "decode_fp8_sm90", "DECODE_FP8_SM90", few_queries),
    Unloaded("forward", "sm90", "mixed_sm90", "MIXED_SM90", _packed_pages),
    Unloaded("forward", "sm90", "fwd_sm90", "FWD_SM90"),
    Unloaded("forward", "sm90", "fwd_8bit_sm90", "FWD_8BIT_SM90", _codes),
    Unloaded("forward", "sm100", "lists_sm100", "LISTS_SM100", _listed),
    Unloaded("forward", "sm100", "mla_decode_sm100", "MLA_DECODE_SM100", _latent),
    Unloaded("forward", "sm100", "decode_sm100", "DECODE_SM100", few_queries),
    Unloaded("forward", "sm100", "fwd_sm100", "FWD_SM100"),
    Unloaded("forward", "sm100", "fwd_8bit_sm100", "FWD_8BIT_SM100", _codes),
    Unloaded("tangents", "sm90", "jvp_sm90", "JVP_SM90"),
    Unloaded("backward", "sm90", "bwd_lists_sm90", "BWD_LISTS_SM90", _listed),
    Unloaded("backward", "sm90", "bwd_sm90", "BWD_SM90"),
    Unloaded("mass", "sm90", "mass_sm90", "MASS_SM90"),
    Unloaded("backward", "sm100", "bwd_sm100.two_cta", "TWO_CTA"),
    Unloaded("backward", "sm100", "bwd_sm100.two_kernels", "TWO_KERNELS"),
    Unloaded("backward", "sm100", "bwd_sm100.wide_heads", "WIDE_HEADS"),
    Unloaded("backward", "sm100", "bwd_sm100.one_cta", "ONE_CTA"),
)
"""All pipelines, in the order in which they are asked. What is ready to launch stays as it is: one put in
front serves calls of looks that have not been seen before."""


def loaded(direction: Direction) -> list[Pipeline]:
    """Pipelines of a direction, in order."""
    mine = (one for one in PIPELINES if one.direction == direction)
    return [one.load() if isinstance(one, Unloaded) else one for one in mine]


def _candidates(direction: Direction, problem: Problem, target: Target, sizes: Sizes) -> Iterator[Pipeline]:
    """Pipelines that may accept the problem, in order, each loaded when it is its turn."""
    for one in PIPELINES:
        if one.direction == direction:
            if isinstance(one, Pipeline):
                yield one
            elif one.family == target.family and one.may(problem, sizes):
                yield one.load()


def accepting(direction: Direction, problem: Problem, target: Target, sizes: Sizes) -> Pipeline | None:
    """The first pipeline that accepts the problem. None where it does not apply output functions and there is
    one: a launch after it does, rather than a kernel that suits the call less."""
    for pipeline in _candidates(direction, problem, target, sizes):
        reads = pipeline.reads(problem.keys)
        writes = pipeline.writes_float32 or not problem.wide_output
        drops = (pipeline.drops and problem.weights == "softmax") or not problem.dropout
        weighs = problem.weights in pipeline.weights and problem.width <= pipeline.widest
        if reads and writes and drops and weighs and pipeline.accepts(problem, target, sizes):
            return pipeline if pipeline.applies_output or not problem.output else None
    return None


def choose(direction: Direction, problem: Problem, target: Target, sizes: Sizes = UNKNOWN) -> Pipeline:
    """The first pipeline that accepts the problem. Raises UnsupportedError where none does."""
    found = accepting(direction, problem, target, sizes)
    if found is not None:
        return found
    raise UnsupportedError(
        f"a {direction} kernel for {target.name}: {problem.explain()}",
        "a problem and a chip that one of the pipelines accepts: "
        + ", ".join(pipeline.name for pipeline in loaded(direction)),
        "nothing: "
        + ("the cache is dequantised first" if problem.keys.dtype else "it is computed in PyTorch operations")
        + " instead",
    )


def by_pairs(facts: Facts, problem: Problem, target: Target, schedule: Schedule, sizes: Sizes) -> Problem:
    """The same forward problem, its mask asked of every pair where that is better than block tables, else as
    it is.

    Kernels for few rows wait for keys, which a mask need not be quick beside: they need no tables, whose
    launches take longer than a step does, split keys, and read pages in place. Tables stay where they leave
    out keys that need not be read: a map's blocks, documents. Tiles of listed keys have no tables.
    """
    if problem.mask_form == "tables" and problem.keys.listed:
        return replace(problem, mask_form="pairs", row_ends=0)
    if problem.mask_form != "tables" or asks_for_order(schedule) or not few_queries(problem, sizes):
        return problem
    if problem.keys.plain and (problem.row_ends or reads_by_blocks(facts.mask)):
        return problem
    asked = replace(problem, mask_form="pairs", row_ends=0)
    return problem if accepting("forward", asked, target, sizes) is None else asked


def plan_forward(
    facts: Facts,
    problem: Problem,
    target: Target = SM90A,
    schedule: Schedule = Schedule(),
    rescale_threshold: float | None = None,
    sizes: Sizes = UNKNOWN,
) -> ForwardPlan:
    """The plan of a forward kernel, which fits the chip. For `rescale_threshold` see ForwardRequest.

    Raises UnsupportedError for what the chip or kernel does not have, InputError where facts and problem
    contradict each other.
    """
    request = ForwardRequest(facts, problem, target, schedule, sizes, rescale_threshold)
    plan: ForwardPlan = _planned("forward", request)
    return plan


def plan_tangents(
    facts: Facts, problem: Problem, target: Target, schedule: Schedule = Schedule(), sizes: Sizes = UNKNOWN
) -> ForwardPlan:
    """The plan of a kernel of attention and its tangents. Errors as of a forward kernel."""
    request = ForwardRequest(facts, problem, target, schedule, sizes)
    plan: ForwardPlan = _planned("tangents", request)
    return plan


def plan_backward(
    facts: Facts,
    problem: Problem,
    target: Target,
    schedule: Schedule = Schedule(),
    sizes: Sizes = UNKNOWN,
) -> BackwardPlan:
    """The plan of a backward kernel, which fits the chip. Raises UnsupportedError where there is none."""
    request = Request(facts, problem, target, schedule, sizes)
    plan: BackwardPlan = _planned("backward", request)
    return plan


def plan_mass(
    facts: Facts,
    problem: Problem,
    target: Target,
    schedule: Schedule = Schedule(),
    sizes: Sizes = UNKNOWN,
) -> Any:
    """The plan of a kernel for sums of probabilities per key. Raises UnsupportedError where there is none."""
    return _planned("mass", Request(facts, problem, target, schedule, sizes))


def _planned(direction: Direction, request: Request) -> Any:
    """The plan by the first pipeline that accepts the request's problem, which fits the chip."""
    plan: Any = choose(direction, request.problem, request.target, request.sizes).plan(request)
    plan.check_resources()
    return plan
