"""The Blackwell backward pipeline of heads wider than 128, with the barriers of the kernel
(wide_heads/roles.py). For step j, products are issued in this order:

    S(j) dP(j) dV(j) dK(j) dQ(j)

Beside dV and dK, tensor memory has 192 columns, in which all else takes turns:

               0 ..        64 ..      128 ..     192
    S          ----------------------            from q_full, and from when dQ(j - 1) is read there
    P          ----------                        of all queries, next to each other
    dP                     --------------------- from when scores are in registers
    dS                     -----      -----      at the start of each fragment's dP
    dQ         --------------------------------- after dV and dK, in order

What is not there, and why the simulation finds nothing missing, is what narrower heads do not have
(bwd_sm100/topology.py), and

no s_empty     S(j + 1) comes after dV(j) and dK(j), which have read P(j) and dS(j), and dQ(j) after them.
"""

from __future__ import annotations

from fa4flex.kernels.bwd_sm100.config import Config
from fa4flex.kernels.bwd_sm100.roles import MULTIPLY
from fa4flex.kernels.bwd_sm100.topology import (
    HALVES,
    compute_role,
    load_role,
    once,
    products_of,
    reduce_role,
    rings_of,
)
from fa4flex.kernels.bwd_sm100.wide_heads.config import FRAGMENTS
from fa4flex.kernels.bwd_sm100.wide_heads.roles import LOADS, barrier_table
from fa4flex.kernels.plan.tensor_memory import Columns
from fa4flex.kernels.plan.topology import Action, Event, Events, Role, Topology

PARTS = tuple(f"{half} {i}" for half in HALVES for i in range(FRAGMENTS))
"""Names of the fragments of what has the queries of a step as columns, by the warpgroup that has them."""

DQ = ("dQ", "dQ late")
"""One product: the columns that the next scores take, and the others."""


def wide_topology(config: Config, columns: Columns, itemsize: int, sloped: bool) -> Topology:
    """sloped: scores have slopes of their own, for which registers are kept."""
    table = barrier_table(config)
    return Topology(
        roles=(load_role(LOADS), _multiply(), *(_compute(i, sloped) for i in HALVES), _reduce()),
        rings=rings_of(table, config, itemsize),
        barriers=table.named_barriers(),
        staging="none",
        mbarriers=table.barriers(),
        overlaps=columns.overlaps,
        by_warp=(*columns.names, *(f"shared dS {i}" for i in HALVES)),
        places=(table.places(),),
    )


def _multiply() -> Role:
    def step(first: bool) -> Events:
        def read(name: str) -> Event:
            return Event("await", name, -1)

        def issue(name: str) -> Events:
            return tuple(Event("issue", f"{name} {part}") for part in PARTS)

        def last(name: str) -> Event:
            return Event("commit", name, per="work", ending=0)

        return (
            *([once("wait", "k")] * first),
            *(read("dq_begun"), Event("wait", "q"), *issue("S"), Event("commit", "s_full")),
            *(once("wait", "v"), read("dq_empty"), Event("await", "s_read")),
            *(Event("wait", "dout"), *issue("dP"), Event("commit", "dp_full")),
            *(Event("await", "p_full"), Event("issue", "dV"), Event("commit", "dout"), last("dv_full")),
            *(Event("await", "ds_full"), Event("issue", "dK"), Event("commit", "q"), last("dk_full")),
            *(*(Event("issue", name) for name in DQ), Event("commit", "dq_full")),
        )

    return Role(
        "multiply",
        1,
        opening=(Event("sync", "allocated"),),
        first=step(True),
        body=step(False),
        products=products_of(PARTS, DQ),
        warp=MULTIPLY,
    )


def _compute(i: int, sloped: bool) -> Role:
    def each(*actions: tuple[Action, str]) -> Events:
        return tuple(Event(act, f"{name} {i} {f}") for f in range(FRAGMENTS) for act, name in actions)

    made = each(("read", "S"), ("write", "P")) if sloped else (*each(("read", "S")), *each(("write", "P")))
    last = made.index(Event("read", f"S {i} {FRAGMENTS - 1}")) + 1
    return compute_role(
        i,
        Event("wait", "lse2"),
        Event("await", "s_full"),
        Event("read", "lse2"),
        *made[:last],
        Event("arrive", "s_read"),
        *made[last:],
        Event("arrive", "p_full"),
        Event("release", "lse2"),
        Event("wait", "delta"),
        Event("await", "dp_full"),
        Event("read", "delta"),
        *each(("read", "dP"), ("write", "dS")),
        Event("write", f"shared dS {i}"),
        Event("arrive", "ds_full"),
        Event("release", "delta"),
    )


def _reduce() -> Role:
    return reduce_role(
        "",
        Event("await", "dq_full"),
        Event("read", "dQ"),
        Event("arrive", "dq_begun"),
        Event("read", "dQ late"),
        Event("arrive", "dq_empty"),
    )
