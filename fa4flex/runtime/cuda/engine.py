"""Launching a program on NVIDIA GPUs: everything about a call is decided once per look of its tensors.

A call's look (dtypes, heads, widths, alignment, and which version of the tensors that masks are proved with)
is the key to a Ready launch, which serves a range of lengths. With one at hand, a call allocates its results
and calls the compiled function: no copy to the host, no allocation but through torch, so that CUDA graphs can
capture it. Without one, everything is proved and compiled first, which may copy captured tensors and lengths
to the host.

Contents of tensors are taken as unchanged while torch says so: a change that torch does not count (another
library writing into the memory, a replayed CUDA graph) is seen by scores, but not by a mask's block tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import (
    Proved,
    ProvedQueries,
    prove,
    prove_queries,
    proving,
    read_queries,
    watched,
)
from fa4flex.codegen.analyze.reach import Reach, extents_of, widest
from fa4flex.codegen.analyze.tabulate import tabulable
from fa4flex.codegen.analyze.tiles import TileMap, tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.plan.arguments import FORWARD, LENGTHS
from fa4flex.codegen.plan.specialize import same_backward_problem, same_problem
from fa4flex.compiler.signature import Signature
from fa4flex.contents import VersionedCache, on_host
from fa4flex.errors import Fa4flexError
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.cuda.arguments import INTERVALS, conversions_of, launch_function
from fa4flex.runtime.cuda.block_tables import BlockTables, ragged_maps, to_device
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.device import require_not_capturing, target_of
from fa4flex.runtime.cuda.families import Families, look_of
from fa4flex.runtime.cuda.fast_backward import RecentBackward
from fa4flex.runtime.cuda.interval_tables import interval_tables
from fa4flex.runtime.cuda.lengths import check_lengths
from fa4flex.runtime.cuda.ready import PARAMETERS, Ready, Results
from fa4flex.runtime.cuda.tile_order import TileOrder

if TYPE_CHECKING:
    from fa4flex.codegen.plan.pipeline import ForwardPlan
    from fa4flex.lower import Given

MOST_READY = 256
"""Looks of calls remembered per program, those with tables at each of their extents; the oldest is forgotten
first."""

MOST_PROVED = 256
"""Proofs of one program, and attempts at some: one serves forward and backward passes, whatever else their
tensors look like."""


class Engine:
    """One program (facts, schedule, precision) on NVIDIA GPUs, with what is ready to launch."""

    def __init__(self, facts: Facts, schedule: Schedule, precision: Precision, kinds: dict[int, str]) -> None:
        self.facts, self.schedule, self.precision = facts, schedule, precision
        self.kinds = kinds
        """The kind of each captured number, by slot."""
        self.watched = watched(facts)
        self._slots = sorted(self.watched.slots)
        self._ready: Families[Ready] = Families(MOST_READY)
        self.backward: Families[Any] = Families(MOST_READY)
        """What runtime/cuda/backward.py keeps: launches by look, None where there is no kernel."""
        self.recent_backward = RecentBackward()
        self.proved: VersionedCache[Any] = VersionedCache(MOST_PROVED)

    def find(self, call: Call) -> Ready | None:
        """What was made ready for calls that look like this one."""
        found = look_of(call)
        ready: Ready | None = None if found is None else self._ready.find(*found, self.watched_tensors(call))
        if ready is not None and call.lengths is not NO_LENGTHS:
            check_lengths(call)
        return ready

    def run(self, call: Call) -> Results:
        """Raises UnsupportedError for what no kernel does, PastTheEnd for short captured tensors."""
        ready = self.find(call)
        if ready is None:
            check_lengths(call)
            with proving():
                ready = make_ready(self, call)
            found = look_of(call)
            if found is not None:
                self._ready.keep(*found, self.watched_tensors(call), ready)
        return ready(call)

    def watched_operands(self, call: Call) -> list[Tensor]:
        return [call.operands[slot] for slot in self._slots]

    def watched_tensors(self, call: Call) -> list[Tensor]:
        found = self.watched_operands(call)
        if self.watched.lengths and call.lengths is not NO_LENGTHS:
            found += [x for x in call.lengths if x is not None]
        return found


# --- making ready -----------------------------------------------------------------------------------------


def given_of(engine: Engine, call: Call, schedule: Schedule, backward: bool = False) -> tuple[Given, Reach]:
    """What calls that look like this one are compiled from, and for which extents it is the same."""
    from fa4flex.lower import Given

    captured, target = Captured(call.operands, numbers_of(engine, call)), target_of(call.q.device)
    inputs = call.inputs(engine.precision.output_dtype(call.q.dtype))
    proofs = Proofs(engine, call, captured)
    limit = same_backward_problem(inputs, target) if backward else same_problem(inputs, target)
    proved = proofs.of_both_passes if backward and not schedule.deterministic else proofs.usable
    sizes = tuple([tuple(x.shape) for x in call.operands])
    reach, bound = widest(engine.facts, inputs.extents, sizes, limit, proved)
    return Given(engine.facts, schedule, inputs, captured, target, proofs.prove, bound=bound), reach


class Proofs:
    """Proofs of a program with what a call captured, made once for each problem."""

    def __init__(self, engine: Engine, call: Call, captured: Captured) -> None:
        self._engine, self._captured = engine, captured
        numbers = engine.watched.numbers_of(captured.scalars)
        self._key = numbers, tuple([(x.shape, x.dtype) for x in call.operands])
        self._seen = engine.watched_operands(call)

    def prove(self, facts: Facts, shape: Shape, captured: Captured) -> Proved:
        """Raises PastTheEnd for short captured tensors, UnsupportedError for integers that are too large."""
        return self._made("mask", shape, lambda: prove(facts, shape, captured))

    def usable(self, shape: Shape) -> Proved | None:
        """What launches for other extents can use: no block tables, no index that is wider than theirs."""
        return self._made("usable", shape, lambda: self._usable(shape))

    def of_both_passes(self, shape: Shape) -> Proved | None:
        """The same, with query intervals, where a backward pass computes them."""
        found = self.usable(shape)
        if found is None or not read_queries(self._engine.facts):
            return found
        queries: ProvedQueries | None = self._made("queries", shape, lambda: self._queries(shape))
        if queries is None or queries.wide_index:
            return None
        return replace(found, in_range=found.in_range and queries.in_range)

    def _usable(self, shape: Shape) -> Proved | None:
        try:
            found = self.prove(self._engine.facts, shape, self._captured)
        except Fa4flexError:
            return None
        return None if found.mask_form == "tables" or found.wide_index else found

    def _queries(self, shape: Shape) -> ProvedQueries | None:
        try:
            return prove_queries(self._engine.facts, shape, self._captured)
        except Fa4flexError:
            return None

    def _made(self, what: str, shape: Shape, make: Callable[[], Any]) -> Any:
        return self._engine.proved.made((what, shape, self._key), self._seen, make)


def make_ready(engine: Engine, call: Call) -> Ready:
    """Everything that calls that look like this one have in common. Raises UnsupportedError for what no
    kernel does, PastTheEnd for short captured tensors."""
    from fa4flex.lower import lower_forward

    require_not_capturing()
    given, reach = given_of(engine, call, engine.schedule)
    lowered, shape, captured = lower_forward(given), given.inputs.extents, given.captured
    plan: ForwardPlan = lowered.plan
    rows = interval_tables(lowered.tabulated.ends, shape, captured, call.q.device)
    by_work = plan.order == "by_work"
    kernel = lowered.compile(signature_of(engine, call, rows, ("order",) if by_work else ()))
    tables = None
    if lowered.problem.mask_form == "tables":
        tables = _tables(engine, call, captured, plan.tile)
    of_one = tables is not None or (lowered.problem.lengths == "dense" and tabulable(engine.facts))
    output = engine.precision.output_dtype(call.q.dtype)
    constants = {"tables": tables, "scalars": captured.scalars or None, INTERVALS: rows}
    conversions = conversions_of(FORWARD, call=call)
    return Ready(
        kernel.launch,
        launch_function(FORWARD, kernel.launch, PARAMETERS, constants, conversions),
        constants,
        bool(rows) or tables is not None,
        bool(conversions),
        output,
        call.v.shape[-1],
        call.statistics,
        Reach.exactly(extents_of(shape)) if of_one else reach,
        call.lengths.seqused_q is not None,
        plan.config().dynamic,
        TileOrder(engine.facts, plan.tile[0], captured.scalars) if by_work else None,
    )


def signature_of(
    engine: Engine, call: Call, rows: tuple[Tensor, ...], more: tuple[str, ...] = ()
) -> Signature:
    """more: names of arguments that are given besides the lengths."""
    used = tuple(row.name for row, x in zip(LENGTHS, call.lengths) if row.when is None and x is not None)
    kinds = tuple(engine.kinds.get(slot, "float") for slot in range(len(call.scalars)))
    read = call.operands + rows
    units = tuple(x.ndim == 0 or x.stride(-1) == 1 for x in read)
    heads_first = call.heads_first or call.packed
    return Signature(heads_first, kinds, units, tuple(map(_even_rows, read)), used + more)


def _even_rows(x: Tensor) -> bool:
    """Whether the elements 2 i and 2 i + 1 of any row are one aligned word."""
    steps = x.stride()
    aligned = x.data_ptr() % (2 * x.element_size()) == 0
    return x.ndim > 0 and steps[-1] == 1 and aligned and all(step % 2 == 0 for step in steps[:-1])


def numbers_of(engine: Engine, call: Call) -> tuple[int | float, ...]:
    """Captured numbers by their kinds: operators pass all of them as floats."""
    kinds = (engine.kinds.get(slot, "float") for slot in range(len(call.scalars)))
    return tuple(float(x) if kind == "float" else int(x) for kind, x in zip(kinds, call.scalars, strict=True))


def _tables(engine: Engine, call: Call, captured: Captured, tile: tuple[int, int]) -> BlockTables:
    shape = call.extents()
    # A padded batch has tiles that no sequence uses, and whose pointers are read like any others.
    rows = 1 if call.packed else -(-shape.q_len // tile[0])
    return to_device(maps_of(engine, call, captured, tile), shape, call.q.device, rows)


def maps_of(engine: Engine, call: Call, captured: Captured, tile: tuple[int, int]) -> list[TileMap]:
    """The tiles of the mask: a map for the whole batch, or one per sequence of a ragged one."""
    facts, shape = engine.facts, call.extents()
    if call.lengths is NO_LENGTHS:
        return [tile_map(facts.mask, facts.keys, shape, captured, tile)]
    lengths = _sequence_lengths(call, 0, shape.q_len), _sequence_lengths(call, 1, shape.kv_len)
    return ragged_maps(facts, shape.heads, captured, tile, lengths)


def _sequence_lengths(call: Call, side: int, length: int) -> Tensor:
    """The used length of every sequence on the host, int64 [sequences]."""
    cu, used = call.lengths[side], call.lengths[side + 2]
    if used is not None:
        return on_host(used).long()
    return torch.full((call.q.shape[0],), length) if cu is None else on_host(cu).long().diff()
