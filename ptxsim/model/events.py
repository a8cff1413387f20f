"""Effects of an executed instruction beyond its warp: arrivals, waits, copies, MMAs, with their operands'
values.

Barriers are named by keys: (CTA, offset) for an mbarrier, (CTA, -1 - number) for a named one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxsim.isa.access import Accessor, locate
from ptxsim.isa.bulk import Tile
from ptxsim.isa.mbarriers import barrier_at, cta_and_offset, distinct
from ptxsim.isa.operands import read
from ptxsim.isa.table import form_of
from ptxsim.isa.tcgen05_mma import Kind
from ptxsim.ptx.nodes import Address, Discard, Instruction
from ptxsim.state.cta import Warp
from ptxsim.state.registers import LANES, Mask, lanes_of
from ptxsim.units import numbers
from ptxsim.units.instruction import ROW_BYTES

Key = tuple[int, int]
CLUSTER: Key = (-1, 0)
"""The barrier of the cluster."""


@dataclass(frozen=True)
class Made:
    """mbarrier.init"""

    key: Key
    count: int


@dataclass(frozen=True)
class Awaited:
    """A wait that came to its end: after `phases` phases of the mbarrier."""

    key: Key
    phases: int


@dataclass(frozen=True)
class Arrived:
    """`arrivals` at an mbarrier, which then also expects `bytes`."""

    key: Key
    arrivals: int
    bytes: int = 0


@dataclass(frozen=True)
class Met:
    """Threads of a warp came to a barrier that `threads` come to; `stays`: and wait there. `comes` is false
    for barrier.cluster.wait, which waits for the round that the warp came to before."""

    key: Key
    threads: int
    stays: bool
    comes: bool = True
    count: int = LANES


@dataclass(frozen=True)
class Loaded:
    """Copies into shared memory: (CTA, bytes, mbarrier) of each."""

    copies: tuple[tuple[int, int, Key], ...]


@dataclass(frozen=True)
class Stored:
    """A bulk copy out of shared memory."""

    bytes: int


@dataclass(frozen=True)
class Drained:
    """A wait until at most `left` of the warp's groups of bulk stores are under way."""

    left: int


@dataclass(frozen=True)
class Multiplied:
    """A tcgen05.mma of `group` CTAs, m x n x k, with `flops` in all; each CTA reads `shared` bytes of its
    operands."""

    group: int
    flops: int
    shared: int
    narrow: bool
    """8-bit inputs."""


@dataclass(frozen=True)
class Committed:
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Fenced:
    """tcgen05.wait::st or wait::ld"""

    stores: bool


Event = (
    Made
    | Awaited
    | Arrived
    | Met
    | Loaded
    | Stored
    | Drained
    | Multiplied
    | Committed
    | Fenced
    | tuple[Any, ...]
)
"""A tuple: several of them."""

Before = Callable[[Warp, Mask], Any]
After = Callable[[Warp, Mask, Any], Event | None]


@dataclass(frozen=True)
class Observer:
    """`before` reads what the instruction may change, `after` says what it did."""

    after: After
    before: Before = lambda warp, mask: None


def observer(instruction: Instruction) -> Observer:
    """Observer of what an instruction does."""
    for name, make in _OBSERVERS.items():
        if instruction.opcode == name or instruction.opcode.startswith(f"{name}."):
            return make(instruction)
    return _nothing(instruction)


def _nothing(instruction: Instruction) -> Observer:
    return Observer(lambda warp, mask, before: None)


def _several(found: list[Event]) -> Event | None:
    return found[0] if len(found) == 1 else tuple(found) or None


def _key(access: Accessor, warp: Warp, address: int) -> Key:
    cta, offset = cta_and_offset(access, warp, address)
    return cta.rank, offset


def _init(instruction: Instruction) -> Observer:
    where, count = locate(instruction.operands[0]), read(instruction.operands[1], "u32")
    access = Accessor(instruction, "shared")

    def after(warp: Warp, mask: Mask, before: Any) -> Event | None:
        made = [
            Made(_key(access, warp, a), int(count(warp)[lanes[0]]))
            for a, lanes in distinct(where(warp), mask)
        ]
        return _several(list(made))

    return Observer(after)


