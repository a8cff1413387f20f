"""Launching a program on NVIDIA GPUs: everything about a call is decided once per look of its tensors.

A call's look (shapes, strides, dtypes, alignment, and which version of the tensors that masks are proved
with) is the key to a Ready launch. With one at hand, a call allocates its results and calls the compiled
function: no copy to the host, no allocation but through torch, so that CUDA graphs can capture it. Without
one, everything is proved and compiled first, which may copy captured tensors and lengths to the host.

Contents of tensors are taken as unchanged while torch says so: a change that torch does not count (another
library writing into the memory, a replayed CUDA graph) is seen by scores, but not by a mask's block tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.tiles import TileMap, tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.contents import Kept, on_host
from fa4flex.errors import UnsupportedError
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.cuda import simulated
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, Signature
from fa4flex.runtime.cuda.choose import Proved, look, prove, proving, watched
from fa4flex.runtime.cuda.compile import compile_kernel
from fa4flex.runtime.cuda.counter import counter
from fa4flex.runtime.cuda.graphs import hold_if_captured
from fa4flex.runtime.cuda.lengths import check_lengths
from fa4flex.runtime.cuda.order import TileOrder
from fa4flex.runtime.cuda.rows import tabulate
from fa4flex.runtime.cuda.tables import BlockTables, ragged_maps, to_device
from fa4flex.runtime.layouts import empty_output

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.codegen.plan import Plan
    from fa4flex.codegen.plan.problem import Problem
    from fa4flex.codegen.plan.target import Target

MOST_READY = 256
"""Looks of calls remembered per program; the oldest is forgotten first."""

MOST_PROVED = 64
"""Proofs of one program: one serves forward and backward passes, whatever else their tensors look like."""

ALIGNMENT = 16
NO_TENSORS: tuple[Tensor, ...] = ()


Results = tuple[Tensor, Tensor | None, Tensor | None]
"""out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries, each None or empty where
it is computed on request and was not asked for."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result."""


@dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """A launch in which only pointers are missing.

    fixes     by argument, what makes a tensor as the kernel reads it; most need nothing
    layouts   of out, lse and max_scores; None for what is not computed
    rows      tables of key intervals, which follow the captured tensors
    gaps      whether there are query rows that no sequence uses, which kernels do not write
    counted   whether blocks take tiles from a counter
    order     of the tiles of a ragged batch, where they are sorted
    """

    launch: Callable[..., None]
    fixes: dict[int, Callable[[Tensor], Tensor]]
    layouts: tuple[Layout, Layout | None, Layout | None]
    tables: BlockTables | None
    rows: tuple[Tensor, ...]
    scalars: tuple[int | float, ...] | None
    max_q_len: int
    gaps: bool
    counted: bool
    order: TileOrder | None = None

    def __call__(self, call: Call) -> Results:
        q, k, v, operands, sinks, lengths, _, scale, _, _ = call
        out, lse, largest = self.results(q)
        if self.rows or self.tables is not None:
            hold_if_captured(q.get_device(), self)
        if self.fixes:
            q, k, v, sinks, lengths, operands = fixed(call, self.fixes)
        self.launch(
            q, k, v, out, lse, largest, *lengths,
            self.tables, sinks, operands + self.rows or None, self.scalars, scale, self.max_q_len,
            counter(q.get_device()) if self.counted else None,
            None if self.order is None else self.order(call),
        )  # fmt: skip
        return out, lse, largest

    def results(self, q: Tensor) -> Results:
        """Memory for what a launch computes."""
        (shape, strides, dtype), of_lse, of_largest = self.layouts
        out = q.new_empty_strided(shape, strides, dtype=dtype)
        lse = None if of_lse is None else _empty(q, of_lse)
        largest = None if of_largest is None else _empty(q, of_largest)
        if self.gaps:
            _fill(out, lse, largest)
        return out, lse, largest


def _fill(out: Tensor, *statistics: Tensor | None) -> None:
    """As for rows without keys."""
    out.zero_()
    for x in statistics:
        if x is not None:
            x.fill_(-math.inf)


def _empty(q: Tensor, layout: Layout) -> Tensor:
    return q.new_empty_strided(layout[0], layout[1], dtype=layout[2])


