"""Tokens to append to pages, and what pages hold afterwards, token by token in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fa4flex
from fa4flex import KVScales, Paging, QKNorm, Rotary, Varlen
from fa4flex.primitives.kv_scales import E4M3


@dataclass(frozen=True)
class How:
    """Options of calls. turning: elements of each head that turn, 0: there is no rotary; axes: of positions
    that are not those of the keys, 0: one without a dimension of its own; norm: "q", "k" or both;
    scales: "" for pools of the tokens' dtype, else of e4m3: "none", or per "head", "page" or "token"."""

    packed: bool = False
    page_size: int = 4
    d: int = 32
    dv: int = 16
    heads: int = 2
    turning: int = 0
    interleaved: bool = False
    queries: bool = False
    part: bool = False
    wide: bool = False
    strided: bool = False
    dtype: torch.dtype = torch.bfloat16
    angles: torch.dtype = torch.float32
    device: str = "cpu"
    axes: int | None = None
    norm: str = ""
    unit_offset: bool = False
    weights: torch.dtype = torch.float32
    gate: bool = False
    scales: str = ""

    @property
    def rounds(self) -> bool:
        """True if what is written is not what was given."""
        return bool(self.turning or self.norm or self.scales)


@dataclass(frozen=True)
class Tokens:
    """A call: keys before, and new tokens, per sequence; `rows` are the tokens in the call's own tensors that
    take part, by sequence."""

    how: How
    k: Tensor
    v: Tensor
    k_pool: Tensor
    v_pool: Tensor
    paging: Paging
    rows: list[list[Any]]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **more: Any) -> Any:
        return fa4flex.append(self.k, self.v, self.k_pool, self.v_pool, self.paging, **self.options, **more)

    def expected(self) -> Expected:
        """Pools as numbers, float64 for those of e4m3, of what they hold now."""
        lengths, q = self.paging.seqused_k.clone(), self.options.get("q")
        pools = [
            numbers(x, scale) for x, scale in zip((self.k_pool, self.v_pool), self.scales(), strict=True)
        ]
        turned = None if q is None else q[..., : self.how.d].clone()
        for b, position, row in self.each():
            slot = self.paging.page_table[b, position // self.how.page_size], position % self.how.page_size
            lengths[b] += 1
            pools[0][slot] = self.turned(_token(self.k, row), position, row, "k").to(pools[0].dtype)
            pools[1][slot] = _token(self.v, row).to(pools[1].dtype)
            if turned is not None:
                queries = _token(q, row)[..., : self.how.d]
                _token(turned, row)[:] = self.turned(queries, position, row, "q").to(turned.dtype)
        return Expected(pools[0], pools[1], lengths, turned)

    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        given = self.options.get("kv_scales")
        return (None, None) if given is None else (given.k, given.v)

    def each(self) -> Iterator[tuple[int, int, Any]]:
        """(sequence, position, row) of each token."""
        for b, rows in enumerate(self.rows):
            for i, row in enumerate(rows):
                yield b, int(self.paging.seqused_k[b]) + i, row

    def turned(self, x: Tensor, position: int, row: Any, name: str) -> Tensor:
        """Heads of a token in float64: normalised, then complex numbers times those of their angles."""
        n, rotary, norm = self.how.turning, self.options.get("rotary"), self.options.get("norm")
        x = x.double()
        weight = None if norm is None else getattr(norm, name)
        if weight is not None:
            size = (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            x = x / size * (weight.double() + (1 if norm.unit_offset else 0))
        if rotary is None:
            return x
        y = x[:, :n]
        pairs = (y[:, ::2], y[:, 1::2]) if self.how.interleaved else (y[:, : n // 2], y[:, n // 2 :])
        at = [self.position(position, row, i) for i in range(n // 2)]
        cos, sin = (
            torch.stack([table[at[i], i].double() for i in range(n // 2)])
            for table in (rotary.cos, rotary.sin)
        )
        found = torch.complex(*(one.contiguous() for one in pairs)) * torch.complex(cos, sin)
        parts = (found.real, found.imag)
        both = torch.stack(parts, -1).flatten(-2) if self.how.interleaved else torch.cat(parts, -1)
        return torch.cat((both, x[:, n:]), -1)

    def position(self, position: int, row: Any, angle: int) -> int:
        """Row of the tables that an angle of a token has."""
        given, axes = self.options.get("positions"), self.options["rotary"].axes
        if given is None:
            return position
        of_token = given[(..., row)] if isinstance(row, int) else given[(..., *row)]
        return int(of_token if axes is None else of_token[axes[angle]])

    def check(self, **more: Any) -> None:
        """Right, and nothing else is written: pools are poisoned where no sequence has keys."""
        exact = self.expected()
        found = self(**more)
        for pool, scale, right in zip(
            (self.k_pool, self.v_pool), self.scales(), (exact.k_pool, exact.v_pool), strict=True
        ):
            _same(numbers(pool, scale), right, self.how)
        assert torch.equal(found.seqused_k, exact.lengths)
        if exact.q is not None:
            _same(found.q, exact.q, replace(self.how, scales=""))
        if self.how.gate:
            assert torch.equal(found.gate, self.options["q"][..., self.how.d :])


class Expected(NamedTuple):
    k_pool: Tensor
    v_pool: Tensor
    lengths: Tensor
    q: Tensor | None


def numbers(pool: Tensor, scale: Tensor | None) -> Tensor:
    """Numbers that a pool holds: a clone, or float64 of e4m3."""
    if pool.dtype != E4M3:
        return pool.clone()
    wide = pool.float().double()
    if scale is None:
        return wide
    return wide * {1: scale, 2: scale[:, None], 3: scale}[scale.ndim][..., None].double()


def _token(x: Tensor, row: Any) -> Tensor:
    """The heads of a token, [H, D]: of packed tensors a number, else (b, i)."""
    return x[row] if isinstance(row, int) else x[row[0], :, row[1]]


def _same(found: Tensor, exact: Tensor, how: How) -> None:
    """float32 differs from float64 by less than a unit in the last place of the dtype; e4m3 rounds to 4
    digits, and numbers below its normal ones, 2^-6 of a scale, to 2^-10. A token's own scale is small."""
    same = torch.equal(found.isnan(), exact.isnan())
    assert same, "something else was written"
    if not how.rounds:
        assert torch.equal(found.nan_to_num(), exact.nan_to_num())
    found, exact = found.nan_to_num(), exact.nan_to_num()
    size = exact.abs().max().item()
    if how.scales:
        scale = {"none": 1.0, "token": size / 448}.get(how.scales, SCALE)
        torch.testing.assert_close(found, exact, atol=2**-10 * scale * 1.01, rtol=2**-4 * 1.01)
        return
    eps = 1e-6 if how.dtype == torch.float32 else torch.finfo(how.dtype).eps
    torch.testing.assert_close(found, exact, atol=2 * eps * size, rtol=2 * eps)


def drawn(how: How, before: tuple[int, ...] = (7, 0, 12), new: tuple[int, ...] = (5, 3, 0)) -> Tokens:
    """Pages in any order, with pages that nobody owns, and columns more than there have to be."""
    count, longest = len(new), max(new)
    columns = -(-(max(before) + longest) // how.page_size) + 1
    pages = count * columns + 2
    table = torch.randperm(pages)[: count * columns].view(count, columns)
    index = torch.int64 if how.wide else torch.int32
    pools = [_pool(how, pages, width) for width in (how.d, how.dv)]
    for b, length in enumerate(before):
        for t in range(length):
            for pool in pools:
                slot = table[b, t // how.page_size], t % how.page_size
                words = pool.view(torch.uint8) if how.scales else pool
                words[slot] = torch.randn(pool.shape[2:]).to(pool.dtype).view(words.dtype)
    shape = (sum(new),) if how.packed else (count, longest)
    k, v, q = (_tokens(how, shape, h, d) for h, d in _heads(how))
    options: dict[str, Any] = {}
    part = tuple(random.randint(0, n) for n in new) if how.part else new
    starts = torch.tensor([0, *new]).cumsum(0).tolist()
    if how.packed:
        cu = torch.tensor(starts, dtype=index)
        options["varlen"] = Varlen(cu, seqused_q=torch.tensor(part, dtype=index) if how.part else None)
        rows: list[list[Any]] = [[starts[b] + i for i in range(n)] for b, n in enumerate(part)]
    else:
        taken = part if how.part else (longest,) * count
        rows = [[(b, i) for i in range(n)] for b, n in enumerate(taken)]
        if how.part:
            options["varlen"] = Varlen(seqused_q=torch.tensor(part, dtype=index))
    if how.turning:
        half, positions = how.turning // 2, columns * how.page_size
        tables = (torch.rand(positions, half) * 2 - 1 for _ in range(2))
        axes = None
        if how.axes is not None:
            options["positions"] = torch.randint(0, positions, (max(how.axes, 1), *shape)).to(index)
            axes = torch.randint(0, how.axes, (half,), dtype=torch.int32) if how.axes else None
            if axes is None:
                options["positions"] = options["positions"][0]
        options["rotary"] = Rotary(*(x.to(how.angles) for x in tables), how.interleaved, axes)
    if how.queries:
        options["q"] = q
    if how.norm:
        weights = {name: torch.rand(how.d).to(how.weights) for name in how.norm}
        options["norm"] = QKNorm(**weights, eps=0.5, unit_offset=how.unit_offset)
    if how.scales not in ("", "none"):
        options["kv_scales"] = KVScales(*(_scales(how, pages) for _ in "kv"))
    paging = Paging(table.to(index), torch.tensor(before, dtype=index))
    return Tokens(how, k, v, *pools, paging, rows, options)


def _heads(how: How) -> tuple[tuple[int, int], ...]:
    return (how.heads, how.d), (how.heads, how.dv), (3 * how.heads, how.d * (2 if how.gate else 1))


SCALE = 0.5
"""Largest scale."""


def _scales(how: How, pages: int) -> Tensor:
    """Scales, small ones for tokens, which are found anew: the numbers before stay as they were."""
    shape = {"head": (how.heads,), "page": (pages, how.heads), "token": (pages, how.page_size, how.heads)}
    return (torch.rand(shape[how.scales]) * 0.5 + 0.5) * SCALE


def _pool(how: How, pages: int, width: int) -> Tensor:
    if how.scales:
        made = torch.full((pages, how.page_size, how.heads, width), torch.nan).to(E4M3)
        if how.strided:
            both = torch.full((pages, how.page_size, how.heads, width + 1), torch.nan).to(E4M3)
            return both[..., 1:]
        return made
    if how.strided:
        both = torch.full((pages, 2, how.heads, how.page_size, width + 1), torch.nan, dtype=how.dtype)
        return both[:, 1, ..., 1:].transpose(1, 2)
    return torch.full((pages, how.page_size, how.heads, width), torch.nan, dtype=how.dtype)


def _tokens(how: How, shape: tuple[int, ...], heads: int, width: int) -> Tensor:
    """[T, H, D], or [B, H, S, D]."""
    x = torch.randn(*shape, heads, width).to(how.dtype)
    if how.strided:
        x = torch.randn(*shape, heads, width, 2).to(how.dtype)[..., 0]
    return x if how.packed else x.transpose(1, 2)


HOWS = {
    "dense": How(),
    "packed": How(packed=True, page_size=1, wide=True),
    "dense, parts": How(part=True, page_size=3),
    "packed, halves": How(packed=True, turning=32, queries=True, page_size=16),
    "dense, pairs": How(turning=16, interleaved=True, queries=True, part=True),
    "packed, parts, pairs": How(packed=True, part=True, turning=32, interleaved=True, queries=True),
    "any strides, halves": How(strided=True, turning=12, queries=True, d=20, dv=7),
    "any strides, pairs": How(
        strided=True, packed=True, turning=6, interleaved=True, queries=True, d=20, dv=7, wide=True
    ),
    "norms": How(norm="qk", queries=True, weights=torch.bfloat16),
    "norm of keys, halves": How(norm="k", turning=16, packed=True, queries=True, unit_offset=True),
    "norms, pairs, gates": How(norm="qk", turning=32, interleaved=True, queries=True, gate=True, part=True),
    "norms, any strides": How(norm="qk", strided=True, turning=12, queries=True, d=20, dv=7, gate=True),
    "positions": How(turning=16, queries=True, axes=0, packed=True, wide=True),
    "three axes": How(turning=32, queries=True, axes=3, norm="q"),
    "three axes, pairs": How(turning=16, queries=True, axes=3, packed=True, interleaved=True, part=True),
    "three axes, any strides": How(
        strided=True, turning=6, interleaved=True, axes=3, queries=True, d=20, dv=7
    ),
    "8 bits": How(scales="none"),
    "8 bits, heads": How(scales="head", turning=16, packed=True, queries=True),
    "8 bits, pages": How(scales="page", norm="k", page_size=3, part=True),
    "8 bits, tokens": How(scales="token", norm="k", turning=32, packed=True, page_size=16),
    "8 bits, tokens, pairs": How(scales="token", turning=16, interleaved=True, wide=True),
    "8 bits, tokens, any strides": How(
        scales="token", turning=6, interleaved=True, strided=True, d=20, dv=7, norm="k"
    ),
}
