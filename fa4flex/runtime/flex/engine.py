"""Engine of one program on torch's flex_attention, with what it keeps between calls.

Kept                 key                                             stale when
a ready call         look of the tensors, extents, numbers that      any of these differs
                     proofs read
a compiled function  text of its module, look without extents        either differs; torch guards extents
a block mask         extents, numbers and contents of tensors that   any of these differs
                     the mask reads, stream
tables of tokens     extents, lengths of a ragged batch, stream      likewise
a number's tensor    its buffer, value, dtype, device, stream        any of these differs

Contents are compared on a CPU. What follows from those on a device is made anew by each call, which waits for
nothing, and within each CUDA graph that is captured: replays follow new contents. With
Schedule(contents="counted") torch's count of changes in place decides instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa4flex.codegen.analyze.domain import Ragged, Shape, numbers_read, slots_read
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.overflow import integers
from fa4flex.codegen.analyze.prove import prove, proving, watched
from fa4flex.codegen.evaluate import MODEST_BITS, Captured
from fa4flex.codegen.expr import nodes
from fa4flex.contents import Followed, VersionedCache
from fa4flex.exact import exactly
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import NO_LENGTHS, Call, Results, largest_of_heads
from fa4flex.runtime.flex import ragged
from fa4flex.runtime.flex.attend import Module, Wanted, buffers_of, module
from fa4flex.runtime.flex.block_mask import Blocks, Classifier, blocks_of, classifier
from fa4flex.runtime.flex.compiled import Attend, Outputs
from fa4flex.runtime.flex.mods import Buffer, Function, Setting
from fa4flex.runtime.flex.refusals import places_of, refuse_entropy, refuse_precision, refuse_schedule
from fa4flex.runtime.kv_heads import of_kv_heads
from fa4flex.torch_internals import current_stream

MOST_READY, MOST_COMPILED, MOST_NUMBERS = 256, 64, 1024
MOST_MASKS = 16
"""Block masks of one program, of as many sets of tensors: one per layer, say."""

LEAST_WIDTH = 16
"""Head width of torch's kernels; narrower heads are padded with zeros."""


class Engine:
    """One program (facts, schedule, precision) on torch's flex_attention."""

    def __init__(self, facts: Facts, schedule: Schedule, precision: Precision) -> None:
        self.facts, self.schedule, self.precision = facts, schedule, precision
        self.watched = watched(facts)
        self._ready: VersionedCache[Ready] = VersionedCache(MOST_READY)  # of keys alone, as the next two
        self._compiled: VersionedCache[Attend] = VersionedCache(MOST_COMPILED)
        self._plain_masks: VersionedCache[Blocks] = VersionedCache(MOST_MASKS)
        self._tokens: Followed[tuple[Tensor, ...]] = Followed(MOST_MASKS, 4)
        self._masks: Followed[Blocks] = Followed(MOST_MASKS, 4)

    def attend(self, call: Call) -> Results:
        """Results of a call with heads first: out in q's layout, lse and max_scores [B, H, Sq], or [H, Tq] of
        packed inputs, max_logit where it is wanted; differentiable.

        Raises UnsupportedError for what torch cannot express, PastTheEnd for short captured tensors.
        """
        ready = self.find(call)
        if ready is None:
            with proving():
                ready = _made(self, call)
            self._ready.keep(self._look(call), (), ready)
        return ready(call)

    def find(self, call: Call) -> Ready | None:
        """Ready call of an earlier one that looked like this, all of whose parts were checked; else None."""
        result: Ready | None = self._ready.get(self._look(call), ())
        return result

    def _look(self, call: Call) -> Hashable:
        return _look(call), self.watched.numbers_of(call.scalars)

    def attend_of(self, key: Hashable, make: Callable[[], Attend]) -> Attend:
        """The function kept for a key, or one that is made now."""
        return self._compiled.made(key, (), make)

    def tokens(self, call: Call) -> tuple[Tensor, ...]:
        """Tables of a ragged batch."""
        q, k, lengths = call.q, call.kv.k, call.lengths
        if lengths is NO_LENGTHS:
            return ()
        packed = lengths.cu_seqlens_q is not None

        def make() -> tuple[Tensor, ...]:
            Varlen(*lengths)  # which raises, where the host reads contents, if these do not fit
            with torch.inference_mode(False):  # what inference makes, no later call could save
                if packed:
                    return ragged.tokens_of(lengths, q.shape[0], k.shape[0])
                return ragged.ends_of(lengths, q.shape[0], q.shape[2], k.shape[2])

        if _capturing(q):
            return make()
        key = q.shape[:1] + k.shape[:1] if packed else (q.shape[0], q.shape[2], k.shape[2])
        absent = tuple([x is None for x in lengths])
        present = [x for x in lengths if x is not None]
        return self._tokens.made((key, absent, _stream(q)), present, make, self.schedule.contents)

    def blocks(self, key: Hashable, read: Sequence[Tensor], make: Callable[[], Blocks]) -> Blocks:
        """Block mask of a mask that reads these tensors, kept for a key or made now."""
        if not read:
            return self._plain_masks.made(key, (), make)
        return self._masks.made(key, read, make, self.schedule.contents)


