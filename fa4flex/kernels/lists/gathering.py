"""Kernels that gather listed keys, whatever their consumers make of these."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from fa4flex.kernels.common.barriers import Pipes, sync
from fa4flex.kernels.common.key_lengths import check_length
from fa4flex.kernels.lists.config import ListsConfig
from fa4flex.kernels.lists.entries import Entries, United
from fa4flex.kernels.lists.producer import Producer
from fa4flex.kernels.lists.tiles import ListTile, Part, Walk, walk_of, with_run
from fa4flex.kernels.plan.barriers import NamedRow


class Gathering:
    """A kernel whose producer warps bring the keys that a list names."""

    config: ListsConfig
    producer: Producer
    listed: NamedRow
    """Barrier behind which all warps know which entries count."""

    def gather(
        self,
        arguments: Any,
        part: Part,
        tile: ListTile,
        entries: Entries | United,
        handed: tuple[Any, Pipes],
        thread: Int32,
    ) -> None:
        """The gathering warps: which entries count, and the keys that they list. handed: shared memory and
        pipes; thread: number among theirs."""
        shared, pipes = handed
        if self.config.paged:
            check_length(arguments, tile.b)
        entries.look(shared, thread)
        sync(self.listed)
        tile, walk = self.keys(arguments, part, tile, entries, shared)
        self.producer.run(arguments, tile, walk, entries, shared, pipes)

    def keys(
        self, arguments: Any, part: Part, tile: ListTile, entries: Entries | United, shared: Any
    ) -> tuple[ListTile, Walk]:
        """The tile with its part of the keys, once it is known which entries count."""
        walk = walk_of(entries.found(shared), tile, arguments, self.config)
        return with_run(tile, walk, part, self.config), walk
