"""The Blackwell backward pipeline, with the barriers of the kernel (kernels/bwd_sm100/roles.py).

A block has one tile of keys; what plans call its key tiles are here its steps j, a tile of queries each. One
warp issues all products and the tensor core executes them in that order (FlashAttention-4, arXiv 2603.05451):

    S(0) dP(0) dV(0)   S(1) dK(0) dQ(0) dP(1) dV(1)   ...   dK(J-1) dQ(J-1)

Products are described by the halves of the queries, which two warpgroups have: S 0 and S 1 are one product.

What is not there, and why the simulation finds nothing missing:

no s_empty        S(j + 1) comes after dV(j), which waited until probabilities had been made of all of S(j),
                  and has read them: they lie over the scores.
no ds_empty       dS(j + 1) is made of dP(j + 1), which comes after dK(j) and dQ(j), and they have read dS(j).
no dp_empty       dP(j + 1) waits until dQ(j) is read, which came after all had read dP(j) and dS(j).
"""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100.config import ROWS, Config
from fa4flex.kernels.bwd_sm100.roles import COMPUTE, LOAD, LOADS, MULTIPLY, REDUCE, Loads, barrier_table
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.memory import column_block, tile_bytes
from fa4flex.kernels.plan.pairs import at
from fa4flex.kernels.plan.tensor_memory import WHOLE, Columns
from fa4flex.kernels.plan.topology import (
    WARPGROUP,
    Action,
    Event,
    Events,
    Product,
    Ring,
    Role,
    Topology,
)

CORE = "the tensor core"
HALVES = (0, 1)
STATISTIC_BYTES = 4 * ROWS


def backward_topology(config: Config, columns: Columns, itemsize: int) -> Topology:
    table = barrier_table(config)
    return Topology(
        roles=(load_role(LOADS), _multiply(), *(_compute(i) for i in HALVES), reduce_role()),
        rings=rings_of(table, config, itemsize),
        barriers=table.named_barriers(),
        staging="none",
        mbarriers=table.barriers(),
        overlaps=columns.overlaps,
        by_warp=(*columns.names, *(f"shared dS {i}" for i in HALVES)),
        places=(table.places(),),
    )


def rings_of(table: BarrierTable, config: Config, itemsize: int) -> tuple[Ring, ...]:
    return (
        tiles(table, "k", ROWS, config.head_dim, itemsize),
        tiles(table, "v", ROWS, config.head_dim_v, itemsize),
        tiles(table, "q", ROWS, config.head_dim, itemsize),
        tiles(table, "dout", ROWS, config.head_dim_v, itemsize),
        numbers(table, "lse2"),
        numbers(table, "delta"),
    )


def tiles(table: BarrierTable, name: str, rows: int, width: int, itemsize: int) -> Ring:
    """Ring of tiles. A TMA box holds a block of columns of all rows."""
    box = tile_bytes(rows, column_block(width), itemsize)
    boxes = (box,) * (width // column_block(width))
    return table.ring(name, sum(boxes), boxes)


def numbers(table: BarrierTable, name: str) -> Ring:
    """Ring of rows' numbers."""
    return table.ring(name, STATISTIC_BYTES, (STATISTIC_BYTES,))


def once(action: Action, target: str) -> Event:
    return Event(action, target, per="work")


def load_role(loads: Loads, cta: int = 0) -> Role:
    """Role of the load warp, of either CTA of a pair."""
    actions: tuple[Action, ...] = ("acquire", "load")
    step = tuple(Event(action, at(name, cta)) for group in loads.step for name in group for action in actions)
    before, after = ([once("load", at(name, cta)) for name in names] for names in (loads.first, loads.late))
    return Role(at("load", cta), 1, first=(*before, *step, *after), body=step, warp=LOAD, cta=cta)


# --- products ------------------------------------------------------------------------------------------


def _multiply() -> Role:
    begin = _scores(0, once("wait", "k")), _dprob(0, once("wait", "v")), _dv(0)
    middle = _scores(0), _dk(-1), _dq(-1), (Event("await", "dq_empty", -1),), _dprob(0), _dv(0)
    end = (once("commit", "dv_full"),), _dk(0), (once("commit", "dk_full"),), _dq(0)
    first, body, last = (tuple(event for part in parts for event in part) for parts in (begin, middle, end))
    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"),),
        first=first,
        body=body,
        last=last,
        products=products_of(("0", "1")),
        warp=MULTIPLY,
    )