def _look(call: Call) -> Hashable:
    """All that a ready call depends on, but for contents and numbers."""
    q, kv, operands, sinks, lengths, _, scale, _, statistics = call
    grad = torch.is_grad_enabled()
    inputs = (q, kv.k, kv.v) if sinks is None else (q, kv.k, kv.v, sinks)
    return (
        tuple([(x.shape, x.dtype, x.device, grad and x.requires_grad) for x in inputs]),
        tuple([(x.shape, x.dtype, x.device, x.layout, grad and x.requires_grad) for x in operands]),
        sinks is None, exactly(scale), statistics, grad,
        None if lengths is NO_LENGTHS else tuple([None if x is None else x.shape for x in lengths]),
    )  # fmt: skip


# --- making ready -----------------------------------------------------------------------------------------


class Recent(NamedTuple):
    """Parts of the last call: text of its numbers, stream, tensors of numbers, and its block mask, if that
    follows from numbers alone. Threads share it: another call makes another one."""

    numbers: str
    stream: int
    tensors: dict[Buffer, Tensor]
    blocks: Blocks | None = None


class Parts(NamedTuple):
    """Tensors of one call, [B, H, S, D], as the compiled function has them; numbers are among `recent`."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Blocks | None
    operands: tuple[Tensor, ...]
    recent: Recent
    sinks: Tensor | None


@dataclass(eq=False)
class Ready:
    """Everything that calls of one look have in common.

    attend            the compiled function, or torch's reference
    classes           None where all pairs take part
    score, mask       buffers that the two functions take
    read              slots of the captured tensors that the mask reads
    numbers           slots of the captured numbers that the mask reads
    dtypes            of the tensors of numbers and lengths that functions read
    padded_to         columns of zeros that q and k, and v, get
    output            dtype of the output
    learned           slots of captured tensors that gradients are wanted of, and the dtype in which these are
                      summed: a sum is rounded to the tensor's own once
    recent            parts of the last call, whoever called
    """

    engine: Engine
    attend: Attend
    shape: Shape
    classes: Classifier | None
    score: tuple[Buffer, ...]
    mask: tuple[Buffer, ...]
    read: tuple[int, ...]
    numbers: tuple[int, ...]
    dtypes: dict[Buffer, torch.dtype]
    padded_to: tuple[int, int]
    output: torch.dtype
    learned: dict[int, torch.dtype]
    recent: Recent | None = None

    def __post_init__(self) -> None:
        self.taken = tuple(dict.fromkeys((*self.score, *self.mask)))

    def __call__(self, call: Call) -> Results:
        parts = self.parts(call, self.recent)
        self.recent = parts.recent
        return self.results(self.compute(parts), call)

    def parts(self, call: Call, recent: Recent | None) -> Parts:
        """Tensors of a call, laid out and padded, and what is kept in `recent` or made now."""
        q, kv, operands, sinks, lengths, scalars, *_ = call
        k, v = kv.k, kv.v
        if lengths is not NO_LENGTHS:
            tables = self.engine.tokens(call)
            operands = (*operands, *tables)
            q, k, v = (_before_ends if lengths.cu_seqlens_q is None else _inside)(call, tables)
        if self.padded_to != (0, 0):
            q, k, v = self._wide(q, k, v)
        k, v = of_kv_heads(k, v)
        recent = self._now(scalars, q, recent)
        blocks = None
        if self.classes is not None:
            blocks, recent = self._blocks(recent, operands, scalars, q)
        if self.learned:
            operands = tuple([x.to(self.learned.get(slot, x.dtype)) for slot, x in enumerate(operands)])
        return Parts(q, k, v, blocks, operands, recent, sinks)

    def arguments(self, parts: Parts) -> tuple[Any, ...]:
        """Arguments of the compiled function."""
        q, k, v, blocks, operands, recent, sinks = parts
        numbers = recent.tensors
        score, mask = (
            tuple([operands[x.which] if x.kind == "tensor" else numbers[x] for x in of])
            for of in (self.score, self.mask)
        )
        return q, k, v, blocks, score, mask, sinks

    def flat(self, parts: Parts) -> tuple[Tensor | None, ...]:
        """The tensors among these, each once and in the same order at each call; None for sinks that are not
        there."""
        q, k, v, blocks, operands, recent, sinks = parts
        numbers = recent.tensors
        values = [operands[x.which] if x.kind == "tensor" else numbers[x] for x in self.taken]
        return q, k, v, *(blocks or ()), *values, sinks

    def compute(self, parts: Parts) -> Outputs:
        return self.attend(*self.arguments(parts))

    def results(self, result: Outputs, call: Call) -> Results:
        """Results in the layout of q."""
        out, lse, largest = result
        if call.sinks is not None and lse is not None and call.lengths.seqused_q is not None:
            lse = self._of_used(lse, call)
        if self.padded_to[1]:
            out = out[..., : call.kv.v.shape[-1]]
        if out.dtype is not self.output:
            out = out.to(self.output)
        if call.lengths.cu_seqlens_q is not None:
            lse, largest = (None if x is None else x[0] for x in (lse, largest))
            out = out[0].transpose(0, 1)
        if "max_logit" in call.statistics:
            assert largest is not None
            return out, lse, largest, largest_of_heads(largest), None
        return out, lse, largest

    def _of_used(self, lse: Tensor, call: Call) -> Tensor:
        """Log-sum-exps, -inf in rows past the ends of sequences: these have no sinks either."""
        tables = self.engine.tokens(call)
        if call.lengths.cu_seqlens_q is not None:
            used = ragged.Tokens(*tables).sequence_q >= 0
        else:
            ends = ragged.Ends(*tables).q_len
            used = (torch.arange(lse.shape[2], device=lse.device) < ends[:, None])[:, None]
        return torch.where(used, lse, -torch.inf)

    def _now(self, scalars: tuple[int | float, ...], q: Tensor, recent: Recent | None) -> Recent:
        """The numbers of this call as tensors: those of the last one, if they are equal."""
        text, stream = exactly(*scalars), _stream(q)
        if recent is not None and recent.numbers == text and recent.stream == stream:
            return recent
        sizes = {"q_len": self.shape.q_len, "kv_len": self.shape.kv_len, "num_heads": self.shape.heads}
        tensors = {
            x: _number_of(sizes[x.which] if x.kind == "length" else scalars[x.which], dtype, q, x)
            for x, dtype in self.dtypes.items()
        }
        return Recent(text, stream, tensors)

    def _wide(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads padded with zeros, where torch's kernels have none so narrow."""
        more_k, more_v = self.padded_to
        if more_k:
            q, k = pad(q, (0, more_k)), pad(k, (0, more_k))
        return q, k, pad(v, (0, more_v)) if more_v else v

    def _blocks(
        self, recent: Recent, operands: tuple[Tensor, ...], scalars: tuple[Any, ...], q: Tensor
    ) -> tuple[Blocks, Recent]:
        """The block mask of a call, and its parts with that."""
        assert self.classes is not None
        read = [operands[slot] for slot in self.read]
        capturing = _capturing(q)
        if recent.blocks is not None and not capturing:
            return recent.blocks, recent
        classes = self.classes

        def find(buffer: Buffer) -> Tensor:
            return operands[buffer.which] if buffer.kind == "tensor" else recent.tensors[buffer]

        def make() -> Blocks:
            with torch.inference_mode(False), torch.no_grad():
                return blocks_of(classes.classes(self.shape, find, q.device))

        if capturing:
            return make(), recent
        numbers = exactly(*[scalars[slot] for slot in self.numbers])
        made = self.engine.blocks((self.shape, numbers, q.device, recent.stream), read, make)
        return made, recent if read else recent._replace(blocks=made)


