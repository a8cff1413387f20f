"""Counts and sums of a pipeline: arrivals against those who arrive, bytes against copies, pairs of events."""

from __future__ import annotations

from collections import Counter

from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.signals import arrivals_of
from fa4flex.kernels.plan.topology import WARP, Barrier, Ring, Role, Topology


def check_counts(topology: Topology) -> None:
    """Raise PlanError where counts and sums do not fit; `verify.simulate` then looks at the order."""
    for ring in topology.rings:
        _check_ring(ring, topology.roles)
    for barrier in topology.mbarriers:
        _check_barrier(barrier, topology.roles)
    rings = {ring.name: ring.shares_empty for ring in topology.rings}
    for role in topology.roles:
        _check_pairs(role, rings)
        _check_products(role)
    _check_named(topology)
    _check_places(topology)


def _require(number: int, expected: int, what: str) -> None:
    if number != expected:
        raise PlanError(what, f"{expected}, not {number}", "make both sides equal")


def _check_ring(ring: Ring, roles: tuple[Role, ...]) -> None:
    name = f"ring {ring.name}"
    if ring.stages < 1:
        raise PlanError(f"{name} has {ring.stages} stages", "at least 1", "give it one")
    brought = sum(ring.copies)
    _require(ring.transaction_bytes, brought, f"{name}: bytes announced, against bytes that its copies bring")
    if ring.copies:
        _require(ring.filled, brought, f"{name}: bytes of a stage, against bytes that its copies bring")
    loading = [role for role in roles if role.uses("load" if ring.copies else "fill", ring.name)]
    filled = sum(_warps(role, ring.per_warp) for role in loading)
    _require(ring.full_arrivals, filled, f"{name}: arrivals that fill a stage, against warps that do")
    freed = sum(_warps(role, ring.per_warp) for role in roles if role.uses("release", ring.name))
    freed += sum(role.uses("commit", ring.name) for role in roles)
    _require(ring.empty_arrivals, freed, f"{name}: arrivals that free a stage, against warps that do")


def _check_barrier(barrier: Barrier, roles: tuple[Role, ...]) -> None:
    arriving = sum(
        1 if any(e.leads for e in role.events if e.target == barrier.name) else _warps(role, barrier.per_warp)
        for role in roles
        if role.uses("arrive", barrier.name)
    )
    arriving += sum(role.uses("commit", barrier.name) for role in roles)
    _require(
        barrier.arrivals, arriving, f"barrier {barrier.name}: arrivals of a phase, against warps that arrive"
    )
    if not any(role.uses("await", barrier.name) for role in roles):
        raise PlanError(f"barrier {barrier.name} that nobody waits for", "a role that does", "leave it out")


def _warps(role: Role, per_warp: bool) -> int:
    return 1 if per_warp else role.warps


_CLOSED_BY: dict[str, tuple[str, ...]] = {
    "allocate": ("free",), "acquire": ("load", "fill", "forgo"), "wait": ("release", "commit"),
    "issue": ("finish",),
}  # fmt: skip


def _check_pairs(role: Role, rings: dict[str, bool]) -> None:
    """Whatever a role opens it closes: the same tiles, later. Products of a shared engine tell by commits,
    and rings that are filled once are not handed back. Who may wait early does so again."""
    events = role.least.run([3, 1])
    shared = {product.name for product in role.products if product.engine}
    for opening, closing in _CLOSED_BY.items():
        open_now: Counter[tuple[str, int]] = Counter()
        for event in events:
            if event.target in shared or rings.get(event.target, event.action == "commit"):
                continue
            key = (event.target, event.tile)
            open_now[key] += (event.action == opening) - (event.action in closing)
            if open_now[key] not in (0, 1):
                word = closing[0] if open_now[key] < 0 else opening
                raise PlanError(
                    f"{role.name}: {word} of {event.target} tile {event.tile} out of place",
                    f"each {opening} before its one {closing[0]}",
                    "reorder the role's events",
                )
        left = sorted(key for key, n in open_now.items() if n)
        if left:
            raise PlanError(
                f"{role.name}: {opening} of {left[0][0]} tile {left[0][1]}, and no {closing[0]}",
                f"one {closing[0]} for each {opening}",
                f"add the missing {closing[0]}",
            )


def _check_products(role: Role) -> None:
    known = {product.name for product in role.products}
    for event in role.events:
        if event.action in ("issue", "finish") and event.target not in known:
            raise PlanError(
                f"{role.name} issues {event.target}", f"one of its products, {sorted(known)}", "describe it"
            )


def _check_named(topology: Topology) -> None:
    numbers = [number for barrier in topology.barriers for number in barrier.numbers]
    if len(set(numbers)) < len(numbers) or 0 in numbers:
        raise PlanError(
            f"named barriers numbered {numbers}", "different numbers, none 0 (__syncthreads)", "renumber them"
        )
    for barrier in topology.barriers:
        # The first turn is given once, by whoever opens; then each phase has one giver and one taker.
        used = {
            (role.name, role.warps, event.action)
            for role in topology.roles
            for when, part in role.parts.items()
            for event in part
            if event.target == barrier.name and (event.action, when) != ("give", "opening")
        }
        threads = sum(WARP * warps for _, warps, _ in used)
        if threads != barrier.threads:
            raise PlanError(
                f"named barrier {barrier.name} of {barrier.threads} threads, where {threads} come",
                "as many threads as arrive and wait in a phase",
                "count both sides",
            )


def _check_places(topology: Topology) -> None:
    """Checks that each mbarrier has one place in memory, where places are given."""
    placed = Counter(name for places in topology.places for name in places if name)
    if placed and placed != Counter(dict.fromkeys(arrivals_of(topology), 1)):
        wrong = sorted(placed.keys() ^ arrivals_of(topology).keys()) or [
            n for n, k in placed.items() if k > 1
        ]
        raise PlanError(
            f"mbarriers without a place in memory, or places without one: {', '.join(wrong)}",
            "one place for each",
            "list them in the order of the kernel's storage",
        )
