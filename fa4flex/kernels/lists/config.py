"""Configuration of kernels for listed keys, as far as it is the same for all of them."""

from __future__ import annotations

from fa4flex.kernels.plan.paging import Gathering

ROWS = 64
"""Pairs of a query and a head that a tile has, where no more share a list; twice as many where more do."""

MOST_ENTRIES = 4096
"""Entries of a list, at most: shared memory has a bit for each."""

PLACES = 2 * MOST_ENTRIES
"""Places of the table by which repeated entries are found, at most half of which are taken."""

TABLE = 2 * PLACES
"""Numbers of the table: a place has a unit, and the first entry that lists it."""

WORDS = MOST_ENTRIES // 32
"""Words of the bits of entries."""

MOST_UNITED = 256
"""Entries of the rows of the lists that a tile has, at most, where these are several."""

MOST_LISTS = 32
"""Rows of the lists of a tile, at most: each has a bit of a number."""

UNITED = 4 * MOST_UNITED
"""Numbers of shared memory by which they are united."""


class ListsConfig(Gathering):
    """Fields and properties of a configuration that shared code reads.

    head_dim, head_dim_v    widths of the tiles in shared memory
    tile_n      keys per tile
    kv_stages   tiles of K, and as many of V, in flight
    paged       keys and values lie in pages
    beside      queries see sinks, a window or a tail beside their lists
    share       tiles of keys per split; None: of each list, all splits have as many
    united      rows of the lists whose queries a tile has
    rows        of a tile
    """

    head_dim: int
    head_dim_v: int
    tile_n: int
    kv_stages: int
    paged: bool
    beside: bool
    share: int | None
    united: int

    @property
    def rows(self) -> int:
        raise NotImplementedError

    @property
    def told(self) -> int:
        """Numbers that consumers are told of a key of a tile: which it is, and the rows that list it."""
        return 1 + (self.united > 1)

    @property
    def splits(self) -> bool:
        """True if several blocks may share the keys of a tile."""
        return self.lengths != "packed"

    @property
    def v_stages(self) -> int:
        """Tiles of V in flight."""
        return self.kv_stages

    @property
    def height(self) -> int:
        """Keys of a tile that a warp gathers."""
        return self.tile_n // self.gather_warps
