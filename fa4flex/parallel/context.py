"""Attention over sequences that are spread over the ranks of a group: `attn.parallel(mesh, dim="cp")`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.build import Bound
from fa4flex.contents import VALIDATE
from fa4flex.default_device import on_the_host
from fa4flex.errors import Fa4flexError, InputError, UnsupportedError
from fa4flex.parallel.attend import Attend, Job, attend_heads
from fa4flex.parallel.dtensors import as_dtensor, is_dtensor, local_parts, whole_captured
from fa4flex.parallel.exchange import tokens
from fa4flex.parallel.heads import (
    ALL,
    Share,
    check_heads,
    parts_in_order,
    split,
    split_placement,
    told_of_heads,
)
from fa4flex.parallel.links import Group, Links, Together, agree
from fa4flex.parallel.moves import by_heads, by_tokens, moved, results_by
from fa4flex.parallel.pieces import SEQUENCE
from fa4flex.parallel.placement import Kind, Placement, Ranges, shown
from fa4flex.parallel.plan import SM_MARGIN, TILE, Guests, Layout, Moves, Plan, bases_read, plan_of
from fa4flex.parallel.rectangle import Rectangles
from fa4flex.parallel.traffic import Model, heads_move
from fa4flex.primitives.dropout import drawn
from fa4flex.primitives.normalizer import check_statistics
from fa4flex.primitives.precision import refuse_codes
from fa4flex.runtime import autocast, launch
from fa4flex.runtime.auxiliary import aux_of, lse_alone
from fa4flex.runtime.checks import (
    check_dense,
    check_operand_devices,
    check_tensors,
    check_transforms,
    check_variant,
)
from fa4flex.runtime.compute import on_gpu
from fa4flex.runtime.output import Rows, applied
from fa4flex.torch_internals import any_autocast
from fa4flex.variant import Variant, listed_now, resolved

Gradients = Literal["summed", "own"]

Lengths = int | tuple[int, int]
"""Queries and keys of the whole; one number where there are as many keys as queries."""


class _Call(NamedTuple):
    """One call on this rank.

    now       the variant with what it captured, as it is now
    qkv       local tensors [B, H, S, D]
    lengths   those of the whole, None where the ranks are to be asked
    in_order  True where tokens lie as torch shards them
    share     share of the heads that the tensors have
    output    the variant's output function, if it has one, with what it captured
    """

    now: launch.Calling
    qkv: tuple[Tensor, Tensor, Tensor]
    lengths: Lengths | None
    in_order: bool
    share: Share
    output: Bound | None = None

    def held(self, result: Plan, shape: Shape) -> tuple[tuple[Ranges, ...], tuple[Ranges, ...]]:
        """The queries and the keys that each rank's tensors hold."""
        queries = result.placement.queries
        if self.in_order:
            queries = parts_in_order(shape.q_len, result.placement.ranks)
        return queries, result.exchange.held