def _made(engine: Engine, call: Call) -> Ready:
    facts, q, kv, grad = engine.facts, call.q, call.kv, torch.is_grad_enabled()
    on_cpu, first, statistics = q.device.type == "cpu", len(call.operands), call.statistics
    wanting = frozenset(i for i, x in enumerate(call.operands) if grad and x.requires_grad)
    refuse_schedule(engine.schedule, on_cpu, bool(wanting))
    refuse_precision(engine.precision, q.dtype, on_cpu)
    refuse_entropy(statistics)
    shape = _shape(call)
    if call.lengths is not NO_LENGTHS:
        facts = (ragged.packed_facts if q.ndim == 3 else ragged.padded_facts)(facts, first)
    operands = (*call.operands, *engine.tokens(call))
    setting = _proved(engine.facts, facts, call, operands, shape)
    setting = replace(setting, learned=wanting, copied=frozenset() if on_cpu else places_of(facts, wanting))
    largest = "max_scores" in statistics or "max_logit" in statistics
    wanted = Wanted(call.scale, "lse" in statistics, largest, call.sinks is not None, engine.schedule.tile)
    made = module(facts, setting, wanted)
    trains = grad and call.wants_gradients
    compiled = not on_cpu or not (trains or wanted.lse or wanted.max_scores or wanted.sinks)
    widths = q.shape[-1], kv.v.shape[-1]
    short = (0, 0) if not compiled else tuple(max(LEAST_WIDTH - width, 0) for width in widths)
    heads = q.shape[1], kv.k.shape[1], kv.v.shape[1]
    key = made.text, compiled, q.dtype, q.device, heads, widths, grad, tuple(sorted(wanting)), trains
    classes = None if made.mask is None else classifier(facts.mask, operands, setting)
    functions = [x for x in (made.score, made.mask) if x is not None]
    functions += [] if classes is None else classes.functions
    return Ready(
        engine,
        engine.attend_of(key, lambda: _attend(made, compiled, on_cpu)),
        shape,
        classes,
        buffers_of(made.score),
        buffers_of(made.mask),
        tuple(sorted(slots_read(facts.mask))),
        numbers_read(facts.mask),
        _dtypes(facts, setting, functions),
        short,  # type: ignore[arg-type]
        engine.precision.output_dtype(q.dtype),
        {slot: engine.precision.compute_dtype(q.dtype) for slot in wanting},
    )


