"""The Hopper pipeline for listed latent rows.

Four warps look at the entries of a list, as those of the kernel for listed keys do. Then they gather blocks
of 64 latent rows into the pieces that the kernel for latent rows has, each with barriers of its own, and tell
of each block which keys it has. What becomes of a block is as there: two warpgroups share an output, half of
its columns each, and have the scores of every other block. A tile of queries is some that share a list, and
up to 64 heads of them; 128 heads are two tiles.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.lists.topology import producer as of_entries
from fa4flex.kernels.mla_decode_sm90.config import BLOCK, BLOCKS, PIECE
from fa4flex.kernels.mla_decode_sm90.topology import KeyEvents, consumers
from fa4flex.kernels.mla_lists_sm90.roles import barrier_table
from fa4flex.kernels.plan.memory import NUMBER
from fa4flex.kernels.plan.topology import Action, Event, Events, Role, Topology


def listed_rows_topology(pieces: int, own: int) -> Topology:
    """pieces: of a block; own: of the output of a warpgroup."""
    table, keys = barrier_table(pieces), KeyEvents(pieces, own)
    ids = [table.ring("ids", NUMBER * BLOCK, unit=block) for block in range(BLOCKS)]
    first, second = consumers(keys)
    return Topology(
        # what a block did is told by the first, in which nothing is left out
        (_listed(first, 0), _listed(second, 1), _producer(keys)),
        (table.ring("k", BLOCK * PIECE * 2), *ids),
        table.named_barriers(),
        "none",
        places=(table.places(),),
        may_end=True,
    )


def _producer(keys: KeyEvents) -> Role:
    actions: tuple[Action, ...] = ("acquire", "fill")
    tile = tuple(
        event
        for block in range(BLOCKS)
        for event in (
            *(Event(action, f"ids {block}") for action in actions),
            *(keys.event(action, block, piece) for piece in range(keys.pieces) for action in actions),
        )
    )
    return replace(of_entries(1), first=tile, body=tile)


def _listed(role: Role, unit: int) -> Role:
    """The role of the kernel for latent rows, to which it is told which keys its blocks have."""
    told: Events = Event("wait", f"ids {unit}"), Event("read", f"ids {unit}")
    until = role.first.index(Event("finish", "S")) + 1
    opening = tuple(replace(x, target="listed") if x.target == "both" else x for x in role.opening)
    tile = *told, *role.first[:until], Event("release", f"ids {unit}"), *role.first[until:]
    return replace(role, opening=opening, first=tile, body=tile)
