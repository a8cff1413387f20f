"""Schedule: how the work is cut and ordered. It never changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fa4flex.errors import InputError

Order = Literal["auto", "row_major", "longest_first"]
NextTile = Literal["auto", "in_turn", "counter", "launch_control"]
Contents = Literal["compared", "counted"]


@dataclass(frozen=True)
class Schedule:
    """tile           (queries, keys) per tile; None lets the planner choose. A CPU honours it exactly; GPU
                   pipelines take the sizes that their instructions have, and the planner refuses others
    deterministic  True: equal inputs give equal bits, run after run, in gradients too. False permits, and
                   does not demand, sums in any order; forward passes and CPUs are deterministic either way
    order          in which tiles of queries are started: "row_major", "longest_first" (most keys first, for
                   balance between processors) or "auto". It is advice to GPU pipelines; one CPU walks the
                   tiles one after the other, where order changes neither result nor balance. Of ragged
                   batches, "longest_first" sorts the tiles of all sequences, once per set of lengths
    next_tile      how a block of a GPU that is done finds its next tile of queries: "in_turn", every
                   so-manieth; from a "counter" in global memory, for balance where tiles differ in work; by
                   "launch_control": it cancels a block that has not started and takes over its tile
                   (Blackwell; other GPUs refuse); or "auto". On CPUs nothing is to be balanced
    split          keys per part, where blocks of a GPU share the keys of a few queries; in whole tiles of
                   keys. A sequence's results then have the same bits whatever else is in the batch. None
                   lets shapes and lengths decide, for speed
    sm_margin      multiprocessors of a GPU that are left to kernels of other streams, such as those of a
                   collective: persistent kernels launch as many fewer blocks, and work is split for as many
                   fewer. Kernels with a block per tile are launched alike
    contents       how the tensors that a mask, lengths and block maps read are recognised between calls,
                   so that what follows from their contents is found again: "compared", with what they
                   held, whoever wrote to them; or "counted", by torch's count of changes in place, which
                   costs less and sees no change that torch does not count: through `.data`, in numpy's
                   memory, of a replayed CUDA graph, of a kernel of one's own. "counted" is then the
                   caller's word that there is none

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
            if len(tile) != 2 or not all(
                isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in tile
            ):
                raise InputError(
                    f"tile={self.tile!r}", "two positive ints (queries, keys)", "e.g. tile=(128, 128)"
                )
            object.__setattr__(self, "tile", tile)
        if not isinstance(self.deterministic, bool):
            raise InputError(f"deterministic={self.deterministic!r}", "True or False", "leave it at False")
        if self.order not in get_args(Order):
            raise InputError(f"order={self.order!r}", f"one of {get_args(Order)}", 'leave it at "auto"')
        if self.split is not None and (
            not isinstance(self.split, int) or isinstance(self.split, bool) or self.split < 1
        ):
            raise InputError(f"split={self.split!r}", "a positive number of keys, or None", "e.g. split=2048")
        if not isinstance(self.sm_margin, int) or isinstance(self.sm_margin, bool) or self.sm_margin < 0:
            raise InputError(
                f"sm_margin={self.sm_margin!r}", "a number of multiprocessors", "e.g. sm_margin=8"
            )
        if self.sm_margin and self.next_tile == "launch_control":
            raise InputError(
                f'sm_margin={self.sm_margin} and next_tile="launch_control"',
                "one of them: launch control fills all multiprocessors with blocks that wait",
                'use next_tile="counter", which balances as well',
            )
        if self.next_tile not in get_args(NextTile):
            given = f"next_tile={self.next_tile!r}"
            raise InputError(given, f"one of {get_args(NextTile)}", 'leave it at "auto"')
        if self.contents not in get_args(Contents):
            given = f"contents={self.contents!r}"
            raise InputError(given, f"one of {get_args(Contents)}", 'leave it at "compared"')
