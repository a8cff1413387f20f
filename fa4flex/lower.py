"""The whole compiler in one list, for all passes: prove, problem, pipeline, plan, source, kernel.

Whoever launches a kernel, shows it or simulates it goes through this list: what is shown is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from fa4flex.codegen.analyze.domain import Shape, slots_read
from fa4flex.codegen.analyze.extents import Reach
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import Proved, prove, prove_queries
from fa4flex.codegen.analyze.tile_bounds import tile_bounds
from fa4flex.codegen.emit import (
    Source,
    emit_backward,
    emit_forward,
    emit_mass,
    emit_sequences,
    emit_tables,
    emit_tangents,
)
from fa4flex.codegen.emit.module import Captions
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr
from fa4flex.compiler import debug
from fa4flex.compiler.background import Job
from fa4flex.compiler.compile import Kernel, compile_ahead, compile_kernel, job_of, kept
from fa4flex.compiler.signature import Signature
from fa4flex.errors import Origin
from fa4flex.kernels import dispatch
from fa4flex.kernels.block_tables.plan import TablesPlan
from fa4flex.kernels.plan.captured_sums import CapturedSum, separate, sums_of
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.pipeline import BY_KEYS, Direction
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.sizes import NO_ANSWERS, Answers, Sizes
from fa4flex.kernels.plan.specialize import backward_problem, by_queries, forward_problem
from fa4flex.kernels.plan.target import Target
from fa4flex.kernels.sequences.plan import plan_sequences
from fa4flex.primitives.schedule import Schedule

EMIT: dict[Direction, Callable[..., Source]] = {
    "forward": emit_forward, "backward": emit_backward, "tangents": emit_tangents, "mass": emit_mass,
}  # fmt: skip
"""Emitters of passes, whose plans are checked, and whose sources people read under names of their own."""

Prove = Callable[[Facts, Shape, Captured], Proved]


@dataclass(frozen=True, eq=False)
class Given:
    """facts, schedule   the program
    inputs            what calls that look alike have in common
    captured          the captured tensors and numbers, whose contents proofs read
    target            the chip
    prove             makes proofs, or finds them again
    changes           fields of Problem that are to be as they are here, whatever was found
    bound             the problem that proofs are made for, which may be larger than this call
    answers           of another call to questions about speed, with which the plan is right, if slower
    """

    facts: Facts
    schedule: Schedule
    inputs: Inputs
    captured: Captured
    target: Target
    prove: Prove = prove
    changes: Mapping[str, Any] = field(default_factory=dict)
    bound: Shape | None = None
    answers: Answers = NO_ANSWERS

    @property
    def proved_for(self) -> Shape:
        return self.inputs.extents if self.bound is None else self.bound


@dataclass(frozen=True, eq=False)
class Lowered:
    """A pass of a program, down to the source of its kernel.

    facts     what it was made of
    sums      memory for the gradients of captured tensors
    valid     extents of calls for which it is the same, by these alone
    answers   to questions about speed, by which another call may have a plan like this one
    """

    direction: Direction
    facts: Facts
    problem: Problem
    plan: Any
    source: Source
    sums: tuple[CapturedSum, ...] = ()
    valid: Reach = Reach()
    answers: Answers = NO_ANSWERS

    def compile(self, signature: Signature) -> Kernel:
        """The kernel for arguments that look like this. What FA4FLEX_DEBUG asks for is printed.

        Raises PlanError for a plan that does not hold.
        """
        kernel = compile_kernel(*self._checked(signature))
        level = debug.level()
        if level:
            debug.report(level, self.plan, self.source, signature, kernel)
        return kernel

    def compile_ahead(self, signature: Signature) -> None:
        """Begin with what `compile` would do, in another process."""
        compile_ahead(*self._checked(signature))

    def kept(self, signature: Signature) -> bool:
        """True if `compile` would find the kernel in memory or on disk."""
        return kept(self.source, self.problem, signature, self.plan.target.name)

    def job(self, signature: Signature) -> Job:
        """The job of another process in place of `compile`, which checks the plan as well."""
        plan = self.plan if self.direction in EMIT else None
        return job_of(self.source, self.problem, signature, self.plan.target.name, plan)

    def _checked(self, signature: Signature) -> tuple[Source, Problem, Signature, str]:
        """Inputs of the compilation, whose plan holds. The plan of a kernel that is kept was checked by who
        compiled it: the sources of plans and checks are in a kernel's key."""
        arguments = self.source, self.problem, signature, self.plan.target.name
        if self.direction in EMIT and not kept(*arguments):
            self.plan.check()
        return arguments


