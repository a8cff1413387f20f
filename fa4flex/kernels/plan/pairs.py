"""Pipelines of pairs of CTAs: names of what either CTA has, and what both graphs of pairs have in common."""

from __future__ import annotations

from dataclasses import replace

from fa4flex.kernels.plan.topology import WARP, Barrier, Topology

BOTH = (0, 1)
"""CTAs."""

THERE = " there"
"""End of the names of what the second one has."""

NAMED_APART = 16
"""Numbers of named barriers: a CTA has as many, and in graphs the second one's follow."""

FREED = "freed"


def at(name: str, cta: int) -> str:
    """Name of what a CTA of a pair has."""
    return name + THERE * cta


def freed(cta: int) -> Barrier:
    """The library's barrier by which CTAs tell each other that they may free tensor memory, of all lanes of a
    warp. It lies behind those of the table."""
    return Barrier(at(FREED, cta), 1, "the other CTA has read its tensor memory", lanes=WARP, cta=cta)


def of_one_cta(topology: Topology) -> Topology:
    """Topology of the first CTA, with roles of the second one that only it has: for sums, and for people."""

    def here(name: str) -> bool:
        return not name.endswith(THERE)

    return replace(
        topology,
        roles=tuple(r for r in topology.roles if here(r.name)),
        rings=tuple(r for r in topology.rings if here(r.name)),
        barriers=tuple(b for b in topology.barriers if here(b.name)),
        mbarriers=tuple(b for b in topology.mbarriers if here(b.name) and b.name != FREED),
    )
