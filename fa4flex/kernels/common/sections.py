"""Numbers of tiles, taken apart by divisors that the host prepares: another division takes some hundred
clocks, in every role and for every tile."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute, select_
from cutlass.cute import FastDivmodDivisorV2 as Divisor

__all__ = ["Divisor", "Sections", "in_section", "sections_of"]


class Sections(NamedTuple):
    """`width` pairs (head, batch) at a time, of which a section has one tile after the other; of the last,
    number `whole`, the pairs that are `left`."""

    length: Divisor
    width: Divisor
    left: Divisor
    whole: Int32


@cute.jit
def sections_of(tiles: Int32, pairs: Int32, width: Int32) -> Sections:
    left = pairs % width
    left = Int32(select_(left > 0, left, width))
    return Sections(Divisor(tiles * width), Divisor(width), Divisor(left), pairs // width)


@cute.jit
def in_section(number: Int32, sections: Sections) -> tuple[Int32, Int32]:
    """(pair, tile) of a number."""
    section, within = divmod(number, sections.length)
    tile, pair = divmod(within, sections.width)
    if section == sections.whole:
        tile, pair = divmod(within, sections.left)
    return section * sections.width.divisor + pair, tile
