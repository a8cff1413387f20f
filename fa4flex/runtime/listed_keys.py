"""Listed keys as a source: tensors or pages of keys, and lists of those that queries attend to."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fa4flex.kernels.lists_sm90.config import MOST_LISTS, MOST_UNITED, ROWS
from fa4flex.kernels.plan.keys import CONTIGUOUS, Keys, in_pages, of_lists
from fa4flex.primitives.lists import Lists
from fa4flex.runtime.key_sources import Contiguous, KeySource, Paged
from fa4flex.runtime.latent_rows import LatentRows


class Tiling(NamedTuple):
    """True if more rows, queries of heads that share keys and a list, share a list than one product has; and
    number of rows of the lists, a power of 2, whose queries one tile has."""

    many: bool
    united: int


def tiling_of(lists: Lists, heads: int, kv_heads: int) -> Tiling:
    groups, (_, of_lists, rows, most) = max(kv_heads, 1), lists.ids.shape
    queries = lists.queries if lists.q_len is None else min(lists.queries, lists.q_len)
    each = max(heads // max(groups, of_lists) * queries, 1)
    together = min(ROWS // each, MOST_UNITED // max(most, 1), MOST_LISTS, rows)
    return Tiling(each > ROWS, 1 << max(together, 1).bit_length() - 1)


class _Listed(NamedTuple):
    k: Tensor
    v: Tensor
    ids: Tensor
    counts: Tensor | None
    beside: bool
    packed: bool
    latent: bool
    many: bool
    united: int
    unit: int
    queries: int
    tail: int
    window: int
    first_keys: int
    end: int
    page_table: Tensor | None = None
    paged_keys: Tensor | None = None


class Listed(_Listed, KeySource):
    """k, v as kernels read those of Contiguous, Paged or LatentRows; the others are those of Lists.

    beside      queries see keys beside their lists
    packed      queries are packed
    latent      keys are latent rows, of which values are views
    many        more rows share a list than one product has
    united      rows of the lists whose queries a tile has
    first_keys  keys that all queries see
    end         keys that the lists are of
    """

    __slots__ = ()
    numbers = "unit", "queries", "tail", "window", "first_keys", "end"
    values = "beside", "packed", "latent", "many", "united", *numbers

    @classmethod
    def of(
        cls, lists: Lists, kv: Contiguous | Paged | LatentRows, heads: tuple[int, int], packed: bool
    ) -> Listed:
        """heads: those of queries, and KV heads."""
        pages = (None, None) if isinstance(kv, Contiguous) else (kv.page_table, kv.paged_keys)
        latent = isinstance(kv, LatentRows)
        tiling = Tiling(False, 1) if latent else tiling_of(lists, *heads)
        numbers = lists.unit, lists.queries, lists.tail, lists.window, lists.sinks, lists.kv_len
        kinds = lists.beside, packed, latent, *tiling
        return cls(kv.k, kv.v, lists.ids, lists.counts, *kinds, *numbers, *pages)

    @property
    def seqused_k(self) -> Tensor | None:
        return self.paged_keys

    @property
    def sequences(self) -> int | None:
        return None if self.page_table is None else self.page_table.shape[0]

    @property
    def leaves_rows(self) -> bool:  # type: ignore[override]
        """True where sequences may be longer than the lists, which the host does not know."""
        return self.packed

    def parts(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        kinds = self.beside, self.packed, self.latent, self.many, self.united
        beside = self.counts, self.page_table, self.paged_keys
        form = type(self), *kinds, self.counts is None, self.page_table is None
        return form, (self.k, self.v, self.ids, *[x for x in beside if x is not None])

    def free(self, packed: bool, rows: int) -> list[tuple[int, ...]]:
        lists = [(0, 2)] * (1 if self.counts is None else 2)
        pages = self._pages()
        if pages is None:
            return [*super().free(packed, rows)[:2], *lists]
        k, v, *others = pages.free(packed, rows)
        return [k, v, *lists, *others]

    def slots(self, batch: int, packed: bool, rows: int) -> int:
        pages = self._pages()
        return super().slots(batch, packed, rows) if pages is None else pages.slots(batch, packed, rows)

    def _pages(self) -> Paged | None:
        if self.page_table is None:
            return None
        assert self.paged_keys is not None
        return Paged(self.k, self.v, self.page_table, self.paged_keys)

    def keys(self, rows: int) -> Keys:
        kept = CONTIGUOUS if self.page_table is None else in_pages(self.k.shape[rows])
        return of_lists(kept, self.counts is not None, self.beside, self.many, self.united, self.latent)

    def longest(self, rows: int) -> int:
        columns = 1 if self.page_table is None else self.page_table.shape[1]
        return self.k.shape[rows if self.k.ndim == 4 else 0] * columns

    def visited(self, keys: int, tile_n: int) -> int:
        """Listed keys have tiles of their own, and those beside the lists have others: of parts of a fixed
        size there have to be as many as hold both. Later queries of a tile see as many keys more."""
        listed = -(-self.ids.shape[3] * self.united * self.unit // tile_n) * tile_n
        if not self.beside:
            return listed
        queries = min(self.queries * self.united, 2 * ROWS if self.many else ROWS)
        near = max(self.window, self.tail * self.unit) + queries - 1
        return listed + min(self.first_keys + near, keys)
