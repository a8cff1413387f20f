"""The pipeline of tiles of few rows: the rings of the forward kernel, with other events.

The producer hands the room of the queries over, and consumers copy these themselves, as no tensor map
describes pairs of a query and a head. Both have all rows, and read their half of every stage. In the end the
second's sums go over the queries to the first.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.fwd_sm90.topology import clearing, values
from fa4flex.kernels.mixed_sm90.config import GROUPS, HANDED, NOTED
from fa4flex.kernels.mixed_sm90.roles import BOTH
from fa4flex.kernels.plan.memory import NUMBER
from fa4flex.kernels.plan.topology import (
    RECEIVE,
    WARPGROUP,
    Action,
    Event,
    Events,
    Product,
    Ring,
    Role,
    Topology,
)


def handing(topology: Topology) -> Topology:
    """The pipeline in which the first tile is handed over as well, and all that is known of each."""
    rings = tuple(
        replace(r, stage_bytes=NUMBER * (HANDED + NOTED)) if r.name == "next" else r for r in topology.rings
    )
    return replace(topology, roles=tuple(_begun(role) for role in topology.roles), rings=rings)


def _begun(role: Role) -> Role:
    def shifted(part: Events) -> Events:
        return tuple(replace(event, tile=event.tile + (event.target == "next")) for event in part)

    first = tuple(event for event in role.last if event.target == "next")
    opening = role.opening + first
    return replace(role, opening=opening, last=shifted(role.last), empty=shifted(role.empty))


def few_topology(forward: Topology) -> Topology:
    """The pipeline beside `forward`, whose rings, places and barriers of a consumer's warps it takes."""
    rows = tuple(barrier for barrier in forward.barriers if barrier.name.startswith("rows"))
    return Topology(
        (*_producers(forward), *(_consumer(i) for i in range(GROUPS))),
        tuple(_handed(ring) for ring in forward.rings),
        (*rows, *BOTH.barriers(0)),
        "none",
        overlaps=tuple((f"q {i}", "sums") for i in range(GROUPS)),
        by_warp=forward.by_warp,
        places=forward.places,
    )


def _handed(ring: Ring) -> Ring:
    """Queries come by no copy."""
    if not ring.name.startswith("q "):
        return ring
    return Ring(ring.name, ring.stages, ring.stage_bytes, (), 0, ring.empty_arrivals)


def _producers(forward: Topology) -> tuple[Role, ...]:
    """Producers, as many as there are for tiles of many rows."""
    count, gathering = len(forward.roles) - GROUPS, bool(forward.by_warp)
    bring: tuple[Action, Action] = ("acquire", "fill" if gathering else "load")
    keys, values = (tuple(Event(action, ring) for action in bring) for ring in ("k", "v"))
    room = tuple(Event(action, f"q {i}", per="work") for i in range(GROUPS) for action in ("acquire", "fill"))
    following = Event("acquire", "next", per="work"), Event("fill", "next", per="work")
    if count == 1:
        both = keys + values
        return (Role("producer", 1, (), both + room, both, following, empty=room + following),)
    received = tuple(Event(action, "next", per="work") for action in RECEIVE)
    if gathering:
        both = keys + values
        return (
            Role("producer", 1, (), both + room, both, following, empty=room + following, apart=True),
            replace(forward.roles[1], first=both, body=both, last=received, empty=received),
        )
    return (
        Role("producer", 1, (), keys + room, keys, following, empty=room + following),
        Role("producer of values", 1, (), values, values, received, empty=received, warp=1),
    )


def _consumer(i: int) -> Role:
    queries = f"q {i}"
    # What the producer has filled the room with is nothing.
    taken: tuple[Action, ...] = ("wait", "read", "write")
    begin = *(Event(action, queries, per="work") for action in taken), Event("sync", f"rows {i}")
    product = Event("wait", "k"), Event("issue", "S")
    softmax = Event("finish", "S"), Event("release", "k"), Event("softmax", f"S of {i}")
    (start, finish), (start_before, finish_before), clear = values(True), values(True, -1), clearing(i)
    sums: Events = (Event("write" if i else "read", "sums", per="work"),)
    meet: Events = (Event("sync", "both"),)
    hand = meet + sums + meet if i else 2 * meet + sums
    received = tuple(Event(action, "next", per="work") for action in RECEIVE)
    end = *hand, *meet, Event("release", queries, per="work"), *received
    return Role(
        f"consumer {i}",
        WARPGROUP,
        first=(*begin, *product, *softmax, *clear),
        body=(*product, *start_before, *softmax, *finish_before, *clear),
        last=(*start, *finish, Event("read", f"O of {i}"), *end),
        empty=(*begin, Event("read", queries, per="work"), *end),  # unused: there are no keys
        products=(
            Product(
                "S", (Event("read", queries, per="work"), Event("read", "k")), Event("write", f"S of {i}")
            ),
            Product("O", (Event("read", "v"),), Event("update", f"O of {i}"), fresh=True),
        ),
        warp=WARPGROUP * (i + 1),
    )