def lower_forward(arguments: Given) -> Lowered:
    """Raises UnsupportedError for what no kernel does, PastTheEnd for short captured tensors."""
    target = arguments.target.leaving(arguments.schedule.sm_margin)
    sizes = Sizes(arguments.inputs, arguments.answers)
    problem = dispatch.by_pairs(arguments.facts, _proved(arguments), target, arguments.schedule, sizes)
    problem = replace(problem, **arguments.changes)
    plan: Any = dispatch.plan_forward(arguments.facts, problem, target, arguments.schedule, sizes=sizes)
    source = _emitted(emit_forward, arguments.facts, plan)
    return Lowered(
        "forward", arguments.facts, plan.problem, plan, source, valid=sizes.valid, answers=sizes.answers
    )


def lower_backward(arguments: Given, needs: Sequence[int] = (), entropy: bool = False) -> Lowered:
    """`needs` are the slots of captured tensors whose gradients are wanted; entropy: whether that of the rows
    has a gradient. Errors as in the forward pass."""
    facts, inputs = arguments.facts, arguments.inputs
    target = arguments.target.leaving(arguments.schedule.sm_margin)
    deterministic = arguments.schedule.deterministic
    sizes = Sizes(inputs, arguments.answers)
    problem = backward_problem(_proved(arguments), facts, deterministic, entropy)
    queries = None
    if inputs.keys.listed:
        problem = dispatch.by_pairs(facts, problem, target, arguments.schedule, sizes)
    elif not deterministic:
        queries = prove_queries(facts, arguments.proved_for, arguments.captured)
    if queries is not None:
        problem = by_queries(problem, queries)
    problem = replace(problem, **arguments.changes)
    pipeline = dispatch.choose("backward", problem, target, sizes)
    if pipeline.splits_groups and inputs.kv_heads < inputs.extents.heads:
        problem = replace(problem, grouped=True)
    sums = sums_of(facts, inputs, problem, pipeline.zero_fills, needs)
    problem = replace(problem, gradients=tuple((one.slot, one.adding) for one in sums))
    plan: Any = dispatch.plan_backward(facts, problem, target, sizes=sizes)
    source = _emitted(emit_backward, facts, plan)
    if deterministic:
        sums = separate(sums, facts, inputs, plan)
    return Lowered("backward", facts, problem, plan, source, sums, sizes.valid, sizes.answers)


def lower_mass(arguments: Given) -> Lowered:
    """The pass of sums of probabilities per key. Errors as in the forward pass."""
    facts, inputs = arguments.facts, arguments.inputs
    target = arguments.target.leaving(arguments.schedule.sm_margin)
    sizes = Sizes(inputs, arguments.answers)
    problem = backward_problem(_proved(arguments), facts, False)
    problem = replace(
        problem,
        head_dim_v=problem.head_dim,
        out_dtype=problem.dtype,  # type: ignore[arg-type]  # none of codes
        sinks=False,
        statistics=(),
        output=False,
    )  # values and the output have no part in it
    queries = prove_queries(facts, arguments.proved_for, arguments.captured)
    if queries is not None:
        problem = by_queries(problem, queries)
    problem = replace(problem, **arguments.changes)
    plan: Any = dispatch.plan_mass(facts, problem, target, sizes=sizes)
    source = _emitted(emit_mass, facts, plan)
    return Lowered("mass", facts, problem, plan, source, (), sizes.valid, sizes.answers)


