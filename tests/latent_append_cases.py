"""Latent rows to append, and what their pages stand for afterwards, token by token in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from latent_bytes import row_of
from torch import Tensor

import fa4flex
from fa4flex import Latent, LatentFormat, Paging, QKNorm, Rotary, Varlen

FORMATS: dict[str, LatentFormat | None] = {
    "plain": None,
    "v3.2": LatentFormat.DEEPSEEK_V3_2,
    "v4": LatentFormat.DEEPSEEK_V4,
    "per tensor": LatentFormat.PER_TENSOR,
}
VALUE, ROPE, SCALE = 512, 64, 0.0625


@dataclass(frozen=True)
class How:
    """Options of calls. turning: columns that turn, 0: there is no rotary; axes: of positions that are not
    those of the keys, 0: one without a dimension of its own; norm: "q", "k" or both; q_width: 0 for none."""

    format: str = "plain"
    packed: bool = False
    part: bool = False
    page_size: int = 4
    turning: int = 0
    interleaved: bool = False
    axes: int | None = None
    norm: str = ""
    unit_offset: bool = False
    q_width: int = 0
    strided: bool = False
    wide: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def width(self) -> int:
        return 512 if self.format == "v4" else 576


HOWS = {
    "dense": How(),
    "packed": How(packed=True, page_size=1, wide=True),
    "dense, parts": How(part=True, page_size=3),
    "packed, parts, pairs": How(packed=True, part=True, turning=64, interleaved=True, q_width=192),
    "norm, pairs, absorbed queries": How(norm="k", turning=64, interleaved=True, q_width=576),
    "norm, halves, any strides": How(norm="k", turning=32, strided=True, q_width=64, packed=True),
    "both norms": How(norm="qk", q_width=512, unit_offset=True, turning=64, interleaved=True, page_size=16),
    "positions": How(turning=64, q_width=192, axes=0, packed=True, wide=True),
    "three axes": How(turning=64, q_width=576, axes=3, part=True),
}


@dataclass(frozen=True)
class Rows:
    """A call: rows before, and new ones, per sequence; `taken` are the tokens in the call's own tensors that
    take part, by sequence."""

    how: How
    rows: Tensor
    latent: Latent
    paging: Paging
    taken: list[list[Any]]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **more: Any) -> Any:
        return fa4flex.append(self.rows, self.latent, self.paging, **self.options, **more)

    def each(self) -> Iterator[tuple[int, int, Any]]:
        """(sequence, position, token) of each token."""
        for b, tokens in enumerate(self.taken):
            for i, token in enumerate(tokens):
                yield b, int(self.paging.seqused_k[b]) + i, token

    def turned(self, x: Tensor, position: int, token: Any, name: str) -> Tensor:
        """Columns [H, width] of a token in float64: normalised, then complex numbers times those of their
        angles."""
        x, n = x.double(), self.how.turning
        rotary, norm = self.options.get("rotary"), self.options.get("norm")
        weight = None if norm is None else getattr(norm, name)
        if norm is not None and weight is not None:
            columns = x[:, : len(weight)]
            size = (columns.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            scaled = columns / size * (weight.double() + norm.unit_offset)
            x = torch.cat((scaled, x[:, len(weight) :]), -1)
        if rotary is None:
            return x
        start = x.shape[1] - ROPE
        y, rest = x[:, start : start + n], x[:, start + n :]
        pairs = (y[:, ::2], y[:, 1::2]) if self.how.interleaved else (y[:, : n // 2], y[:, n // 2 :])
        at = [self.position(position, token, i) for i in range(n // 2)]
        cos, sin = (
            torch.stack([table[at[i], i].double() for i in range(n // 2)])
            for table in (rotary.cos, rotary.sin)
        )
        made = torch.complex(*(one.contiguous() for one in pairs)) * torch.complex(cos, sin)
        parts = (made.real, made.imag)
        both = torch.stack(parts, -1).flatten(-2) if self.how.interleaved else torch.cat(parts, -1)
        return torch.cat((x[:, :start], both, rest), -1)

    def position(self, position: int, token: Any, angle: int) -> int:
        """Row of the tables that an angle of a token has."""
        given, axes = self.options.get("positions"), self.options["rotary"].axes
        if given is None:
            return position
        of_token = given[(..., token)] if isinstance(token, int) else given[(..., *token)]
        return int(of_token if axes is None else of_token[axes[angle]])

    def exact(self) -> list[tuple[int, int, Tensor]]:
        """(page, slot, columns in float64) of each new row."""
        table, size = self.paging.page_table, self.how.page_size
        return [
            (int(table[b, at // size]), at % size, self.turned(token_of(self.rows, token), at, token, "k")[0])
            for b, at, token in self.each()
        ]

    def queries(self) -> Tensor:
        """Queries in float64, of tokens that take no part as they were."""
        made: Tensor = self.options["q"].double()
        for _, at, token in self.each():
            token_of(made, token)[:] = self.turned(token_of(self.options["q"], token), at, token, "q")
        return made

    def check(self, **more: Any) -> None:
        """Right within the format's rounding, and nothing else is written."""
        exact, before = self.exact(), self.latent.cache.clone()
        queries = self.queries() if self.how.q_width else None
        lengths = self.paging.seqused_k + torch.tensor([len(x) for x in self.taken])
        made = self(**more)
        assert torch.equal(made.seqused_k, lengths.to(made.seqused_k.dtype))
        same = bytes_of(before) == bytes_of(self.latent.cache)
        for page, slot, row in exact:
            check_row(self.how, self.latent, row, page, slot)
            forget(self.how, same, page, slot)
        assert same.all(), "something else was written"
        if queries is not None:
            eps = max(torch.finfo(made.q.dtype).eps, 2**-20)
            assert (made.q.double() - queries).abs().max() <= eps * queries.abs().max()


