"""Calls with lists of keys by kernels that gather what is listed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import EarlierError, Fa4flexError, UnsupportedError
from fa4flex.kernels.lists.config import MOST_ENTRIES
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.kv_scales import KVScales, is_eight_bit
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.lists import Lists, listed_map
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.ragged_maps import ragged
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast, launch, listed_gradients
from fa4flex.runtime.call import Call, Results, Statistics
from fa4flex.runtime.checks import check_descriptions
from fa4flex.runtime.cuda import in_place
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.launches.ready import Ready
from fa4flex.runtime.cuda.listed_backward import deterministic, has_backward
from fa4flex.runtime.key_sources import Contiguous, KeySource, Paged
from fa4flex.runtime.latent_rows import EncodedRows, LatentRows
from fa4flex.runtime.listed_keys import Listed, tiling_of
from fa4flex.runtime.sources import source_of
from fa4flex.torch_internals import any_autocast
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
    if scales is not None or not _may(variant, lists, qkv):
        return None
    if variant.blocks is not None:
        variant = changed(variant, blocks=None)
    now: launch.Calling | None = None
    try:
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


def _may(variant: Variant, lists: Lists, qkv: tuple[Any, Any, Any]) -> bool:
    """True if kernels might compute the variant over such lists."""
    q, k, v = qkv
    if type(k) is Latent and v is None:
        k = v = k.cache
    qkv = q, k, v
    if torch.compiler.is_dynamo_compiling() or not all(isinstance(x, Tensor) for x in qkv):
        return False
    others = variant.normalizer, variant.dropout, variant.output_mod
    if any(x is not None for x in others) or variant.precision.coded or is_eight_bit(k, v):
        return False
    if any(x.is_nested or x.layout is not torch.strided for x in qkv):
        return False
    if not launch.by_kernels(variant, q) or lists.ids.device != q.device:
        return False
    if not 0 < lists.capacity <= MOST_ENTRIES or not (lists.unit % TILE or lists.queries % TILE):
        return False
    return not launch.observed(*qkv, lists.ids)


def _attend(
    now: launch.Calling,
    lists: Lists,
    qkv: tuple[Tensor, Tensor, Tensor],
    varlen: Varlen | None,
    paging: Paging | None,
    statistics: Statistics,
) -> Results | None:
    (q, k, v), variant = qkv, now.variant
    if varlen is not None or paging is not None:
        check_descriptions(varlen, paging)
    brought = source_of(k, v, paging, None)
    brought.check(q, varlen, variant)
    if isinstance(brought, EncodedRows):
        brought = _decoded(brought, q, varlen, variant)
    placed = brought.by_lists if isinstance(brought, LatentRows) else brought.in_place
    kv = placed(q, varlen, variant)
    packed = varlen is not None and varlen.packed
    if not isinstance(kv, (Contiguous, Paged, LatentRows)) or not _lie_well(kv, paging is not None):
        return None
    listed = Listed.of(lists, kv, packed)
    call = launch.call_of(now, q, listed, varlen, statistics)
    of_lists, heads = lists.ids.shape[1], call.kv_heads
    if call.empty or not heads or (of_lists % heads and heads % of_lists):
        return None
    tiling = tiling_of(lists, query_heads(variant, q), heads)
    if tiling != (False, 1) and not listed.latent:
        call = call._replace(kv=listed._replace(many=tiling.many, united=tiling.united))
    engine, trains = now.prepared.engine, torch.is_grad_enabled() and call.wants_gradients
    if trains:
        if paging is not None or listed.latent or not _may_train(lists, call, engine):
            return None
        if "lse" not in statistics:
            call = call._replace(statistics=("lse", *statistics))
    ready = _ready(now, call, (brought, lists), varlen, paging)
    if ready is None or (trains and not has_backward(engine, call)):
        return None
    results: Results = listed_gradients.attend(engine, ready, call) if trains else ready(call)
    return results


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
) -> Ready | None:
    """The launch of a call; None where no kernel is for it. given: keys as they were brought, and lists."""
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
    found: Ready | None = ready
    return found


def check_lists(
    variant: Variant, call: Call, lists: Lists, varlen: Varlen | None, paging: Paging | None
) -> None:
    """Raise InputError or StateError unless lists are those of such queries and keys."""
    outline = outline_of(lists)
    if paging is not None or call.packed:
        q_len = 0 if call.packed else call.q.shape[2 if variant.layout == "bhsd" else 1]
        ragged(outline, None, (varlen, paging), (query_heads(variant, call.q), q_len))
    else:
        shape = call.extents()
        outline.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)


def outline_of(lists: Lists) -> BlockMap:
    """A map of the sizes and lengths of lists that stands for no contents, and takes no memory."""
    assert lists.q_len is not None
    made = torch.empty if lists.ids.is_cuda else torch.zeros  # a GPU's are not looked at
    classes = made(1, dtype=torch.uint8, device=lists.ids.device)
    shape = *lists.ids.shape[:3], -(-lists.kv_len // lists.unit)
    return listed_map(classes.expand(shape), (lists.queries, lists.unit), (lists.q_len, lists.kv_len))
