"""Kernels that gather listed keys, whatever their consumers make of these."""

from __future__ import annotations

from typing import Any

from fa4flex.kernels.lists.config import ListsConfig
from fa4flex.kernels.lists.entries import Entries, United
from fa4flex.kernels.lists.tiles import ListTile, Part, Walk, walk_of, with_run


class Gathering:
    """A kernel whose producer warps bring the keys that a list names."""

    config: ListsConfig

    def keys(
        self, arguments: Any, part: Part, tile: ListTile, entries: Entries | United, shared: Any
    ) -> tuple[ListTile, Walk]:
        """The tile with its part of the keys, once it is known which entries count."""
        walk = walk_of(entries.found(shared), tile, arguments, self.config)
        return with_run(tile, walk, part, self.config), walk
