"""In which order the instructions of a block are executed, so that many of a kind can be at once.

A list scheduler: an instruction can go once all are done that it depends on by a register, and of those that
can go, the kind of which there are most goes next. What is not known to touch registers only keeps its order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ptxsim.isa.table import Step
from ptxsim.isa.together import Elementwise, together

FEWEST = 3
"""Instructions that are worth executing at once."""
RegisterKey = tuple[int, int]
"""(width of the file, index)."""


class Item:
    """One instruction of a block: what it executes, the registers it reads and writes, and how many others it
    still has to wait for. `kind` is None where it cannot join others."""

    def __init__(self, run: Step, kind: Hashable, reads: set[RegisterKey], writes: set[RegisterKey]) -> None:
        self.run, self.kind, self.reads, self.writes = run, kind, reads, writes
        self.before = 0
        self.after: list[int] = []


def ordered(items: Sequence[Item]) -> list[list[int]]:
    """The items in an order that keeps what each reads: groups, of one kind where there are several."""
    _connect(items)
    ready: dict[Hashable, list[int]] = {}
    alone: list[int] = []
    for index, item in enumerate(items):
        if not item.before:
            _add(index, item, ready, alone)
    found: list[list[int]] = []
    while ready or alone:
        # Whatever goes alone in any case goes first: others may be waiting for it.
        group = [alone.pop(0)] if alone else ready.pop(max(ready, key=lambda kind: len(ready[kind])))
        found.append(group)
        for index in group:
            for later in items[index].after:
                items[later].before -= 1
                if not items[later].before:
                    _add(later, items[later], ready, alone)
    return found


def steps(items: Sequence[Item]) -> list[Step]:
    """Steps to execute for all 32 lanes, in order."""
    found: list[Step] = []
    for group in ordered(items):
        if len(group) >= FEWEST:
            members = [run for run in (items[i].run for i in group) if isinstance(run, Elementwise)]
            found.append(together(members))
        else:
            found += [run.step if isinstance(run := items[i].run, Elementwise) else run for i in group]
    return found


def _add(index: int, item: Item, ready: dict[Hashable, list[int]], alone: list[int]) -> None:
    if item.kind is None:
        alone.append(index)
    else:
        ready.setdefault(item.kind, []).append(index)


def _connect(items: Sequence[Item]) -> None:
    """Dependences between items: reads wait for writes before them, writes for reads and writes before
    them."""
    writer: dict[RegisterKey, int] = {}
    readers: dict[RegisterKey, list[int]] = {}
    for index, item in enumerate(items):
        earlier = {writer[key] for key in item.reads | item.writes if key in writer}
        for key in item.writes:
            earlier.update(readers.pop(key, ()))
            writer[key] = index
        for key in item.reads:
            readers.setdefault(key, []).append(index)
        earlier.discard(index)
        item.before = len(earlier)
        for other in earlier:
            items[other].after.append(index)