@dataclass(frozen=True, eq=False, repr=False)
class ContextParallel:
    """One variant over many ranks: `cp(q, k, v)` on each rank's part of the sequence. See docs/parallel.md.

    links    the ranks of the group, as this one sees it
    layout   how queries are dealt, and in how many stages keys arrive
    reduced  whether gradients of captured tensors and sinks are summed over the ranks
    across   the ranks that exchange tokens for heads before each call, if any: each has a part of the tokens
             of one rank of `links`
    """

    variant: Variant
    links: Links
    layout: Layout = Layout()
    reduced: bool = True
    across: Links | None = None
    _caller: launch.Caller = field(default_factory=launch.Caller)
    _seen: set[Any] = field(default_factory=set)
    """Calls that all ranks were found to agree about: shapes, dtypes and lengths."""
    _whole: dict[int, Tensor] = field(default_factory=dict)
    """Captured DTensors as they were gathered last, by number, for plans that were made of them. They are
    gathered at each call, and stay here as long as their contents are the same."""

    def __repr__(self) -> str:
        heads = "" if self.across is None else f", {self.across.rank} of {self.across.size} for heads"
        return f"ContextParallel({self.variant!r}, rank {self.links.rank} of {self.links.size}{heads})"

    @property
    def rank(self) -> int:
        """This rank's place in `placement`."""
        return (
            self.links.rank if self.across is None else self.links.rank * self.across.size + self.across.rank
        )

    # --- where tokens lie -----------------------------------------------------------------------------------

    @on_the_host
    def plan(self, lengths: Lengths, batch: int = 1, heads: int = 1) -> Plan:
        """Placement and exchange for these lengths. `batch` and `heads` matter where the mask reads them."""
        return self._plan(self._planning(), Shape(batch, heads, *_pair(lengths)))

    @on_the_host
    def placement(self, lengths: Lengths, batch: int = 1, heads: int = 1) -> Placement:
        """Tokens that each rank holds."""
        result = self.plan(lengths, batch, heads).placement
        return result if self.across is None else split_placement(result, self.across.size)

    @on_the_host
    def shard(self, x: Tensor, dim: int, **sizes: int) -> Tensor:
        """This rank's tokens of a whole tensor, with as many keys as queries; `dim` is the sequence."""
        return self.placement(x.shape[dim], **sizes).shard(x, self.rank, dim)

    @on_the_host
    def unshard(self, x: Tensor, dim: int, length: int, **sizes: int) -> Tensor:
        """The whole tensor, on every rank, of each rank's tokens. No gradients flow back."""
        placement = self.plan(length, **sizes).placement
        rows = x.detach().movedim(dim, 0).contiguous()
        if self.across is not None:
            rows = _gathered(self.across, rows, split(placement.queries[self.links.rank], self.across.size))
        rows = _gathered(self.links, rows, placement.queries)
        return placement.unshard(rows.split(list(map(tokens, placement.queries))), 0).movedim(0, dim)

    @on_the_host
    def positions(self, length: int, **sizes: int) -> Tensor:
        """The place in the whole of each of this rank's tokens: position ids."""
        return self.placement(length, **sizes).positions(self.rank)

    def _calling(self, q: Tensor) -> launch.Calling:
        """The variant with what it captured, as it is now: all ranks gather what is spread over them, and
        have the seed of the first."""
        variant = listed_now(self.variant).core
        if variant.dropout is not None and isinstance(q, Tensor):
            dropout = drawn(variant.dropout, q.device)
            for links in (*([] if self.across is None else [self.across]), self.links):
                dropout = replace(dropout, seed=_of_first(links, dropout.seed))
            variant = replace(variant, dropout=dropout)
        now = launch.calling(variant, self._caller)
        if now.variant.sinks is not None and is_dtensor(now.variant.sinks.now()):
            raise UnsupportedError(
                "sinks that are a DTensor", "a tensor of all heads on every rank", "use sinks.full_tensor()"
            )
        return self._with_whole(now, range(len(now.bound.bases)))

    def _planning(self) -> launch.Calling:
        """The same for a plan: only what the mask reads. FSDP has parameters in parts between calls."""
        now = launch.calling(self.variant.shown, self._caller)
        return self._with_whole(now, bases_read(now.bound))

    def _output(self) -> Bound | None:
        """The variant's output function with what it captured, as it is now, whole on every rank."""
        if self.variant.output_mod is None:
            return None
        bound = launch.bound_for(self.variant, self._caller)
        bases = [
            whole_captured(self.links, x, at, self.reduced) if is_dtensor(x) else x
            for at, x in enumerate(bound.bases)
        ]
        return bound._replace(bases=tuple(bases))

    def _with_whole(self, now: launch.Calling, wanted: Iterable[int]) -> launch.Calling:
        bases = list(now.bound.bases)
        for at in wanted:
            if not is_dtensor(bases[at]):
                continue
            result = whole_captured(self.links, bases[at], at, self.reduced)
            if not result.requires_grad:
                kept = self._whole.get(at)
                if kept is not None and kept.dtype == result.dtype and torch.equal(kept, result):
                    result = kept
                self._whole[at] = result
            bases[at] = result
        return now._replace(bound=now.bound._replace(bases=tuple(bases)))

    # --- the call -------------------------------------------------------------------------------------------

    @torch.compiler.disable  # plans are made on the host, and collectives of torch break graphs in any case
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Lengths | None = None,
        return_lse: bool = False,
        return_aux: Sequence[str] | None = None,
    ) -> Any:
        """Attention of this rank's queries over all keys; tensors as for the attention itself, but local.

        q, k and v hold the tokens of this rank's ranges in `placement(lengths)`, one range after another. All
        ranks call alike. Without `lengths` they are found by asking all ranks, at each call; with them, ranks
        compare shapes at the first call of a kind only. Returns out, or (out, lse), of the local queries, or
        with return_aux=("lse",) out and a fa4flex.Aux; other statistics raise UnsupportedError.

        DTensors are sharded along the sequence, in order, and so are the results: queries travel to where
        they are computed, and back.
        """
        if return_aux is not None:
            statistics = lse_alone(return_aux, return_lse, "of queries that are spread over ranks")
            out, lse = self(q, k, v, lengths=lengths, return_lse=True)
            return out, aux_of((out, lse, None), statistics)
        if any_autocast() and autocast.active(q):
            q, k, v = autocast.cast(q, k, v)
            with autocast.off(q):
                return self(q, k, v, lengths=lengths, return_lse=return_lse)
        swap = self.variant.layout == "bshd"
        check_statistics(self.variant, ("lse",) if return_lse else ())
        if any(map(is_dtensor, (q, k, v))):
            return self._of_dtensors((q, k, v), 1 if swap else SEQUENCE, return_lse)
        out, lse = self._called((q, k, v), lengths, in_order=False)
        return (out, lse) if return_lse else out

    def _of_dtensors(self, qkv: tuple[Any, Any, Any], dim: int, return_lse: bool) -> Any:
        q, k, _ = qkv
        if self.across is not None:
            raise UnsupportedError(
                "DTensors, and heads_dim",
                "plain tensors with heads_dim, or DTensors over dim alone",
                "shard plain tensors with shard(x, dim)",
            )
        lengths = q.shape[dim], k.shape[dim]
        local, share = local_parts(self.links, qkv, dim)
        out, lse = self._called(local, lengths, in_order=True, share=share)
        out = as_dtensor(out, q, (*q.shape[:3], out.shape[3]), {})
        if not return_lse:
            return out
        sizes = q.shape[0], q.shape[3 - dim], q.shape[dim]
        return out, as_dtensor(lse, q, sizes, {dim: SEQUENCE, 3 - dim: 3 - SEQUENCE})

    @on_the_host
    def _called(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        lengths: Lengths | None,
        in_order: bool,
        share: Share = ALL,
    ) -> tuple[Tensor, Tensor]:
        """Output, in the variant's layout, and log-sum-exp. in_order: tokens lie as torch shards them."""
        q, k, v = qkv
        swap = self.variant.layout == "bshd"
        if swap:
            q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x for x in (q, k, v))
        now, output = self._calling(q), self._output()
        now = now._replace(variant=_of_call(now.variant, q, share))
        try:
            out, lse = self._attend(_Call(now, (q, k, v), lengths, in_order, share, output))
        except Fa4flexError as error:
            for bound in (now.bound, *(() if output is None else (output,))):
                launch.dress_of(error, bound.trace)
            error.add_note(f"in {self!r}")
            raise
        return out.transpose(1, 2) if swap else out, lse

    def _attend(self, call: _Call) -> tuple[Tensor, Tensor]:
        shape, result = self._agreed(call)
        out, lse = self._attend_all(call, shape, result)
        if call.output is None:
            return out, lse
        own = call.held(result, shape)[0][self.links.rank]
        if self.across is not None:
            own = split(own, self.across.size)[self.across.rank]
        first = call.share.part * out.shape[1]
        places = torch.cat([torch.arange(*span, device=out.device) for span in own or [(0, 0)]])
        rows = Rows(positions=places, whole=(shape.q_len, first, shape.heads))
        bound, every = call.output, [self.links, *([] if self.across is None else [self.across])]
        if self.reduced:
            for links in (*every, *call.share.links):
                bases, _ = _together(links, bound.bases, None)
                bound = bound._replace(bases=bases)
        return applied(replace(self.variant, layout="bhsd"), bound, out, rows), lse

    def _attend_all(self, call: _Call, shape: Shape, result: Plan) -> tuple[Tensor, Tensor]:
        """The output and log-sum-exp of this rank's queries, before an output function."""
        if self.across is None:
            return self._here(call, shape, result)
        across, own = self.across, self.links.rank
        held = [_counted(x[own], across.size) for x in call.held(result, shape)]
        q, k, v = (by_heads(across, at, x) for x, at in zip(call.qkv, (*held, held[1]), strict=True))
        share = Share(across.rank, across.size, (across,))
        out, lse = self._here(call._replace(qkv=(q, k, v), share=share), shape, result)
        return results_by(partial(by_tokens, across, held[0]), out, lse)

    def _here(self, call: _Call, shape: Shape, result: Plan) -> tuple[Tensor, Tensor]:
        """Attention of this rank's share of the heads."""
        now, (q, k, v), share = call.now, call.qkv, call.share
        operands, sinks = now.operands(), now.sinks
        if self.reduced:
            for links in (self.links, *share.links):
                operands, sinks = _together(links, operands, sinks)
        sinks = share.of_sinks(sinks, q.shape[1])
        facts, variant = now.bound.trace.facts, self.variant
        seen = tuple(x.detach() for x in operands)
        whole = {"q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads}
        first = None if share.parts == 1 else share.part * q.shape[1]
        rectangles = Rectangles(facts, variant, now.bound.scalars, seen, now.scale(q), whole, first)
        compute = variant.precision.compute_dtype(q.dtype)
        dtypes = variant.precision.output_dtype(q.dtype), compute
        margin = self.layout.sm_margin if on_gpu(q) else 0
        job = Job(result.exchange, self.links.rank, self.links, rectangles, *dtypes, margin)
        held, at = call.held(result, shape), result.placement.queries
        if self._by_heads(now, result, call.qkv):
            return attend_heads(job, held, call.qkv, sinks, operands)
        q = moved(self.links, held[0], at, q)
        out, lse = Attend.apply(job, q, k, v, sinks, *operands)
        return results_by(partial(moved, self.links, at, held[0]), out, lse)

    def _by_heads(self, now: launch.Calling, result: Plan, qkv: tuple[Tensor, Tensor, Tensor]) -> bool:
        """True if tokens of heads move. Raises InputError where they should and heads cannot be dealt."""
        q, k, v = qkv
        if self.layout.moves != "heads":
            # Heads that see different numbers of keys are not equal work.
            alike = "h" not in now.bound.trace.facts.mask.free
            return self.layout.moves == "auto" and alike and heads_move(result, self.model(q, k, v))
        heads, ranks = _heads(qkv), self.links.size
        if any(n % ranks for n in heads):
            raise InputError(
                f'moves="heads", {told_of_heads(*heads)} on {ranks} ranks',
                "numbers of heads that are multiples of the number of ranks",
                'leave it at moves="auto", or use fewer ranks',
            )
        return True

    def model(self, q: Tensor, k: Tensor, v: Tensor) -> Model:
        """Sizes of local tensors [B, H, S, D], for the bytes that move."""
        wide = self.variant.precision.compute_dtype(q.dtype).itemsize
        widths = q.shape[3], v.shape[3]
        return Model(q.shape[1], k.shape[1], *widths, q.itemsize, wide, q.shape[0], v.shape[1])

    def _plan(self, now: launch.Calling, shape: Shape, in_order: bool = False) -> Plan:
        if now.variant.blocks is not None:
            now.variant.blocks.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
        held = parts_in_order(shape.kv_len, self.links.size) if in_order else None
        contents = self.variant.schedule.contents
        return plan_of(now.bound, shape, self.links.size, self.layout, held, contents)

    # --- agreement ------------------------------------------------------------------------------------------

    def _agreed(self, call: _Call) -> tuple[Shape, Plan]:
        """The whole's sizes, and the plan. Raises InputError, on every rank, where calls do not fit."""
        now, qkv, lengths, in_order, share, _ = call
        try:
            description, failed = self._description(call), None
        except Fa4flexError as error:
            description, failed = {}, error
        # What is new must be so on every rank: it says nothing of this rank's own part.
        known = (in_order, *description.items())
        ask = failed is not None or lengths is None or VALIDATE or known not in self._seen
        own = {"own": None if failed else (qkv[0].shape[SEQUENCE], qkv[1].shape[SEQUENCE])}
        descriptions = self._agree(failed or {**description, **own}) if ask else []
        each = (x["own"] for x in descriptions)
        q_len, kv_len = map(sum, zip(*each, strict=True)) if lengths is None else _pair(lengths)
        shape = Shape(qkv[0].shape[0], qkv[0].shape[1] * share.parts, q_len, kv_len)
        try:
            result = self._plan(now, shape, in_order)
            held = [x[self.links.rank] for x in call.held(result, shape)]
            if self.across is not None:
                held = [split(x, self.across.size)[self.across.rank] for x in held]
            _check_parts(held, qkv, self.rank)
            parts: dict[str, Any] | Fa4flexError = {"placement, as its mask's tables say": result.digest}
        except Fa4flexError as error:
            parts = error
        if ask:
            self._agree(parts)
        if isinstance(parts, Fa4flexError):
            raise parts
        self._seen.add(known)
        return shape, result

    def _agree(self, description: Mapping[str, Any] | Exception) -> list[Mapping[str, Any]]:
        """Descriptions from the ranks of `links`; what the ranks of `across` say is put together first. An
        error of any rank reaches all of both: those that learn of it from the ones tell the others."""
        if self.across is not None:
            try:
                descriptions = agree(self.across, description)
                description = dict(descriptions[0])
                if "own" in description:
                    each = (x["own"] for x in descriptions)
                    description["own"] = tuple(map(sum, zip(*each, strict=True)))
            except Fa4flexError as error:
                description = error
        return agree(self.links, description)

    def _description(self, call: _Call) -> dict[str, Any]:
        """Description of a rank's call for the others: all but its own lengths must be the same on each."""
        now, qkv, share = call.now, call.qkv, call.share
        check_tensors(*qkv)
        sizes = check_dense(*qkv, self.variant.layout)
        whole = replace(sizes, q_heads=sizes.q_heads * share.parts, kv_heads=sizes.kv_heads * share.parts)
        check_variant(whole, qkv[0], _without_blocks(self.variant))
        if self.across is not None:
            check_heads(_heads(qkv), self.across.size)
        operands, sinks = now.operands(), now.sinks
        check_operand_devices(operands, tuple(o.name for o in now.bound.trace.operands), qkv[0])
        check_transforms(*qkv, *operands, sinks)
        q, k, v = qkv
        output = call.output
        bases = () if output is None else output.bases
        learned = tuple(x.requires_grad for x in (*operands, *(() if sinks is None else (sinks,)), *bases))
        return {
            "batch": q.shape[0],
            "query heads": q.shape[1],
            "KV heads": k.shape[1],
            "heads of values": v.shape[1],
            "head_dim": (q.shape[3], v.shape[3]),
            "dtype": str(q.dtype),
            "lengths": call.lengths,
            "program": now.bound.trace.facts.key,
            "captured numbers": repr(now.bound.scalars),
            "output function": output and (output.trace.facts.key, repr(output.scalars)),
            "requires_grad of captured tensors": torch.is_grad_enabled() and learned,
        }


def _heads(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int, int]:
    """Heads of q, k and v [B, H, S, D]."""
    q, k, v = qkv
    return q.shape[1], k.shape[1], v.shape[1]


def _together(
    links: Links, operands: tuple[Tensor, ...], sinks: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The same tensors, whose gradients will be summed over the ranks."""
    arguments = [*operands, sinks]
    learned = [at for at, x in enumerate(arguments) if x is not None and x.requires_grad]
    if learned and torch.is_grad_enabled():
        for at, x in zip(learned, Together.apply(links, *(arguments[at] for at in learned)), strict=True):
            arguments[at] = x
    return tuple(x for x in arguments[:-1] if x is not None), arguments[-1]


def _of_call(variant: Variant, q: Tensor, share: Share) -> Variant:
    """The variant for a call whose local queries [B, H, S, D] are some heads of the whole."""
    if variant.normalizer is None or not isinstance(q, Tensor) or q.ndim != 4:
        return variant
    return resolved(variant, q.shape[1] * share.parts, q)


def _without_blocks(variant: Variant) -> Variant:
    """The variant without its block map, which is for the whole."""
    return variant if variant.blocks is None else replace(variant, blocks=None)


def _counted(own: Ranges, parts: int) -> tuple[Ranges, ...]:
    """Equal parts of these tokens, by their numbers among them."""
    return parts_in_order(tokens(own), parts)


def _gathered(links: Links, rows: Tensor, held: tuple[Ranges, ...]) -> Tensor:
    """The rows of all ranks, one after another."""
    every = rows.repeat(links.size, *[1] * (rows.ndim - 1))
    return links.all_to_all(every, [len(rows)] * links.size, list(map(tokens, held)))()


def _of_first(links: Links, x: Any) -> Tensor:
    """The number of the first rank, on every rank."""
    once = [1] * links.size
    return links.all_to_all(x.reshape(1).repeat(links.size), once, once)()[0]


def _check_parts(held: Sequence[Ranges], qkv: tuple[Tensor, Tensor, Tensor], rank: int) -> None:
    """Raise InputError unless q, k and v have the tokens that this rank is to hold."""
    for name, x, own in zip("qkv", qkv, (held[0], held[1], held[1]), strict=True):
        wanted = tokens(own)
        if x.shape[SEQUENCE] != wanted:
            raise InputError(
                f"rank {rank} holds {x.shape[SEQUENCE]} tokens of {name}",
                f"{wanted}: {shown(own)}",
                "cut whole tensors with shard(x, dim), or with placement(lengths).shard(x, rank, dim)",
            )


def parallel(
    variant: Variant,
    mesh: DeviceMesh | ProcessGroup,
    dim: str = "cp",
    *,
    placement: Kind | None = None,
    tile: int = TILE,
    stages: int = 1,
    moves: Moves = "auto",
    guests: Guests = "auto",
    sm_margin: int = SM_MARGIN,
    captured_gradients: Gradients = "summed",
    heads_dim: str | None = None,
) -> ContextParallel:
    """A variant over the ranks of dimension `dim` of a mesh, or of a process group.

    heads_dim  another dimension of the mesh, over which the tokens of each rank of `dim` are spread in turn:
               its ranks exchange them for heads before each call, and back after it
    placement  "contiguous", "head-tail" or "min-heap"; by default whichever suits the mask
    tile       least number of tokens that are dealt together
    stages     in how many parts keys of other ranks arrive, each while those before are attended; each more
               is one more set of partial results to merge
    moves      "keys": those that others see; "heads": all tokens of each rank's heads, where the ranks divide
               the numbers of heads; "auto": what takes fewer bytes
    guests     of queries with more keys than one rank should compute: others compute them against some, where
               it costs less ("auto"), wherever loads differ by more than 3 % without ("always"), or "never"
    sm_margin  multiprocessors of a GPU that persistent kernels leave to an exchange that runs meanwhile
    captured_gradients   "summed" over the ranks, or each rank's "own", for what sums or averages them itself,
               as FSDP and DDP do over all ranks

    Raises InputError for a mesh without that dimension, and for options that do not exist.
    """
    if variant.backend != "auto":
        raise UnsupportedError(
            f"backend={variant.backend!r} over several ranks, whose parts are merged by operators of our own",
            'backend="auto"',
            'compile the variant with backend="auto"',
        )
    refuse_codes(
        variant.precision,
        "over several ranks, which would each round their keys about a mean of their own",
        "leave out qk and pv, or gather the keys and attend on each rank",
    )
    if variant.weights.kind == "softpick":
        raise UnsupportedError(
            f"{variant.normalizer!r} over several ranks: parts of its sum are no parts of a log-sum-exp",
            "the softmax, also plus a constant, and elementwise normalisers",
            "gather the keys, and attend on each rank",
        )
    if captured_gradients not in get_args(Gradients):
        raise InputError(
            f"captured_gradients={captured_gradients!r}",
            f"one of {get_args(Gradients)}",
            'leave it at "summed"',
        )
    if heads_dim is not None and (isinstance(mesh, ProcessGroup) or heads_dim == dim):
        raise InputError(
            f"heads_dim={heads_dim!r} beside dim={dim!r}",
            "the names of two dimensions of a mesh",
            'make one: init_device_mesh("cuda", (2, 4), mesh_dim_names=("cp", "heads"))',
        )
    layout = Layout(placement, tile, stages, moves, guests, sm_margin)
    across = None if heads_dim is None else Group(_group(mesh, heads_dim))
    return ContextParallel(variant, Group(_group(mesh, dim)), layout, captured_gradients == "summed", across)


def _group(mesh: Any, dim: str) -> ProcessGroup:
    if isinstance(mesh, ProcessGroup):
        return mesh
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if dim not in names:
        raise InputError(
            f"dim={dim!r} of a mesh with dimensions {list(names)}",
            "the name of one of the mesh's dimensions",
            'name them: init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "cp"))',
        )
    result: ProcessGroup = mesh.get_group(dim)
    return result


def _pair(lengths: Lengths) -> tuple[int, int]:
    return (lengths, lengths) if isinstance(lengths, int) else (lengths[0], lengths[1])
