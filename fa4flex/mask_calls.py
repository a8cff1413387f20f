"""Calls of flex_attention with a BlockMask on a GPU: what they have in common is kept with the BlockMask.

Each call makes the classes of blocks anew of what the lists hold then, by one launch. They stand in memory
that is kept for the stream, so that the next call looks like this one. A call whose results carry gradients
keeps its own: lists may change before the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fa4flex import calls
from fa4flex.codegen.build import code_key
from fa4flex.contents import validating
from fa4flex.primitives.block_lists import check_lists
from fa4flex.primitives.blocks import ANY_LENGTH, BlockMap, block_size_of, lists_of, own_mask_mod, trusted_map
from fa4flex.primitives.mask import as_mask
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime import launch
from fa4flex.runtime.block_lists import by_kernel
from fa4flex.runtime.call import Results, Statistics
from fa4flex.runtime.cuda.block_lists import kernel_of
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.counters import capture_of
from fa4flex.variant import Variant, compose
from ptxsim import active as simulated

QKV = tuple[Tensor, Tensor, Tensor]

NAME = "_fa4flex_calls"
"""Attribute of a BlockMask with what is kept of its calls."""

MOST_KEPT = 8
"""Kinds of score mods, and streams, of one BlockMask."""


class Options(NamedTuple):
    """Arguments of flex_attention besides tensors and the BlockMask."""

    score_mod: Callable[..., Any] | None
    scale: float | None
    schedule: Schedule
    precision: Precision

    def variant(self, mask: Any, blocks: BlockMap | None = None) -> Variant:
        score_mod, scale, schedule, precision = self
        return compose(score_mod, mask, blocks=blocks, scale=scale, schedule=schedule, precision=precision)

    def same(self, other: Options) -> bool:
        """True if these are the very options, or equal numbers other than 0, which has a sign."""
        scale, known = self.scale, other.scale
        return (
            self.score_mod is other.score_mod
            and (scale is known or (type(scale) is float and scale == known and scale != 0))
            and (self.schedule is other.schedule or self.schedule == other.schedule)
            and (self.precision is other.precision or self.precision == other.precision)
        )


def with_block_mask(
    qkv: QKV, block_mask: BlockMask, options: Options, statistics: Statistics
) -> Results | None:
    """The results of a call whose classes a kernel makes; None for others."""
    if launch.observed(*qkv):
        return None
    kept: MaskCalls | None = vars(block_mask).get(NAME)
    if kept is None or not kept.holds(block_mask):
        kept = MaskCalls.of(block_mask)
        if kept is None:
            return None
        vars(block_mask)[NAME] = kept
    return kept(qkv, options, statistics)


class MaskCalls:
    """Calls with one BlockMask, as long as it has these lists, lengths and mask_mod.

    blocks    maps whose memory nobody uses, by stream: a call takes one, and gives it back
    callers   what calls with score mods of one code have in common, by that and settings
    last      options, map, variant and caller of the last call
    """

    __slots__ = ("blocks", "callers", "columns", "gpu", "last", "launch", "lengths", "lists", "mask",
                 "mask_mod", "own_size", "size")  # fmt: skip

    def __init__(self, block_mask: BlockMask) -> None:
        self.lists = lists_of(block_mask)
        self.own_size, self.lengths = block_mask.BLOCK_SIZE, block_mask.seq_lengths
        self.mask_mod, self.gpu = block_mask.mask_mod, simulated.gpu()
        check_lists(self.lists)
        own, self.size = own_mask_mod(block_mask), block_size_of(self.own_size)
        self.mask = None if own is None else as_mask(own)
        self.columns = -(-self.lengths[1] // self.size[1])
        self.launch = kernel_of(self.lists).launch
        self.blocks: dict[tuple[int, int], BlockMap] = {}
        self.callers: dict[Any, launch.Caller] = {}
        self.last: tuple[Options, BlockMap, Variant, launch.Caller] | None = None

    @staticmethod
    def of(block_mask: BlockMask) -> MaskCalls | None:
        """None for lists that no kernel reads, or that are empty, and for a BlockMask that stands for none.
        Raises InputError or StateError for what does not fit."""
        lists = lists_of(block_mask)
        plain = all(x is None or type(x) is Tensor for x in lists)
        if not plain or not lists[0].numel() or not by_kernel(lists[0]):
            return None
        return None if ANY_LENGTH in block_size_of(block_mask.BLOCK_SIZE) else MaskCalls(block_mask)

    def __reduce__(self) -> Any:
        return type(None), ()  # copies and files of a BlockMask are without it

    def holds(self, block_mask: BlockMask) -> bool:
        """True if calls with this BlockMask are those."""
        return bool(
            all(map(is_, lists_of(block_mask), self.lists))
            and block_mask.mask_mod is self.mask_mod
            and self.own_size == block_mask.BLOCK_SIZE
            and block_mask.seq_lengths == self.lengths
            and simulated.gpu() == self.gpu
            and not validating()
        )

    def __call__(self, qkv: QKV, options: Options, statistics: Statistics) -> Results:
        place = capture_of(qkv[0])
        keeps = place is not None and not place[1]
        blocks = self.blocks.pop(place, None) if keeps else None  # type: ignore[arg-type]
        if blocks is None:
            blocks = self._new_map()
        self.launch(*self.lists, blocks.classes, faults.table())
        last = self.last
        if last is not None and last[1] is blocks and options.same(last[0]):
            _, _, variant, caller = last
        else:
            variant, caller = options.variant(self.mask, blocks), self._caller(options)
            self.last = options, blocks, variant, caller
        results = calls.run(variant, caller, qkv, None, None, statistics)
        if keeps and not results[0].requires_grad:
            if len(self.blocks) == MOST_KEPT:
                self.blocks.clear()
            self.blocks[place] = blocks  # type: ignore[index]
        return results

    def _new_map(self) -> BlockMap:
        counts = self.lists[0]
        with torch.inference_mode(False):  # what inference makes, no later call could save
            classes = counts.new_empty((*counts.shape, self.columns), dtype=torch.uint8)
        return trusted_map(classes, self.size, *self.lengths)

    def _caller(self, options: Options) -> launch.Caller:
        key = code_key(options.score_mod), options.schedule, options.precision
        result = self.callers.get(key)
        if result is None:
            if len(self.callers) == MOST_KEPT:
                self.callers.clear()
            result = self.callers[key] = launch.Caller()
        return result
