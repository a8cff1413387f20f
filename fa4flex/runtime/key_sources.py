"""Sources of keys and values: contiguous tensors, pages of a cache, caches of 8 bits.

A source is one class: a named tuple of its tensors, whose names are those of its rows among a launch's
arguments (kernels/plan/arguments.py, source "call.kv"), with the methods of KeySource. A call goes down with
the source that it brought. Kernels read one `in_place` where they have a loader for it. Elsewhere it is
`copied` into a simpler one, until keys are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fa4flex.contents import validating
from fa4flex.kernels.plan.keys import CONTIGUOUS, Keys, eight_bit, in_pages
from fa4flex.kernels.plan.lengths import Scaling
from fa4flex.primitives.kv_scales import (
    Arrangement,
    KVScales,
    check_caches,
    dequantised,
    per,
)
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import autocast
from fa4flex.runtime.checks import (
    check_paged,
    check_pages,
    check_strided,
    check_tensors,
    refuse_map,
)
from fa4flex.variant import Variant

QKV = tuple[Tensor, Tensor, Tensor]

Results = tuple[Any, ...]
"""out in q's layout; lse and max_scores [B, Hq, Sq], or [Hq, Tq] for packed queries; and where one of them is
wanted, max_logit [Hq] and entropy, which is like lse. Each is None or empty where it is computed on request
and was not wanted."""


class Copied(NamedTuple):
    """A call whose keys were copied: queries, their simpler source, lengths, and the function that makes the
    results of the call before of those of this one."""

    q: Tensor
    kv: KeySource
    varlen: Varlen | None
    results: Callable[[Results], Results]


MOST_WIDTH = 256
"""Width of heads, at most, of most kernels. Wider ones are computed blockwise where no kernel does."""


class KeySource(tuple[Any, ...]):
    """Keys and values of a call: a named tuple. Its fields are rows, and what launches depend on besides.
    What a source does not say of itself is that of contiguous keys that no kernel reads."""

    __slots__ = ()
    _fields: ClassVar[Any]
    values: ClassVar[tuple[str, ...]] = ()
    """Fields that are no tensors."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """Those of them that launches are handed, and do not depend on."""
    leaves_rows: ClassVar[bool] = False
    """True if there may be queries that kernels do not write."""

    k: Tensor
    v: Tensor

    @property
    def seqused_k(self) -> Tensor | None:
        """Number of keys of each sequence [B]; None where the lengths of the call tell."""
        return None

    @property
    def sequences(self) -> int | None:
        """Number of sequences that tensors besides k and v are for; None where they are none's."""
        return None if self.seqused_k is None else self.seqused_k.shape[0]

    def keys(self, rows: int) -> Keys:
        """Source as kernels are specialised to it. rows: the dimension of k that has tokens."""
        return CONTIGUOUS

    def longest(self, rows: int) -> int:
        """Upper bound of the number of keys of a sequence. rows: the dimension of k that has tokens."""
        return self.k.shape[rows]

    def visited(self, keys: int, tile_n: int) -> int:
        """Upper bound of the number of keys that a tile of queries visits, in tiles of tile_n, of sequences
        of so many."""
        return keys

    def parts(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """Type and fields, with False in place of tensors, and these."""
        form: list[Any] = [type(self)]
        tensors = []
        for x in self:
            if x is None or type(x) is str or not isinstance(x, Tensor):
                form.append(x)
            else:
                form.append(False)
                tensors.append(x)
        return tuple(form), tuple(tensors)

    def free(self, packed: bool, rows: int) -> list[tuple[int, ...]]:
        """Dimensions, by tensor of a source as it was brought, that launches read themselves."""
        dims = (0,) if packed else (0, rows)
        return [dims if name in "kv" else () for name in self._fields if getattr(self, name) is not None]

    def slots(self, batch: int, packed: bool, rows: int) -> int:
        """The number of `longest` of `batch` sequences, of keys in place whose tensors are like those of an
        earlier call but for what is `free`; 0 where they do not agree with each other."""
        k, v = self.k.shape, self.v.shape
        if packed:
            return k[0] if k[0] == v[0] else 0
        return k[rows] if batch == k[0] == v[0] and k[rows] == v[rows] else 0

    def cast(self, q: Tensor) -> tuple[Tensor, KeySource] | None:
        """Queries and keys in autocast's dtype; None for keys that keep their own."""
        return None

    def check(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> None:
        """Raise InputError or UnsupportedError for what not even the look of an earlier call allows."""

    def in_place(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        """The source as kernels read it, with heads where q has them; None where none does."""
        return None

    def placed(self, batch: int, heads_first: bool) -> KeySource:
        """The same, of a source that kernels read, for so many sequences."""
        return self

    def fits(self, q: Tensor, varlen: Varlen | None) -> None:
        """Raise InputError unless queries and keys fit, whatever their contents."""
        check_tensors(q, self.k, self.v)

    def stand_in(self, q: Tensor, heads_first: bool) -> QKV:
        """Queries, and keys and values of the shapes that these stand for, of the dtype of q: [B, H, S, D],
        or packed where q is. heads_first: whether those of q are."""
        if heads_first:
            return q, self.k, self.v
        q, k, v = (x.transpose(1, 2) if x.ndim == 4 else x for x in (q, self.k, self.v))
        return q, k, v

    def copied(
        self, q: Tensor, varlen: Varlen | None, variant: Variant, *, kernels: bool, eager: bool
    ) -> Copied | None:
        """The same call of a simpler source; None where keys are contiguous.

        kernels   whether kernels compute, which round as a cache of q's dtype does
        eager     whether the host may read contents
        """
        return None


# --- contiguous -------------------------------------------------------------------------------------------


class _Tensors(NamedTuple):
    k: Tensor
    v: Tensor


class Contiguous(_Tensors, KeySource):
    """k, v [B, H, S, D], or [B, S, H, D]; packed [T, H, D]."""

    __slots__ = ()

    def cast(self, q: Tensor) -> tuple[Tensor, KeySource] | None:
        q, k, v = autocast.cast(q, self.k, self.v)
        return q, Contiguous(k, v)

    def in_place(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        return self


# --- paged ------------------------------------------------------------------------------------------------


class _Pages(NamedTuple):
    k: Tensor
    v: Tensor
    page_table: Tensor
    paged_keys: Tensor


class Paged(_Pages, KeySource):
    """k, v [pages, page_size, H, D]; pages of each sequence [B, columns], and its number of keys [B]. In
    place beside queries with heads first they are [pages, H, page_size, D]."""

    __slots__ = ()

    @property
    def seqused_k(self) -> Tensor:
        return self.paged_keys

    @property
    def sequences(self) -> int:
        return self.page_table.shape[0]

    def keys(self, rows: int) -> Keys:
        return in_pages(self.k.shape[rows])

    def longest(self, rows: int) -> int:
        return self.page_table.shape[1] * self.k.shape[rows]

    def cast(self, q: Tensor) -> tuple[Tensor, KeySource] | None:
        q, k, v = autocast.cast(q, self.k, self.v)
        return q, Paged(k, v, self.page_table, self.paged_keys)

    def in_place(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        paging = Paging(self.page_table, self.paged_keys) if validating() else None
        if not read_in_pages((q, self.k, self.v), varlen, variant, paging):
            return None
        return self.placed(q.shape[0], varlen is None and variant.layout == "bhsd")

    def placed(self, batch: int, heads_first: bool) -> Paged:
        return self.heads_first() if heads_first else self

    def parts(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        return (type(self),), tuple(self)

    def free(self, packed: bool, rows: int) -> list[tuple[int, ...]]:
        return [(0,), (0,), (0, 1), (0,)]

    def slots(self, batch: int, packed: bool, rows: int) -> int:
        (sequences, columns), pages = self.page_table.shape, self.k.shape
        agree = sequences == batch == self.paged_keys.shape[0] and pages[0] == self.v.shape[0]
        return columns * pages[1 if packed else rows] if agree and pages[0] else 0

    def heads_first(self) -> Paged:
        return Paged(self.k.transpose(1, 2), self.v.transpose(1, 2), self.page_table, self.paged_keys)

    def fits(self, q: Tensor, varlen: Varlen | None) -> None:
        check_tensors(q, self.k, self.v)
        check_pages(q, self.k, self.v, Paging(self.page_table, self.paged_keys), varlen)

    def stand_in(self, q: Tensor, heads_first: bool) -> QKV:
        return _as_contiguous(q, [x[:1, :1] for x in (self.k, self.v)], self.longest(1), heads_first)

    def copied(
        self, q: Tensor, varlen: Varlen | None, variant: Variant, *, kernels: bool, eager: bool
    ) -> Copied | None:
        paging = Paging(self.page_table, self.paged_keys)
        if not eager:
            paging.check(self.k, self.v)
            return self.spread(q, varlen, variant.layout == "bhsd")
        refuse_map(variant, "pages")
        check_paged(q, self.k, self.v, paging, varlen)
        return self.gathered(q, varlen, variant.layout == "bhsd")

    def gathered(self, q: Tensor, varlen: Varlen | None, heads_first: bool) -> Copied:
        """The keys that sequences use, packed. Their number has to be known, so the host waits for it."""
        paging = Paging(self.page_table, self.paged_keys)
        k, starts = paging.gather(self.k)
        kv = Contiguous(k, self._values(k, lambda pool: paging.gather(pool)[0]))
        if varlen is not None:
            return Copied(q, kv, Varlen(varlen.cu_seqlens_q, starts, varlen.seqused_q), same)
        rows = q.transpose(1, 2) if heads_first else q  # [B, Sq, Hq, D]
        sizes = rows.shape[:2]
        cu_q = torch.arange(sizes[0] + 1, dtype=torch.int32, device=q.device) * sizes[1]

        def results(result: Results) -> Results:
            out = result[0].unflatten(0, sizes)
            statistics = [
                x.unflatten(1, sizes).transpose(0, 1) if x is not None and x.ndim == 2 else x
                for x in result[1:]
            ]
            return out.transpose(1, 2) if heads_first else out, *statistics

        return Copied(rows.flatten(0, 1), kv, Varlen(cu_q, starts), results)

    def spread(self, q: Tensor, varlen: Varlen | None, heads_first: bool) -> Copied:
        """Keys and values of all pages of each sequence, used or not: the host reads nothing. Beside packed
        queries they are packed, too."""
        paging = Paging(self.page_table, self.paged_keys)
        k = paging.spread(self.k)  # [B, T, Hkv, D]
        v = self._values(k, paging.spread)
        if varlen is None:
            k, v = (k.transpose(1, 2), v.transpose(1, 2)) if heads_first else (k, v)
            return Copied(q, Contiguous(k, v), Varlen(seqused_k=self.paged_keys), same)
        batch, tokens = k.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * tokens
        ragged = Varlen(varlen.cu_seqlens_q, starts, varlen.seqused_q, self.paged_keys)
        return Copied(q, Contiguous(k.flatten(0, 1), v.flatten(0, 1)), ragged, same)

    def _values(self, k: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Copies of values, beside those of keys."""
        return copy(self.v)


def same(result: Results) -> Results:
    return result


def read_in_pages(qkv: QKV, varlen: Varlen | None, variant: Variant, paging: Paging | None) -> bool:
    """True if kernels may read the pages of a call. With `paging` its contents are looked at."""
    packed = varlen is not None and varlen.packed and varlen.cu_seqlens_k is None and varlen.seqused_k is None
    if variant.blocks is not None or not (packed or varlen is None):
        return False
    if [x.ndim for x in qkv] != [3 if packed else 4, 4, 4] or not all(x.numel() for x in qkv):
        return False
    if paging is not None:
        check_paged(*qkv, paging, varlen)
        if varlen is not None:
            varlen.check_contents()
            varlen.check_tokens(qkv[0].shape[0], None)
    return True


def _as_contiguous(q: Tensor, one_key: list[Tensor], keys: int, heads_first: bool) -> QKV:
    """Queries, and keys and values of this number, of which `one_key` has one each, [1, 1, H, D]."""
    if q.ndim == 3:
        k, v = (x[0].expand(q.shape[0], -1, -1) for x in one_key)
        return q, k, v
    k, v = (x.expand(q.shape[0], keys, -1, -1).transpose(1, 2) for x in one_key)
    return q if heads_first else q.transpose(1, 2), k, v


# --- 8 bits -----------------------------------------------------------------------------------------------


class _Scaled(NamedTuple):
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_per: Scaling = ""
    v_per: Scaling = ""
    page_table: Tensor | None = None
    paged_keys: Tensor | None = None


class PerhapsPaged(KeySource):
    """Keys that lie in pages where there is a page table."""

    __slots__ = ()
    page_table: Tensor | None
    paged_keys: Tensor | None

    @property
    def seqused_k(self) -> Tensor | None:
        return self.paged_keys

    @property
    def sequences(self) -> int | None:
        return None if self.page_table is None else self.page_table.shape[0]


class EightBit(_Scaled, PerhapsPaged):
    """k, v of e4m3, contiguous or in pages, and float32 scales of both, None for 1.

    In place, scales are as kernels index them, [sequences or pages, heads], or [sequences or pages, heads,
    tokens], and `k_per` and `v_per` their granularity (primitives/kv_scales.py). Otherwise a CPU dequantises
    to the dtype that it computes in, which is exact, and a GPU to the dtype of the queries, which rounds as a
    cache of that dtype does.
    """

    __slots__ = ()
    values = "k_per", "v_per"

    def keys(self, rows: int) -> Keys:
        page_size = 0 if self.page_table is None else self.k.shape[rows]
        return eight_bit(page_size, self.k_per, self.v_per)

    def longest(self, rows: int) -> int:
        return self.k.shape[rows] * (1 if self.page_table is None else self.page_table.shape[1])

    def check(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> None:
        check_strided(q, self.k, self.v)
        check_caches(q, self.k, self.v)
        arrangement = self._arrangement(varlen, variant)
        if self.k.ndim == self.v.ndim == (3 if arrangement == "packed" else 4):
            # other ranks are refused with the rest of the call
            KVScales(self.k_scale, self.v_scale).check(self.k, self.v, arrangement)

    def _arrangement(self, varlen: Varlen | None, variant: Variant) -> Arrangement:
        """Arrangement of the caches' dimensions."""
        if self.page_table is not None:
            return "paged"
        return "packed" if varlen is not None and varlen.packed else variant.layout

    def in_place(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        qkv, arrangement = (q, self.k, self.v), self._arrangement(varlen, variant)
        k_scale, v_scale = self.k_scale, self.v_scale
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k_scale, v_scale)):
            return None
        paging = _paging(self) if validating() else None
        if arrangement == "paged":
            if q.ndim != 4 or not read_in_pages(qkv, varlen, variant, paging):
                return None
        elif (
            arrangement == "packed"
            or variant.blocks is not None
            or any(x.ndim != 4 for x in qkv)
            or not all(x.numel() for x in qkv)
        ):
            return None
        return self.placed(q.shape[0], variant.layout == "bhsd")

    def placed(self, batch: int, heads_first: bool) -> EightBit:
        k, v, k_scale, v_scale, _, _, table, used = self
        arrangement: Arrangement = "bhsd" if heads_first else "bshd"
        if table is not None:
            arrangement = "paged"
            if heads_first:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
        of = per(k_scale, arrangement), per(v_scale, arrangement)
        k_scale, v_scale = _indexed(k_scale, arrangement, batch), _indexed(v_scale, arrangement, batch)
        return EightBit(k, v, k_scale, v_scale, *of, table, used)

    def free(self, packed: bool, rows: int) -> list[tuple[int, ...]]:
        dims = (0, rows) if self.page_table is None else (0,)
        scales = [dims[: x.ndim - 1] for x in (self.k_scale, self.v_scale) if x is not None]
        return [dims, dims, *scales, *([] if self.page_table is None else [(0, 1), (0,)])]

    def slots(self, batch: int, packed: bool, rows: int) -> int:
        k, table = self.k.shape, self.page_table
        for scale, of in ((self.k_scale, self.k_per), (self.v_scale, self.v_per)):
            if scale is not None:
                sizes = scale.shape
                if sizes[0] != (batch if of == "head" else k[0]) or (of == "token" and sizes[2] != k[rows]):
                    return 0
        if table is None or self.paged_keys is None:
            return KeySource.slots(self, batch, packed, rows)
        return Paged(self.k, self.v, table, self.paged_keys).slots(batch, packed, rows)

    def fits(self, q: Tensor, varlen: Varlen | None) -> None:
        if (paging := _paging(self)) is not None:
            check_pages(q, self.k, self.v, paging, varlen)

    def stand_in(self, q: Tensor, heads_first: bool) -> QKV:
        like_q = q.new_empty(1)
        if self.page_table is None:
            k, v = (like_q.expand(x.shape) for x in (self.k, self.v))
            return Contiguous(k, v).stand_in(q, heads_first)
        one_key = [like_q.expand(1, 1, *x.shape[2:]) for x in (self.k, self.v)]
        return _as_contiguous(q, one_key, self.longest(1), heads_first)

    def copied(
        self, q: Tensor, varlen: Varlen | None, variant: Variant, *, kernels: bool, eager: bool
    ) -> Copied | None:
        on_cpu, output = q.device.type == "cpu" and not kernels, variant.precision.output_dtype(q.dtype)
        dtype = variant.precision.compute_dtype(q.dtype) if on_cpu else q.dtype

        def results(result: Results) -> Results:
            return result[0].to(output), *result[1:]

        return Copied(q.to(dtype), self.dequantised(varlen, variant, dtype), varlen, results)

    def dequantised(self, varlen: Varlen | None, variant: Variant, dtype: torch.dtype) -> Contiguous | Paged:
        """The keys and values that the cache stands for. Differentiable by the scales."""
        arrangement = self._arrangement(varlen, variant)
        k = dequantised(self.k, self.k_scale, arrangement, dtype)
        v = dequantised(self.v, self.v_scale, arrangement, dtype)
        if self.page_table is None or self.paged_keys is None:
            return Contiguous(k, v)
        return Paged(k, v, self.page_table, self.paged_keys)


def _paging(kv: EightBit) -> Paging | None:
    if kv.page_table is None or kv.paged_keys is None:
        return None
    return Paging(kv.page_table, kv.paged_keys)


def _indexed(scale: Tensor | None, arrangement: Arrangement, batch: int) -> Tensor | None:
    """A scale as kernels index it, without a copy."""
    if scale is None:
        return None
    if scale.ndim == 1:
        return scale.expand(batch, -1)
    return scale.transpose(1, 2) if scale.ndim == 3 and arrangement != "bhsd" else scale
