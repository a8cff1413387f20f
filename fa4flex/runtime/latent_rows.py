"""Latent rows as a source of keys and values: each row is a key, whose first columns are the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fa4flex.contents import validating
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.plan.keys import Keys, LatentKeys, in_pages
from fa4flex.primitives.latent import Latent, LatentFormat
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast
from fa4flex.runtime.checks import check_pages, check_strided
from fa4flex.runtime.key_sources import (
    MOST_WIDTH,
    QKV,
    Contiguous,
    Copied,
    KeySource,
    Paged,
    PerhapsPaged,
    Results,
    read_in_pages,
    same,
)
from fa4flex.variant import Variant


class _Rows(NamedTuple):
    k: Tensor
    v: Tensor
    page_table: Tensor | None = None
    paged_keys: Tensor | None = None


class LatentRows(_Rows, PerhapsPaged):
    """k [B, S, 1, width], packed [T, 1, width] or pages [pages, page_size, 1, width]; v its first columns,
    a view of it."""

    __slots__ = ()

    def longest(self, rows: int) -> int:
        return self.k.shape[rows] * (1 if self.page_table is None else self.page_table.shape[1])

    def free(self, packed: bool, rows: int) -> list[tuple[int, ...]]:
        if self.page_table is None:
            return [(0, 1), (0, 1)]
        return [(0,), (0,), (0, 1), (0,)]

    def slots(self, batch: int, packed: bool, rows: int) -> int:
        k, v, table, used = self
        if table is None or used is None:
            return KeySource.slots(self, batch, packed, rows)
        return Paged(k, v, table, used).slots(batch, packed, rows)

    def cast(self, q: Tensor) -> tuple[Tensor, KeySource]:
        q, k, _ = autocast.cast(q, self.k, self.k)
        return q, self._replace(k=k, v=k[..., : self.v.shape[-1]])

    def check(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> None:
        check_strided(q, self.k, self.v)
        _check_call(q, self.k.shape[-1], variant)

    def fits(self, q: Tensor, varlen: Varlen | None) -> None:
        self._simpler("bshd").fits(q, varlen)

    def stand_in(self, q: Tensor, heads_first: bool) -> QKV:
        return self._simpler("bhsd" if heads_first else "bshd").stand_in(q, heads_first)

    def keys(self, rows: int) -> Keys:
        if self.page_table is None:
            return LatentKeys()
        pages = in_pages(self.k.shape[rows])
        return LatentKeys(pages.loader, pages.together, pages.rows)

    def in_place(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        """Views of the rows, where other kernels have heads as wide."""
        if self.k.shape[-1] <= MOST_WIDTH:
            return self._simpler(variant.layout).in_place(q, varlen, variant)
        if self.page_table is not None:
            paging = Paging(self.page_table, self.paged_keys) if validating() else None  # type: ignore[arg-type]
            if varlen is not None or not read_in_pages((q, self.k, self.v), varlen, variant, paging):
                return None
        elif (
            variant.blocks is not None
            or (varlen is not None and varlen.packed)
            or not q.ndim == self.k.ndim == 4
            or not (q.numel() and self.k.numel())
        ):
            return None
        return self.placed(q.shape[0], variant.layout == "bhsd")

    def by_lists(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        """The rows as kernels read them that gather what lists say: packed ones, too."""
        if self.k.shape[-1] <= MOST_WIDTH or (self.page_table is None and self.k.ndim == 4):
            return self.in_place(q, varlen, variant)
        if self.page_table is None:
            return self if self.k.ndim == 3 and q.numel() and self.k.numel() else None
        paging = Paging(self.page_table, self.paged_keys) if validating() else None  # type: ignore[arg-type]
        if not read_in_pages((q, self.k, self.v), varlen, variant, paging):
            return None
        return self.placed(q.shape[0], varlen is None and variant.layout == "bhsd")

    def placed(self, batch: int, heads_first: bool) -> KeySource:
        if self.k.shape[-1] <= MOST_WIDTH:
            return self._simpler("bhsd" if heads_first else "bshd").placed(batch, heads_first)
        k, v = (x.transpose(1, 2) if heads_first else x for x in self[:2])
        return self._replace(k=k, v=v)

    def copied(
        self, q: Tensor, varlen: Varlen | None, variant: Variant, *, kernels: bool, eager: bool
    ) -> Copied | None:
        return Copied(q, self._simpler(variant.layout), varlen, same)

    def _simpler(self, layout: str) -> Contiguous | Paged:
        """Keys and values as views of the rows, with heads where a layout has them."""
        k, v, table, used = self
        if table is not None and used is not None:
            return PagedRows(k, v, table, used)
        if layout == "bhsd" and k.ndim == 4:
            return Contiguous(k.transpose(1, 2), v.transpose(1, 2))
        return Contiguous(k, v)


class PagedRows(Paged):
    """Pages of latent rows: v is a view of the first columns of k, and of a copy of k."""

    __slots__ = ()

    def cast(self, q: Tensor) -> tuple[Tensor, KeySource] | None:
        return None  # a source that was cast before

    def _values(self, k: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        return k[..., : self.v.shape[-1]]


def latent_rows(latent: Latent, v: Any, paging: Paging | None, scales: Any) -> KeySource:
    """The source of a call's latent rows. Raises InputError or UnsupportedError for what is beside them."""
    if v is not None:
        raise InputError(
            f"v beside {latent!r}", "the latent rows alone, whose first columns are the values", "leave v out"
        )
    if scales is not None:
        raise UnsupportedError(
            f"kv_scales= beside {latent!r}",
            "rows of 16 or 32 bits",
            "dequantise the rows, and leave kv_scales out",
        )
    k, pages = latent.cache, (None, None)
    if paging is not None:
        pages = paging.page_table, paging.seqused_k  # type: ignore[assignment]
    if latent.format is not None:
        return EncodedRows(k, k, latent.scale, latent.format, latent.value_dim, *pages)
    return LatentRows(k, k[..., : latent.value_dim], *pages)


