"""From inputs and proofs to the problem of a pass: what its kernel is specialised to."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.codegen.analyze.domain import READS
from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.analyze.hoist import read_by_pairs
from fa4flex.codegen.analyze.prove import Proved, ProvedQueries
from fa4flex.codegen.analyze.reach import ANY, Reach
from fa4flex.codegen.expr import TRUE, const, nodes
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.problem import PACKED_HEADS, ROW_CLASSES, Problem
from fa4flex.kernels.plan.target import Target

MOST_PACKED = 1 << 30
"""Rows of a group of heads in one sequence, at most: their numbers have 32 bits."""

SHORT_SEQUENCES = 11
"""Sequences of a packed batch are short that have up to about so many times, on average, the queries by
which a tile of a head passes the end of one and a tile of a group does not: under a causal mask, 8 % of the
products or so are of these. Narrow heads may have twice as many, whose tiles are higher than they are wide;
without a mask, half as many count as short. 0: none are short; MOST_PACKED: all are."""

MANY_READS = 4
"""Elements of captured tensors that a score reads for its pair, from which on these are what takes time, when
kernels run and when they are compiled: those have little code then, rather than long tiles."""

ONE_HEAD = 8
"""Heads of which rows r and r + 8 of a tile are of the same one, at most: a thread has parts of both rows."""


def forward_problem(facts: Facts, inputs: Inputs, proved: Proved, target: Target) -> Problem:
    """The problem of a forward pass."""
    longest = inputs.extents.q_len
    return Problem(
        head_dim=inputs.head_dim,
        head_dim_v=inputs.head_dim_v,
        dtype=inputs.dtype,  # type: ignore[arg-type]
        out_dtype=inputs.out_dtype,  # type: ignore[arg-type]
        kv_dtype=inputs.kv_dtype,  # type: ignore[arg-type]
        k_scales=inputs.k_scales,
        v_scales=inputs.v_scales,
        lengths=inputs.lengths,
        mask_form=proved.mask_form,
        sinks=inputs.sinks,
        statistics=inputs.statistics,
        wide_index=proved.wide_index,
        in_range=proved.in_range,
        positive_scale=inputs.positive_scale,
        few_queries=longest <= target.few_queries,
        few_rows=longest <= _few_rows(inputs, target.few_rows),
        row_class=_row_class(inputs, target),
        query_class=_query_class(facts, inputs, target),
        packed_heads=1 if proved.mask_form == "tables" else _packed_heads(facts, inputs, target),
        many_queries=inputs.lengths == "dense" and 0 < target.many_queries < longest,
        operands=inputs.operands,
        page_rows=inputs.page_rows,
        many_reads=_many_reads(facts),
        row_ends=proved.row_ends if inputs.lengths == "dense" else 0,
    )


def backward_problem(
    problem: Problem, facts: Facts, inputs: Inputs, target: Target, deterministic: bool
) -> Problem:
    """The problem of a backward pass from that of the forward pass, its mask by tables of key intervals."""
    found = replace(
        problem,
        few_rows=False,
        row_class=0,
        query_class=0,
        packed_heads=1,
        sloped=facts.gradient.by_score is not const(1.0),
        deterministic=deterministic,
        many_keys=0 < target.many_keys < inputs.usual_keys and _met_alike(facts, problem),
        few_keys=_has_few_keys(inputs, target),
        few_tiles=_has_few_tiles(inputs, target),
        long_scores=long_scores(facts),
        pair_reads=any(map(read_by_pairs, nodes(facts.score))),
        long_masks=_long_masks(facts),
        row_ends=0,
    )
    return replace(found, few_steps=_has_few_steps(found, inputs, target))


def same_problem(facts: Facts, inputs: Inputs, target: Target) -> Reach:
    """The extents, around those of `inputs`, for which `forward_problem` sets the same flags."""
    limits = [_few_rows(inputs, rows) for rows in (target.few_rows, *_row_classes(inputs, target))]
    limits += _query_classes(facts, inputs, target) + _most_packed(facts, inputs, target)
    reach = _same_queries(inputs, target).within(_same_packing(facts, inputs, target))
    for few in limits:
        least, most = _side(inputs.extents.q_len, few) if few >= 0 else (0, ANY)
        reach = reach.within(Reach((0, least, 0), (ANY, most, ANY)))
    return reach


def _same_queries(inputs: Inputs, target: Target) -> Reach:
    """The same of the flags that both passes have."""
    longest = inputs.extents.q_len
    queries = [_side(longest, target.few_queries)]
    if inputs.lengths == "dense" and target.many_queries > 0:
        queries.append(_side(longest, target.many_queries))
    least, most = max(low for low, _ in queries), min(high for _, high in queries)
    return Reach((0, least, 0), (ANY, most, ANY))


def _row_classes(inputs: Inputs, target: Target) -> tuple[int, ...]:
    """Classes of query rows by which kernels differ."""
    return ROW_CLASSES if inputs.kv_dtype else target.row_classes


def _row_class(inputs: Inputs, target: Target) -> int:
    """The class of the query rows; 0 where they are in none."""
    longest = inputs.extents.q_len
    return next((n for n in _row_classes(inputs, target) if longest <= _few_rows(inputs, n)), 0)


def _query_classes(facts: Facts, inputs: Inputs, target: Target) -> tuple[int, ...]:
    """Classes of queries by which kernels differ: none of packed sequences, of which all queries together are
    known, and none where rows of a group fill tiles."""
    narrow = max(inputs.head_dim, inputs.head_dim_v) <= target.class_width
    packed = inputs.lengths == "packed" or _packed_heads(facts, inputs, target) > 1
    return target.query_classes if narrow and not packed else ()


def _query_class(facts: Facts, inputs: Inputs, target: Target) -> int:
    """The class of the queries; 0 where they are in none."""
    return next((n for n in _query_classes(facts, inputs, target) if inputs.extents.q_len <= n), 0)


def _packed_heads(facts: Facts, inputs: Inputs, target: Target) -> int:
    """Query heads whose rows share tiles."""
    longest, most = inputs.extents.q_len, _most_packed(facts, inputs, target)
    few = longest <= _few_rows(inputs, target.few_rows)
    if _may_pack_sequences(facts, inputs, target):
        return _group(inputs) if longest <= _short_in_all(facts, inputs, target) else 1
    return _group(inputs) if most and longest <= most[0] and not few else 1


def _most_packed(facts: Facts, inputs: Inputs, target: Target) -> tuple[int, ...]:
    """The most queries of heads of dense lengths whose rows share tiles; () where none do: with hooks they
    were slower, and what is copied row by row comes head by head."""
    plain = facts.score is SCORE and facts.mask is TRUE and not inputs.sinks
    copied = inputs.lengths == "dense" and inputs.out_dtype != "float32"
    return (MOST_PACKED // _group(inputs),) if plain and copied and _divides(inputs, target) else ()


def _may_pack_sequences(facts: Facts, inputs: Inputs, target: Target) -> bool:
    """True if rows of a group may share tiles in packed sequences. Keys of a tile are looked for by its
    queries, so masks may not differ between heads; scores and sinks may where a thread has rows of one."""
    heads = inputs.sinks or "h" in facts.score.free
    packed = inputs.lengths == "packed" and _divides(inputs, target)
    return packed and "h" not in facts.mask.free and not (heads and _group(inputs) > ONE_HEAD)


def _divides(inputs: Inputs, target: Target) -> bool:
    """True if a copy of rows has whole queries of a group, of tensors that lie as they were given."""
    group = _group(inputs)
    divides = group in PACKED_HEADS[1:] and target.packed_rows > 0 and target.packed_rows % group == 0
    return divides and not inputs.page_rows and not inputs.kv_dtype


def _short_in_all(facts: Facts, inputs: Inputs, target: Target) -> int:
    """The most queries of all sequences of a packed batch that are short. Batches of up to twice as many
    sequences have the same, so that a few launches serve batches of any size."""
    group, narrow = _group(inputs), max(inputs.head_dim, inputs.head_dim_v) <= target.class_width
    saved = target.packed_rows - target.packed_rows // group
    each = SHORT_SEQUENCES * saved * (2 if narrow else 1) // (2 if facts.mask is TRUE else 1)
    return min(each * _least_batch(inputs) * 3 // 2, MOST_PACKED // group)


def _least_batch(inputs: Inputs) -> int:
    """The power of two at or below the number of sequences."""
    return 1 << max(inputs.extents.batch, 1).bit_length() - 1


def _same_packing(facts: Facts, inputs: Inputs, target: Target) -> Reach:
    """Extents of packed sequences that are short, as those of `inputs` are, or not."""
    if not _may_pack_sequences(facts, inputs, target):
        return Reach()
    batch = _least_batch(inputs)
    least, most = _side(inputs.extents.q_len, _short_in_all(facts, inputs, target))
    return Reach((batch if batch > 1 else 0, least, 0), (2 * batch - 1, most, ANY))


def _group(inputs: Inputs) -> int:
    """Query heads that share a head of keys."""
    return max(inputs.extents.heads // max(inputs.kv_heads, 1), 1)


def _few_rows(inputs: Inputs, rows: int) -> int:
    """The most queries of a sequence that a tile of so many rows holds; -1 where there is no such tile. Of
    packed sequences, all queries together are known, which says nothing of one."""
    if not rows or inputs.lengths == "packed":
        return -1
    return rows // _group(inputs)


def same_backward_problem(inputs: Inputs, target: Target) -> Reach:
    """The extents for which `backward_problem` does so too."""
    same, extents = _same_queries(inputs, target), inputs.extents
    if _counts_few_keys(inputs, target):
        least, most = _side(extents.kv_len, target.few_keys)
        same = same.within(Reach((0, 0, least), (ANY, ANY, most)))
    same = same.within(_same_steps(inputs, target)).within(_same_tiles(inputs, target))
    if target.many_keys <= 0:
        return same
    if inputs.lengths == "packed":  # keys per sequence count: for another number of these, other lengths
        batch = extents.batch
        least, most = _side(extents.kv_len, (target.many_keys + 1) * max(batch, 1) - 1)
        return same.within(Reach((batch, 0, least), (batch, ANY, most)))
    least, most = _side(extents.kv_len, target.many_keys * 2 + 1 if inputs.keys_used else target.many_keys)
    return same.within(Reach((0, 0, least), (ANY, ANY, most)))


def _has_few_keys(inputs: Inputs, target: Target) -> bool:
    return _counts_few_keys(inputs, target) and inputs.extents.kv_len <= target.few_keys


def _has_few_steps(problem: Problem, inputs: Inputs, target: Target) -> bool:
    """True if steps may be long, and queries are so few that longer ones compute more than they save."""
    unmasked, masked = target.few_steps
    most = unmasked if problem.mask_form == "none" else masked
    plain = not (problem.sloped or problem.long_scores or problem.pair_reads or problem.long_masks)
    return plain and _counts_steps(inputs, target) and inputs.extents.q_len <= most


def _same_steps(inputs: Inputs, target: Target) -> Reach:
    """Extents with few steps, as those of `inputs` have, or with many, whatever the mask."""
    if not _counts_steps(inputs, target):
        return Reach()
    sides = [_side(inputs.extents.q_len, most) for most in target.few_steps]
    return Reach((0, max(least for least, _ in sides), 0), (ANY, min(most for _, most in sides), ANY))


def _counts_steps(inputs: Inputs, target: Target) -> bool:
    """True if shapes alone tell how many queries each sequence has, and kernels differ by that."""
    least, most = target.step_widths
    widths = inputs.head_dim, inputs.head_dim_v
    return inputs.lengths == "dense" and least <= inputs.head_dim and max(widths) <= most


def _has_few_tiles(inputs: Inputs, target: Target) -> bool:
    """True if no block has all keys, and blocks of `halved_tile` keys would leave half of the multiprocessors
    idle."""
    each = _few_tiles(inputs, target)
    few = each > 0 and inputs.extents.kv_len <= each * target.halved_tile
    return few and not _has_few_keys(inputs, target)


def _same_tiles(inputs: Inputs, target: Target) -> Reach:
    """Extents with few tiles, as those of `inputs` have, or with many: for any number of sequences of which
    as many tiles each are few."""
    each = _few_tiles(inputs, target)
    if each < 0 or _has_few_keys(inputs, target):
        return Reach()
    limit, sequences = each * target.halved_tile, _few_in_all(inputs, target)
    if _has_few_tiles(inputs, target):
        return Reach((0, 0, 0), (sequences // each, ANY, limit))
    return Reach((sequences // (each + 1) + 1, 0, limit + 1), (ANY, ANY, ANY))


def _few_tiles(inputs: Inputs, target: Target) -> int:
    """The most tiles of each sequence that are few; -1 where shapes do not tell how many there are, or
    kernels do not differ by that."""
    if inputs.lengths != "dense" or max(inputs.head_dim, inputs.head_dim_v) > target.halved_width:
        return -1
    return _few_in_all(inputs, target) // max(inputs.extents.batch, 1)


def _few_in_all(inputs: Inputs, target: Target) -> int:
    """The most tiles of all sequences, for a head of queries, that are few."""
    return target.multiprocessors // 2 // max(inputs.extents.heads, 1)


def _counts_few_keys(inputs: Inputs, target: Target) -> bool:
    """True if shapes alone tell how many keys each sequence has, and kernels differ by that."""
    return inputs.lengths == "dense" and target.few_keys > 0


def _side(extent: int, threshold: int) -> tuple[int, int]:
    """The extents that are on the same side of a threshold: up to it, or beyond."""
    return (threshold + 1, ANY) if extent > threshold else (0, threshold)


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
