"""The pipelines of the two Blackwell backward kernels of heads up to 256, with the barriers of the kernels
(two_kernels/roles.py); mma.py says in which order products are issued.

What is not there, and why the simulation finds nothing missing:

no p_full        No product takes probabilities beside dS.
no ds_empty      dS(j + 1) are made of dP(j + 1), which comes after dK(j) and dQ(j), and they have read dS(j).
no dp_empty      dQ(j) takes the place of dP(j) after dK(j), which waited until all had read it.
no s_empty       Of dV, S(j + 2) comes after dV(j), which waited until probabilities had been made of all of
                 S(j), and has read them: they lie over the scores.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.bwd_sm100.config import ROWS
from fa4flex.kernels.bwd_sm100.roles import MULTIPLY
from fa4flex.kernels.bwd_sm100.topology import (
    HALVES,
    compute_role,
    load_role,
    once,
    products_of,
    reduce_role,
    tiles,
)
from fa4flex.kernels.bwd_sm100.two_kernels.config import SCORE_STAGES, STEP, Config, ValuesConfig
from fa4flex.kernels.bwd_sm100.two_kernels.roles import LOADS, VALUE_LOADS, barrier_table, value_barriers
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.tensor_memory import Columns
from fa4flex.kernels.plan.topology import Event, Events, Product, Ring, Role, Topology

PARTS = tuple(map(str, HALVES))
DQ = ("dQ", "dQ late")
"""Halves of dQ', of either half of the head."""

STATISTIC_BYTES = 4 * STEP


def keys_topology(config: Config, columns: Columns, itemsize: int) -> Topology:
    """The pipeline of the kernel for dK and dQ."""
    table = barrier_table(config)
    return Topology(
        roles=(load_role(LOADS), _multiply(), *(_compute(i) for i in HALVES), _reduce()),
        rings=(
            tiles(table, "k", ROWS, config.head_dim, itemsize),
            *_of_queries(table, config, itemsize),
            _numbers(table, "delta"),
        ),
        barriers=table.named_barriers(),
        staging="none",
        mbarriers=table.barriers(),
        overlaps=columns.overlaps,
        by_warp=(*columns.names, *(f"shared dS {i}" for i in HALVES)),
        places=(table.places(),),
    )


def values_topology(config: ValuesConfig, columns: Columns, itemsize: int) -> Topology:
    """The pipeline of the kernel for dV."""
    table = value_barriers(config)
    staged = tuple((f"{name} {i}", SCORE_STAGES) for name in ("S", "P") for i in HALVES)
    return Topology(
        roles=(load_role(VALUE_LOADS), _multiply_values(), *(_weigh(i) for i in HALVES), _idle()),
        rings=_of_queries(table, config, itemsize),
        barriers=table.named_barriers(),
        staging="none",
        mbarriers=table.barriers(),
        overlaps=columns.overlaps,
        stages=staged,
        by_warp=columns.names,
        places=(table.places(),),
    )


def _of_queries(table: BarrierTable, config: Config | ValuesConfig, itemsize: int) -> tuple[Ring, ...]:
    return (
        tiles(table, "q", STEP, config.head_dim, itemsize),
        tiles(table, "dout", STEP, config.head_dim_v, itemsize),
        _numbers(table, "lse2"),
    )


def _numbers(table: BarrierTable, name: str) -> Ring:
    return table.ring(name, STATISTIC_BYTES, (STATISTIC_BYTES,))


# --- products ------------------------------------------------------------------------------------------


def _multiply() -> Role:
    def issue(name: str) -> Events:
        return tuple(Event("issue", f"{name} {part}") for part in PARTS)

    def dq(step: int, *before: Event) -> Events:
        early = Event("issue", "dQ", step), Event("commit", "dq_half", step)
        late = Event("issue", "dQ late", step), Event("commit", "dq_full", step)
        return *early, *before, *late

    def dk(step: int) -> Events:
        return Event("await", "ds_full", step), Event("issue", "dK", step), Event("commit", "q", step)

    scores = Event("wait", "q"), *issue("S"), Event("commit", "s_full")
    dprob = (
        *(Event("await", "dq_early", -1), Event("wait", "dout"), *issue("dP")),
        *(Event("commit", "dp_full"), Event("commit", "dout")),
    )
    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"),),
        first=(once("wait", "k"), *scores, once("await", "v_full"), *dprob),
        body=(
            *(Event("await", "s_read", -1), Event("await", "dq_empty", -2), *scores),
            *(*dk(-1), *dq(-1, Event("await", "s_read")), *dprob),
        ),
        last=(*dk(0), *dq(0, once("commit", "dk_full"), Event("await", "dq_empty", -1))),
        products=tuple(_held("dP", "V", one) for one in products_of(PARTS, DQ) if one.name != "dV"),
        warp=MULTIPLY,
    )


def _held(name: str, held: str, product: Product) -> Product:
    """The product as it is, or, of this name, with its first operand in tensor memory."""
    if not product.name.startswith(f"{name} "):
        return product
    parts = tuple(once("read", f"{held} {part}") for part in PARTS)
    return replace(product, reads=(*parts, *product.reads[1:]))


def _multiply_values() -> Role:
    issue = tuple(Event("issue", f"S {part}") for part in PARTS)
    scores = Event("wait", "q"), *issue, Event("commit", "s_full"), Event("commit", "q")

    def dv(step: int) -> Events:
        return (
            Event("wait", "dout", step),
            Event("await", "p_full", step),
            Event("issue", "dV", step),
            Event("commit", "dout", step),
        )

    mine = ("dV", *(f"S {part}" for part in PARTS))
    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"),),
        first=(once("await", "k_full"), *scores),
        body=(*scores, *dv(-1)),
        last=(*dv(0), once("commit", "dv_full")),
        products=tuple(_held("S", "K", one) for one in products_of(PARTS) if one.name in mine),
        warp=MULTIPLY,
    )


# --- what is made of them --------------------------------------------------------------------------------


def _compute(i: int) -> Role:
    role = compute_role(
        i,
        Event("wait", "lse2"),
        Event("await", "s_full"),
        Event("read", "lse2"),
        Event("read", f"S {i}"),
        Event("arrive", "s_read"),
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
    before = once("write", f"V {i}"), once("arrive", "v_full")
    return replace(role, first=(*before, *role.first), last=(once("await", "dk_full"), Event("read", "dK")))


def _weigh(i: int) -> Role:
    role = compute_role(
        i,
        Event("wait", "lse2"),
        Event("await", "s_full"),
        Event("read", "lse2"),
        Event("read", f"S {i}"),
        Event("write", f"P {i}"),
        Event("arrive", "p_full"),
        Event("release", "lse2"),
    )
    before = once("write", f"K {i}"), once("arrive", "k_full")
    return replace(role, first=(*before, *role.first), last=(once("await", "dv_full"), Event("read", "dV")))


def _reduce() -> Role:
    return reduce_role(
        "",
        *(Event("await", "dq_half"), Event("read", "dQ"), Event("arrive", "dq_early")),
        *(Event("await", "dq_full"), Event("read", "dQ late"), Event("arrive", "dq_empty")),
    )


def _idle() -> Role:
    return replace(reduce_role(), first=(), body=())
