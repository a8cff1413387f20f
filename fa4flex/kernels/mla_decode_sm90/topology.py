"""The Hopper pipeline for few queries over latent rows.

One warp copies blocks of 64 keys by TMA in pieces of 64 columns, each with barriers of its own. Two
warpgroups share one output of 64 rows, half of its columns each, as the registers of one have room for no
more; and each has the scores of every other block. So the probabilities of a block are used twice: by the
warpgroup that has them in registers, and by the other one from shared memory, where they lie over the piece
of their block that holds no values; where there is none, in room of their own. Both use the same maxima,
which the first warpgroup raises by its block and hands on, and the second one hands back with its block in
them.

This is FlashMLA's schedule ("seesaw", FlashMLA 2025), with a producer of its own: one warpgroup's products
run under the other one's softmax.
"""

from __future__ import annotations

from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE
from fa4flex.kernels.mla_decode_sm90.roles import barrier_table
from fa4flex.kernels.plan.topology import WARPGROUP, Action, Event, Events, Product, Role, Topology


def latent_topology(pieces: int, own: int, clears: bool, box_rows: int = BLOCK) -> Topology:
    """pieces: of a block; own: of the output of a warpgroup; `clears`: sequences may end before their tensor
    does; box_rows: keys of a copy."""
    table, keys = barrier_table(pieces, clears), KeyEvents(pieces, own)
    first, second = consumers(keys, clears)
    size, box = (rows * PIECE * 2 for rows in (BLOCK, box_rows))
    return Topology(
        (_producer(keys), first, second),
        (table.ring("k", size, (box,) * (size // box)),),
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


class KeyEvents:
    """Events of pieces of a tile of keys."""

    def __init__(self, pieces: int, own: int) -> None:
        self.pieces, self.own = pieces, own

    def event(self, action: Action, block: int, piece: int) -> Event:
        return Event(action, "k", block * self.pieces + piece, each=BLOCKS * self.pieces)

    def all(self, action: Action, block: int, pieces: range | None = None) -> Events:
        """An event of each piece of a block, or of some."""
        pieces = range(self.pieces) if pieces is None else pieces
        return tuple(self.event(action, block, piece) for piece in pieces)

    def values(self, unit: int) -> range:
        """Pieces of the columns that a warpgroup has of the output."""
        return range(unit * self.own, (unit + 1) * self.own)

    def spare(self, action: Action, block: int) -> Events:
        """The event of the piece where probabilities of a block lie; where all pieces are values they have
        memory of their own, which nobody hands over."""
        if self.pieces > BLOCKS * self.own:
            return (self.event(action, block, BLOCKS * self.own),)
        return (Event(action, f"P of {block}"),) if action in ("read", "write") else ()


def consumers(keys: KeyEvents, clears: bool = False) -> tuple[Role, Role]:
    """The two warpgroups that multiply."""
    return _first(keys, clears), _second(keys, clears)


def _producer(keys: KeyEvents) -> Role:
    tile = tuple(
        keys.event(action, block, piece)
        for block in range(BLOCKS)
        for piece in range(keys.pieces)
        for action in ("acquire", "load")
    )
    return Role("producer", 1, (), tile, tile)


def _scores(keys: KeyEvents, unit: int, clears: bool) -> Events:
    """Scores of a block. Where a sequence ends, values past it are cleared once all warps have scores."""
    meet = Event("sync", f"cleared {unit}", maybe=True)
    return *keys.all("wait", unit), Event("issue", "S"), Event("finish", "S"), *(meet, meet) * clears


def _first(keys: KeyEvents, clears: bool) -> Role:
    mine, others = keys.values(0), keys.values(1)
    tile = (
        *_scores(keys, 0, clears),
        *keys.all("release", 0, others),
        *(Event("softmax", "S of 0"), Event("write", "maxima of 0"), Event("give", "maxima")),
        Event("issue", "O"),
        *(Event("take", "second"), Event("read", "maxima of 1")),
        *(*keys.spare("write", 0), Event("give", "first"), *keys.spare("release", 0)),
        *(Event("finish", "O"), *keys.all("release", 0, mine)),
        *(*keys.all("wait", 1), *keys.all("release", 1, others)),
        *(Event("issue", "other O"), Event("finish", "other O")),
        *(*keys.all("release", 1, mine), *keys.spare("release", 1)),
    )
    opening = Event("write", "q", per="block"), Event("sync", "both")
    return _consumer(keys, 0, opening, tile)


def _second(keys: KeyEvents, clears: bool) -> Role:
    mine, others = keys.values(1), keys.values(0)
    tile = (
        *_scores(keys, 1, clears),
        *keys.all("release", 1, others),
        *(Event("take", "maxima"), Event("read", "maxima of 0")),
        *(Event("softmax", "S of 1"), Event("write", "maxima of 1"), *keys.spare("write", 1)),
        *(Event("give", "second"), *keys.spare("release", 1), Event("issue", "O")),
        *(*keys.all("wait", 0), *keys.all("release", 0, others)),
        *(Event("take", "first"), Event("finish", "O"), *keys.all("release", 1, mine)),
        *(Event("issue", "other O"), Event("finish", "other O")),
        *(*keys.all("release", 0, mine), *keys.spare("release", 0)),
    )
    return _consumer(keys, 1, (Event("sync", "both"),), tile)


def _consumer(keys: KeyEvents, unit: int, opening: Events, tile: Events) -> Role:
    other = 1 - unit
    sums = Event("write", f"sums of {unit}", per="block"), Event("sync", "both")
    own, others = (
        tuple(keys.event("read", block, piece) for piece in keys.values(unit)) for block in (unit, other)
    )
    return Role(
        f"consumer {unit}",
        WARPGROUP,
        opening=opening,
        first=tile,
        body=tile,
        last=(Event("read", f"O of {unit}", 1, each=2),),
        closing=(*sums, Event("read", f"sums of {other}", per="block")),
        products=(
            Product(
                "S",
                (Event("read", "q", per="block"), *keys.all("read", unit)),
                Event("write", f"S of {unit}"),
            ),
            Product("O", own, Event("update", f"O of {unit}", 0, each=2), fresh=True),
            Product(
                "other O",
                (*keys.spare("read", other), *others),
                Event("update", f"O of {unit}", 1, each=2),
            ),
        ),
        warp=WARPGROUP * (unit + 1),
    )
