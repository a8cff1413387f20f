"""Keys and values of a call, as far as kernels are specialised to the source that they come from. Data only.

A source whose keys do not follow each other in memory has a loader, which is a class in a module that kernels
import (kernels/common/key_loader.py), and rows: the tensors besides k and v that the loader reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from fa4flex.kernels.plan.lengths import Scaling
from fa4flex.kernels.plan.looks import Array, Columns, Dimension, Given, Look, Number, Scales

KeyDtype = Literal["", "float8_e4m3fn", "codes"]
"""Dtype of k and v: that of q; an 8-bit cache; codes, as q is."""
QueryCodes = Literal["int8", "float8_e4m3fn"]
ValueCodes = Literal["float8_e4m3fn", "bfloat16", "float16"]

TOGETHER = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of keys that kernels know to lie next to each other in memory."""


@dataclass(frozen=True)
class KeyRow:
    """A tensor of a source: its name, which is that of the argument and of the field of the source, and what
    it looks like. held: whether such calls bring it."""

    name: str
    look: Look
    held: bool = True

    def when(self, held: object) -> KeyRow:
        return KeyRow(self.name, self.look, bool(held))


@dataclass(frozen=True)
class Codes:
    """Quantised queries, keys and values, as fa4flex.quantize lays them out.

    qk        of q and k, which have scales by query, and by TILE keys
    pv        of v and of probabilities: transposed, with scales by channel, or 16-bit values as they are
    biased    q.k has a part that is the same for all keys of a query
    offset    channels of v have a part that is the same for all keys
    packed    sequences follow each other, and it is told with which tile of scales each begins
    promote   sums of P v over a tile of keys are float32; else all of them have the fraction bits of the
              tensor cores' sums
    """

    qk: QueryCodes
    pv: ValueCodes
    biased: bool = False
    offset: bool = False
    packed: bool = False
    promote: bool = True

    @property
    def transposed(self) -> bool:
        """True if v has one row of keys per channel."""
        return self.pv == "float8_e4m3fn"


@dataclass(frozen=True)
class Keys:
    """loader        class that finds keys on the device, as "package.module:Class"; "": keys of a sequence
                     follow each other, and each sequence has as many, or lengths come with the call
    together         with a loader, keys that surely lie next to each other: of those whose numbers begin at a
                     multiple of it, one of TOGETHER
    rows             tensors besides k and v
    dtype            of k and v, where it is another than that of q; "": the same
    k_scales, v_scales   granularity of the scales of an 8-bit cache, besides heads
    codes            what q, k and v are codes of; None: they are numbers
    """

    loader: str = ""
    together: int = 0
    rows: tuple[KeyRow, ...] = ()
    dtype: KeyDtype = ""
    k_scales: Scaling = ""
    v_scales: Scaling = ""
    codes: Codes | None = None

    latent: ClassVar[bool] = False
    """True if values are the first columns of keys."""
    listed: ClassVar[bool] = False
    """True if lists say which keys queries attend to."""
    beside: ClassVar[bool] = False
    """True if queries see keys beside their lists."""

    @property
    def loaded(self) -> bool:
        """True if a loader finds keys."""
        return bool(self.loader)

    @property
    def plain(self) -> bool:
        """True if kernels need not be told of the source: keys follow each other, in the dtype of q."""
        return not (self.loader or self.dtype)

    @property
    def bare(self) -> Keys:
        """The same as far as kernels that read no keys know of it."""
        return Keys(self.loader and PAGES, int(self.loaded))


@dataclass(frozen=True)
class LatentKeys(Keys):
    """Rows of which values are the first columns: a tile of keys in shared memory is one of values, too."""

    latent: ClassVar[bool] = True


@dataclass(frozen=True)
class ListedKeys(Keys):
    """Keys of which lists say which ones queries attend to.

    many      more rows, pairs of a query and a head that share keys, share a list than one product has;
              either is right, and what is not true is slower
    united    rows of the lists whose queries fit in a tile together, and their entries in what unites them
    """

    many: bool = False
    united: int = 1

    listed: ClassVar[bool] = True


