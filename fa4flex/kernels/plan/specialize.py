"""From inputs and proofs to the problem of a pass: what its kernel is specialised to."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.codegen.analyze.blocks import Numbers, block_size
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.hoist import read_by_pairs
from fa4flex.codegen.analyze.prove import Proved, ProvedQueries
from fa4flex.codegen.expr import READS, Expr, const, keep, nodes
from fa4flex.codegen.ops import OPS
from fa4flex.errors import UnsupportedError
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.problem import Problem

MANY_READS = 4
"""Elements of captured tensors that a score reads for its pair, from which on these are what takes time, when
kernels run and when they are compiled: those have little code then, rather than long tiles."""

FEW, SHORT = 32, 3
"""Operations of a weight and its derivative, and fp32 slots of one, up to which both are brief: a gelu by
tanh, of 22, spills no registers; one by erf does."""

USUAL = 128
"""Queries and keys of usual tiles, which edges of larger blocks do not cut, nor those of multiples."""

BLOCK_QUERIES, BLOCK_KEYS = 64, (64, 48, 32, 16)
"""Queries and keys of tiles that smaller blocks may have."""


def forward_problem(facts: Facts, inputs: Inputs, proved: Proved, numbers: Numbers = ()) -> Problem:
    """The problem of a forward pass. numbers: captured ones by slot; without them, blocks are not known."""
    return Problem(
        head_dim=inputs.head_dim,
        head_dim_v=inputs.head_dim_v,
        dtype=inputs.dtype,  # type: ignore[arg-type]
        out_dtype=inputs.out_dtype,  # type: ignore[arg-type]
        lengths=inputs.lengths,
        mask_form=proved.mask_form,
        sinks=inputs.sinks,
        statistics=inputs.statistics,
        wide_index=proved.wide_index,
        in_range=proved.in_range,
        positive_scale=inputs.positive_scale,
        operands=inputs.operands,
        keys=inputs.keys,
        many_reads=_many_reads(facts),
        row_ends=proved.row_ends if inputs.lengths == "dense" else 0,
        blocks=small_blocks(facts.mask, numbers) if proved.mask_form == "tables" and numbers else None,
        shares=inputs.shares,
        skip=inputs.skip,
        dropout=_dropout(facts),
        weights=facts.weights.kind,
    )


def small_blocks(mask: Expr, numbers: Numbers) -> tuple[int, int] | None:
    """Queries and keys of the largest tiles that no edge of a block cuts, of a mask that reads a map of
    blocks that usual tiles are too large for. None for larger blocks, for smaller ones, and without a map."""
    size = block_size(mask, numbers)
    if size is None or min(size) <= 0:
        return None
    rows, columns = size
    if rows % BLOCK_QUERIES or (rows % USUAL == 0 and columns % USUAL == 0):
        return None
    keys = next((keys for keys in BLOCK_KEYS if columns % keys == 0), None)
    return None if keys is None else (BLOCK_QUERIES, keys)


def _dropout(facts: Facts) -> bool:
    """True if weights are dropped. Raises UnsupportedError for pairs that are counted from elsewhere, as in a
    part of a whole: threads of kernels hold keys whose hashes are the same if they count from 0."""
    if facts.kept is None:
        return False
    seed, threshold, *_ = facts.kept.args
    if facts.kept is not keep(seed, threshold):
        raise UnsupportedError(
            "a kernel for dropout in a part of the pairs",
            "dropout of whole sequences",
            "nothing: it is computed in PyTorch operations instead",
        )
    return True


def backward_problem(problem: Problem, facts: Facts, deterministic: bool, entropy: bool = False) -> Problem:
    """The problem of a backward pass from that of the forward pass, its mask by tables of key intervals.
    entropy: whether that has a gradient."""
    return replace(
        problem,
        statistics=("lse", "entropy") if entropy else ("lse",),
        sloped=facts.gradient.by_score is not const(1.0),
        deterministic=deterministic,
        met_alike=_met_alike(facts, problem),
        long_scores=long_scores(facts),
        pair_reads=any(map(read_by_pairs, nodes(facts.score))),
        long_masks=_long_masks(facts),
        brief=brief(facts) and not problem.dropout,
        row_ends=0,
        skip=0.0,  # it leaves out nothing
    )


def by_queries(problem: Problem, proved: ProvedQueries) -> Problem:
    """The same problem, its mask computed by query intervals, without tables of key intervals."""
    return replace(
        problem,
        mask_form="queries",
        wide_index=problem.wide_index or proved.wide_index,
        in_range=problem.in_range and proved.in_range,
    )


def long_scores(facts: Facts) -> bool:
    """True if tensors are read for a score by query or key, or its derivative is another one for each."""
    read = {name for node in nodes(facts.score) if node.op in READS for name in node.free}
    return not {"q", "kv", "score"}.isdisjoint(read | facts.gradient.by_score.free)


def brief(facts: Facts) -> bool:
    """True if weights are elementwise, and they and their derivatives take few instructions, and nothing but
    the score and what a head's scores have in common. Kernels write each of these instructions out as often
    as a thread has scores, and what branches keeps registers."""
    if facts.weights.kind != "elementwise":
        return False
    scored = [x for x in nodes(facts.score, facts.gradient.by_score) if "score" in x.free and x.args]
    moved = {"q", "kv"} & (facts.score.free | facts.gradient.by_score.free)
    known = all(x.op in OPS for x in scored)
    return not moved and known and len(scored) <= FEW and all(map(_is_short, scored))


def _is_short(x: Expr) -> bool:
    row = OPS[x.op]
    return row.cost.fp32 <= SHORT and not row.branches


def _many_reads(facts: Facts) -> bool:
    """True if MANY_READS reads of captured tensors are made for each score."""
    reads = [node for node in nodes(facts.score) if node.op in READS and {"q", "kv"} <= node.free]
    return len(reads) >= MANY_READS


def _long_masks(facts: Facts) -> bool:
    """True if query intervals take divisions, or elements of captured tensors."""
    bounds = () if facts.queries is None else (bound for span in facts.queries.spans for bound in span)
    return any(node.op in (*READS, "floordiv", "mod") for bound in bounds for node in nodes(bound))


def _met_alike(facts: Facts, problem: Problem) -> bool:
    """True if keys next to each other meet nearly the same queries: all of them, or those from some one on,
    as under a causal mask."""
    if problem.mask_form == "spans" and facts.keys is not None:
        return all(lo is const(0) for lo, _ in facts.keys.spans)
    return problem.mask_form == "none"
