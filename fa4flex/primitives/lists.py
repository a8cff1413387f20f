"""Lists of the keys that queries attend to, in units of neighbouring keys, and the maps that they are.

    allowed(q, kv) = kv // unit is listed in row q // queries, or kv < sinks, or p - window < kv <= p,
                     or first <= kv <= p;   p = q + (kv_len - q_len),
                     first = ((p + 1) // unit + 1 - tail) * unit

A mask beside lists decides about all of these pairs: lists say where to look, a mask what may be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.exact import is_count
from fa4flex.primitives.base import CONTEXT, Family, Mod, call_with, check_integers, kind_of, show
from fa4flex.primitives.block_lists import EMPTY, FULL
from fa4flex.primitives.block_parts import ascending, check_longer, listed, part_of_lists
from fa4flex.primitives.blocks import BlockMap, trusted_map
from fa4flex.primitives.mask import CONVERSIONS, Mask, MaskMod, as_mask
from ptxsim.active import simulating

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_UNIT = 64
"""Keys of a unit from which a map of units is what a GPU's kernels read; of smaller units it would be the
mask itself, written out."""


@dataclass(frozen=True, eq=False, repr=False)
class Lists:
    """Keys that rows of queries attend to, one softmax over the union of all that is said here.

    ids      int32 or int64 [B or 1, H, R, cap]: unit i is the keys from i * unit to (i + 1) * unit; H is 1,
             or the query heads, or a divisor of them, as heads of keys are: groups of neighbours share a list
    counts   integers [B or 1, H, R]: only so many first entries of a row are read; None: all
    kv_len   keys, of which those past the end are in no list
    q_len    queries; None: R * queries
    unit     keys of a unit
    queries  neighbouring queries that share a row of ids
    tail     units that every query sees up to itself, from the one that the key after it falls in: of 1, the
             keys after the last whole unit; 0: none
    window   keys up to and with the query's own; sinks: first keys; both beside what is listed

    An id below 0, or of a unit past the end, lists nothing, wherever it stands; one that stands twice is
    there once. Hopper kernels gather what the lists of a call say, in time and memory that go with their
    entries; `explain(lists=lists)` tells which calls. Each call of `compile(blocks=lists)` reads them
    anew; `map()` and `mask()` are of what they list at that time. Raises InputError for shapes and numbers
    that do not fit.
    """

    ids: Tensor
    counts: Tensor | None = None
    kv_len: int = field(kw_only=True)
    q_len: int | None = field(default=None, kw_only=True)
    unit: int = field(default=1, kw_only=True)
    queries: int = field(default=1, kw_only=True)
    tail: int = field(default=0, kw_only=True)
    window: int = field(default=0, kw_only=True)
    sinks: int = field(default=0, kw_only=True)
    role: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        check_integers("ids", self.ids)
        if self.ids.ndim != 4:
            raise InputError(
                f"ids of rank {self.ids.ndim}, shape {list(self.ids.shape)}",
                "[B or 1, H, R, entries]",
                "add the missing dimensions, e.g. ids[None, None]",
            )
        for name in ("kv_len", "unit", "queries", "tail", "window", "sinks"):
            least = 0 if name in ("tail", "window", "sinks") else 1
            if not is_count(getattr(self, name), least):
                raise InputError(
                    f"{name}={getattr(self, name)!r}", f"an int of {least} or more", f"pass {name} in tokens"
                )
        q_len = self.ids.shape[2] * self.queries if self.q_len is None else self.q_len
        object.__setattr__(self, "q_len", q_len)
        if not is_count(q_len) or -(-q_len // self.queries) != self.ids.shape[2]:
            raise InputError(
                f"{self.ids.shape[2]} rows of ids for q_len={q_len}, {self.queries} queries a row",
                "a row for each ceil(q_len / queries)",
                "pass q_len=, or queries= that share a row",
            )
        if self.counts is not None:
            check_integers("counts", self.counts)
            if self.counts.shape != self.ids.shape[:3] or self.counts.device != self.ids.device:
                raise InputError(
                    f"counts {list(self.counts.shape)} on {self.counts.device}, "
                    f"ids {list(self.ids.shape)} on {self.ids.device}",
                    "a count for each row of ids, on one device",
                    "leave counts out where -1 stands behind what is listed",
                )

    @classmethod
    def of(cls, blocks: BlockMap, capacity: int | None = None) -> Lists:
        """The blocks of a map that are not empty, ascending; of each row the `capacity` lowest, by default
        all. A mask beside lists decides in all of them, in full ones as well."""
        if not isinstance(blocks, BlockMap):
            raise InputError(
                f"lists of {kind_of(blocks)}", "a fa4flex.BlockMap", "make one: BlockMap.from_torch(mask)[0]"
            )
        if capacity is not None and not is_count(capacity):
            raise InputError(f"capacity={capacity!r}", "a positive int", "leave it out for all blocks")
        counts, ids = ascending(blocks.classes != EMPTY, capacity or blocks.classes.shape[3])
        rows, columns = blocks.block_size
        more = {name: getattr(blocks, name, 0) for name in ("tail", "window", "sinks")}
        return cls(ids, counts, kv_len=blocks.kv_len, q_len=blocks.q_len, unit=columns, queries=rows, **more)

    @property
    def capacity(self) -> int:
        """Entries of a row."""
        return int(self.ids.shape[3])

    @property
    def beside(self) -> bool:
        """True if queries see keys beside what is listed."""
        return bool(self.tail or self.window or self.sinks)

    def classes(self) -> Tensor:
        """uint8 [B or 1, H, R, units]: 1 where a unit is listed, 0 elsewhere."""
        columns = -(-self.kv_len // self.unit)
        if self.ids.is_cuda or simulating():
            return torch.ops.fa4flex.listed_units(self.ids, self.counts, columns)
        return listed(self.ids, self.counts, columns).to(torch.uint8)

    def map(self) -> BlockMap:
        """The map of what is listed, in blocks of `queries` x `unit`, a byte for each; it keeps what is seen
        besides."""
        assert self.q_len is not None
        size = self.queries, self.unit
        beside = {"tail": self.tail, "window": self.window, "sinks": self.sinks}
        return listed_map(self.classes(), size, (self.q_len, self.kv_len), **beside)

    def mask(self, inner: Mask | MaskMod | Family[Mask] | None = None) -> Mask:
        """The lists as a Mask of pairs; `inner` decides about all that they allow."""
        return self.map().mask(inner)

    def brought(self) -> BlockMap:
        """The map that a call with `blocks=` of these lists has where no kernel gathers what they list
        (listed_calls.py). Raises UnsupportedError for short units on a GPU: the map of all pairs of rows and
        units is large."""
        if self.unit < LEAST_UNIT and (self.ids.is_cuda or simulating()):
            columns = -(-self.kv_len // self.unit)
            size = self.ids.shape[0] * self.ids.shape[1] * self.ids.shape[2] * columns
            raise UnsupportedError(
                f"lists of units of {self.unit} keys on {self.ids.device}",
                f"units of {LEAST_UNIT} keys or more, for which kernels read a map of blocks; or on a Hopper"
                " GPU a call that has a kernel for lists, as explain(lists=True) says",
                f"pass blocks=lists.map(), a captured table of all rows and units, {size} bytes; or select "
                "larger units",
            )
        return self.map()

    def to(self, device: torch.device | str) -> Lists:
        """The same lists on another device."""
        counts = None if self.counts is None else self.counts.to(device)
        return replace(self, ids=self.ids.to(device), counts=counts)

    # --- parts, growth, pictures ----------------------------------------------------------------

    def __getitem__(self, index: Any) -> Lists:
        """The lists of a part, `lists[b, h, rows]`: entries of the batch and heads in any order, and rows
        that follow each other; an int keeps its dimension. Keys are all that there were. Raises
        UnsupportedError for rows without the last one beside a tail or a window: those of other tokens."""
        assert self.q_len is not None
        (ids, counts), q_len, rows = part_of_lists(index, (self.ids, self.counts), (self.queries, self.q_len))
        if (self.tail or self.window) and rows.stop < self.ids.shape[2]:
            raise _other_tokens(self)
        return replace(self, ids=ids, counts=counts, q_len=q_len)

    def grown(self, q_len: int | None = None, kv_len: int | None = None) -> Lists:
        """The lists for more queries or keys, as a step of decoding adds them: new rows list nothing, and
        new keys are in the last unit, where it had fewer, or in units that no row lists."""
        assert self.q_len is not None
        q_len = check_longer("q_len", self.q_len, self.q_len if q_len is None else q_len, "lists")
        kv_len = check_longer("kv_len", self.kv_len, self.kv_len if kv_len is None else kv_len, "lists")
        ids, counts, units = self.ids, self.counts, -(-self.kv_len // self.unit)
        if -(-kv_len // self.unit) > units:
            ids = torch.where(ids < units, ids, -1)
        if more := -(-q_len // self.queries) - ids.shape[2]:
            ids = torch.cat((ids, ids.new_full((*ids.shape[:2], more, ids.shape[3]), -1)), 2)
            counts = (
                None if counts is None else torch.cat((counts, counts.new_zeros(*ids.shape[:2], more)), 2)
            )
        return replace(self, ids=ids, counts=counts, q_len=q_len, kv_len=kv_len)

    def plot(self, b: int = 0, h: int | None = None) -> Figure:
        """A matplotlib Figure of what is listed: see BlockMap.plot. Raises UnsupportedError for lists whose
        map would have more than 2**28 blocks."""
        return resolve_name("fa4flex.view.block_map:figure_of_lists")(self, b, h)

    def _repr_html_(self) -> str:
        return resolve_name("fa4flex.view.block_map:html_of_lists")(self)

    def __repr__(self) -> str:
        counts = "" if self.counts is None else f", {show(self.counts)}"
        numbers = {"kv_len": 0, "q_len": 0, "unit": 1, "queries": 1, "tail": 0, "window": 0, "sinks": 0}
        more = "".join(
            f", {n}={getattr(self, n)}" for n, usual in numbers.items() if getattr(self, n) != usual
        )
        return f"Lists({show(self.ids)}{counts}{more})"


@dataclass(frozen=True, eq=False, repr=False)
class ListedMap(BlockMap):
    """A BlockMap whose heads may be those of keys, and beside whose blocks every query sees a tail, a window
    and sinks: see Lists.

    lists: those that a variant with this map was composed of, and reads at each call; None: it is their map
    of some moment
    """

    tail: int = 0
    window: int = 0
    sinks: int = 0
    lists: ClassVar[Lists | None] = None

    @property
    def beside(self) -> bool:
        """True if queries see keys beside the blocks."""
        return bool(self.tail or self.window or self.sinks)

    def mask(self, inner: Mask | MaskMod | Family[Mask] | None = None) -> Mask:
        return ListedMask(self, None if inner is None else as_mask(inner))

    def _check_part(self, lengths: tuple[int, int], first: tuple[int, int]) -> None:
        moved = first[0] + lengths[0] - self.q_len != first[1] + lengths[1] - self.kv_len
        if (self.sinks and first[1]) or ((self.tail or self.window) and moved):
            raise _other_tokens(self)

    def _check_alone(self, what: str) -> None:
        if self.beside:
            raise UnsupportedError(
                f"{what} of {self!r}, which would lose its tail, window and sinks",
                "a map without them",
                "leave them out of the Lists, and combine the map with a mask: "
                "fa4flex.variants.sliding_window",
            )

    def _fits_heads(self, heads: int) -> bool:
        return heads % int(self.classes.shape[1]) == 0

    def _wanted_heads(self, heads: int) -> str:
        return f"a divisor of {heads}, as heads of keys are"

    def _other_lengths(self, q_len: int, kv_len: int) -> str:
        share = q_len // self.classes.shape[2]
        if self.block_size[0] == 1 and share > 1 and share * self.classes.shape[2] == q_len:
            return f", or say how many queries share a row: queries={share}"
        return super()._other_lengths(q_len, kv_len)

    def __repr__(self) -> str:
        numbers = {"tail": self.tail, "window": self.window, "sinks": self.sinks}
        more = "".join(f", {name}={value}" for name, value in numbers.items() if value)
        size = f"{self.block_size}, {self.q_len}, {self.kv_len}"
        return f"ListedMap({show(self.classes)}, {size}{more})"


def _other_tokens(given: Lists | ListedMap) -> UnsupportedError:
    """Error for a part of lists, or of their map, whose queries or keys stand elsewhere than those of all."""
    return UnsupportedError(
        f"a part of {given!r}, whose tail, window and sinks are those of other tokens there",
        "parts that leave out as many of the last queries as of the last keys, and no first keys",
        "slice a map without them, and combine it with a mask: fa4flex.variants.sliding_window",
    )


def kept_map(lists: Lists) -> BlockMap:
    """The map that a variant composed of lists keeps, which knows them. Raises as `brought`."""
    made = lists.brought()
    object.__setattr__(made, "lists", lists)
    return made


def lists_kept(blocks: BlockMap | None) -> Lists | None:
    """Lists that a variant with such a map reads at each call; None for another map or none."""
    return blocks.lists if isinstance(blocks, ListedMap) else None


def listed_map(
    classes: Tensor,
    size: tuple[int, int],
    lengths: tuple[int, int],
    tail: int = 0,
    window: int = 0,
    sinks: int = 0,
) -> ListedMap:
    """A ListedMap of classes that were made here: none is above 2, and nobody need look."""
    return _made(ListedMap, trusted_map(classes, size, *lengths), tail=tail, window=window, sinks=sinks)


Kind = TypeVar("Kind", bound=ListedMap)


def _made(kind: type[Kind], values: BlockMap, **more: int) -> Kind:
    made = object.__new__(kind)
    for name, value in {**vars(values), **more}.items():
        object.__setattr__(made, name, value)
    return made


class Sizes(NamedTuple):
    """The shape of classes that nobody reads."""

    shape: tuple[int, ...]


class Outline(ListedMap):
    """A map of the sizes and lengths of lists that has no contents."""

    def _check_contents(self) -> None:
        pass


@lru_cache
def outline_of(rows: tuple[int, ...], size: tuple[int, int], lengths: tuple[int, int]) -> Outline:
    """The outline of lists of [B or 1, H, R] rows, in blocks of such a size."""
    classes: Any = Sizes((*rows, -(-lengths[1] // size[1])))
    return _made(Outline, trusted_map(classes, size, *lengths))


@dataclass(frozen=True, eq=False, repr=False)
class ListedMask(Mask):
    """A map of lists as a mask, with the mask that decides about what it allows."""

    blocks: ListedMap
    inner: Mask | None
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = set() if self.inner is None else set(self.inner.context)
        names |= {"num_heads"} if self.blocks.classes.shape[1] > 1 else set()
        names |= {"q_len", "kv_len"} if self.blocks.tail or self.blocks.window else set()
        object.__setattr__(self, "context", tuple(name for name in CONTEXT if name in names))

    @property
    def parts(self) -> tuple[Mod, ...]:
        return () if self.inner is None else (self.inner,)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        blocks, classes = self.blocks, self.blocks.classes
        (rows, columns), heads = blocks.block_size, classes.shape[1]
        head = h // (context["num_heads"] // heads) if heads > 1 else 0
        result = classes[b if classes.shape[0] != 1 else 0, head, q_idx // rows, kv_idx // columns]
        seen = result != EMPTY
        if blocks.sinks:
            seen = seen | (kv_idx < blocks.sinks)
        if blocks.tail or blocks.window:
            position = q_idx + (context["kv_len"] - context["q_len"])
            if blocks.window:
                seen = seen | ((kv_idx > position - blocks.window) & (kv_idx <= position))
            if blocks.tail:
                first = ((position + 1) // columns + 1 - blocks.tail) * columns
                seen = seen | ((kv_idx >= first) & (kv_idx <= position))
        if self.inner is None:
            return seen
        inside = call_with(self.inner, (b, h, q_idx, kv_idx), self.inner.context, context)
        return (result == FULL) | (seen & inside)

    def __repr__(self) -> str:
        return f"{self.blocks!r}.mask({'' if self.inner is None else repr(self.inner)})"


def mask_of_lists(value: Any) -> Mask | None:
    """Lists as a Mask; None for anything else."""
    return value.brought().mask() if isinstance(value, Lists) else None


CONVERSIONS.append(mask_of_lists)
