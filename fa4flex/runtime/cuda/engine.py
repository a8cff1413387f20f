"""Launching a program on NVIDIA GPUs: everything about a call is decided once per look of its tensors.

A call's look (shapes, strides, dtypes, alignment, and which version of the tensors that masks are proved
with) is the key to a Ready launch. With one at hand, a call allocates its results and calls the compiled
function: no copy to the host, no allocation but through torch, so that CUDA graphs can capture it. Without
one, everything is proved and compiled first, which may copy captured tensors and lengths to the host.

Contents of tensors are taken as unchanged while torch says so: a change that torch does not count (another
library writing into the memory, a replayed CUDA graph) is seen by scores, but not by a mask's block tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.prove import Proved, prove, proving, watched
from fa4flex.codegen.analyze.tiles import TileMap, tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.plan.arguments import FORWARD, LENGTHS
from fa4flex.compiler import simulated
from fa4flex.compiler.signature import Signature
from fa4flex.contents import VersionedCache, on_host
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.cuda.arguments import INTERVALS, conversions_of, key_function, launch_function
from fa4flex.runtime.cuda.block_tables import BlockTables, ragged_maps, to_device
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.device import require_not_capturing, target_of
from fa4flex.runtime.cuda.interval_tables import interval_tables
from fa4flex.runtime.cuda.lengths import check_lengths
from fa4flex.runtime.cuda.ready import PARAMETERS, Ready, Results, result_layouts
from fa4flex.runtime.cuda.tile_order import TileOrder

if TYPE_CHECKING:
    from fa4flex.codegen.plan.pipeline import ForwardPlan
    from fa4flex.lower import Given

MOST_READY = 256
"""Looks of calls remembered per program; the oldest is forgotten first."""

MOST_PROVED = 64
"""Proofs of one program: one serves forward and backward passes, whatever else their tensors look like."""


class Engine:
    """One program (facts, schedule, precision) on NVIDIA GPUs, with what is ready to launch."""

    def __init__(self, facts: Facts, schedule: Schedule, precision: Precision, kinds: dict[int, str]) -> None:
        self.facts, self.schedule, self.precision = facts, schedule, precision
        self.kinds = kinds
        """The kind of each captured number, by slot."""
        self.watched = watched(facts)
        self._slots = sorted(self.watched.slots)
        self._ready: VersionedCache[Ready] = VersionedCache(MOST_READY)
        self.backward: VersionedCache[Any] = VersionedCache(MOST_READY)
        """What runtime/cuda/backward.py keeps: launches by look, None where there is no kernel."""
        self.proved: VersionedCache[Proved] = VersionedCache(MOST_PROVED)

    def find(self, call: Call) -> Ready | None:
        """What was made ready for calls that look like this one."""
        seen = self.watched_tensors(call)
        ready: Ready | None = self._ready.get(self.key(call), seen)
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
            self._ready.keep(self.key(call), self.watched_tensors(call), ready)
        return ready(call)

    def watched_operands(self, call: Call) -> list[Tensor]:
        return [call.operands[slot] for slot in self._slots]

    def watched_tensors(self, call: Call) -> list[Tensor]:
        found = self.watched_operands(call)
        if self.watched.lengths and call.lengths is not NO_LENGTHS:
            found += [x for x in call.lengths if x is not None]
        return found

    def key(self, call: Call) -> Any:
        """Key of a call: all that its launch depends on."""
        lengths = None if call.lengths is NO_LENGTHS else _key_of_lengths(call)
        return _key_of(call), lengths, call.heads_first, call.statistics, simulated.target()


_key_of, _key_of_lengths = (key_function(FORWARD, source) for source in ("call", "call.lengths"))


# --- making ready -----------------------------------------------------------------------------------------


def given_of(engine: Engine, call: Call, schedule: Schedule) -> Given:
    """What calls that look like this one are compiled from."""
    from fa4flex.lower import Given

    captured = Captured(call.operands, numbers_of(engine, call))
    sizes = tuple([(x.shape, x.dtype) for x in call.operands])

    def proved(facts: Facts, shape: Shape, captured: Captured) -> Proved:
        key = shape, engine.watched.numbers_of(captured.scalars), sizes
        seen = engine.watched_operands(call)
        return engine.proved.made(key, seen, lambda: prove(facts, shape, captured))

    inputs = call.inputs(engine.precision.output_dtype(call.q.dtype))
    return Given(engine.facts, schedule, inputs, captured, target_of(call.q.device), proved)


def make_ready(engine: Engine, call: Call) -> Ready:
    """Everything that calls that look like this one have in common. Raises UnsupportedError for what no
    kernel does, PastTheEnd for short captured tensors."""
    from fa4flex.lower import lower_forward

    require_not_capturing()
    given = given_of(engine, call, engine.schedule)
    lowered, shape, captured = lower_forward(given), given.inputs.extents, given.captured
    plan: ForwardPlan = lowered.plan
    rows = interval_tables(lowered.tabulated.ends, shape, captured, call.q.device)
    by_work = plan.order == "by_work"
    kernel = lowered.compile(signature_of(engine, call, rows, ("order",) if by_work else ()))
    tables = None
    if lowered.problem.mask_form == "tables":
        tables = _tables(engine, call, captured, plan.tile)
    constants = {
        "tables": tables,
        "scalars": captured.scalars or None,
        "max_q_len": shape.q_len,
        INTERVALS: rows,
    }
    conversions = conversions_of(FORWARD, call=call)
    return Ready(
        kernel.launch,
        launch_function(FORWARD, kernel.launch, PARAMETERS, constants, conversions),
        constants,
        bool(rows) or tables is not None,
        bool(conversions),
        result_layouts(call, shape, engine.precision.output_dtype(call.q.dtype)),
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
