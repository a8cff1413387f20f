"""Skipping: what a pipeline does of which consumers may leave out tiles of keys, and what it says."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.plan.topology import Event, Events, Role, Topology


def explain_skip(skip: float, rows: str, what: str = "exponentials and values") -> list[str]:
    """Nothing where nothing may be left out. rows: those that a tile is left out for together; what: of it is
    left out."""
    if not skip:
        return []
    return [
        f"  a tile of keys is left out where each score of {rows} is at most the row's maximum in use less"
        f" log(n / {skip:g}), of n keys of all tiles: its {what}"
    ]


def explain_exact(skip: float) -> list[str]:
    """Words of a kernel that leaves out nothing, where something may be."""
    return [f"  this kernel leaves out no tile of keys for skip={skip:g}: it is exact"] if skip else []


def skipping(topology: Topology, passes: bool = False) -> Topology:
    """The pipeline in which consumers may leave out the values of key tiles but a row's first. After their
    scores, warps of one meet at its barrier "rows" to agree on that, and outputs start from zeros. passes:
    consumers without rows do not meet."""
    roles = tuple(_skipping(role, passes) if role.kind == "consumer" else role for role in topology.roles)
    return replace(topology, roles=roles)


def _skipping(consumer: Role, passes: bool) -> Role:
    number = consumer.name.removeprefix(consumer.kind)  # "" or " 1"
    output = next(product.result.target for product in consumer.products if product.name == "O")
    meet = Event("sync", f"rows{number}", maybe=passes)
    body, last = (_left_out(part, meet, output) for part in (consumer.body, consumer.last))
    products = tuple(replace(product, fresh=False) for product in consumer.products)
    first = (Event("write", output, -1), *consumer.first)
    return replace(consumer, first=first, body=body, last=last, products=products)


def _left_out(events: Events, meet: Event, output: str) -> Events:
    results: list[Event] = []
    for event in events:
        results.append(replace(event, maybe=event.maybe or event.target == "O"))
        if event.action == "softmax":
            results.append(meet)
        elif event.action == "issue" and event.target == "O":
            # Values that nobody multiplies are let go of.
            left = Event("read", "v", event.tile), Event("update", output, event.tile)
            results += [replace(one, instead=True) for one in left]
    return tuple(results)
