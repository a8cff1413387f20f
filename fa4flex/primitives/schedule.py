"""Schedule: how the work is divided and ordered. It never changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fa4flex.errors import InputError
from fa4flex.exact import is_count

Order = Literal["auto", "row_major", "longest_first"]
NextTile = Literal["auto", "in_turn", "counter", "launch_control"]
Contents = Literal["compared", "counted"]


@dataclass(frozen=True)
class Schedule:
    """tile           (queries, keys) per tile; None lets the planner choose. A CPU takes any size; GPU
                   pipelines take the sizes that their instructions support, and others raise
    deterministic  True: equal inputs give equal bits, run after run, in gradients too. False permits, and
                   does not demand, sums in any order. CPUs are deterministic either way, and so are forward
                   passes of GPUs, but where a better kernel, compiled in the background, takes over
    order          in which tiles of queries are started: "row_major", "longest_first" (most keys first, for
                   balance between processors) or "auto". It is advice to GPU pipelines; one CPU walks the
                   tiles one after the other, where order changes neither result nor balance. Of ragged
                   batches, "longest_first" sorts the tiles of all sequences, once per set of lengths
    next_tile      how a block of a GPU that is done finds its next tile of queries: "in_turn", at a
                   fixed stride; from a "counter" in global memory, for balance where tiles differ in work; by
                   "launch_control": it cancels a block that has not started and takes over its tile
                   (Blackwell; other GPUs refuse); or "auto". It has no effect on CPUs
    split          keys per part where blocks of a GPU split the keys of a sequence (split-KV), in whole
                   tiles. A sequence's results then have the same bits whatever else is in the batch. None
                   chooses by shapes and lengths, for speed
    sm_margin      multiprocessors of a GPU that are left to kernels of other streams, such as those of a
                   collective: persistent kernels launch as many fewer blocks, and work is split for as many
                   fewer. Kernels with a block per tile are launched alike
    contents       how changes of captured tensors, sequence lengths and block maps are detected between
                   calls: "compared", by comparing their contents, which notices every change; or
                   "counted", by torch's version counter, which costs less and misses writes through
                   `.data`, in numpy's memory, by a replayed CUDA graph or by your own kernel. With
                   "counted" the caller promises that there are none

    Raises InputError for anything else.
    """

    tile: tuple[int, int] | None = None
    deterministic: bool = False
    order: Order = "auto"
    next_tile: NextTile = "auto"
    split: int | None = None
    sm_margin: int = 0
    contents: Contents = "compared"

    def __post_init__(self) -> None:
        if self.tile is not None:
            tile = tuple(self.tile) if isinstance(self.tile, (tuple, list)) else ()
            if len(tile) != 2 or not all(map(is_count, tile)):
                raise InputError(
                    f"tile={self.tile!r}", "two positive ints (queries, keys)", "e.g. tile=(128, 128)"
                )
            object.__setattr__(self, "tile", tile)
        if not isinstance(self.deterministic, bool):
            raise InputError(f"deterministic={self.deterministic!r}", "True or False", "leave it at False")
        if self.split is not None and not is_count(self.split):
            raise InputError(f"split={self.split!r}", "a positive number of keys, or None", "e.g. split=2048")
        if not is_count(self.sm_margin, 0):
            raise InputError(
                f"sm_margin={self.sm_margin!r}", "a number of multiprocessors", "e.g. sm_margin=8"
            )
        if self.sm_margin and self.next_tile == "launch_control":
            raise InputError(
                f'sm_margin={self.sm_margin} and next_tile="launch_control"',
                "one of them: launch control fills all multiprocessors with blocks that wait",
                'use next_tile="counter", which balances as well',
            )
        for name, kind in (("order", Order), ("next_tile", NextTile), ("contents", Contents)):
            value, choices = getattr(self, name), get_args(kind)
            if value not in choices:
                raise InputError(f"{name}={value!r}", f"one of {choices}", f'leave it at "{choices[0]}"')
