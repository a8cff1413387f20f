"""The role that looks at the entries of a list and gathers tiles of keys and values."""

from __future__ import annotations

from fa4flex.kernels.plan.topology import WARPGROUP, Action, Event, Role


def producer(united: int, warp: int = 0) -> Role:
    """Entries of a list that is not ascending are put into a table, and looked up there. Those of several
    lists are compared twice. warp: the first of four."""
    looked, again = Event("sync", "entries"), Event("sync", "entries", maybe=True)
    entries = (looked, again, again) if united == 1 else (looked, looked)
    actions: tuple[Action, ...] = ("acquire", "fill")
    tile = tuple(Event(action, ring) for ring in ("ids", "k", "v") for action in actions)
    return Role("producer", WARPGROUP, (*entries, Event("sync", "listed")), tile, tile, warp=warp)
