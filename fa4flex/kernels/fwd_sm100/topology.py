"""The Blackwell forward pipeline, with the barriers and counts of the kernel (kernels/fwd_sm100/roles.py).

One warp issues all products and the tensor core executes them in that order (FlashAttention-4, arXiv
2603.05451, section 3.1). By query tile i and key tile j:

    S_0(0) S_1(0)   O_0(0) S_0(1) O_1(0) S_1(1)   O_0(1) S_0(2) O_1(1) S_1(2)   ...

What is not there, and why the simulation finds nothing missing:

no s_empty        S_i(j + 1) comes after O_i(j), which waited until probabilities had been made of all of
                  S_i(j), and has read them: they lie over the scores.
no scale_empty    scales for j + 1 are written after S_i(j + 1), so after O_i(j), which waited until the
                  correction warps had read those for j.
no o_empty        the correction warps arrive at p_early for the next tile of queries when they have read an
                  output; once at the start, when there is none.
one `next` slot   its empty barrier counts every warp that reads it, so nobody can be two numbers behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from fa4flex.kernels.fwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.fwd_sm100.roles import (
    ALLOCATED,
    BARRIERS,
    CORRECTION,
    FINISHED,
    LOAD,
    MULTIPLY,
    SCHEDULE,
    STORE,
    TOUCH_TENSOR_MEMORY,
    answer_readers,
    readers,
)
from fa4flex.kernels.fwd_sm100.tiles import Tiles
from fa4flex.kernels.plan.memory import ANSWER, NUMBER, column_block, tile_bytes
from fa4flex.kernels.plan.signals import stage_barriers
from fa4flex.kernels.plan.tensor_memory import WHOLE, Columns
from fa4flex.kernels.plan.topology import (
    RECEIVE,
    WARP,
    WARPGROUP,
    Barrier,
    Event,
    Events,
    NamedBarrier,
    Product,
    Ring,
    Role,
    Topology,
)

CORE = "the tensor core"
STEPS = 3
"""Contents that an output has per key tile: rescaled, and after the product with either part of the
probabilities."""

MEANINGS = {
    "s_full": "scores are there, and all earlier products are done",
    "p_early": "the first probabilities are there and the output may be added to",
    "p_late": "the other probabilities are there",
    "o_full": "the output is complete",
    "scale_full": "what the output is to be multiplied by before the next product",
}


Handed = Literal["", "number", "answer"]
"""Source of the next tile: none, where blocks take tiles in turn; a number that a warp takes from a counter;
or the hardware's answer, for which a warp asks."""


def forward_topology(
    tiles: Tiles, columns: Columns, handed: Handed, ragged: bool, box_rows: int = 0
) -> Topology:
    """The pipeline of a CTA of a forward kernel. `ragged`: sequences end within tiles, so that what values
    follow their ends is cleared. Tiles of K and V are brought `box_rows` keys at a time, if given."""
    n, staged = tiles.q_tiles, tiles.out_stages > 0
    workers = [_load(n), _multiply(n, ragged), *(_softmax(i) for i in range(n)), _correction(tiles)]
    if staged:
        workers.append(_store(tiles))
    if handed:
        workers = [_receiving(role) for role in workers]
        workers.append(_scheduler(handed))
    if n == 1:
        workers.append(
            Role("idle", WARPGROUP, opening=(Event("sync", "allocated"),), apart=True, warp=WARPGROUP)
        )
    return Topology(
        roles=tuple(workers),
        rings=tuple(_rings(tiles, handed, box_rows)),
        barriers=(
            NamedBarrier("allocated", ALLOCATED, TOUCH_TENSOR_MEMORY),
            NamedBarrier("finished", FINISHED, WARP * WARPGROUP),
        ),
        staging="own" if staged else "none",
        mbarriers=tuple(
            Barrier(f"{name} {i}", BARRIERS[name][1], meaning, BARRIERS[name][0] == "warp")
            for name, meaning in MEANINGS.items()
            for i in range(n)
        ),
        overlaps=columns.overlaps,
        by_warp=(
            *columns.names,
            *(f"{name} {i}" for name in ("scales", "finals") for i in range(n)),
            "out",
        ),
        places=(_places(tiles, handed),),
    )


def _places(tiles: Tiles, handed: Handed) -> tuple[str, ...]:
    """Mbarriers in the order of the kernel's storage."""
    n = tiles.q_tiles
    rings = {"q": "q", "final": "finals", "out": "out", "next": "next"}
    found: list[str] = []
    for barrier, (per, _) in BARRIERS.items():
        name, _, side = barrier.rpartition("_")
        name, side = (rings[name], f" {side}") if name in rings else (barrier, "")
        if per == "tile":
            found += [f"{name} {i}{side}" for i in range(n)]
        elif per == "warp":
            found += [f"{name} {i}{side} of warp {w}" for i in range(n) for w in range(WARPGROUP)]
        elif per == "stage":
            staged = stage_barriers(name, tiles.out_stages, (side.strip(),))
            found += staged if tiles.out_stages else [""]
        else:
            found.append(f"{name}{side}" if handed else "")
    for name, stages in zip(("k", "v"), tiles.kv_stages, strict=True):
        found += stage_barriers(name, stages)
    return tuple(found)


