"""Calls with lists of keys by kernels that gather what is listed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.errors import EarlierError, Fa4flexError, UnsupportedError
from fa4flex.kernels.lists_sm90.config import MOST_ENTRIES
from fa4flex.primitives.kv_scales import KVScales, is_eight_bit
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.lists import Lists, outline_of
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.ragged_maps import ragged
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast, launch, listed_gradients
from fa4flex.runtime.call import Call, Results, Statistics, common_heads, lengths_of
from fa4flex.runtime.checks import check_descriptions
from fa4flex.runtime.cuda import in_place
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.launches.ready import Ready
from fa4flex.runtime.cuda.listed_backward import deterministic, has_backward
from fa4flex.runtime.key_sources import Contiguous, KeySource, Paged
from fa4flex.runtime.latent_rows import EncodedRows, LatentRows
from fa4flex.runtime.listed_keys import Listed
from fa4flex.runtime.recent import Recent
from fa4flex.runtime.sources import source_of
from fa4flex.torch_internals import any_autocast, is_tracing
from fa4flex.variant import Variant, changed, query_heads

TILE = 128
"""Queries and keys of a kernel's tile: lists of whole ones are a map, of which kernels for many rows skip
tiles."""

MAP_TILE = 64
"""Queries and keys of the smallest tile of a backward kernel for maps of blocks."""


def attend(
    variant: Variant,
    caller: launch.Caller | None,
    lists: Lists,
    qkv: tuple[Any, Any, Any],
    described: tuple[Varlen | None, Paging | None, KVScales | None],
    statistics: Statistics,
) -> Results | None:
    """The results of `variant` over what is listed by a kernel that gathers it; None where none does."""
    varlen, paging, scales = described
    if any_autocast() and isinstance(qkv[0], Tensor) and autocast.active(qkv[0]) and _casts(*qkv[1:]):
        cast = _cast(*qkv)
        with autocast.off(qkv[0]):
            return attend(variant, caller, lists, cast, described, statistics)
    if scales is not None or not _may(variant, lists):
        return None
    if variant.blocks is not None:
        variant = changed(variant, blocks=None)
    now: launch.Calling | None = None
    try:
        recent = None if caller is None else caller.recent
        served = None if recent is None else _served(recent, variant, lists, qkv, varlen, paging, statistics)
        if served is not None:
            return served
        if not _may_read(variant, lists, qkv):
            return None
        now = launch.calling(variant, caller)
        return _attend(now, lists, qkv, varlen, paging, statistics)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise


def _casts(k: Any, v: Any) -> bool:
    """True for keys that autocast casts."""
    return k.format is None if isinstance(k, Latent) else not is_eight_bit(k, v)


def _cast(q: Tensor, k: Any, v: Any) -> tuple[Tensor, Any, Any]:
    """A call's tensors in autocast's dtype."""
    if not isinstance(k, Latent):
        return autocast.cast(q, k, v)
    q, rows, _ = autocast.cast(q, k.cache, k.cache)
    return q, replace(k, cache=rows), v


def _may(variant: Variant, lists: Lists) -> bool:
    """True if kernels might compute the variant over such lists."""
    if torch.compiler.is_dynamo_compiling() or not 0 < lists.capacity <= MOST_ENTRIES:
        return False
    others = variant.normalizer, variant.dropout, variant.output_mod
    if others != (None, None, None) or variant.precision.coded:
        return False
    return bool(lists.unit % TILE or lists.queries % TILE)


def _may_read(variant: Variant, lists: Lists, qkv: tuple[Any, Any, Any]) -> bool:
    """True if kernels might read such tensors."""
    q, k, v = qkv
    if type(k) is Latent and v is None:
        k = v = k.cache
    qkv = q, k, v
    if not all(isinstance(x, Tensor) for x in qkv) or is_eight_bit(k, v):
        return False
    if any(x.is_nested or x.layout is not torch.strided for x in qkv):
        return False
    if not launch.by_kernels(variant, q) or lists.ids.device != q.device:
        return False
    return not launch.observed(*qkv, lists.ids)


def _served(
    recent: Recent[Any],
    variant: Variant,
    lists: Lists,
    qkv: tuple[Any, Any, Any],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
) -> Results | None:
    """The results of a call that looks like an earlier one over lists; None for others."""
    if not recent.known.kept or is_tracing() or not _usual(qkv, varlen, paging):
        return None
    q, k, v = qkv
    found = _source(variant, lists, (q, k, v), varlen, paging)
    if found is None:
        return None

    def check(call: Call) -> None:
        check_lists(variant, call, lists, varlen, paging)

    listed = found.listed
    return recent.serve_listed(variant, q, listed, lengths_of(varlen, listed), statistics, check)


def _usual(qkv: tuple[Any, Any, Any], varlen: Any, paging: Any) -> bool:
    """True for arguments of the types that most calls have."""
    q, k, v = qkv
    of_keys = k.format is None and v is None if type(k) is Latent else type(k) is type(v) is Tensor
    lengths = varlen is None or type(varlen) is Varlen
    return type(q) is Tensor and of_keys and lengths and (paging is None or type(paging) is Paging)


class Found(NamedTuple):
    """Keys as they were brought, and in place with what is listed of them."""

    brought: KeySource
    listed: Listed


def _source(
    variant: Variant, lists: Lists, qkv: tuple[Tensor, Any, Any], varlen: Varlen | None, paging: Paging | None
) -> Found | None:
    """The keys of a call; None where kernels do not read them by lists."""
    q, k, v = qkv
    brought = source_of(k, v, paging, None)
    brought.check(q, varlen, variant)
    if isinstance(brought, EncodedRows):
        brought = _decoded(brought, q, varlen, variant)
    placed = brought.by_lists if isinstance(brought, LatentRows) else brought.in_place
    kv = placed(q, varlen, variant)
    if not isinstance(kv, (Contiguous, Paged, LatentRows)) or not _lie_well(kv, paging is not None):
        return None
    at = 1 if kv.k.ndim == 3 or (variant.layout == "bhsd" and q.ndim == 4) else 2
    if min(kv.k.ndim, kv.v.ndim) <= at:
        return None
    heads = query_heads(variant, q), common_heads(kv.k.shape[at], kv.v.shape[at])
    return Found(brought, Listed.of(lists, kv, heads, varlen is not None and varlen.packed))


def _attend(
    now: launch.Calling,
    lists: Lists,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
) -> Results | None:
    q, variant = qkv[0], now.variant
    if varlen is not None or paging is not None:
        check_descriptions(varlen, paging)
    found = _source(variant, lists, qkv, varlen, paging)
    if found is None:
        return None
    call = launch.call_of(now, q, found.listed, varlen, statistics)
    of_lists, heads = lists.ids.shape[1], call.kv_heads
    if call.empty or not heads or (of_lists % heads and heads % of_lists):
        return None
    engine, trains = now.prepared.engine, torch.is_grad_enabled() and call.wants_gradients
    if trains:
        if paging is not None or found.listed.latent or not _may_train(lists, call, engine):
            return None
        if "lse" not in statistics:
            call = call._replace(statistics=("lse", *statistics))
    ready, new = _ready(now, call, (found.brought, lists), varlen, paging)
    if ready is None or (trains and not has_backward(engine, call)):
        return None
    if trains:
        return listed_gradients.attend(engine, ready, call)
    if now.recent is not None and not new:
        now.recent.remember(call, found.listed, ready, None, statistics)
    return ready(call)


def _may_train(lists: Lists, call: Call, engine: Engine) -> bool:
    """True if kernels might compute gradients of such a call over lists. Of lists whose blocks are whole
    tiles of kernels for maps, these hold dK and dV in registers."""
    tiles = lists.queries % MAP_TILE == 0 and lists.unit % MAP_TILE == 0 and not lists.beside
    captured = any(x.requires_grad for x in call.operands)
    return not (tiles or captured or "entropy" in call.statistics or deterministic(engine))


def _decoded(kv: EncodedRows, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource:
    """The rows that bytes of a format stand for, all of them."""
    kv.fits(q, varlen)
    copied = kv.copied(q, varlen, variant, kernels=True, eager=True)
    assert copied is not None
    return copied.kv


def _lie_well(kv: Contiguous | Paged | LatentRows, paged: bool) -> bool:
    """True for tensors that kernels may read, or have copied."""
    return not paged or (tma_able(kv.k) and tma_able(kv.v))


def _ready(
    now: launch.Calling,
    call: Call,
    given: tuple[KeySource, Lists],
    varlen: Varlen | None,
    paging: Paging | None,
) -> tuple[Ready | None, bool]:
    """The launch of a call, None where no kernel is for it, and whether it is new. given: keys as they were
    brought, and lists."""
    engine, (brought, lists) = now.prepared.engine, given
    ready = engine.find(call)
    new = ready is MISSING
    if new or ready is not None:
        check_lists(now.variant, call, lists, varlen, paging)
    if new:
        brought.fits(call.q, varlen)
        launch.check_call(now, call.q, brought, varlen, call.operands)
        try:
            ready = engine.made(call) if paging is None else in_place.made(engine, call)
        except UnsupportedError:
            ready = None
            engine.keep(call, None)
    return ready, new


def check_lists(
    variant: Variant, call: Call, lists: Lists, varlen: Varlen | None, paging: Paging | None
) -> None:
    """Raise InputError or StateError unless lists are those of such queries and keys."""
    assert lists.q_len is not None
    size, lengths = (lists.queries, lists.unit), (lists.q_len, lists.kv_len)
    outline = outline_of(tuple(lists.ids.shape[:3]), size, lengths)
    if paging is not None or call.packed:
        q_len = 0 if call.packed else call.q.shape[2 if variant.layout == "bhsd" else 1]
        ragged(outline, None, (varlen, paging), (query_heads(variant, call.q), q_len))
    else:
        shape = call.extents()
        outline.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
