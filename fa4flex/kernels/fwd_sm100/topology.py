"""The Blackwell forward pipeline, with the barriers of the kernel (kernels/fwd_sm100/roles.py).

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

Of heads so wide that there is room for the output of one query tile, scores have two stages instead, by
turns:

    S(0) S(1)   O(0) S(2)   O(1) S(3)   ...

All of this then holds from S(j + 2) to O(j): of scales, too, which have two stages as well. But S(j + 1) that
is there does not tell that O(j) was added to: o_full does, after each key tile. No more than one tile of
queries is looked ahead: where it has one tile of keys, the scores after it come when its output was added to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa4flex.kernels.fwd_sm100.config import FRAGMENT, ROWS
from fa4flex.kernels.fwd_sm100.roles import (
    CORRECTION,
    LOAD,
    MULTIPLY,
    SCHEDULE,
    STORE,
    Handed,
    barrier_table,
)
from fa4flex.kernels.fwd_sm100.tiles import Tiles
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.memory import ANSWER, NUMBER, column_block, tile_bytes
from fa4flex.kernels.plan.tensor_memory import WHOLE, Columns
from fa4flex.kernels.plan.topology import (
    RECEIVE,
    WARPGROUP,
    Event,
    Events,
    Product,
    Ring,
    Role,
    Topology,
)

CORE = "the tensor core"
STEPS = 3
"""Contents that an output has per key tile: rescaled, and after the product with either part of the
probabilities."""


def forward_topology(
    tiles: Tiles, columns: Columns, handed: Handed, ragged: bool, box_rows: int = 0
) -> Topology:
    """The pipeline of a CTA of a forward kernel. `ragged`: sequences end within tiles, so that what values
    follow their ends is cleared. Tiles of K and V are brought `box_rows` keys at a time, if given."""
    n, staged, table = tiles.q_tiles, tiles.out_stages > 0, barrier_table(tiles, handed)
    multiply = _multiply(n, ragged, tiles.staggered) if tiles.score_stages == 1 else _multiply_ahead(ragged)
    workers = [_load(n), multiply, *(_softmax(i) for i in range(n)), _correction(tiles)]
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
        rings=tuple(_rings(table, tiles, handed, box_rows)),
        barriers=table.named_barriers(),
        staging="own" if staged else "none",
        mbarriers=table.barriers(),
        overlaps=columns.overlaps,
        by_warp=(
            *columns.names,
            *(f"{name} {i}" for name in ("scales", "finals") for i in range(n)),
            "out",
        ),
        stages=_stages(tiles),
        places=(table.places(),),
    )


def _stages(tiles: Tiles) -> tuple[tuple[str, int], ...]:
    """Places that scores, what lies over them, and scales have by turns."""
    names = ("S 0", "P 0 early", "P 0 late", "scales 0") if tiles.score_stages > 1 else ()
    return tuple((name, tiles.score_stages) for name in names)


def _rings(table: BarrierTable, tiles: Tiles, handed: Handed, box_rows: int) -> Iterator[Ring]:
    """Rings with the bytes of their stages. A TMA box holds a block of columns of all rows, or of
    `box_rows`."""

    def ring(name: str, rows: int, width: int, size: int, together: int = 0, unit: int | None = None) -> Ring:
        together, columns = together or rows, column_block(width, size)
        boxes = (tile_bytes(together, columns, size),) * (width // columns * (rows // together))
        return table.ring(name, sum(boxes), boxes, unit)

    for i in range(tiles.q_tiles):
        yield ring("q", ROWS, tiles.head_dim, tiles.itemsize, unit=i)
    # Of a pair of CTAs, each holds half of the keys of a tile of K, and half of the columns of V.
    yield ring("k", tiles.tile_n // tiles.ctas, tiles.head_dim, tiles.itemsize, box_rows)
    yield ring("v", *tiles.values, tiles.v_itemsize, box_rows)
    if tiles.out_stages:
        yield table.ring("out", tile_bytes(ROWS, tiles.out_columns, tiles.out_itemsize))
    for i in range(tiles.q_tiles):
        yield table.ring("finals", NUMBER * ROWS * tiles.last_numbers, unit=i)
    if handed == "number":
        yield table.ring("next", NUMBER)
    if handed == "answer":
        yield table.ring("next", ANSWER, (ANSWER,))


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


def _multiply(n: int, ragged: bool, staggered: bool) -> Role:
    """The first scores of the next tile of queries come between the last outputs of the one at hand: they are
    left out where there is none. staggered: those of a block's first one wait for probabilities of the query
    tile before."""

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

    def begun(i: int) -> Events:
        apart = (Event("await", f"p_early {i - 1}", ahead=True),) if staggered and i else ()
        return _work("wait", f"q {i}", ahead=True), *apart, *_scores(i, 0, 0, True)

    first = [event for i in range(n) for event in begun(i)]
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


def _multiply_ahead(ragged: bool) -> Role:
    """The warp that multiplies one query tile, whose scores are two tiles of keys ahead of its output."""

    def add(at: int) -> Events:
        clear = (Event("clear", "v", at),) if ragged else ()
        commits = Event("commit", "o_full 0", at), Event("commit", "v", at)
        return Event("wait", "v", at), *clear, *_values(0, at), *commits

    # S'(0) comes before the last output of its predecessor, or after it if that is the first one as well.
    following = (*_begun(1, 1, starting=0), *_continued(2, 1))
    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"), *_begun(0, 0), *_continued(1, 0)),
        body=(*add(-1), *_next_scores()),
        last=(*add(0), *following),
        products=_products(0),
        warp=MULTIPLY,
    )


def _begun(at: int, work: int, starting: int | None = None) -> Events:
    """The first scores of a tile of queries, if there is one, and the one at hand starts there."""
    events = (
        Event("wait", "k", at, ahead=True),
        _work("wait", "q 0", work, ahead=True),
        *_scores(0, at, work, True),
        Event("commit", "k", at, ahead=True),
    )
    return tuple(replace(event, starting=starting) for event in events)


def _continued(at: int, work: int) -> Events:
    """The second ones, if it has so many."""
    events = Event("wait", "k", at), *_scores(0, at, work, False), Event("commit", "k", at)
    return tuple(replace(event, continuing=at) for event in events)


def _next_scores() -> Events:
    """Scores of the next key tile: of the same tile of queries, or the first of the following one."""
    wait, commit = Event("wait", "k", 1, ahead=True), Event("commit", "k", 1, ahead=True)
    issue, told, freed = _scores(0, 1, 0, True)
    return (
        wait,
        replace(_work("wait", "q 0", 1, ahead=True), starting=1),
        issue,
        told,
        replace(freed, continuing=1),
        replace(freed, tile=1, starting=1),
        commit,
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
    body = [event for i in range(n) for event in _rescale(i, tiles)]
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


def _rescale(i: int, tiles: Tiles) -> Events:
    added = (Event("await", f"o_full {i}", -1),) if tiles.score_stages > 1 else ()
    return (
        Event("await", f"scale_full {i}", per="later"),
        *added,
        Event("read", f"scales {i}", per="later"),
        Event("update", f"O {i}", each=STEPS),
        Event("arrive", f"p_early {i}"),
    )


def _finish(i: int, tiles: Tiles) -> Events:
    """The output leaves by chunks of columns, by way of shared memory where it is staged. The next product
    may begin when the last of them is in registers."""
    final = _work("wait", f"finals {i}"), _work("read", f"finals {i}"), _work("release", f"finals {i}")
    read, done = Event("read", f"O {i}", STEPS - 1, each=STEPS), Event("arrive", f"p_early {i}", 1)
    full = _work("await", f"o_full {i}") if tiles.score_stages == 1 else Event("await", f"o_full {i}")
    if not tiles.out_stages:
        return *final, full, read, done
    events: list[Event] = [*final, full]
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