def _dtypes(facts: Facts, setting: Setting, functions: Sequence[Function]) -> dict[Buffer, torch.dtype]:
    """Numbers that functions read, and the dtypes of their tensors."""
    kinds = {node.value: node.kind for node in nodes(facts.score, facts.mask) if node.op == "scalar"}
    floats, ints = (getattr(torch, x.removeprefix("torch.")) for x in (setting.floats, setting.ints))
    read = dict.fromkeys(x.base for f in functions for x in f.buffers if x.kind != "tensor")
    return {x: floats if x.kind == "number" and kinds[x.which] == "float" else ints for x in read}


def _attend(made: Module, compiled: bool, on_cpu: bool) -> Attend:
    if not compiled:
        return made.uncompiled()
    return made.compiled((lambda: made.uncompiled()) if on_cpu else None)


def _shape(call: Call) -> Shape:
    q, k = call.q, call.kv.k
    if q.ndim == 3:
        return Shape(1, q.shape[1], q.shape[0], k.shape[0])
    return Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _proved(
    own: Facts,
    facts: Facts,
    call: Call,
    operands: tuple[Tensor, ...],
    shape: Shape,
) -> Setting:
    """Dtypes that the integers of the mods need, and whether indices have to be clamped.

    The size of captured integers is looked at, once: arithmetic that does not fit in 64 bits is refused.
    """
    captured = Captured(operands, call.scalars, _bits(facts, operands))
    if call.lengths is not NO_LENGTHS:  # a batch entry or a head without an element raises
        sequences = next(x for x in call.lengths if x is not None).shape[0] - (call.q.ndim == 3)
        prove(own, Ragged(sequences, *(shape.heads, shape.q_len, shape.kv_len)), captured)
    result = prove(facts, shape, captured)
    read = slots_read(facts.score, facts.mask)
    reads_integers = any(not operands[slot].is_floating_point() for slot in read)
    wide = result.wide_index or reads_integers or call.q.device.type == "cpu"
    sizes = None if result.in_range else tuple(tuple(x.shape) for x in operands)
    floats = "torch.float64" if call.q.dtype == torch.float64 else "torch.float32"
    return Setting(floats, "torch.int64" if wide else "torch.int32", sizes)