def _wait(instruction: Instruction) -> Observer:
    done, where = read(instruction.operands[0], "pred"), locate(instruction.operands[1])
    access = Accessor(instruction, "shared")

    def before(warp: Warp, mask: Mask) -> Any:
        # The address register may be overwritten by nobody, the predicate is.
        return [(address, lanes[0]) for address, lanes in distinct(where(warp), mask)]

    def after(warp: Warp, mask: Mask, addresses: Any) -> Event | None:
        found: list[Event] = []
        for address, lane in addresses:
            if done(warp)[lane]:
                barrier = barrier_at(access, warp, address)
                found.append(Awaited(_key(access, warp, address), barrier.phase))
        return _several(found)

    return Observer(after, before)


def _arrive(instruction: Instruction) -> Observer:
    operands = instruction.operands
    if not isinstance(operands[0], Address):
        operands = operands[1:] if isinstance(operands[0], Discard) or len(operands) > 1 else operands
    where, expects = locate(operands[0]), instruction.has("expect_tx")
    amount = read(operands[1], "u32") if len(operands) > 1 else None
    access = Accessor(instruction, "shared")
    arrives = instruction.has("arrive") or instruction.has("arrive_drop")

    def before(warp: Warp, mask: Mask) -> Any:
        found: list[Event] = []
        for address, lanes in distinct(where(warp), mask):
            given = 0 if amount is None else int(amount(warp)[lanes].sum(dtype=np.int64))
            count = len(lanes) if expects or amount is None else given
            found.append(
                Arrived(_key(access, warp, address), count if arrives else 0, given if expects else 0)
            )
        return _several(found)

    return Observer(lambda warp, mask, found: found, before)


def _sent(instruction: Instruction) -> Observer:
    """st.async: as many bytes fewer are expected where they go."""
    count = next((int(m[1]) for m in instruction.modifiers if m in ("v2", "v4")), 1)
    size = count * next(int(m[1:]) for m in instruction.modifiers if m[1:] in ("32", "64")) // 8
    where, access = locate(instruction.operands[2]), Accessor(instruction, "shared")

    def after(warp: Warp, mask: Mask, before: Any) -> Event | None:
        found = [
            Arrived(_key(access, warp, a), 0, -size * len(lanes)) for a, lanes in distinct(where(warp), mask)
        ]
        return _several(list(found))

    return Observer(after)


