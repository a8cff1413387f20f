"""The operator `fa4flex::append_latent`: latent rows into their pages, in PyTorch operations.

The host reads no contents of tensors on a device. On a CPU they are checked before anything is written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.contents import validating
from fa4flex.default_device import on_the_host
from fa4flex.operators import OPERATORS
from fa4flex.primitives.latent import Latent, format_of, pieces_of, planes_of
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.rotary import Rotary
from fa4flex.runtime.append import check_contents, norm_of, rotary_of
from fa4flex.runtime.cuda.append import New, Pool
from fa4flex.runtime.cuda.device import faults
from ptxsim.active import simulating

_APPEND = OPERATORS["append_latent"]

NOT_WRITTEN = (
    "append to latent rows: a token past the end of the page table, in a page that does not exist, or at a"
    " position without angles was not written, or lengths do not fit the tokens"
)


def by_operator(new: New, latent: Latent, paging: Paging) -> tuple[Tensor, Tensor]:
    """(lengths afterwards, queries) by the operator. new.k are the rows."""
    made: tuple[Tensor, Tensor] = torch.ops.fa4flex.append_latent(*arguments_of(new, latent, paging))
    return made


def arguments_of(new: New, latent: Latent, paging: Paging) -> list[Any]:
    """Arguments of the operator."""
    rotary, norm = new.rotary, new.norm
    named = {
        "rows": new.k, "cache": latent.cache, "page_table": paging.page_table, "seqused_k": paging.seqused_k,
        "cu_seqlens": new.cu_seqlens, "seqused": new.seqused,
        "cos": rotary and rotary.cos, "sin": rotary and rotary.sin, "axes": rotary and rotary.axes,
        "interleaved": rotary is not None and rotary.interleaved, "q": new.q, "positions": new.positions,
        "q_weight": norm and norm.q, "k_weight": norm and norm.k, "eps": norm.eps if norm else 0.0,
        "unit_offset": norm is not None and norm.unit_offset, "value_dim": latent.value_dim,
        "rope_dim": latent.rope_dim, "scale": latent.scale,
        "format": latent.format and latent.format._text,
    }  # fmt: skip
    return _APPEND.packed(named)


@on_the_host
def append_latent(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(lengths afterwards, normalised and rotated queries, which are empty without q)."""
    value = _APPEND.named(arguments)
    rows, cache = value["rows"], value["cache"]
    given = {name: value[name] for name in ("q", "cu_seqlens", "seqused", "positions")}
    new = New(rows, rows, **given, rotary=rotary_of(value), norm=norm_of(value))
    pool = Pool(cache, cache, value["page_table"], value["seqused_k"])
    on_device = not rows.is_cpu or simulating()
    if on_device:
        faults.check()
    if not on_device or validating():
        check_contents(new, pool)
    tokens = _tokens(new, pool)
    if on_device:
        later.require_at_each_replay(tokens.sound, NOT_WRITTEN)
    made = format_of(value["format"]) if value["format"] else None
    latent = Latent(cache, value["value_dim"], value["rope_dim"], made, value["scale"])
    _write(latent, tokens, _turned(new, rows, latent, tokens, "k"))
    if new.q is None:
        return tokens.lengths, rows.new_empty(0)
    queries = _turned(new, new.q, latent, tokens, "q").to(new.q.dtype)
    kept = torch.where(tokens.live[:, None, None], queries, _by_token(new, new.q))
    return tokens.lengths, _as_given(new, kept)


def append_latent_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    value = _APPEND.named(arguments)
    q, used = value["q"], value["seqused_k"]
    rotated = value["rows"].new_empty(0) if q is None else q.new_empty(q.shape)
    return used.new_empty(used.shape), rotated


class _Tokens(NamedTuple):
    """All tokens of the rows [tokens]: whether they take part, and are written, and whether that and the
    lengths are right; page and slot, which exist for those that are written; positions for rotary in the
    tables, [axes, tokens] with axes. lengths [B]: new ones."""

    live: Tensor
    written: Tensor
    sound: Tensor
    page: Tensor
    slot: Tensor
    position: Tensor
    lengths: Tensor


def _tokens(new: New, pool: Pool) -> _Tokens:
    """Places of tokens, whatever the contents: indices are clamped, and what does not fit is not written."""
    used, table = pool.seqused_k.long(), pool.page_table
    sequence, i, fits, count = _in_sequences(new, used.numel())
    position = used[sequence] + i
    pages, page_size = pool.k.shape[:2]
    column = position.div(page_size, rounding_mode="floor")
    page = table[sequence, column.clamp(0, table.shape[1] - 1)].long()
    live = (i >= 0) & (i < count[sequence])
    written = live & fits & (used[sequence] >= 0) & (column < table.shape[1]) & (page >= 0) & (page < pages)
    turning = _positions(new, position)
    if new.rotary is not None:
        written = written & _known(new.rotary, turning)
        turning = turning.clamp(0, new.rotary.cos.shape[0] - 1)
    lengths = (used + count).clamp(0, table.shape[1] * page_size).to(pool.seqused_k.dtype)
    sound = fits & (written | ~live)
    return _Tokens(live, written, sound, page, position % page_size, turning, lengths)