@dataclass(frozen=True)
class KeysBesideLists(ListedKeys):
    """The same, where queries see first keys, near ones or the last unit besides."""

    beside: ClassVar[bool] = True


@dataclass(frozen=True)
class ListedRows(ListedKeys):
    """Latent rows of which lists say which ones queries attend to."""

    latent: ClassVar[bool] = True


@dataclass(frozen=True)
class RowsBesideLists(KeysBesideLists):
    """The same, where queries see others besides."""

    latent: ClassVar[bool] = True


CONTIGUOUS = Keys()

# --- pages ------------------------------------------------------------------------------------------------

PAGES = "fa4flex.kernels.common.pages:Pages"
PAGE_TABLE = KeyRow("page_table", Given("page_table", ("sequences", "columns")))


def in_pages(page_size: int) -> Keys:
    """Keys in pages of so many."""
    return Keys(PAGES, together(page_size), (PAGE_TABLE,))


def together(page_size: int) -> int:
    """Keys of a page that surely lie next to each other: the greatest of TOGETHER that divides its size."""
    return math.gcd(page_size, TOGETHER[-1])


# --- lists ------------------------------------------------------------------------------------------------

_ROW_OF_LISTS = "list batch", "list heads", "list rows"
_OF_LISTS = (
    KeyRow("ids", Given("ids", (*_ROW_OF_LISTS, "entries"))),
    *(KeyRow(x, Number("int")) for x in ("unit", "queries", "tail", "window", "first_keys", "end")),
)


def of_lists(
    kept: Keys, counted: bool, beside: bool, many: bool = False, united: int = 1, latent: bool = False
) -> ListedKeys:
    """Keys of another source that lists select from. counted: lists have counts; many, united: see
    ListedKeys; latent: keys are latent rows."""
    rows = *kept.rows, *_OF_LISTS, KeyRow("counts", Given("counts", _ROW_OF_LISTS), counted)
    plain, near = (ListedRows, RowsBesideLists) if latent else (ListedKeys, KeysBesideLists)
    kind = near if beside else plain
    return kind(kept.loader, kept.together, rows, many=many, united=united)


# --- 8 bits -----------------------------------------------------------------------------------------------


def eight_bit(page_size: int, k_scales: Scaling = "", v_scales: Scaling = "") -> Keys:
    """Keys and values of e4m3 with such scales, in pages of so many, or 0 for contiguous ones."""
    kept = in_pages(page_size) if page_size else CONTIGUOUS
    rows = (
        PAGE_TABLE.when(page_size),
        KeyRow("k_scale", _scales(k_scales, kept.loaded), bool(k_scales)),
        KeyRow("v_scale", _scales(v_scales, kept.loaded), bool(v_scales)),
    )
    return Keys(kept.loader, kept.together, rows, "float8_e4m3fn", k_scales, v_scales)


def _scales(per: Scaling, paged: bool) -> Scales:
    first: Dimension = "pages" if per == "page" or (per == "token" and paged) else "batch"
    return Scales((first, "kv_heads", "kv_len") if per == "token" else (first, "kv_heads"))


# --- codes ------------------------------------------------------------------------------------------------

TILE = 128
"""Keys that share a scale."""

COLUMNS = Columns("kv_heads", "head_dim_v", "columns")
"""Look of transposed values."""


def of_codes(codes: Codes) -> Keys:
    """Keys and values of codes, contiguous, padded or packed."""
    rows = (
        KeyRow("q_scale", Array("float32", ("batch", "q_heads", "q_len"))),
        KeyRow("k_scale", Array("float32", ("batch", "kv_heads", "key tiles"))),
        KeyRow("v_scale", _CHANNELS).when(codes.transposed),
        KeyRow("q_bias", Array("float32", ("batch", "q_heads", "q_len"))).when(codes.biased),
        KeyRow("v_offset", _CHANNELS).when(codes.offset),
        KeyRow("first_tiles", Array("int32", ("lengths",))).when(codes.packed),
    )
    return Keys(rows=rows, dtype="codes", codes=codes)


_CHANNELS = Array("float32", ("sequences", "kv_heads", "channels"), together=2)
