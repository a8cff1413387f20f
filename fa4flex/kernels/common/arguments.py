"""Arguments of kernels: named tuples of the rows in kernels/plan/arguments.py that they read."""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from fa4flex.kernels.plan.arguments import BACKWARD, TABLES, TANGENTS, TURNS, forward_schema
from fa4flex.kernels.plan.keys import Keys

if TYPE_CHECKING:
    from fa4flex.kernels.common.key_loader import KeyLoader


def named(name: str, names: tuple[str, ...]) -> Any:
    """A class of named tuples; Any, as mypy does not know its fields. The compiler wants a type for each."""
    made: Any = namedtuple(name, names)  # type: ignore[misc]
    made.__annotations__ = dict.fromkeys(names, Any)
    return made


_Tables: Any = named("Tables", TABLES.names)
_Turns: Any = named("Turns", TURNS.names)
_BackwardArguments: Any = named("BackwardArguments", BACKWARD.read_by("kernel"))
_TangentArguments: Any = named("TangentArguments", TANGENTS.read_by("kernel"))


class Tables(_Tables):
    """Key tiles per query tile, int32. Query tile m of (b, h) visits the partial tiles
    partial_tiles[partial_ptr[b, h, m, 0] : partial_ptr[b, h, m, 1]], then the full ones alike.

    Pointers are [B, H, query tiles, 2], with stride 0 along what the mask does not depend on.

    row_ends int32 [2 * spans, B, H, Sq]: first key of each of a row's spans, and the one past its last. Where
    in_order [B, H] is 0, captured tensors are not sorted as the spans assume, and these say nothing.
    """


class Turns(_Turns):
    """In which order tiles of keys add to a tile of queries, where sums are to be the same run after run:
    that in which their blocks are launched. A block waits for blocks that were launched before it, and for
    no others, so that the first of those that run can always go on. So do CTAs of a pair, which begin at the
    same time, and wait for each other and for pairs that were launched before theirs.

    done     int32 [B, H, R / turn_rows], or packed [H, R / turn_rows], zero at first: tiles of keys that have
             added to so many rows, or to as many numbers
    With a mask, tiles of keys are launched last to first, and each visits tiles of queries in their order:
    pointers int32 [B, H, key tiles, 2] into
    entries  int32, 2 * tile of queries + whether it needs the mask
    ranks    int32, how many tiles of keys add before this entry's one does
    Without one, they are launched first to last, and each visits all tiles of queries.
    """


class Arguments(tuple[Any, ...]):
    """Arguments of a forward kernel: named tuples, whose fields are rows of their source of keys as well.

    q, k, v, out [B, S, H, D], or packed [T, H, D]; any strides whose last is 1.
    lse, max_scores float32 [B, H, S], or packed [H, T]; lengths are int32 vectors; None where absent.
    counters int32 [COUNTERS], zero: tiles taken, blocks done, and what a kernel counts besides. A launch
    leaves them zero, and may not share them with another that runs at the same time.
    order int32 [tiles, 2]: of a ragged batch, the sequence and the number in it of each tile of queries, as
    they are to be computed one after another; behind the last, the sequence is the number of sequences.

    loader       finds keys: k and v are [pages, slots, Hkv, D] then, and used_keys [B] as it was given, any
                 int; None where keys of a sequence follow each other
    """

    loader: ClassVar[type[KeyLoader] | None] = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def kv_heads(arguments: Any) -> Any:
    """Number of KV heads. Where k and v differ in heads, both have these as one mode, (share, heads) with
    stride 0 along share: KV head j is head j // share."""
    heads = arguments.k.shape[-2]
    return heads[0] * heads[1] if isinstance(heads, tuple) else heads


@lru_cache
def arguments_of(keys: Keys) -> type[Arguments]:
    """The class of the arguments of a forward kernel over keys of such a source."""
    fields = named("Arguments", forward_schema(keys).read_by("kernel"))
    return type("Arguments", (fields, Arguments), {"loader": _loader(keys)})


class TangentArguments(_TangentArguments, Arguments):
    """Those of a forward kernel, and tq, tk, tv, tout, tlse: tangents of q, k and v, None for what has none,
    and of out and lse, which look like what they are of."""


def _loader(keys: Keys) -> type[KeyLoader] | None:
    if not keys.loaded:
        return None
    module, _, name = keys.loader.partition(":")
    found: type[KeyLoader] = getattr(import_module(module), name)
    return found


class BackwardArguments(_BackwardArguments):
    """q, dout, k, v, dk, dv [B, S, H, D], or packed [T, H, D]; any strides whose last is 1.
    lse2, delta float32 [B, H, R], R being S padded to ROW_BLOCK: log-sum-exp in log2 units, and the gradient
    of the log-sum-exp less the sum of out * dout, which dP is added to; rows past the end, and rows without
    keys, have lse2 inf. pulled, None where the entropy has no gradient: that times log(2), by which the
    logarithm of base 2 of P is multiplied and taken from dP; the gradient times the entropy is in delta.
    dq_sum float32 [B, H, R * head_dim], zero at first: dQ / scale by tiles of tile_m rows, each in its
    kernel's own order; rows past the end hold anything. Packed, these three are [H, R]: rows of a sequence
    begin at `first_row` of it. None where a block has all keys of its queries and writes dq, as q, itself.
    scale_log2: scale * log2(e); each use of a product would compute it anew.
    dk_parts, dv_parts: where the query heads of a group may be shared out in parts, dK and dV of each, as if
    there were that many more KV heads; those of a KV head follow each other. Else None.
    tables: by tile of keys, the tiles of queries to visit; pointers [B, H, key tiles, 2]. turns: where sums
    are ordered; they stand for tables too.
    gradients: of captured tensors, [copies, shape...], zero at first; the sum of its copies is a gradient.
    cleared: int32 [B, H], zero at first, of which the first numbers count for each section of heads how many
    tiles of keys have cleared their share of its sums; these are contiguous then, and not zero.
    counters: from which persistent blocks take tiles of keys.
    """
