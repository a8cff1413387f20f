"""The Hopper pipeline for sums per key, with the barriers of the kernel (roles.py).

What plans call key tiles are here the steps of a tile of keys: a tile of queries each. A producer warp brings
K once, and for each step Q with its rows' log-sum-exps. Consumer warpgroups have 64 keys each: S = K Q', of
which they make probabilities, and add them up in registers until the last step.
"""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.mass_sm90 import roles
from fa4flex.kernels.mass_sm90.config import Config
from fa4flex.kernels.plan.barriers import BarrierTable
from fa4flex.kernels.plan.memory import NUMBER, tile_bytes
from fa4flex.kernels.plan.topology import WARPGROUP, Action, Event, Product, Ring, Role, Topology


def mass_topology(config: Config, itemsize: int) -> Topology:
    """The pipeline of a block."""
    table = roles.barrier_table(config)
    return Topology(
        roles=(_producer(), *(_consumer(w) for w in range(config.consumers))),
        rings=_rings(table, config, itemsize),
        barriers=table.named_barriers(),
        staging="none",
        mbarriers=table.barriers(),
        places=(table.places(),),
    )


def _rings(table: BarrierTable, config: Config, itemsize: int) -> tuple[Ring, ...]:
    """Log-sum-exps come with the tiles of Q."""
    numbers = NUMBER * config.tile_m
    q, k = (_tiles(table, *one, config, itemsize) for one in (("q", config.tile_m), ("k", config.tile_n)))
    copies = (*q.copies, numbers)
    return replace(q, copies=copies, transaction_bytes=sum(copies), beside=(("lse2", numbers),)), k


def _tiles(table: BarrierTable, name: str, rows: int, config: Config, itemsize: int) -> Ring:
    """Ring of tiles of so many rows. A TMA box holds the columns of all rows that a swizzle spans."""
    copies = (tile_bytes(rows, config.swizzle, itemsize),) * (config.head_dim // config.swizzle)
    return table.ring(name, sum(copies), copies)


def _work(action: Action, target: str) -> Event:
    """Once per tile of keys."""
    return Event(action, target, 0, "work")


def _producer() -> Role:
    step = Event("acquire", "q"), Event("load", "q")
    keys = (_work("load", "k"),)
    return Role("producer", 1, first=(*keys, *step), body=step, empty=keys, warp=roles.PRODUCER)


def _consumer(w: int) -> Role:
    """Without steps, K comes for nothing, and zeros are written."""
    there = (replace(_work("wait", "k"), again=True),)
    step = (
        *(Event("wait", "q"), Event("issue", "S"), Event("finish", "S")),
        *(Event("read", f"S of {w}"), Event("release", "q")),
    )
    scores = Product("S", (_work("read", "k"), Event("read", "q")), Event("write", f"S of {w}"))
    return Role(
        f"consumer {w}",
        WARPGROUP,
        first=(*there, *step),
        body=step,
        empty=(*there, _work("read", "k")),
        products=(scores,),
        warp=roles.CONSUMER + WARPGROUP * w,
    )
