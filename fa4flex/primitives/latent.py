"""Latent: rows that multi-head latent attention keeps, each a key whose first columns are its value; and how
rows of 8 bits are stored."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import check_device, kind_of, show
from fa4flex.primitives.kv_scales import E4M3

VALUE_DIM, ROPE_DIM = 512, 64
"""Columns of DeepSeek-V2's and V3's rows: the latent, and the rotated part of the key."""

E8M0 = torch.float8_e8m0fnu
_ELEMENTS = (E4M3, torch.bfloat16, torch.float16)
_SCALES = (torch.float32, E8M0)


class Segment(NamedTuple):
    """Columns of a row that are stored alike: so many of a dtype, and for each `group` of them a scale of
    another, or None."""

    dtype: torch.dtype
    columns: int
    scale: torch.dtype | None = None
    group: int = 0

    @property
    def scales(self) -> int:
        """Number of scales."""
        return 0 if self.scale is None else self.columns // self.group

    @property
    def scale_bytes(self) -> int:
        return 0 if self.scale is None else self.scales * self.scale.itemsize


@dataclass(frozen=True)
class LatentFormat:
    """Bytes of a latent row, segment by segment: (dtype, columns), or (dtype, columns, scale dtype, group)
    where each `group` of columns has a scale, which what is stored is multiplied by. Elements are e4m3,
    bfloat16 or float16, scales float32 or float8_e8m0fnu.

    segments   in the order of their columns
    planes     False: a segment's scales follow it in the row. True: of a page, the rows of all keys come
               first, and then the scales of all keys
    pad        bytes of each key behind its scales

    DEEPSEEK_V3_2 (656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16), DEEPSEEK_V4 (584: 448 e4m3 and 64
    bfloat16, then 7 e8m0 scales and a byte) and PER_TENSOR (576 e4m3, with Latent(scale=...)) are formats of
    serving engines. Raises InputError.
    """

    segments: tuple[Segment, ...]
    planes: bool = False
    pad: int = 0
    _text: str = field(init=False, repr=False, compare=False)
    """The format as an argument of operators, made here: compilers cannot. `format_of` reads it."""

    DEEPSEEK_V3_2: ClassVar[LatentFormat]
    DEEPSEEK_V4: ClassVar[LatentFormat]
    PER_TENSOR: ClassVar[LatentFormat]

    def __post_init__(self) -> None:
        given = tuple(Segment(*x) for x in self.segments)
        object.__setattr__(self, "segments", given)
        for one in given:
            counts = type(one.columns) is type(one.group) is int and one.columns > 0
            whole = counts and (one.scale is None or (one.group > 0 and one.columns % one.group == 0))
            kinds = one.dtype in _ELEMENTS and one.scale in (None, *_SCALES)
            if not whole or not kinds:
                raise InputError(
                    f"{one!r}",
                    "columns of float8_e4m3fn, bfloat16 or float16, in whole groups of scales of float32 or"
                    " float8_e8m0fnu",
                    "e.g. (torch.float8_e4m3fn, 512, torch.float32, 128)",
                )
        if not given or type(self.pad) is not int or self.pad < 0:
            raise InputError(
                f"{len(given)} segments, pad={self.pad}",
                "one segment or more, and no less than 0 bytes",
                "see fa4flex.LatentFormat.DEEPSEEK_V3_2",
            )
        names = [(str(x.dtype), x.columns, None if x.scale is None else str(x.scale), x.group) for x in given]
        object.__setattr__(self, "_text", repr((names, self.planes, self.pad)))

    @property
    def width(self) -> int:
        """Columns of a row."""
        return sum(one.columns for one in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes of each key, its scales and padding included."""
        return self._data_bytes + sum(one.scale_bytes for one in self.segments) + self.pad

    @property
    def _data_bytes(self) -> int:
        return sum(one.columns * one.dtype.itemsize for one in self.segments)

    def decoded(self, cache: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Rows of a dtype that bytes [..., 1, row_bytes] stand for, times `scale`: [..., 1, width]. With
        planes, they are those of pages [pages, page_size, 1, row_bytes]. Products are float32, or float64
        where that is the dtype, and rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        data, scales = self._parts(cache)
        found = []
        for one, raw, factor in zip(self.segments, data, scales, strict=True):
            x = _viewed(raw, one.dtype).to(wide)
            if factor is not None:
                x = x.unflatten(-1, (-1, one.group)) * _scales(factor, one.scale).unsqueeze(-1)
                x = x.flatten(-2)
            found.append(x)
        rows = torch.cat(found, -1)
        return (rows if scale is None else rows * scale).to(dtype)

    def encoded(self, rows: Tensor, scale: Tensor | None = None) -> Tensor:
        """Bytes [..., 1, row_bytes] of floating rows [..., 1, width], which they stand for when multiplied by
        `scale`: the inverse of `decoded`, up to rounding. With planes, rows are those of whole pages
        [pages, page_size, 1, width].

        A float32 scale is the largest element of its group / 448, an e8m0 scale the smallest power of two
        with which no element passes 448; either is 1 for a group of zeros, and NaN for one with an element
        that is not finite. In groups without a scale, elements past 448 are stored as 448. bfloat16 and
        float16 have scales of 1, or larger ones where float16 would overflow. Quotients are float32, or
        float64 of such rows, and rounded once. Raises InputError.
        """
        if rows.ndim < 3 or list(rows.shape[-2:]) != [1, self.width] or not rows.is_floating_point():
            raise InputError(
                f"rows {rows.dtype} {list(rows.shape)}",
                f"floats [..., 1, {self.width}]",
                "give them a dimension of one head: rows.unsqueeze(-2)",
            )
        pieces = pieces_of(self, rows, scale)
        if not self.planes:
            return pieces[0]
        cache = torch.empty(*rows.shape[:-1], self.row_bytes, dtype=torch.uint8, device=rows.device)
        for plane, piece in zip(planes_of(self, cache), pieces, strict=True):
            plane.copy_(piece)
        return cache

    def _parts(self, cache: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Bytes of each segment, and of its scales."""
        data = [one.columns * one.dtype.itemsize for one in self.segments]
        scales = [one.scale_bytes for one in self.segments]
        if self.planes:
            rows, factors = planes_of(self, cache.flatten(1).view(cache.shape))
            parts = list(rows.split(data, -1)), list(factors[..., : sum(scales)].split(scales, -1))
        else:
            sizes = [n for pair in zip(data, scales, strict=True) for n in pair]
            each = cache[..., : sum(sizes)].split(sizes, -1)
            parts = list(each[::2]), list(each[1::2])
        return parts[0], [x if one.scales else None for one, x in zip(self.segments, parts[1], strict=True)]


def pieces_of(form: LatentFormat, rows: Tensor, scale: Tensor | None) -> list[Tensor]:
    """Bytes of encoded rows [..., width], one piece for each of `planes_of`."""
    wide = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    wide = wide if scale is None else wide / scale
    data, scales = [], []
    for one, x in zip(form.segments, wide.split([one.columns for one in form.segments], -1), strict=True):
        if one.scale is not None:
            groups = x.unflatten(-1, (-1, one.group))
            stored = _scales_for(groups.abs().amax(-1), one).view(torch.uint8)
            scales.append(stored)
            x = (groups / _scales(stored, one.scale).unsqueeze(-1)).flatten(-2)
        limit = torch.finfo(one.dtype).max if one.dtype == E4M3 else torch.inf
        data.append(x.clamp(-limit, limit).to(one.dtype).view(torch.uint8))
        if one.scale is not None and not form.planes:
            data.append(scales.pop())
    pad = wide.new_zeros(*wide.shape[:-1], form.pad, dtype=torch.uint8)
    if form.planes:
        return [torch.cat(data, -1), torch.cat([*scales, pad], -1)]
    return [torch.cat([*data, pad], -1)]


def planes_of(form: LatentFormat, cache: Tensor) -> list[Tensor]:
    """Bytes of keys that lie together, as views: `cache` itself; with planes, of pages
    [pages, page_size, 1, row_bytes] without gaps, rows [pages, page_size, 1, bytes] and scales."""
    if not form.planes:
        return [cache]
    page_size = cache.shape[1]
    whole = cache.view(cache.shape[0], page_size * form.row_bytes)
    ends = page_size * form._data_bytes
    return [
        whole[:, :ends].unflatten(1, (page_size, 1, form._data_bytes)),
        whole[:, ends:].unflatten(1, (page_size, 1, form.row_bytes - form._data_bytes)),
    ]


def format_of(text: str) -> LatentFormat:
    """The format of `_text`."""
    named, planes, pad = ast.literal_eval(text)

    def dtype(name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, name.removeprefix("torch."))
        return found

    segments = (Segment(dtype(x), n, scale and dtype(scale), group) for x, n, scale, group in named)
    return LatentFormat(tuple(segments), planes, pad)


def _viewed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements of a dtype."""
    return raw.contiguous().view(dtype)


def _scales(raw: Tensor, dtype: torch.dtype | None) -> Tensor:
    """float32 scales of their bytes. e8m0 is the exponent of a float32: 2^(x - 127), and NaN for 255."""
    if dtype is not E8M0:
        return _viewed(raw, torch.float32)
    found = torch.exp2(raw.to(torch.float32) - 127)
    return torch.where(raw == 255, torch.nan, found)


def _scales_for(largest: Tensor, segment: Segment) -> Tensor:
    """Scales, of their dtype or as bytes, of groups whose largest elements are these."""
    limit, eight_bit = torch.finfo(segment.dtype).max, segment.dtype == E4M3
    finite = largest < torch.inf
    if segment.scale is not E8M0:
        least = torch.finfo(torch.float32).tiny if eight_bit else 1.0
        found = torch.where(largest == 0, 1.0, (largest / limit).clamp_min(least))
        return torch.where(finite, found, torch.nan).to(torch.float32)
    # largest = m * 2^x and limit = n * 2^y, m and n in [0.5, 1): it fits 2^(x - y), or one more where m > n
    (m, x), (n, y) = torch.frexp(largest), math.frexp(limit)
    power = x - y + (m > n)
    power = torch.where(largest == 0, 0, power if eight_bit else power.clamp_min(0))
    return torch.where(finite, (power + 127).clamp(0, 254), 255).to(torch.uint8)


LatentFormat.DEEPSEEK_V3_2 = LatentFormat(
    (Segment(E4M3, 512, torch.float32, 128), Segment(torch.bfloat16, 64))
)
LatentFormat.DEEPSEEK_V4 = LatentFormat((Segment(E4M3, 448, E8M0, 64), Segment(torch.bfloat16, 64)), True, 1)
LatentFormat.PER_TENSOR = LatentFormat((Segment(E4M3, 576),))


@dataclass(frozen=True, eq=False, repr=False)
class Latent:
    """Keys and values of absorbed multi-head latent attention: one row for each token, which all query heads
    share. `cache` is [B, S, 1, width] in any layout of the queries, packed [T, 1, width], or with `paging`
    [pages, page_size, 1, width]; bfloat16, float16 or float32, of any strides but that of columns, which
    is 1. With a `format`, rows are torch.uint8 of so many bytes in place of columns.

    value_dim   columns of the value: the first ones of the row
    rope_dim    columns of the key's rotated part: the last ones of the row. They follow the value, so that
                width is value_dim + rope_dim (DeepSeek-V2, V3: 512 + 64), or are its last ones, and width is
                value_dim (all of the row is the value)
    format      how rows of 8 bits are stored: a fa4flex.LatentFormat. They are dequantised for each call
    scale       with a format, a float32 number [] or [1] on the cache's device that all of it is multiplied
                by

        attn(q, fa4flex.Latent(cache), scale=192**-0.5)  # q [B, H, Sq, 576] -> out [B, H, Sq, 512]

    A key is the row, a value its first columns: a view, nothing is copied. The scale of a call is required:
    that of the attention before absorption, 1 / sqrt(nope + rope) of its heads, which no shape here tells.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 (absorption: 2.1.2). Raises InputError.
    """

    cache: Tensor
    value_dim: int = VALUE_DIM
    rope_dim: int = ROPE_DIM
    format: LatentFormat | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cache, Tensor):
            raise InputError(
                f"a latent cache of {kind_of(self.cache)}",
                "a tensor [B, S, 1, width], or [pages, page_size, 1, width] with paging=",
                "pass the cache of one layer",
            )
        sizes = self.value_dim, self.rope_dim
        if any(not isinstance(x, int) or isinstance(x, bool) for x in sizes) or min(sizes) < 0:
            raise InputError(
                f"value_dim={self.value_dim!r}, rope_dim={self.rope_dim!r}",
                "whole numbers of columns",
                f"e.g. value_dim={VALUE_DIM}, rope_dim={ROPE_DIM}",
            )
        if self.format is None:
            self._check_plain()
        else:
            self._check_encoded()
        self._check_shape()

    def _check_shape(self) -> None:
        shape, bytes_of_row = list(self.cache.shape), None if self.format is None else self.format.row_bytes
        columns = "width" if bytes_of_row is None else f"{bytes_of_row} bytes"
        one_head = self.cache.ndim in (3, 4) and shape[-2] == 1
        if not one_head or (bytes_of_row is not None and shape[-1] != bytes_of_row):
            raise InputError(
                f"a latent cache of shape {shape}",
                f"one KV head: [B, S, 1, {columns}], [pages, page_size, 1, {columns}] or packed"
                f" [T, 1, {columns}]",
                "give it a dimension of one head: cache.unsqueeze(-2)",
            )
        if self.width not in (self.value_dim + self.rope_dim, self.value_dim) or self.value_dim < 1:
            raise InputError(
                f"latent rows of {self.width} columns with value_dim={self.value_dim},"
                f" rope_dim={self.rope_dim}",
                f"{self.value_dim + self.rope_dim} = value_dim + rope_dim columns, or {self.value_dim} ="
                " value_dim where the rotated columns are part of the value",
                "name the columns of the value, and those of the rotated part",
            )

    def _check_plain(self) -> None:
        if not self.cache.is_floating_point() or self.cache.itemsize == 1:
            raise UnsupportedError(
                f"latent rows of {self.cache.dtype} without a format",
                "bfloat16, float16 or float32, or bytes of a fa4flex.LatentFormat",
                "e.g. Latent(cache.view(torch.uint8), format=fa4flex.LatentFormat.PER_TENSOR, scale=scale)",
            )
        if self.scale is not None:
            raise InputError(
                "a scale of rows that are no bytes of a format",
                "the softmax's scale in the call, attn(q, latent, scale=...)",
                "leave it out of Latent",
            )

    def _check_encoded(self) -> None:
        if not isinstance(self.format, LatentFormat):
            raise InputError(
                f"a format of {kind_of(self.format)}",
                "a fa4flex.LatentFormat",
                "e.g. LatentFormat.DEEPSEEK_V3_2",
            )
        if self.cache.dtype != torch.uint8:
            raise InputError(
                f"bytes of {self.cache.dtype}", "torch.uint8", "view them: cache.view(torch.uint8)"
            )
        if self.scale is not None:
            if (
                not isinstance(self.scale, Tensor)
                or self.scale.dtype != torch.float32
                or self.scale.numel() != 1
            ):
                raise InputError(
                    f"a scale of {kind_of(self.scale)}",
                    "one float32 number in a tensor",
                    "torch.tensor(number, device=cache.device)",
                )
            check_device("scale", self.scale, "the cache", self.cache.device, "move the scale to the cache")

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.cache.shape[-1] if self.format is None else self.format.width

    def __repr__(self) -> str:
        stored = "" if self.format is None else f", format={self.format!r}"
        return f"Latent({show(self.cache)}, value_dim={self.value_dim}, rope_dim={self.rope_dim}{stored})"


def refuse_latent(name: str, value: object) -> None:
    """Raise UnsupportedError for latent rows where a tensor is expected."""
    if isinstance(value, Latent):
        raise UnsupportedError(
            f"{name} is a fa4flex.Latent",
            "a tensor here; latent rows are keys of fa4flex.compile(...)(q, latent) and fa4flex.attention",
            "pass the rows as keys, and their first value_dim columns as values, both with heads where those"
            " of q are",
        )