def _known(rotary: Rotary, position: Tensor) -> Tensor:
    """True for tokens [tokens] whose angles are in the tables."""
    known = (position >= 0) & (position < rotary.cos.shape[0])
    if rotary.axes is None:
        return known
    return known.all(0) & ((rotary.axes >= 0) & (rotary.axes < len(position))).all()


def _in_sequences(new: New, sequences: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence of each token, its number in there, whether the lengths fit the tokens, and the number of
    tokens of each sequence that take part [sequences]."""
    device = new.k.device
    if new.cu_seqlens is None:
        length = new.k.shape[2]
        token = torch.arange(sequences * length, device=device)
        room = torch.full((sequences,), length, device=device)
        sequence, i = token // max(length, 1), token % max(length, 1)
        sound = torch.ones((), dtype=torch.bool, device=device)
    else:
        cu = new.cu_seqlens.long()
        token = torch.arange(new.k.shape[0], device=device)
        room = cu.diff()
        sequence = torch.searchsorted(cu[1:], token, right=True).clamp(max=sequences - 1)
        i = token - cu[sequence]
        sound = (cu[:1] == 0).all() & (room >= 0).all() & (cu[-1:] == len(token)).all()
    if new.seqused is None:
        return sequence, i, sound.expand(len(token)), room
    count = new.seqused.long()
    fits = sound & (count >= 0).all() & (count <= room).all()
    return sequence, i, fits.expand(len(token)), torch.minimum(count, room).clamp(min=0)


def _positions(new: New, place: Tensor) -> Tensor:
    """Positions by which tokens are rotated: [tokens], or [axes, tokens]."""
    if new.positions is None or new.rotary is None:
        return place
    position = new.positions.long().flatten(1)
    return position[0] if new.rotary.axes is None else position


def _by_token(new: New, x: Tensor) -> Tensor:
    """[tokens, H, width] of [B, H, S, width], or of packed ones."""
    return x if new.cu_seqlens is not None else x.transpose(1, 2).flatten(0, 1)


def _as_given(new: New, x: Tensor) -> Tensor:
    """The inverse of `_by_token`, contiguous."""
    if new.cu_seqlens is not None:
        return x.contiguous()
    return x.unflatten(0, (new.k.shape[0], new.k.shape[2])).transpose(1, 2).contiguous()


def _turned(new: New, x: Tensor, latent: Latent, tokens: _Tokens, name: str) -> Tensor:
    """[tokens, H, width] of rows or queries, normalised and rotated, rounded by whoever stores them."""
    heads = _by_token(new, x)
    wide = torch.float64 if heads.dtype == torch.float64 else torch.float32
    weight = None if new.norm is None else getattr(new.norm, name)
    if new.norm is not None and weight is not None:
        columns = weight.shape[0]
        normalised = new.norm.normalised(heads[..., :columns], weight)
        heads = torch.cat((normalised, heads[..., columns:].to(wide)), -1)
    if new.rotary is None:
        return heads
    rest = heads.shape[-1] - latent.rope_dim
    rotary = new.rotary
    if rotary.axes is not None:  # axes that do not exist are told, and read nothing
        rotary = replace(rotary, axes=rotary.axes.clamp(0, len(tokens.position) - 1))
    turned = rotary.turned(heads[..., rest:].to(wide), tokens.position)
    return torch.cat((heads[..., :rest].to(wide), turned), -1)


def _write(latent: Latent, tokens: _Tokens, rows: Tensor) -> None:
    """Write rows [tokens, 1, width] to their places.

    As many are written as there are tokens, since their number is not known on the host: those that are none
    repeat the first one that is, or, without any, what lies there.
    """
    if not rows.numel() or not latent.cache.numel():
        return
    first = tokens.written.to(torch.uint8).argmax()
    source = torch.where(tokens.written, torch.arange(len(rows), device=rows.device), first)
    some = tokens.written.any()
    places = torch.where(some, tokens.page[source], 0), tokens.slot[source]
    if latent.format is None:
        planes, pieces = [latent.cache], [rows.to(latent.cache.dtype)]
    else:
        planes = planes_of(latent.format, latent.cache)
        pieces = pieces_of(latent.format, rows, latent.scale)
    for plane, piece in zip(planes, pieces, strict=True):
        plane.index_put_(places, torch.where(some, piece[source], plane[places]))
