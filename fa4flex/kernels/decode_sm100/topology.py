"""The Blackwell pipeline for few query rows.

One warp copies tiles of keys and values by TMA, or row by row where pages are of few keys, as far ahead as
the rings are deep: memory is what such a kernel waits for. One warp issues all products, which the tensor
core executes in that order:

    S(0)   O(0) S(1)   O(1) S(2)   ...

Four warps take the softmax, rescale the output and write it. Each has its own lanes of tensor memory, and no
thread needs another's numbers before the end: the query rows are in tensor memory several times, and each
copy meets its own part of every tile's keys, with a maximum, a sum and an output of its own. At the end
copies are merged through the memory of the wider ring, as splits are by another kernel. A block has one tile:
a part of the keys of a sequence and a KV head.

What is not there, and why the simulation finds nothing missing:

no s_empty        S(j + 1) comes after O(j), which waited for probabilities of all of S(j), and has read them:
                  they lie over the scores.
no o_empty        O is rescaled when S(j) is there, so after O(j - 1), and before probabilities of j are.
no finished       The four warps meet for the last time when all of the output is read: then the first one
                  frees tensor memory.
"""

from __future__ import annotations

from fa4flex.kernels.decode_sm100.config import (
    MERGED,
    MERGED_STAGES,
    wider,
)
from fa4flex.kernels.decode_sm100.roles import LOAD, MULTIPLY, barrier_table
from fa4flex.kernels.plan.memory import block_bytes
from fa4flex.kernels.plan.paging import TileCopies
from fa4flex.kernels.plan.tensor_memory import WHOLE, Columns
from fa4flex.kernels.plan.topology import (
    WARPGROUP,
    Event,
    Events,
    Product,
    Role,
    Topology,
)

CORE = "the tensor core"

UPDATES = 2
"""Contents that the output has per key tile: rescaled, and after the product."""


def decode_topology(
    widths: tuple[int, int], tile_n: int, kv_stages: int, columns: Columns, clears: bool, copies: TileCopies
) -> Topology:
    """The pipeline with tiles of K and V of these widths. `clears`: sequences may end before their tensor
    does."""
    table = barrier_table(kv_stages, copies.gather_warps)
    rings = [
        copies.ring(table, name, tile_n, (2 * width, block_bytes(width)))
        for name, width in zip(("k", "v"), widths, strict=True)
    ]
    return Topology(
        (copies.role("load", LOAD), multiply(clears), softmax(widths[1] // MERGED)),
        (*rings, table.ring("Q", 0)),
        table.named_barriers(),
        "none",
        mbarriers=table.barriers(),
        overlaps=(*columns.overlaps, ("merged", wider(*widths))),
        stages=(("merged", MERGED_STAGES),),
        by_warp=(*columns.names, "statistics", "merged"),
        places=(table.places(),),
        may_end=True,
    )


def multiply(clears: bool, warp: int = MULTIPLY) -> Role:
    def scores(at: int) -> Events:
        return (
            Event("wait", "k", at),
            Event("issue", "S", at),
            Event("commit", "s_full", at),
            _commit("k", at),
        )

    def output(at: int) -> Events:
        clear = (Event("clear", "v", at),) * clears
        return (
            *(Event("wait", "v", at), *clear),
            *(Event("await", "p_full", at), Event("issue", "O", at), _commit("v", at)),
        )

    result = Event("update", "O", 1, each=UPDATES)
    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"),),
        first=(Event("wait", "Q", per="work"), *scores(0)),
        body=(*output(-1), *scores(0)),
        last=(*output(0), Event("commit", "o_full", per="work")),
        products=(
            Product(
                "S", (Event("read", "Q", per="work"), Event("read", "k")), Event("write", "S"), engine=CORE
            ),
            Product("O", (Event("read", "P"), Event("read", "v")), result, fresh=True, engine=CORE),
        ),
        warp=warp,
    )


def _commit(ring: str, at: int) -> Event:
    return Event("commit", ring, at)


def softmax(chunks: int) -> Role:
    take = Event("await", "s_full"), Event("read", "S")
    give = Event("write", "P"), Event("arrive", "p_full")
    merge = [Event("write", "statistics", per="work"), Event("sync", "meeting")]
    merge += [Event("read", "statistics", per="work")]
    for chunk in range(chunks):
        # Two buffers: whoever writes one has met those who have read what was in it.
        merge += [
            *(Event("read", "O", UPDATES - 1, each=UPDATES), _chunk("write", chunk, chunks)),
            *(Event("sync", "meeting"), _chunk("read", chunk, chunks)),
        ]
    return Role(
        "softmax",
        WARPGROUP,
        opening=(Event("allocate", WHOLE), Event("sync", "allocated")),
        first=(Event("fill", "Q", per="work"), *take, *give),
        body=(*take, Event("update", "O", each=UPDATES), *give),
        last=(Event("await", "o_full", per="work"), *merge),
        closing=(Event("free", WHOLE),),
        apart=True,
    )


def _chunk(action: str, chunk: int, chunks: int) -> Event:
    return Event(action, "merged", chunk, "work", each=chunks)  # type: ignore[arg-type]