def bytes_of(cache: Tensor) -> Tensor:
    """Bytes [pages, bytes of a page]."""
    return cache.contiguous().view(torch.uint8).flatten(1)


def forget(how: How, same: Tensor, page: int, slot: int) -> None:
    """Allow the bytes of a key to change."""
    size = same.shape[1] // how.page_size
    if how.format == "v4":
        same[page, slot * 576 : (slot + 1) * 576] = True
        same[page, how.page_size * 576 + slot * 8 : how.page_size * 576 + (slot + 1) * 8] = True
    else:
        same[page, slot * size : (slot + 1) * size] = True


def stored(how: How, latent: Latent, page: int, slot: int) -> tuple[Tensor, Tensor]:
    """(columns in float64, bytes of the scales) of a key."""
    if how.format == "plain":
        return latent.cache[page, slot, 0].double(), torch.empty(0, dtype=torch.uint8)
    data, size = bytes_of(latent.cache)[page], latent.cache.shape[-1]
    scales = data[:0]
    row = data[slot * size : (slot + 1) * size]
    if how.format == "v4":
        row = data[slot * 576 : (slot + 1) * 576]
        scales = data[how.page_size * 576 + slot * 8 : how.page_size * 576 + slot * 8 + 8]
        assert scales[7] == 0
    columns = torch.tensor(row_of(how.format, bytes(row.tolist()), bytes(scales.tolist()))).double()
    return columns * (1.0 if latent.scale is None else float(latent.scale)), scales


def rounding(how: How, row: Tensor) -> Tensor:
    """Bounds of what rounding once, of columns [width] in float64 which float32 made, may be off by: half of
    a unit in the last place of e4m3 (2^-4 of a number, 2^-10 of its scale) or of bfloat16."""
    size = row.abs()
    close = size.max() * 2**-20  # float32's sums of squares, and products of angles
    if how.format == "plain":
        kind = torch.finfo(how.dtype)
        eps = kind.eps if how.dtype != torch.float32 else 0.0
        return torch.maximum(size * eps, torch.tensor(kind.smallest_normal * kind.eps)) / 2 + close
    codes, group = {"v3.2": (512, 128), "v4": (448, 64), "per tensor": (576, 576)}[how.format]
    largest = size[:codes].view(-1, group).amax(1)
    scale = largest / 448
    if how.format == "v4":
        scale = torch.exp2(torch.ceil(torch.log2(scale * (1 + 1e-6))))
    if how.format == "per tensor":
        scale = torch.tensor([SCALE]).double()
    scale = scale.repeat_interleave(group)
    of_codes = torch.maximum(size[:codes] * 2**-4, scale * 2**-10)
    of_codes = torch.maximum(of_codes, size[:codes] - 448 * scale)
    return torch.cat((of_codes * 1.00001, size[codes:] * 2**-8)) + close


