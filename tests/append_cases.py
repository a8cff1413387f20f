"""Tokens to append to pages, and what pages hold afterwards, token by token in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex import Paging, Rotary, Varlen


@dataclass(frozen=True)
class How:
    """Options of calls; `turning` elements of each head turn, 0: there is no rotary."""

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

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(k_pool, v_pool, lengths, q) of what the pools hold now."""
        pools, lengths = [x.clone() for x in (self.k_pool, self.v_pool)], self.paging.seqused_k.clone()
        q = self.options.get("q")
        turned = None if q is None else q.clone()
        for b, position, row in self.each():
            slot = self.paging.page_table[b, position // self.how.page_size], position % self.how.page_size
            lengths[b] += 1
            pools[0][slot] = self.turned(_token(self.k, row), position)
            pools[1][slot] = _token(self.v, row)
            if turned is not None:
                _token(turned, row)[:] = self.turned(_token(q, row), position)
        return pools[0], pools[1], lengths, turned

    def each(self) -> Iterator[tuple[int, int, Any]]:
        """(sequence, position, row) of each token."""
        for b, rows in enumerate(self.rows):
            for i, row in enumerate(rows):
                yield b, int(self.paging.seqused_k[b]) + i, row

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Heads of a token as complex numbers times those of their angles, rounded once."""
        n, rotary = self.how.turning, self.options.get("rotary")
        if rotary is None:
            return x
        y = x[:, :n].double()
        pairs = (y[:, ::2], y[:, 1::2]) if self.how.interleaved else (y[:, : n // 2], y[:, n // 2 :])
        angle = torch.complex(rotary.cos[position].double(), rotary.sin[position].double())
        found = torch.complex(*(one.contiguous() for one in pairs)) * angle
        parts = (found.real, found.imag)
        both = torch.stack(parts, -1).flatten(-2) if self.how.interleaved else torch.cat(parts, -1)
        return torch.cat((both.to(x.dtype), x[:, n:]), -1)

    def check(self, **more: Any) -> None:
        """Right, and nothing else is written: pools are poisoned where no sequence has keys."""
        *exact, q = self.expected()
        found = self(**more)
        _same(self.k_pool, exact[0], self.how)
        _same(self.v_pool, exact[1], self.how)
        assert torch.equal(found.seqused_k, exact[2])
        if q is not None:
            _same(found.q, q, self.how)


def _token(x: Tensor, row: Any) -> Tensor:
    """The heads of a token, [H, D]: of packed tensors a number, else (b, i)."""
    return x[row] if isinstance(row, int) else x[row[0], :, row[1]]


def _same(found: Tensor, exact: Tensor, how: How) -> None:
    """Rotation in float32 differs from float64's by less than a unit in the last place of the dtype."""
    same = torch.equal(found.isnan(), exact.isnan())
    assert same, "something else was written"
    if not how.turning:
        assert torch.equal(found.nan_to_num(), exact.nan_to_num())
    eps = 1e-6 if how.dtype == torch.float32 else torch.finfo(how.dtype).eps
    size = exact.nan_to_num().abs().max().item()
    torch.testing.assert_close(found.nan_to_num(), exact.nan_to_num(), atol=2 * eps * size, rtol=2 * eps)


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
                pool[table[b, t // how.page_size], t % how.page_size] = torch.randn(pool.shape[2:]).to(
                    how.dtype
                )
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
        options["rotary"] = Rotary(*(x.to(how.angles) for x in tables), how.interleaved)
    if how.queries:
        options["q"] = q
    paging = Paging(table.to(index), torch.tensor(before, dtype=index))
    return Tokens(how, k, v, *pools, paging, rows, options)


def _heads(how: How) -> tuple[tuple[int, int], ...]:
    return (how.heads, how.d), (how.heads, how.dv), (3 * how.heads, how.d)


def _pool(how: How, pages: int, width: int) -> Tensor:
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
}