def _bits(facts: Facts, operands: tuple[Tensor, ...]) -> tuple[tuple[int, int], ...]:
    """Slots of captured integers of 2^30 and more, with the bits that they have."""
    slots = sorted(slots_read(*integers(facts.score, facts.mask)))
    large = [s for s in slots if operands[s].dtype in (torch.int64, torch.uint32) and operands[s].numel()]
    results = []
    for slot in large:
        least, most = operands[slot].detach().to(torch.int64).aminmax()
        bits = max(-int(least), int(most)).bit_length()
        if bits > MODEST_BITS:
            results.append((slot, bits))
    return tuple(results)


# --- parts of a call --------------------------------------------------------------------------------------

_numbers: VersionedCache[Tensor] = VersionedCache(MOST_NUMBERS)  # of keys alone: no contents


def _number_of(
    value: bool | int | float, dtype: torch.dtype, q: Tensor, buffer: Buffer | None = None
) -> Tensor:
    """A number as a 0-d tensor on the device of q, which no other buffer has: of two inputs that are one
    tensor torch makes one, and would compile again once they differ."""

    def make() -> Tensor:
        with torch.inference_mode(False):
            return torch.full((), value, dtype=dtype, device=q.device)

    return _numbers.made((buffer, exactly(value), dtype, q.device, _stream(q)), (), make)


def _inside(call: Call, tables: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k, v as one sequence [1, H, T, D]. Tokens beyond lengths used, where these are given, are
    zeros: they may hold NaN."""
    tokens = ragged.Tokens(*tables)
    q, k, v, lengths = call.q, call.kv.k, call.kv.v, call.lengths
    if lengths.seqused_q is not None:
        q = torch.where((tokens.sequence_q >= 0)[:, None, None], q, 0)
    if lengths.seqused_k is not None:
        there = (tokens.sequence_k >= 0)[:, None, None]
        k, v = torch.where(there, k, 0), torch.where(there, v, 0)
    return tuple(x.transpose(0, 1)[None] for x in (q, k, v))  # type: ignore[return-value]


def _before_ends(call: Call, tables: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded q, k, v with zeros past the ends of sequences."""
    ends = ragged.Ends(*tables)

    def cut(x: Tensor, length: Tensor) -> Tensor:
        place = torch.arange(x.shape[2], device=x.device)
        return torch.where((place < length[:, None])[:, None, :, None], x, 0)

    return cut(call.q, ends.q_len), cut(call.kv.k, ends.kv_len), cut(call.kv.v, ends.kv_len)


def _stream(q: Tensor) -> int:
    """The stream that work is queued on: what one makes, another may read too early."""
    return current_stream(q.get_device()) if q.is_cuda else 0


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()