def check_row(how: How, latent: Latent, row: Tensor, page: int, slot: int) -> None:
    found, scales = stored(how, latent, page, slot)
    assert ((found - row).abs() <= rounding(how, row)).all(), f"{how} page {page} slot {slot}"
    if how.format == "v4":
        largest = row[:448].abs().view(7, 64).amax(1)
        factor = torch.exp2(scales[:7].double() - 127)
        assert (largest <= 448 * factor * (1 + 1e-5)).all(), "a scale is too small"
        assert (largest > 224 * factor * (1 - 1e-5)).all(), "a scale is not the smallest"


def token_of(x: Tensor, token: Any) -> Tensor:
    """Columns of a token, [H, width]: of packed tensors a number, else (b, i)."""
    return x[token] if isinstance(token, int) else x[token[0], :, token[1]]


def drawn(how: How, before: tuple[int, ...] = (7, 0, 12), new: tuple[int, ...] = (5, 3, 0)) -> Rows:
    """Pages in any order of random bytes, with pages that nobody owns, and columns more than there have to
    be."""
    count, longest = len(new), max(new)
    columns = -(-(max(before) + longest) // how.page_size) + 1
    pages = count * columns + 2
    index = torch.int64 if how.wide else torch.int32
    table = torch.randperm(pages)[: count * columns].view(count, columns)
    form = FORMATS[how.format]
    if form is None:
        cache = torch.full((pages, how.page_size, 1, how.width), torch.nan, dtype=how.dtype)
    else:
        cache = torch.randint(0, 256, (pages, how.page_size, 1, form.row_bytes), dtype=torch.uint8)
    if how.strided:
        both = torch.stack([cache, cache], 1)
        cache = both[:, 1] if how.format == "v4" else both.transpose(1, 2).contiguous()[:, :, 0]
    scale = torch.tensor(SCALE) if how.format == "per tensor" else None
    shape = (sum(new),) if how.packed else (count, longest)
    rows = _heads(how, torch.randn(*shape, 1, how.width) * 8 ** torch.randn(*shape, 1, 1))
    options: dict[str, Any] = {}
    part = tuple(random.randint(0, n) for n in new) if how.part else new
    starts = torch.tensor([0, *new]).cumsum(0)
    seqused = torch.tensor(part, dtype=index) if how.part else None
    if how.packed:
        options["varlen"] = Varlen(starts.to(index), seqused_q=seqused)
        taken: list[list[Any]] = [[int(starts[b]) + i for i in range(n)] for b, n in enumerate(part)]
    else:
        each = part if how.part else (longest,) * count
        taken = [[(b, i) for i in range(n)] for b, n in enumerate(each)]
        if how.part:
            options["varlen"] = Varlen(seqused_q=seqused)
    _more(how, options, columns * how.page_size, shape, index)
    latent = Latent(cache, VALUE, ROPE, form, scale)
    return Rows(how, rows, latent, Paging(table.to(index), torch.tensor(before, dtype=index)), taken, options)


def _more(how: How, options: dict[str, Any], length: int, shape: tuple[int, ...], index: torch.dtype) -> None:
    if how.turning:
        half, axes = how.turning // 2, None
        if how.axes is not None:
            options["positions"] = torch.randint(0, length, (max(how.axes, 1), *shape)).to(index)
            axes = torch.randint(0, how.axes, (half,), dtype=torch.int32) if how.axes else None
            if axes is None:
                options["positions"] = options["positions"][0]
        angles = torch.rand(length, half) * 6
        options["rotary"] = Rotary(angles.cos(), angles.sin(), how.interleaved, axes)
    if how.q_width:
        options["q"] = _heads(how, torch.randn(*shape, 3, how.q_width))
    if how.norm:
        weights = {name: torch.rand(VALUE) + 0.5 for name in how.norm}
        options["norm"] = QKNorm(**weights, eps=0.5, unit_offset=how.unit_offset)


def _heads(how: How, x: Tensor) -> Tensor:
    """[T, H, width], or [B, H, S, width], of the dtype."""
    x = x.to(how.dtype)
    if how.strided:
        x = torch.stack([x, x], -1)[..., 0]
    return x if how.packed else x.transpose(1, 2)
