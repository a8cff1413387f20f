"""Loaders: the kernels' half of a source of keys, which says where keys lie."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from cutlass import Int32, Int64

from fa4flex.kernels.common.arguments import Arguments


class Wanted(NamedTuple):
    """Keys that are asked for: those of sequence b, which has `length` of them, for head kv_head of keys and
    tile `tile` of queries."""

    b: Int32
    kv_head: Int32
    tile: Int32
    length: Int32


class KeyLoader(Protocol):
    """Finds the keys of one sequence in k and v, [pages, slots, Hkv, D].

    pages    number past the last page
    entry    type of what is read to find a page

    Key j is looked up in two steps, so that no copy waits for what is read: `entry_of` starts the read, and
    `place` makes a page of it some tiles later. Of keys that lie together (Keys.together) the first is.
    """

    pages: Int32
    entry: Any

    @staticmethod
    def capacity(arguments: Arguments) -> Int64:
        """Number of keys that a sequence can have at most."""

    @staticmethod
    def of(arguments: Arguments, wanted: Wanted) -> KeyLoader: ...

    def entry_of(self, key: Int32) -> tuple[Any, Int32]:
        """Entry that is read for the page of a key, and the key's slot in it."""

    def place(self, entry: Any, slot: Int32) -> tuple[Int32, Int32]:
        """Page and slot; `pages` and 0 where there is no such page. Slots may be those of boxes."""