def _barrier(instruction: Instruction) -> Observer:
    reduces = instruction.has("red")  # between its result and the predicate that it reduces
    place, *threads = instruction.operands[1:-1] if reduces else instruction.operands
    number = read(place, "u32")
    count = read(threads[0], "u32") if threads else None
    stays = instruction.has("sync") or reduces

    def before(warp: Warp, mask: Mask) -> Any:
        lane = lanes_of(mask)[0]
        threads = int(count(warp)[lane]) if count else warp.cta.living_threads()
        return Met((warp.cta.rank, -1 - int(number(warp)[lane])), -(-threads // LANES) * LANES, stays)

    return Observer(lambda warp, mask, met: met, before)


def _cluster(instruction: Instruction) -> Observer:
    comes = instruction.has("arrive")

    def before(warp: Warp, mask: Mask) -> Any:
        threads = sum(cta.living_threads() for cta in warp.cta.cluster.ctas)
        return Met(CLUSTER, threads, not comes, comes)

    return Observer(lambda warp, mask, met: met, before)


def _tensor_copy(instruction: Instruction) -> Observer:
    spaces = [m for m in instruction.modifiers if m in ("global", "shared::cta", "shared::cluster")]
    if spaces[0] == "global":
        stored = Tile.of(instruction.operands[0])
        return Observer(lambda warp, mask, b: Stored(stored.at(warp, lanes_of(mask)[0])[0].box_bytes))
    access, multicast = Accessor(instruction, "shared"), instruction.has("multicast::cluster")
    target, tile = locate(instruction.operands[0]), Tile.of(instruction.operands[1])
    barrier = locate(instruction.operands[2])
    ranks = read(instruction.operands[3], "u16") if multicast else None
    pair = instruction.has("cta_group::2")

    def after(warp: Warp, mask: Mask, before: Any) -> Event | None:
        copies = []
        for lane in lanes_of(mask):
            size = tile.at(warp, lane)[0].box_bytes
            home = _key(access, warp, int(barrier(warp)[lane]))
            if ranks is None:
                copies.append((_key(access, warp, int(target(warp)[lane]))[0], size, home))
                continue
            chosen = int(ranks(warp)[lane])
            for rank in (r for r in range(16) if chosen >> r & 1):
                told = rank & ~1 | home[0] & 1 if pair else rank
                copies.append((rank, size, (told, home[1])))
        return Loaded(tuple(copies))

    return Observer(after)


def _copy(instruction: Instruction) -> Observer:
    spaces = [m for m in instruction.modifiers if m in ("global", "shared::cta", "shared::cluster")]
    size = read(instruction.operands[2], "u32")
    if spaces[0] == "global":
        return Observer(lambda warp, mask, b: Stored(int(size(warp)[lanes_of(mask)].sum())))
    access, target = Accessor(instruction, "shared"), locate(instruction.operands[0])
    barrier = locate(instruction.operands[3])

    def after(warp: Warp, mask: Mask, before: Any) -> Event | None:
        return Loaded(
            tuple(
                (
                    _key(access, warp, int(target(warp)[lane]))[0],
                    int(size(warp)[lane]),
                    _key(access, warp, int(barrier(warp)[lane])),
                )
                for lane in lanes_of(mask)
            )
        )

    return Observer(after)


def _drain(instruction: Instruction) -> Observer:
    left = read(instruction.operands[0], "u32")
    return Observer(lambda warp, mask, before: Drained(int(left(warp)[0])))


def _mma(instruction: Instruction) -> Observer:
    kind = Kind.of(form_of(instruction))
    in_tensor = isinstance(instruction.operands[1], Address)
    shape = read(instruction.operands[3], "u32")

    def after(warp: Warp, mask: Mask, before: Any) -> Event | None:
        found: list[Event] = []
        for lane in lanes_of(mask):
            it = kind.shape(int(shape(warp)[lane]))
            rows = (0 if in_tensor else it.m // kind.group) + it.n // kind.group
            small = numbers.raw_dtype(it.a_type).itemsize == 1
            found.append(Multiplied(kind.group, 2 * it.m * it.n * it.k, rows * ROW_BYTES, small))
        return _several(found)

    return Observer(after)


def _commit(instruction: Instruction) -> Observer:
    where, access = locate(instruction.operands[0]), Accessor(instruction, "shared")
    multicast = instruction.has("multicast::cluster")
    ranks = read(instruction.operands[1], "u16") if multicast else None

    def after(warp: Warp, mask: Mask, before: Any) -> Event | None:
        keys: list[Key] = []
        for lane in lanes_of(mask):
            home, offset = _key(access, warp, int(where(warp)[lane]))
            chosen = int(ranks(warp)[lane]) if ranks is not None else 1 << home
            keys += [(rank, offset) for rank in range(16) if chosen >> rank & 1]
        return Committed(tuple(keys))

    return Observer(after)


_OBSERVERS: dict[str, Callable[[Instruction], Observer]] = {
    "mbarrier.init": _init,
    "mbarrier.try_wait": _wait,
    "mbarrier.test_wait": _wait,
    "mbarrier.arrive": _arrive,
    "mbarrier.arrive_drop": _arrive,
    "mbarrier.expect_tx": _arrive,
    "st.async": _sent,
    "barrier.cluster": _cluster,
    "bar.warp": _nothing,
    "bar": _barrier,
    "barrier": _barrier,
    "cp.async.bulk.tensor": _tensor_copy,
    "cp.reduce.async.bulk.tensor": _tensor_copy,
    "cp.async.bulk.wait_group": _drain,
    "cp.async.bulk.commit_group": _nothing,
    "cp.async.bulk": _copy,
    "cp.reduce.async.bulk": _copy,
    "tcgen05.mma": _mma,
    "tcgen05.commit": _commit,
    "tcgen05.wait::st": lambda instruction: Observer(lambda warp, mask, before: Fenced(True)),
    "tcgen05.wait::ld": lambda instruction: Observer(lambda warp, mask, before: Fenced(False)),
}
"""Observers by the beginning of the opcode, the first that fits."""