class Engine:
    """One program (facts, schedule, precision) on NVIDIA GPUs, with what is ready to launch."""

    def __init__(self, facts: Facts, schedule: Schedule, precision: Precision, kinds: dict[int, str]) -> None:
        self.facts, self.schedule, self.precision = facts, schedule, precision
        self.kinds = kinds
        """By slot, the kind of each captured number."""
        self.watched = watched(facts)
        self._slots = sorted(self.watched.slots)
        self._ready: Kept[Ready] = Kept(MOST_READY)
        self.backward: Kept[Any] = Kept(MOST_READY)
        """What runtime/cuda/backward.py keeps: launches by look, None where there is no kernel."""
        self.proved: Kept[Proved] = Kept(MOST_PROVED)

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
        """What a launch depends on of a call. Numbers are told apart by their text: 0.0 equals -0.0."""
        q, k, v, operands, sinks, lengths, scalars, scale, heads_first, statistics = call
        key: tuple[Any, ...] = (
            q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype,
            q.get_device(), k.get_device(), v.get_device(),
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT,
            repr(scalars), scale > 0, heads_first, statistics, simulated.target(),
        )  # fmt: skip
        if operands:
            key += tuple([look(x) for x in operands])
        if lengths is not NO_LENGTHS:
            key += tuple([look(x) for x in lengths])
        return key if sinks is None else (*key, look(sinks))


# --- making ready -----------------------------------------------------------------------------------------


class Settled(NamedTuple):
    """What a kernel is planned from, of calls that look like one: facts, in which spans of keys may be read
    from `rows`; numbers, the captured ones by their kinds."""

    target: Target
    problem: Problem
    facts: Facts
    rows: tuple[Tensor, ...]
    captured: Captured
    numbers: tuple[int | float, ...]


def settle(engine: Engine, call: Call) -> Settled:
    """Raises UnsupportedError for what no kernel does, PastTheEnd for short captured tensors."""
    target = target_of(call.q.device)
    numbers = numbers_of(engine, call)
    shape, captured = call.extents(), Captured(call.operands, numbers)
    sizes = tuple([(x.shape, x.dtype) for x in call.operands])
    key, seen = (shape, engine.watched.numbers_of(numbers), sizes), engine.watched_operands(call)
    proved = engine.proved.made(key, seen, lambda: prove(engine.facts, shape, captured))
    facts, rows = engine.facts, NO_TENSORS
    if proved.mask_form == "spans" and call.lengths is NO_LENGTHS:
        facts, rows = tabulate(facts, shape, captured, call.q.device)
    return Settled(target, problem_of(engine, call, proved, rows, target), facts, rows, captured, numbers)


def make_ready(engine: Engine, call: Call) -> Ready:
    """Prove, plan, emit, compile and build tables for calls that look like this one."""
    _require_not_capturing()
    target, problem, facts, rows, captured, numbers = settle(engine, call)
    plan, source = program(facts, problem, engine.schedule, target)
    by_work = plan.order == "by_work"
    signature = replace(signature_of(engine, call, rows), ordered=by_work)
    kernel = compile_kernel(source, problem, signature, target.name)
    shape = call.extents()
    return Ready(
        kernel.launch,
        fixes_of(call),
        _layouts(call, shape, engine.precision.output_dtype(call.q.dtype)),
        _tables(engine, call, captured, plan.tile) if problem.mask_form == "tables" else None,
        rows,
        numbers or None,
        shape.q_len,
        call.lengths[2] is not None,
        plan.config().dynamic,
        TileOrder(engine.facts, plan.tile[0], numbers) if by_work else None,
    )


def _layouts(call: Call, shape: Shape, dtype: torch.dtype) -> tuple[Layout, Layout | None, Layout | None]:
    out = empty_output(call.q, call.v.shape[-1], dtype)
    sizes = (shape.heads, shape.q_len) if call.packed else (shape.batch, shape.heads, shape.q_len)
    strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
    row = sizes, strides, torch.float32
    lse, largest = (row if name in call.statistics else None for name in ("lse", "max_scores"))
    return (tuple(out.shape), out.stride(), dtype), lse, largest


@lru_cache(maxsize=256)
def program(
    facts: Facts, problem: Problem, schedule: Schedule = Schedule(), target: Target | None = None
) -> tuple[Plan, Source]:
    """The plan and the generated source, without the user's lines: equal programs are one kernel.

    `target` None means Hopper.
    """
    from fa4flex.codegen.emit import emit_forward
    from fa4flex.codegen.plan import SM90A, plan_forward

    plan = plan_forward(facts, problem, target or SM90A, schedule)
    return plan, emit_forward(facts, plan)


