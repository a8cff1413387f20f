"""Query heads whose rows share tiles: of all heads that share a KV head, where one copy brings them."""

from __future__ import annotations

from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.expr import TRUE
from fa4flex.kernels.fwd_sm90.tiles import NARROW
from fa4flex.kernels.plan.few_rows import few_rows
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.sizes import Sizes

GROUPS = (2, 4, 8, 16)
"""Groups of query heads whose rows may share tiles. 64 heads of one query in a copy were slower."""

COPIED = 64
"""Rows that one copy brings of all heads of a group, which divides them: those of a warpgroup."""

MOST_PACKED = 1 << 30
"""Rows of a group of heads in one sequence, at most: their numbers have 32 bits."""

SHORT_SEQUENCES = 11
"""Sequences of a packed batch are short that have up to about so many times, on average, the queries by
which a tile of a head passes the end of one and a tile of a group does not: under a causal mask, 8 % of the
products or so are of these. Narrow heads may have twice as many, whose tiles are higher than they are wide;
without a mask, half as many count as short. 0: none are short; MOST_PACKED: all are."""

ONE_HEAD = 8
"""Heads of which rows r and r + 8 of a tile are of the same one, at most: a thread has parts of both rows."""


def packed_heads(request: ForwardRequest) -> int:
    """Query heads whose rows share tiles; 1: each head has tiles of its own."""
    facts, problem, sizes = request.facts, request.problem, request.sizes
    # A copy has whole queries of a group, of tensors that lie as they were given.
    copied = sizes.group in GROUPS and not problem.keys.loaded
    if not copied or problem.mask_form == "tables":
        return 1
    if problem.lengths == "packed":
        may = _may_pack_sequences(facts, problem, sizes) and sizes.rows.at_most(MOST_PACKED)
        pays = may and sizes.q.at_most(_short_in_all(request), right="any")
    else:
        pays = _may_pack(facts, problem) and not few_rows(problem, sizes) and sizes.rows.at_most(MOST_PACKED)
    return sizes.group if pays else 1


def _may_pack(facts: Facts, problem: Problem) -> bool:
    """True where lengths are dense, and nothing is computed of scores: with hooks it was slower, and what is
    copied row by row comes head by head."""
    plain = facts.score is SCORE and facts.mask is TRUE and not problem.sinks
    return plain and problem.lengths == "dense" and not problem.wide_output


def _may_pack_sequences(facts: Facts, problem: Problem, sizes: Sizes) -> bool:
    """True if packed sequences have no mask that differs between heads: keys of a tile are looked for by its
    queries. Scores and sinks may where a thread has rows of one head."""
    heads = problem.sinks or "h" in facts.score.free
    return "h" not in facts.mask.free and not (heads and sizes.group > ONE_HEAD)


def _short_in_all(request: ForwardRequest) -> int:
    """The most queries of all sequences of a packed batch that are short. Batches of up to twice as many
    sequences have the same, so that a few launches serve batches of any size."""
    problem, sizes = request.problem, request.sizes
    group, narrow = sizes.group, max(problem.head_dim, problem.head_dim_v) <= NARROW
    saved = COPIED - COPIED // group
    each = SHORT_SEQUENCES * saved * (2 if narrow else 1) // (2 if request.facts.mask is TRUE else 1)
    return each * sizes.batch_power() * 3 // 2