def _check_call(q: Tensor, width: int, variant: Variant) -> None:
    if variant.scale is None:
        raise InputError(
            "latent keys without a scale",
            "the scale of the attention before absorption, 1 / sqrt(nope + rope) of its heads",
            "pass scale=fa4flex.variants.mla().scale, which is 1 / sqrt(192), or that of your model",
        )
    if q.ndim and q.shape[-1] != width:
        raise InputError(
            f"q of {q.shape[-1]} columns, latent rows of {width}",
            "queries as wide as the rows: absorbed into the latent space, then their rotated part",
            "torch.cat((q_nope @ w_uk, q_rope), -1)",
        )


# --- bytes ------------------------------------------------------------------------------------------------


class _Encoded(NamedTuple):
    k: Tensor
    v: Tensor
    scale: Tensor | None
    format: LatentFormat
    value_dim: int
    page_table: Tensor | None = None
    paged_keys: Tensor | None = None


class EncodedRows(_Encoded, PerhapsPaged):
    """k and v the bytes of latent rows of a format [B, S, 1, bytes], packed [T, 1, bytes] or
    [pages, page_size, 1, bytes], times `scale`. For each call they are dequantised to the dtype that a CPU
    computes in, or that of the queries on a GPU."""

    __slots__ = ()
    values = "format", "value_dim"

    def check(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> None:
        check_strided(q, self.k, self.v)
        _check_call(q, self.format.width, variant)
        if self.format.planes and self.page_table is None:
            raise UnsupportedError(
                f"latent rows of {self.format!r} without pages",
                "pages: the scales of all keys of a page follow their rows",
                "pass paging=fa4flex.Paging(page_table, seqused_k)",
            )

    def fits(self, q: Tensor, varlen: Varlen | None) -> None:
        if self.page_table is not None and self.paged_keys is not None:
            check_pages(q, self.k, self.v, Paging(self.page_table, self.paged_keys), varlen)

    def copied(
        self, q: Tensor, varlen: Varlen | None, variant: Variant, *, kernels: bool, eager: bool
    ) -> Copied | None:
        output = variant.precision.output_dtype(q.dtype)
        on_cpu = q.device.type == "cpu" and not kernels
        dtype = variant.precision.compute_dtype(q.dtype) if on_cpu else q.dtype
        rows = self.format.decoded(self.k, dtype, self.scale)
        kv = LatentRows(rows, rows[..., : self.value_dim], self.page_table, self.paged_keys)

        def results(result: Results) -> Results:
            return result[0].to(output), *result[1:]

        return Copied(q.to(dtype), kv, varlen, results)
