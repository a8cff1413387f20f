"""Block-sparse maps: which blocks of (query, key) pairs are empty, partial or full.

    allowed(q, kv) = block is full, or block is partial and (there is no mask_mod or mask_mod allows it)

A block map without a mask_mod is therefore a mask by itself. `blocks & mask` is what both allow: there, full
blocks are masked, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pkgutil import resolve_name  # an import within a method of a map would have no trace of it kept
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from fa4flex.contents import Followed, checked_here
from fa4flex.errors import InputError, StateError
from fa4flex.exact import is_count
from fa4flex.primitives.base import Family, Mod, call_with, kind_of, show, truth_value
from fa4flex.primitives.block_lists import (
    EMPTY,
    FULL,
    PARTIAL,
    Lists,
    block_classes,
    check_index_tensor,
    check_lists,
    checked_tensor,
    listed_by_rows,
    out_of_range,
)
from fa4flex.primitives.block_parts import (
    ascending,
    check_class,
    check_longer,
    grown,
    listed,
    padded,
    part_of,
    unfit,
)
from fa4flex.primitives.mask import CONVERSIONS, Mask, MaskMod, as_mask
from fa4flex.primitives.schedule import Contents
from ptxsim.active import simulating

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class BlockMap:
    """`classes` uint8 [B or 1, H or 1, R, C], each EMPTY, PARTIAL or FULL, for blocks of `block_size`.

    R = ceil(q_len / block_size[0]), C = ceil(kv_len / block_size[1]). B = 1 or H = 1 stands for every
    batch or every query head. Raises InputError for anything else.

    `&`, `|` and `~` combine a map with masks, and give a Mask. `blocks[b, h, rows, columns]` is the map of a
    part: of entries of the batch and heads in any order, and of rows and columns of blocks that follow each
    other, whose lengths it has. An int keeps its dimension; what is left out is whole.
    """

    classes: Tensor
    block_size: tuple[int, int]
    q_len: int
    kv_len: int
    role: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", block_size_of(self.block_size))
        _check_lengths(self.q_len, self.kv_len)
        object.__setattr__(self, "classes", _checked_classes(self))

    # --- constructors ---------------------------------------------------------------------------

    @staticmethod
    def from_counts(
        counts: Tensor,
        indices: Tensor,
        block_size: int | tuple[int, int],
        q_len: int,
        kv_len: int,
        full_counts: Tensor | None = None,
        full_indices: Tensor | None = None,
    ) -> BlockMap:
        """Lists of key blocks per row of query blocks, as torch's BlockMask and FlashAttention hold them.

        counts [B or 1, H or 1, R] and indices [B or 1, H or 1, R, C'] (int32 or int64) list the partial
        blocks, `full_*` the full ones. Only the first `counts` entries of a row are read. Raises
        InputError for counts beyond C', indices out of range, and blocks listed twice. On a GPU invalid
        entries are left out, and a later call raises; with FA4FLEX_VALIDATE=1 this call does.
        """
        size = block_size_of(block_size)
        _check_lengths(q_len, kv_len)
        lists = counts, indices, full_counts, full_indices
        columns = -(-kv_len // size[1])
        compiling = torch.compiler.is_compiling()
        if not compiling:
            check_lists(lists)
        # One node of a compiled graph: to trace what is in it, and make kernels of it, would take seconds.
        if compiling or counts.is_cuda or simulating():
            return trusted_map(torch.ops.fa4flex.block_classes(*lists, columns), size, q_len, kv_len)
        return trusted_map(block_classes(lists, columns), size, q_len, kv_len)

    @staticmethod
    def from_dense(
        classes: Tensor,
        block_size: int | tuple[int, int],
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> BlockMap:
        """From bool (True is PARTIAL: a mask_mod still decides) or uint8 classes.

        classes [R, C], [H, R, C] or [B, H, R, C]; lengths default to whole blocks.
        """
        if not isinstance(classes, Tensor) or classes.dtype not in (torch.bool, torch.uint8):
            raise InputError(
                f"a block map of {kind_of(classes)}",
                "a bool tensor, or uint8 with 0 empty, 1 partial, 2 full",
                "convert it: torch.as_tensor(listed).bool() for listed blocks, .to(torch.uint8) for classes",
            )
        if classes.ndim not in (2, 3, 4):
            raise InputError(
                f"a block map of rank {classes.ndim}, shape {list(classes.shape)}",
                "[R, C], [H, R, C] or [B, H, R, C]",
                "add or drop leading dimensions",
            )
        size = block_size_of(block_size)
        while classes.ndim < 4:
            classes = classes.unsqueeze(0)
        whole = (classes.shape[2] * size[0], classes.shape[3] * size[1])
        q_len, kv_len = whole[0] if q_len is None else q_len, whole[1] if kv_len is None else kv_len
        return BlockMap(classes.to(torch.uint8), size, q_len, kv_len)

    @staticmethod
    def from_lists(
        ids: Any, block_size: int | tuple[int, int], q_len: int | None = None, kv_len: int | None = None
    ) -> BlockMap:
        """From the key blocks that each row of query blocks lists, which become partial blocks.

        ids  an integer tensor [R, entries], [H, R, entries] or [B, H, R, entries] in which ids below 0 list
             nothing, or nested lists of ints; blocks that are listed twice are listed. Lengths default to
             whole blocks, up to the last one that is listed: to know it, the host waits for a device

        Blocks past kv_len raise InputError on a CPU, and list nothing on a device.
        """
        size = block_size_of(block_size)
        rows = ids if isinstance(ids, Tensor) else padded(ids)
        if rows.ndim not in (2, 3, 4):
            raise InputError(
                f"ids of rank {rows.ndim}", "[R, C'], [H, R, C'] or [B, H, R, C']", "unsqueeze it"
            )
        check_index_tensor(rows, rows.ndim, "ids")
        while rows.ndim < 4:
            rows = rows.unsqueeze(0)
        if kv_len is None:
            kv_len = (max(int(rows.max()) if rows.numel() else 0, 0) + 1) * size[1]
        q_len = rows.shape[2] * size[0] if q_len is None else q_len
        _check_lengths(q_len, kv_len)
        columns = -(-kv_len // size[1])
        if not torch.compiler.is_compiling() and checked_here(rows) and bool((rows >= columns).any()):
            raise out_of_range(rows, columns, "ids")
        return trusted_map(listed(rows, None, columns).to(torch.uint8), size, q_len, kv_len)

    @staticmethod
    def from_torch(
        block_mask: BlockMask, contents: Contents = "compared"
    ) -> tuple[BlockMap | None, MaskMod | None]:
        """A torch BlockMask as its map and its mask_mod (None where it has none).

        A map without a mask_mod keeps its meaning: listed blocks are allowed, all others are not. The map is
        None for the BlockMask that torch itself makes where none is given: one block for any length.

        Eager calls reuse the map of a BlockMask on a CPU while its lists are equal; elsewhere it is made
        anew, without waiting for the device. `contents="counted"` reuses it on all devices: see Schedule.
        Raises StateError for a sliced BlockMask that was given no new mask_mod.
        """
        own = own_mask_mod(block_mask)
        if torch.compiler.is_compiling():
            return _map_of(block_mask), own
        lists = lists_of(block_mask)
        tensors, present = [x for x in lists if x is not None], tuple([x is not None for x in lists])
        key = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths), present

        def make() -> BlockMap | None:
            with torch.inference_mode(False):  # what inference makes, no later call could save
                return _map_of(block_mask)

        return _maps.made(key, tensors, make, contents), own

    @staticmethod
    def from_csr(
        row_starts: Tensor,
        columns: Tensor,
        shape: tuple[int, int],
        block_size: int | tuple[int, int],
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> BlockMap:
        """From the CSR pattern of listed (PARTIAL) blocks, one for all batches and heads.

        row_starts [R + 1] (crow_indices, indptr) and columns [entries] (col_indices, indices), int32 or
        int64; shape = (R, C) in blocks; lengths default to whole blocks.
        """
        listed = listed_by_rows(row_starts, columns, shape)
        return BlockMap.from_dense(listed, block_size, q_len, kv_len)

    @staticmethod
    def from_sparse(
        pattern: Tensor,
        block_size: int | tuple[int, int] | None = None,
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> BlockMap:
        """From a sparse_csr tensor [R, C] with an entry per block, or a sparse_bsr tensor [q_len, kv_len].

        A BSR tensor brings its block size; a CSR tensor needs `block_size`. Only the pattern counts:
        a stored zero raises InputError, because it might have been meant as "not allowed".
        """
        if pattern.layout not in (torch.sparse_csr, torch.sparse_bsr) or pattern.ndim != 2:
            raise InputError(
                f"a {pattern.layout} tensor of shape {list(pattern.shape)}",
                "a 2-D sparse_csr or sparse_bsr tensor",
                "convert with .to_sparse_csr() or .to_sparse_bsr(block_size)",
            )
        values = pattern.values()
        if bool((values == 0).any()):
            raise InputError(
                "the sparse tensor stores zeros, and only its pattern is used",
                "non-zero stored values",
                "store ones for the blocks; express what is masked inside a block as a mask_mod",
            )
        if pattern.layout == torch.sparse_bsr:
            own = (values.shape[-2], values.shape[-1])
            if block_size is not None and block_size_of(block_size) != own:
                raise InputError(
                    f"block_size={block_size} for a BSR tensor of {own} blocks",
                    f"{own}",
                    "leave block_size out",
                )
            shape = (pattern.shape[0] // own[0], pattern.shape[1] // own[1])
            return BlockMap.from_csr(pattern.crow_indices(), pattern.col_indices(), shape, own, q_len, kv_len)
        if block_size is None:
            raise InputError(
                "a CSR tensor of blocks without block_size", "tokens per block", "pass block_size=(128, 128)"
            )
        shape = (pattern.shape[0], pattern.shape[1])
        return BlockMap.from_csr(
            pattern.crow_indices(), pattern.col_indices(), shape, block_size, q_len, kv_len
        )

    # --- meaning --------------------------------------------------------------------------------

    def mask(self, inner: Mask | MaskMod | Family[Mask] | None = None) -> Mask:
        """The map as a Mask; `inner` decides inside partial blocks (None: they are allowed)."""
        return BlockedMask(self, None if inner is None else as_mask(inner))

    def packed(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None) -> Mask:
        """The map of all packed tokens, [1, H or 1, R, C], as a mask over each sequence's own indices: for
        calls with Varlen(cu_seqlens_q, cu_seqlens_k). Given as `blocks=`, a map is over each sequence's own
        indices instead."""
        self._check_alone("packed()")
        packed = resolve_name("fa4flex.primitives.ragged_maps:packed")
        return packed(self, cu_seqlens_q, cu_seqlens_k)

    def __and__(self, other: Any) -> Mask:
        return self.mask() & other

    def __rand__(self, other: Any) -> Mask:
        return as_mask(other) & self.mask()

    def __or__(self, other: Any) -> Mask:
        return self.mask() | other

    def __ror__(self, other: Any) -> Mask:
        return as_mask(other) | self.mask()

    def __invert__(self) -> Mask:
        return ~self.mask()

    def __bool__(self) -> bool:
        """Raise TraceError, as masks do."""
        return truth_value(self, Mask.combined_with)

    def fits(self, q_len: int, kv_len: int, batch: int, heads: int) -> None:
        """Raise StateError unless the map was made for these lengths, InputError unless for this batch and
        these query heads, or for classes that are none by now, where the host can tell."""
        self._check_contents()
        if self.q_len != q_len or self.kv_len != kv_len:
            other = self._other_lengths(q_len, kv_len)
            raise StateError(
                f"block_mask was created for q_len={self.q_len}, kv_len={self.kv_len}, "
                f"but got q_len={q_len}, kv_len={kv_len}",
                "the lengths that the map was made for",
                f"build the map for these lengths{other}; a mask without a block map serves any length",
            )
        own_batch, own_heads = self.classes.shape[:2]
        if own_batch not in (1, batch):
            raise unfit("batch", own_batch, batch, f"1 (shared) or {batch}")
        if not self._fits_heads(heads):
            raise unfit("heads", own_heads, heads, self._wanted_heads(heads))

    def _check_contents(self) -> None:
        if not torch.compiler.is_compiling() and checked_here(self.classes) and (self.classes > FULL).any():
            raise _no_class(self.classes)

    def _fits_heads(self, heads: int) -> bool:
        """True if the map is one for so many query heads."""
        return self.classes.shape[1] in (1, heads)

    def _wanted_heads(self, heads: int) -> str:
        """Numbers of heads that `_fits_heads` allows."""
        return f"1 (shared) or {heads}; heads are query heads"

    def _other_lengths(self, q_len: int, kv_len: int) -> str:
        """Advice how a map of these lengths is made of this one, for an error message."""
        if min(q_len, kv_len) < 1:
            return ""
        (rows, columns), shape = self.block_size, self.classes.shape
        if (-(-q_len // rows), -(-kv_len // columns)) == tuple(shape[2:]):
            lengths = f"q_len={q_len}, kv_len={kv_len}"
            return f", or say it of the same blocks: dataclasses.replace(blocks, {lengths})"
        if q_len >= self.q_len and kv_len >= self.kv_len:
            return f", or let it grow: blocks.grown(q_len={q_len}, kv_len={kv_len})"
        return ", or take a part of it: blocks[:, :, rows, columns]"

    @property
    def counts(self) -> dict[str, int]:
        """Number of blocks that are empty, partial and full."""
        counted = torch.bincount(self.classes.flatten().long(), minlength=3).tolist()
        return dict(zip(("empty", "partial", "full"), counted, strict=True))

    @property
    def sparsity(self) -> float:
        """The share of empty blocks, 0 to 1."""
        return self.counts["empty"] / self.classes.numel()

    @property
    def densities(self) -> Tensor:
        """float32 [B or 1, H or 1]: the share of blocks that are not empty, 0 to 1. Waits for no device."""
        return (self.classes != EMPTY).float().mean((2, 3))

    def to(self, device: torch.device | str) -> BlockMap:
        """The same map on another device."""
        return replace(self, classes=self.classes.to(device))

    # --- other maps -----------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> BlockMap:
        lengths = self.q_len, self.kv_len
        classes, (q_len, kv_len), first = part_of(index, self.classes, self.block_size, lengths)
        self._check_part((q_len, kv_len), first)
        return self._of(classes, q_len, kv_len)

    def _of(self, classes: Tensor, q_len: int, kv_len: int) -> BlockMap:
        """A map of its kind with classes that were made of its own: nobody need look at them."""
        return remade(self, classes, q_len, kv_len)

    def _check_part(self, lengths: tuple[int, int], first: tuple[int, int]) -> None:
        """Raise UnsupportedError where the part from `first` of these lengths would mean something else."""

    def _check_alone(self, what: str) -> None:
        """Raise UnsupportedError where more than the classes says what is seen, which `what` would lose."""

    def grown(self, q_len: int | None = None, kv_len: int | None = None, new: str = "partial") -> BlockMap:
        """The map for more queries or keys, as a step of decoding adds them.

        new  class of blocks that there were none of: "partial" (a mask decides), "empty" or "full". The last
             block of a row may have had fewer tokens: it keeps its class
        """
        q_len = check_longer("q_len", self.q_len, self.q_len if q_len is None else q_len)
        kv_len = check_longer("kv_len", self.kv_len, self.kv_len if kv_len is None else kv_len)
        rows, columns = -(-q_len // self.block_size[0]), -(-kv_len // self.block_size[1])
        return self._of(grown(self.classes, rows, columns, check_class(new)), q_len, kv_len)

    def for_query_heads(self, heads: int) -> BlockMap:
        """The map of heads of keys as one of `heads` query heads, where groups of neighbours share it."""
        own = self.classes.shape[1]
        if not is_count(heads) or heads % own:
            raise InputError(
                f"for_query_heads({heads!r}) of a map of {own} heads",
                f"a multiple of {own}",
                "a map of heads of keys serves the query heads that share them",
            )
        return self._of(self.classes.repeat_interleave(heads // own, 1), self.q_len, self.kv_len)

    def to_torch(self, mask: Mask | MaskMod | Family[Mask] | None = None, **context: int) -> BlockMask:
        """The map as torch's BlockMask; `mask` decides in partial blocks (None: they are allowed).

        context  num_heads, for a mask that asks for it; lengths are those of the map

        torch's flex_attention reads blocks only under torch.compile: called eagerly, it applies the mask_mod
        to all pairs, in empty and full blocks as well.
        """
        self._check_alone("to_torch()")
        if unknown := set(context) - {"num_heads"}:
            raise InputError(
                f"to_torch({', '.join(sorted(unknown))}=...)", "num_heads at most", "lengths are the map's"
            )
        (counts, ids), (full_counts, full_ids) = (
            ascending(self.classes == which, self.classes.shape[3]) for which in (PARTIAL, FULL)
        )
        mod = None if mask is None else as_mask(mask).bind(q_len=self.q_len, kv_len=self.kv_len, **context)
        lengths = self.q_len, self.kv_len
        # Torch reads entries behind the counts as blocks: any that there is will do.
        lists = counts, ids.clamp(min=0), full_counts, full_ids.clamp(min=0)
        return BlockMask.from_kv_blocks(*lists, self.block_size, mod, seq_lengths=lengths)

    # --- pictures -------------------------------------------------------------------------------

    def plot(self, b: int = 0, h: int | None = None) -> Figure:
        """A matplotlib Figure of the blocks of query head `h`, or of all heads (16 at most) side by side.
        Needs the extra `plot`."""
        return resolve_name("fa4flex.view.block_map:figure")(self, b, h)

    def _repr_html_(self) -> str:
        return resolve_name("fa4flex.view.block_map:html")(self)

    def __repr__(self) -> str:
        return f"BlockMap({show(self.classes)}, {self.block_size}, {self.q_len}, {self.kv_len})"


@dataclass(frozen=True, eq=False, repr=False)
class BlockedMask(Mask):
    """A block map as a mask, with the mask that decides inside its partial blocks."""

    blocks: BlockMap
    inner: Mask | None
    context: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", () if self.inner is None else self.inner.context)

    @property
    def parts(self) -> tuple[Mod, ...]:
        return () if self.inner is None else (self.inner,)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, **context: Any) -> Any:
        classes, (rows, columns) = self.blocks.classes, self.blocks.block_size
        batch = b if classes.shape[0] != 1 else 0
        head = h if classes.shape[1] > 1 else 0
        result = classes[batch, head, q_idx // rows, kv_idx // columns]
        if self.inner is None:
            return result != EMPTY
        inside = call_with(self.inner, (b, h, q_idx, kv_idx), self.inner.context, context)
        return (result == FULL) | ((result == PARTIAL) & inside)

    def __repr__(self) -> str:
        return f"{self.blocks!r}.mask({'' if self.inner is None else repr(self.inner)})"


def mask_of_blocks(value: Any) -> Mask | None:
    """A BlockMap or a torch BlockMask, with its own mask_mod, as a Mask; None for anything else."""
    if isinstance(value, BlockMask):
        blocks, inner = BlockMap.from_torch(value)
        return as_mask(inner or noop_mask) if blocks is None else blocks.mask(inner)
    return value.mask() if isinstance(value, BlockMap) else None


CONVERSIONS.append(mask_of_blocks)


# --- torch's BlockMask --------------------------------------------------------------------------------

ANY_LENGTH = 1 << 30
"""The block size of a BlockMask that stands for none."""

_maps: Followed[BlockMap | None] = Followed(16, 4)
"""Maps of BlockMasks by block size, lengths and the contents of the lists of their blocks."""


def lists_of(block_mask: BlockMask) -> Lists:
    """Counts and indices of a BlockMask's partial blocks, then of its full ones."""
    partial = block_mask.kv_num_blocks, block_mask.kv_indices
    return *partial, block_mask.full_kv_num_blocks, block_mask.full_kv_indices


def own_mask_mod(block_mask: BlockMask) -> MaskMod | None:
    """The mask_mod of a BlockMask, None where it has none. Raises StateError for a sliced one's."""
    mask_mod: MaskMod | None = block_mask.mask_mod
    if getattr(mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise StateError(
            "Cannot use mask_mod from a sliced BlockMask: slicing replaced it by one that only raises",
            "a BlockMask whose mask_mod fits the slice",
            "reassign it: sliced.mask_mod = original.mask_mod, with b, h, q_idx offset by what was cut",
        )
    return None if mask_mod is noop_mask else mask_mod


def _map_of(block_mask: BlockMask) -> BlockMap | None:
    size, lengths = tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)
    if size == (ANY_LENGTH, ANY_LENGTH) and lengths == (1, 1) and _lists_its_block(block_mask):
        return None
    counts, indices, *full = lists_of(block_mask)
    return BlockMap.from_counts(counts, indices, block_mask.BLOCK_SIZE, *block_mask.seq_lengths, *full)


def _lists_its_block(block_mask: BlockMask) -> bool:
    """True if the one block there is is partial, for all batches and heads."""
    counts, full = block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
    if counts.numel() != 1 or full is not None:
        return False
    return torch.compiler.is_compiling() or bool(counts == 1)


# --- checks -----------------------------------------------------------------------------------------


def block_size_of(size: int | tuple[int, int]) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (tuple, list)) else ()
    if len(pair) != 2 or not all(map(is_count, pair)):
        raise InputError(
            f"block_size={size}", "one or two positive ints (query, key tokens)", "e.g. block_size=128"
        )
    return pair[0], pair[1]