def lower_tangents(arguments: Given, moved: tuple[str, ...] = ("q", "k", "v")) -> Lowered:
    """A forward pass with tangents of those of q, k and v that are `moved`. Errors likewise."""
    target = arguments.target.leaving(arguments.schedule.sm_margin)
    sizes = Sizes(arguments.inputs, arguments.answers)
    problem = replace(_proved(arguments), **{"moved": moved, **arguments.changes})
    plan: Any = dispatch.plan_tangents(arguments.facts, problem, target, arguments.schedule, sizes)
    source = _emitted(emit_tangents, arguments.facts, plan)
    return Lowered(
        "tangents", arguments.facts, problem, plan, source, valid=sizes.valid, answers=sizes.answers
    )


def lower_tables(lowered: Lowered, captured: Captured = Captured()) -> Lowered:
    """The kernels that find the tiles of the mask of a pass, for block tables of its tiles. They are the same
    for all widths of heads."""
    problem, tile = lowered.problem, lowered.plan.tile
    facts = Facts(mask=lowered.facts.mask, intervals=lowered.facts.intervals)
    bare = Problem(
        WIDTH, WIDTH, lengths=problem.lengths, mask_form="tables", operands=problem.operands,
        in_range=problem.in_range, wide_index=problem.wide_index, row_ends=problem.row_ends,
        keys=problem.keys.bare, deterministic=problem.deterministic,
    )  # fmt: skip
    # Ranges stand in tables of 32 bits; without them, tiles are asked pair by pair.
    ranges, large = not problem.wide_index, frozenset(dict(captured.bits))
    ragged = problem.lengths != "dense"
    bounds = tile_bounds(facts.mask, tile, len(problem.operands), ranges, large, ragged)
    keys = facts.keys if problem.row_ends else None
    read = tuple(sorted(slots_read(facts.mask)))
    plan = TablesPlan(lowered.plan.target, bare, bounds, lowered.direction in BY_KEYS, read, keys)
    return Lowered("tables", facts, bare, plan, _emitted(emit_tables, facts, plan))


def lower_lengths(
    facts: Facts, problem: Problem, target: Target, tile: tuple[int, int] | None = None
) -> Lowered:
    """The kernel that corrects lengths for calls of a kernel for `problem`; it sorts their tiles of queries
    if `tile` is given."""
    plan = plan_sequences(facts, problem, target, tile)
    return Lowered("sequences", plan.facts, plan.problem, plan, _emitted(emit_sequences, plan.facts, plan))


WIDTH = 64
"""Any width of heads: kernels of block tables read none."""


def captioned(lowered: Lowered, captions: Captions, origins: Mapping[Expr, Origin]) -> Source:
    """The source under the user's names, with the lines that it comes from. Its code is the same."""
    return EMIT[lowered.direction](lowered.facts, lowered.plan, captions, origins)


def _proved(arguments: Given) -> Problem:
    """The proof, and the problem of a forward pass."""
    proved = arguments.prove(arguments.facts, arguments.proved_for, arguments.captured)
    numbers = arguments.captured.scalars
    problem = forward_problem(arguments.facts, arguments.inputs, proved, numbers)
    function = arguments.facts.of_output
    if function is None:
        return problem
    channels = replace(arguments.proved_for, kv_len=arguments.inputs.head_dim_v)
    other = prove(function, channels, arguments.captured, of_scores=("b", "h", "kv"))
    return replace(
        problem,
        output=True,
        wide_index=problem.wide_index or other.wide_index,
        in_range=problem.in_range and other.in_range,
    )


@lru_cache(maxsize=1024)
def _emitted(emit: Callable[[Facts, Any], Source], facts: Facts, plan: Any) -> Source:
    """The source of a plan. Equal programs are one kernel, whose source has no lines of a user's."""
    return emit(facts, plan)