def _rings(tiles: Tiles, handed: Handed, box_rows: int) -> Iterator[Ring]:
    """Stages, bytes, and the kernel's counts of arrivals. A TMA box holds a block of columns of all rows, or
    of `box_rows`."""
    n = tiles.q_tiles

    def ring(name: str, counts: str, stages: int, rows: int, width: int, together: int = 0) -> Ring:
        together = together or rows
        box = tile_bytes(together, column_block(width), tiles.itemsize)
        boxes = (box,) * (width // column_block(width) * (rows // together))
        full, empty = (BARRIERS[f"{counts}_{side}"][1] if counts else 1 for side in ("full", "empty"))
        return Ring(name, stages, sum(boxes), boxes, sum(boxes), empty, full)

    for i in range(n):
        yield ring(f"q {i}", "q", 1, ROWS, tiles.head_dim)
    # Of a pair of CTAs, each holds half of the keys of a tile of K, and half of the columns of V.
    yield ring("k", "", tiles.kv_stages[0], tiles.tile_n // tiles.ctas, tiles.head_dim, box_rows)
    yield ring("v", "", tiles.kv_stages[1], tiles.tile_n, tiles.head_dim_v // tiles.ctas, box_rows)
    if tiles.out_stages:
        full, empty = (BARRIERS[f"out_{side}"][1] for side in ("full", "empty"))
        chunk = tile_bytes(ROWS, tiles.out_columns, tiles.out_itemsize)
        yield Ring("out", tiles.out_stages, chunk, (), 0, empty, full)
    for i in range(n):
        full, empty = (BARRIERS[f"final_{side}"][1] for side in ("full", "empty"))
        yield Ring(f"finals {i}", 1, 4 * ROWS, (), 0, empty, full, per_warp=True)
    if handed == "number":
        yield Ring("next", 1, NUMBER, (), 0, readers(n, tiles.out_stages), BARRIERS["next_full"][1])
    if handed == "answer":
        count = answer_readers(n, tiles.out_stages)
        yield Ring("next", 1, ANSWER, (ANSWER,), ANSWER, count, BARRIERS["next_full"][1])


def _work(action: str, target: str, tile: int = 0, **more: bool) -> Event:
    """Once per tile of queries."""
    return Event(action, target, tile, "work", **more)  # type: ignore[arg-type]


def _scheduler(handed: Handed) -> Role:
    """It asks once all have read the last answer, and reads the answer like all others."""
    if handed == "number":
        return Role("scheduler", 1, first=(_work("acquire", "next"), _work("fill", "next")), warp=SCHEDULE)
    asked = (_work("acquire", "next"), _work("load", "next"))
    received = tuple(_work(action, "next") for action in RECEIVE)
    return Role("scheduler", 1, first=(*asked, *received), warp=SCHEDULE)


def _receiving(role: Role) -> Role:
    """The warp that multiplies asks at the start of a tile of queries, as its last products come between the
    first of the next one; all others when they are done with theirs."""
    received = tuple(_work(action, "next") for action in RECEIVE)
    if role.name == "multiply":
        return replace(role, first=received + role.first)
    return replace(role, last=role.last + received)


def _load(n: int) -> Role:
    """In the order in which they are multiplied: values of a tile before keys of the next."""

    def copy(name: str, tile: int = 0) -> Events:
        return Event("acquire", name, tile), Event("load", name, tile)

    queries = [(_work("acquire", f"q {i}"), _work("load", f"q {i}")) for i in range(n)]
    rest = tuple(event for events in queries[1:] for event in events)
    return Role(
        "load",
        1,
        first=(*queries[0], *copy("k"), *rest),
        body=(*copy("v", -1), *copy("k")),
        last=copy("v"),
        warp=LOAD,
    )


# --- products ------------------------------------------------------------------------------------------


def _multiply(n: int, ragged: bool) -> Role:
    """The first scores of the next tile of queries come between the last outputs of the one at hand: they are
    left out where there is none."""

    def step(at: int, ahead: bool) -> Events:
        """O(at - 1), S(at) of each query tile, where `at` counts from the key tile at hand."""
        events = [Event("wait", "v", at - 1)]
        if ragged:
            events.append(Event("clear", "v", at - 1))
        for i in range(n):
            events += _values(i, at - 1)
            if ahead:
                events.append(_work("commit", f"o_full {i}"))
            if i == n - 1:
                events.append(Event("commit", "v", at - 1))
            if i == 0:
                events.append(Event("wait", "k", at, ahead=ahead))
            if ahead:
                events.append(_work("wait", f"q {i}", 1, ahead=True))
            events += _scores(i, at, int(ahead), ahead)
        return *events, Event("commit", "k", at, ahead=ahead)

    first = [
        event for i in range(n) for event in (_work("wait", f"q {i}", ahead=True), *_scores(i, 0, 0, True))
    ]
    wait, free = Event("wait", "k", ahead=True), Event("commit", "k", ahead=True)
    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"), wait, *first, free),
        body=step(0, ahead=False),
        last=step(1, ahead=True),
        products=tuple(product for i in range(n) for product in _products(i)),
        warp=MULTIPLY,
    )


def _products(i: int) -> tuple[Product, ...]:
    """S = q k', and O += P v in two parts: the first begins while the last probabilities are made."""
    queries, keys, values = _work("read", f"q {i}"), Event("read", "k"), Event("read", "v")

    def add(part: str, step: int) -> Product:
        operands = Event("read", f"P {i} {part}"), values
        result = Event("update", f"O {i}", step, each=STEPS)
        return Product(f"O {i} {part}", operands, result, fresh=part == "early", engine=CORE)

    scores = Product(f"S {i}", (queries, keys), Event("write", f"S {i}"), engine=CORE)
    return scores, add("early", 1), add("late", 2)


def _scores(i: int, at: int, work: int, ahead: bool) -> Events:
    """The last ones of a row free its queries."""
    return (
        Event("issue", f"S {i}", at, ahead=ahead),
        Event("commit", f"s_full {i}", at, ahead=ahead),
        Event("commit", f"q {i}", work, "work", ahead=ahead, ending=at),
    )


def _values(i: int, at: int) -> Events:
    parts = ("early", "late")
    return tuple(
        event
        for part in parts
        for event in (Event("await", f"p_{part} {i}", at), Event("issue", f"O {i} {part}", at))
    )


# --- softmax, correction and stores ----------------------------------------------------------------------


def _softmax(i: int) -> Role:
    """A row per thread, so that no warp needs another's numbers."""
    take = Event("await", f"s_full {i}"), Event("read", f"S {i}")
    scale = Event("write", f"scales {i}", per="later"), Event("arrive", f"scale_full {i}", per="later")
    give = tuple(
        event
        for part in ("early", "late")
        for event in (Event("write", f"P {i} {part}"), Event("arrive", f"p_{part} {i}"))
    )
    return Role(
        f"softmax {i}",
        WARPGROUP,
        opening=(Event("sync", "allocated"),),
        first=take + give,
        body=take + scale + give,
        last=(_work("acquire", f"finals {i}"), _work("fill", f"finals {i}")),
        apart=True,
        warp=WARPGROUP * i,
    )


def _correction(tiles: Tiles) -> Role:
    """Arrives at p_early for the first products, too: there is no output yet that they could spoil."""
    n = tiles.q_tiles
    body = [event for i in range(n) for event in _rescale(i)]
    last = [event for i in range(n) for event in _finish(i, tiles)]
    return Role(
        "correction",
        WARPGROUP,
        opening=(
            Event("allocate", WHOLE),
            Event("sync", "allocated"),
            *(Event("arrive", f"p_early {i}") for i in range(n)),
        ),
        body=tuple(body),
        last=tuple(last),
        closing=(Event("sync", "finished"), Event("free", WHOLE)),
        apart=True,
        warp=CORRECTION,
    )


def _rescale(i: int) -> Events:
    return (
        Event("await", f"scale_full {i}", per="later"),
        Event("read", f"scales {i}", per="later"),
        Event("update", f"O {i}", each=STEPS),
        Event("arrive", f"p_early {i}"),
    )


def _finish(i: int, tiles: Tiles) -> Events:
    """The output leaves by chunks of columns, by way of shared memory where it is staged. The next product
    may begin when the last of them is in registers."""
    final = _work("wait", f"finals {i}"), _work("read", f"finals {i}"), _work("release", f"finals {i}")
    read, done = Event("read", f"O {i}", STEPS - 1, each=STEPS), Event("arrive", f"p_early {i}", 1)
    if not tiles.out_stages:
        return *final, _work("await", f"o_full {i}"), read, done
    events: list[Event] = [*final, _work("await", f"o_full {i}")]
    chunks, wide = (
        tiles.head_dim_v // tiles.out_columns,
        tiles.out_columns > FRAGMENT,
    )
    for chunk in range(chunks):
        acquire, fill = (_chunk(action, i, chunk, tiles) for action in ("acquire", "fill"))
        before = (read, acquire, read) if wide else (read,)
        end = (done,) if chunk == chunks - 1 else ()
        events += (*before, *end, *(() if wide else (acquire,)), fill)
    return tuple(events)


def _chunk(action: str, i: int, chunk: int, tiles: Tiles) -> Event:
    """Chunks of all query tiles go through one ring."""
    each = tiles.head_dim_v // tiles.out_columns
    return Event(action, "out", i * each + chunk, "work", each=tiles.q_tiles * each)  # type: ignore[arg-type]


def _store(tiles: Tiles) -> Role:
    chunks = tiles.head_dim_v // tiles.out_columns
    events = tuple(
        _chunk(action, i, chunk, tiles)
        for i in range(tiles.q_tiles)
        for chunk in range(chunks)
        for action in ("wait", "store", "drain", "release")
    )
    return Role("store", 1, last=events, warp=STORE)
