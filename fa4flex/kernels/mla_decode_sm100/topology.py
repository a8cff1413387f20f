"""The Blackwell pipeline for few queries over latent rows.

One warp copies tiles of 64 rows by TMA; a tile is keys, and its first columns are values. One warp issues all
products, which the tensor core executes in that order:

    S(0)   O(0) S(1)   O(1) S(2)   ...

Scores of the next tile do not come before the output of this one: two tiles are all that shared memory has
room for beside the queries, and the copy of a tile more begins when an output is done. A product that waited
for that copy would keep the next output back.

Four warps take the softmax, rescale the output and write it. A product of 64 rows lies in all 128 lanes of
tensor memory, half of its columns in each half of the lanes: a row has two threads, with 32 scores of a tile
and half of the columns of the output each. Both use one maximum, of which they tell each other through shared
memory, and their sums are added up at the end. Probabilities are an operand in shared memory. A block has one
tile of queries, with a part of the keys of a sequence.

What is not there, and why the simulation finds nothing missing:

no s_empty        S(j + 1) comes after O(j), which waited for probabilities of all of S(j).
no p_empty        Probabilities of j + 1 are written when S(j + 1) is there: O(j) has read those of j.
no o_empty        O is rescaled when S(j) is there, so after O(j - 1), and before probabilities of j are.
"""

from __future__ import annotations

from fa4flex.kernels.decode_sm100.roles import LOAD, MULTIPLY
from fa4flex.kernels.decode_sm100.topology import CORE, UPDATES
from fa4flex.kernels.mla_decode_sm100.config import BLOCK, PIECE, ROWS
from fa4flex.kernels.mla_decode_sm100.roles import barrier_table
from fa4flex.kernels.plan.tensor_memory import WHOLE, Columns
from fa4flex.kernels.plan.topology import WARPGROUP, Event, Events, Product, Role, Topology

MAXIMA = 2
"""Places of a thread's maximum, which tiles take in turn: while one is read, the next is written."""


def latent_topology(
    width: int, held: int, kv_stages: int, columns: Columns, clears: bool, box_rows: int = BLOCK
) -> Topology:
    """width: of a row; held: columns of queries that are in tensor memory; `clears`: sequences may end before
    their tensor does; box_rows: keys of a copy."""
    table = barrier_table(kv_stages)
    box = box_rows * PIECE * 2
    copies = (box,) * (BLOCK * width * 2 // box)
    return Topology(
        (_load(), _multiply(clears), _softmax()),
        (table.ring("k", BLOCK * width * 2, copies), table.ring("q", ROWS * (width - held) * 2)),
        table.named_barriers(),
        "none",
        mbarriers=table.barriers(),
        overlaps=columns.overlaps,
        stages=(("maxima", MAXIMA),),
        by_warp=(*columns.names, "p", "q", "maxima", "sums"),
        places=(table.places(),),
        may_end=True,
    )


def _load() -> Role:
    tile = Event("acquire", "k"), Event("load", "k")
    return Role("load", 1, (), tile, tile, warp=LOAD)


def _multiply(clears: bool) -> Role:
    scores = Event("wait", "k"), Event("issue", "S"), Event("commit", "s_full")

    def output(at: int) -> Events:
        return (
            *(Event("await", "s_full", at), Event("clear", "k", at)) * clears,
            *(Event("await", "p_full", at), Event("issue", "O", at), Event("commit", "k", at)),
        )

    result = Event("update", "O", 1, each=UPDATES)
    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"),),
        first=(Event("wait", "q", per="work"), *scores),
        body=(*output(-1), *scores),
        last=(*output(0), Event("commit", "o_full", per="work")),
        products=(
            Product(
                "S",
                (*(Event("read", name, per="work") for name in ("Q", "q")), Event("read", "k")),
                Event("write", "S"),
                engine=CORE,
            ),
            Product("O", (Event("read", "p"), Event("read", "k")), result, fresh=True, engine=CORE),
        ),
        warp=MULTIPLY,
    )


def _softmax() -> Role:
    take = (
        *(Event("await", "s_full"), Event("read", "S")),
        *(Event("write", "maxima"), Event("sync", "halves"), Event("read", "maxima")),
    )
    give = Event("write", "p"), Event("arrive", "p_full")
    sums = Event("write", "sums", per="work"), Event("sync", "meeting"), Event("read", "sums", per="work")
    finish = Event("read", "O", UPDATES - 1, each=UPDATES), Event("sync", "meeting")
    return Role(
        "softmax",
        WARPGROUP,
        opening=(Event("allocate", WHOLE), Event("sync", "allocated")),
        first=(Event("write", "Q", per="work"), Event("fill", "q", per="work"), *take, *give),
        body=(*take, Event("update", "O", each=UPDATES), *give),
        last=(Event("await", "o_full", per="work"), *sums, *finish),
        closing=(Event("free", WHOLE),),
        apart=True,
    )