def products_of(parts: tuple[str, ...], dq: tuple[str, ...] = ("dQ",)) -> tuple[Product, ...]:
    """Operands are all parts of what has parts, but S and dP are made part by part."""

    def of(name: str) -> Events:
        return tuple(Event("read", f"{name} {part}") for part in parts)

    def square(name: str, keys: str, queries: str) -> tuple[Product, ...]:
        reads = once("read", keys), Event("read", queries)
        return tuple(
            Product(f"{name} {part}", reads, Event("write", f"{name} {part}"), engine=CORE) for part in parts
        )

    def sums(name: str, first: str, second: str) -> Product:
        reads = (*of(first), Event("read", second))
        return Product(name, reads, Event("update", name), fresh=True, engine=CORE)

    ds = (*(Event("read", f"shared dS {i}") for i in HALVES), once("read", "k"))
    return (
        *square("S", "k", "q"),
        *square("dP", "v", "dout"),
        sums("dV", "P", "dout"),
        sums("dK", "dS", "q"),
        *(Product(name, ds, Event("write", name), engine=CORE) for name in dq),
    )


def _issue(name: str, step: int) -> Events:
    return tuple(Event("issue", f"{name} {i}", step) for i in HALVES)


def _scores(step: int, *before: Event) -> Events:
    return *before, Event("wait", "q", step), *_issue("S", step), Event("commit", "s_full", step)


def _dprob(step: int, *before: Event) -> Events:
    return *before, Event("wait", "dout", step), *_issue("dP", step), Event("commit", "dp_full", step)


def _dv(step: int) -> Events:
    return Event("await", "p_full", step), Event("issue", "dV", step), Event("commit", "dout", step)


def _dk(step: int) -> Events:
    return Event("await", "ds_full", step), Event("issue", "dK", step), Event("commit", "q", step)


def _dq(step: int) -> Events:
    return Event("issue", "dQ", step), Event("commit", "dq_full", step)


# --- what is made of them --------------------------------------------------------------------------------


def _compute(i: int) -> Role:
    return compute_role(
        i,
        Event("wait", "lse2"),
        Event("await", "s_full"),
        Event("read", "lse2"),
        Event("read", f"S {i}"),
        Event("write", f"P {i}"),
        Event("arrive", "p_full"),
        Event("release", "lse2"),
        Event("wait", "delta"),
        Event("await", "dp_full"),
        Event("read", "delta"),
        Event("read", f"dP {i}"),
        Event("write", f"dS {i}"),
        Event("write", f"shared dS {i}"),
        Event("arrive", "ds_full"),
        Event("release", "delta"),
    )


def compute_role(i: int, *step: Event) -> Role:
    """A key per thread, so that no warp needs another's numbers."""
    sums = (once("await", "dv_full"), Event("read", "dV"), once("await", "dk_full"), Event("read", "dK"))
    first_warp = Event("allocate", WHOLE), Event("free", WHOLE)
    opening, closing = Event("sync", "allocated"), Event("sync", "finished")
    return Role(
        f"compute {i}",
        WARPGROUP,
        opening=(opening,) if i else (first_warp[0], opening),
        first=step,
        body=step,
        last=sums,
        closing=(closing,) if i else (closing, first_warp[1]),
        apart=True,
        warp=COMPUTE + WARPGROUP * i,
    )


def reduce_role(there: str = "", *step: Event) -> Role:
    """Its pieces in shared memory are each warp's own. there: what names end with in the second CTA of a
    pair; dQ that is read counts in the first."""
    step = step or (
        Event("await", f"dq_full{there}"),
        Event("read", f"dQ{there}"),
        Event("arrive", "dq_empty"),
    )
    return Role(
        f"reduce{there}",
        WARPGROUP,
        opening=(Event("sync", f"allocated{there}"),),
        first=step,
        body=step,
        closing=(Event("give", f"finished{there}"),),
        apart=True,
        warp=REDUCE,
        cta=int(bool(there)),
    )