def problem_of(
    engine: Engine, call: Call, proved: Proved, rows: tuple[Tensor, ...], target: Target
) -> Problem:
    from fa4flex.codegen.plan.problem import Problem

    longest = call.extents().q_len
    ragged = "packed" if call.packed else "dense" if call.lengths is NO_LENGTHS else "used"
    return Problem(
        head_dim=call.q.shape[-1],
        head_dim_v=call.v.shape[-1],
        dtype=_name(call.q.dtype),  # type: ignore[arg-type]
        out_dtype=_name(engine.precision.output_dtype(call.q.dtype)),  # type: ignore[arg-type]
        lengths=ragged,  # type: ignore[arg-type]
        mask_form=proved.mask_form,
        sinks=call.sinks is not None,
        statistics=call.statistics,
        wide_index=proved.wide_index,
        in_range=proved.in_range,
        positive_scale=call.scale > 0,
        few_queries=longest <= target.few_queries,
        many_queries=ragged == "dense" and 0 < target.many_queries < longest,
        operands=tuple((_name(x.dtype), x.ndim) for x in call.operands + rows),
    )


def signature_of(engine: Engine, call: Call, rows: tuple[Tensor, ...]) -> Signature:
    used_q, used_k = call.lengths[2:]
    kinds = tuple(engine.kinds.get(slot, "float") for slot in range(len(call.scalars)))
    read = call.operands + rows
    units = tuple(x.ndim == 0 or x.stride(-1) == 1 for x in read)
    heads_first = call.heads_first or call.packed
    return Signature(
        heads_first, used_q is not None, used_k is not None, kinds, units, tuple(map(_even_rows, read))
    )


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- what kernels do not read as it is --------------------------------------------------------------------


def fixes_of(call: Call) -> dict[int, Callable[[Tensor], Tensor]]:
    """By position in _arguments(call), what a tensor must go through at every launch."""
    fixes: dict[int, Callable[[Tensor], Tensor]] = {}
    for i, x in enumerate(_arguments(call)):
        if x is None:
            continue
        if i < 3:
            if not tma_able(x):
                fixes[i] = _compact
        elif i == 3:
            if x.dtype != torch.float32 or x.stride(-1) != 1:
                fixes[i] = _float_vector
        elif i < 8:
            if x.dtype != torch.int32 or x.stride(-1) != 1:
                fixes[i] = _int_vector
        elif x.dtype == torch.bool or x.ndim == 0:
            fixes[i] = _readable
    return fixes


def _arguments(call: Call) -> tuple[Tensor | None, ...]:
    return (call.q, call.k, call.v, call.sinks, *call.lengths, *call.operands)


def fixed(call: Call, fixes: dict[int, Callable[[Tensor], Tensor]]) -> tuple[Any, ...]:
    """(q, k, v, sinks, lengths, operands) as kernels read them."""
    given: list[Any] = list(_arguments(call))
    for i, fix in fixes.items():
        given[i] = fix(given[i])
    return (*given[:4], given[4:8], tuple(given[8:]))


def tma_able(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can read x: 16-byte steps, except along the last dimension."""
    per_step = ALIGNMENT // x.element_size()
    steps = all(s % per_step == 0 for s in x.stride()[:-1])
    return x.stride(-1) == 1 and steps and x.data_ptr() % ALIGNMENT == 0


def _compact(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _float_vector(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _int_vector(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def _readable(x: Tensor) -> Tensor:
    x = x.detach()
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return x.reshape(1) if x.ndim == 0 else x


# --- what is refused --------------------------------------------------------------------------------------


def target_of(device: torch.device) -> Target:
    """The chip that a GPU is, with as many multiprocessors as this one has; raises UnsupportedError where
    there is no kernel for it."""
    from fa4flex.codegen.plan.target import TARGETS

    found = torch.cuda.get_device_capability(device)
    target = next((target for target in TARGETS if target.capability == found), None)
    if target is None:
        known = ", ".join(f"{'.'.join(map(str, t.capability))} ({t.chip})" for t in TARGETS)
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} of compute capability {found[0]}.{found[1]}",
            f"one of the compute capabilities that kernels exist for: {known}",
            "run on such a GPU, or move the tensors with .cpu()",
        )
    return replace(target, multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count)


def _require_not_capturing() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the first call of its kind while a CUDA graph is being captured",
            "a kernel that is compiled, and masks that are proved, before the capture begins",
            "call once with the same shapes and the same captured tensors before capturing",
        )