def _check_lengths(q_len: int, kv_len: int) -> None:
    if not (is_count(q_len) and is_count(kv_len)):
        raise InputError(
            f"q_len={q_len}, kv_len={kv_len}", "positive ints", "pass lengths in tokens, not in blocks"
        )


def remade(blocks: BlockMap, classes: Tensor, q_len: int, kv_len: int) -> BlockMap:
    """A map of the kind of `blocks` with classes that were made of its own: nobody need look at them."""
    made: BlockMap = object.__new__(type(blocks))
    others = vars(trusted_map(classes, blocks.block_size, q_len, kv_len))
    for name, value in {**vars(blocks), **others}.items():
        object.__setattr__(made, name, value)
    return made


def trusted_map(classes: Tensor, block_size: tuple[int, int], q_len: int, kv_len: int) -> BlockMap:
    """A BlockMap of classes that were made here: none is above 2, and a graph need not look."""
    _check_shape(classes, block_size, q_len, kv_len)
    made = object.__new__(BlockMap)
    object.__setattr__(made, "classes", classes)
    object.__setattr__(made, "block_size", block_size)
    object.__setattr__(made, "q_len", q_len)
    object.__setattr__(made, "kv_len", kv_len)
    return made


def _checked_classes(blocks: BlockMap) -> Tensor:
    classes = blocks.classes
    if not isinstance(classes, Tensor) or classes.dtype != torch.uint8:
        raise InputError(
            f"classes of {kind_of(classes)}",
            "a uint8 tensor: 0 empty, 1 partial, 2 full",
            "use BlockMap.from_dense for bool maps",
        )
    if classes.ndim != 4:
        raise InputError(
            f"classes of rank {classes.ndim}, shape {list(classes.shape)}",
            "[B or 1, H or 1, R, C]",
            "use BlockMap.from_dense for fewer dimensions",
        )
    _check_shape(classes, blocks.block_size, blocks.q_len, blocks.kv_len)
    checked = checked_tensor(classes, classes <= FULL, "BlockMap: a class above 2")
    if checked is None:
        raise _no_class(classes)
    return checked


def _check_shape(classes: Tensor, block_size: tuple[int, int], q_len: int, kv_len: int) -> None:
    wanted = [-(-q_len // block_size[0]), -(-kv_len // block_size[1])]
    if list(classes.shape[2:]) != wanted:
        raise InputError(
            f"a map of {list(classes.shape[2:])} blocks for q_len={q_len}, kv_len={kv_len} "
            f"in blocks of {block_size}",
            f"{wanted} blocks: ceil(length / block size)",
            "check block_size (query, key) and the lengths in tokens",
        )


def _no_class(classes: Tensor) -> InputError:
    return InputError(
        f"class {int(classes.max())} in the map", "0 empty, 1 partial, 2 full", "map other values to these"
    )
