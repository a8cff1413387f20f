"""From a trace to a prediction: clocks of a loop's step, how busy every unit is in it, and TFLOP/s of a long
problem."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ptxsim.doors.launch import Launch
from ptxsim.errors import InputError
from ptxsim.model.chip import B200, SUBCORES, Chip
from ptxsim.model.machine import BIN, Bins, Machine, Walker
from ptxsim.model.recorder import Trace, record
from ptxsim.model.roles import role

UNITS = {
    "special functions": "xu",
    "fma": "fma",
    "alu": "alu",
}
"""Pipes of the sub-cores, by the names that people know them by."""
SATURATED = 0.9
"""From which utilisation on a unit is said to bound a loop."""


@dataclass(frozen=True)
class Attention:
    """q [batch, heads, q_len, dim], k and v [batch, heads, kv_len, dim]. A causal mask is aligned at the
    bottom right, and its flops count half, as is usual. `products` are those of a tile: 2 in a forward
    pass, 5 in a backward pass."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    dim: int = 128
    causal: bool = False
    products: int = 2

    @property
    def flops(self) -> float:
        full = 2 * self.products * self.batch * self.heads * self.q_len * self.kv_len * self.dim
        return full / 2 if self.causal else full


@dataclass(frozen=True)
class Role:
    """Warps of CTA 0 that do the same: shares of the time in the steady state."""

    name: str
    warps: tuple[int, ...]
    issuing: float
    waiting: dict[str, float]
    """Share of time it waits, by cause: "barriers" that others complete, "synchronisation" (the latency of a
    wait that is over), "results" of own instructions, "issue" slots taken by other warps, pipes by their
    names."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one CTA of a launch and for a loop around its MMAs.

    cycles           clocks from the launch of the CTA to its end
    cycles_per_step  clocks of one iteration in the steady state
    step_flops       of the CTA in one iteration
    utilisation      share of the time that each unit is busy in the steady state
    """

    kernel: str
    chip: Chip
    ctas: int
    cycles: float
    cycles_per_step: float
    step_flops: float
    total_flops: float
    utilisation: dict[str, float]
    roles: tuple[Role, ...]
    machine: Machine = field(repr=False, compare=False)
    window: tuple[float, float] = field(repr=False)
    """The clocks that the steady state is taken from."""

    @property
    def bound(self) -> str:
        """The unit that bounds the loop, or "dependences" where none is busy all the time."""
        unit, share = max(self.utilisation.items(), key=lambda item: item[1])
        return unit if share >= SATURATED else "dependences"

    @property
    def steady_tflops(self) -> float:
        """TFLOPS of the whole chip, were the loop never to end."""
        return self.step_flops / self.cycles_per_step * self.chip.processors * self.chip.gigahertz / 1000

    @cached_property
    def overhead(self) -> float:
        """Clocks of a CTA beyond its steps: beginning, end, steps that are slower because of a mask. Record
        a launch in which it does one tile, so that they are counted once."""
        return self.cycles - self.total_flops / self.step_flops * self.cycles_per_step

    def tflops(self, shape: Attention, tile: tuple[int, int] = (256, 128)) -> float:
        """TFLOPS of a whole problem, whose tiles (rows of q of a CTA, rows of k of a step) go to
        multiprocessors as they become free, the longest first. Raises InputError where the loop's step is no
        such tile."""
        rows, columns = tile
        if 2 * shape.products * rows * columns * shape.dim != self.step_flops:
            given = f"a tile of {rows} x {columns} at head_dim {shape.dim}"
            expected = f"one with the {self.step_flops:,.0f} flops of the kernel's step"
            raise InputError(given, expected, "pass the kernel's tile")
        # CTAs of a cluster take as long as the longest of them.
        each = rows * self.ctas
        steps = []
        for first in range(0, shape.q_len, each):
            end = min(shape.q_len, first + each) + shape.kv_len - shape.q_len
            steps.append(-(-(min(end, shape.kv_len) if shape.causal else shape.kv_len) // columns))
        work = sorted(steps * (shape.batch * shape.heads), reverse=True)
        free = [0.0] * (self.chip.processors // self.ctas)
        for count in work:
            heapq.heapreplace(free, free[0] + self.overhead + count * self.cycles_per_step)
        return shape.flops / max(free) * self.chip.gigahertz / 1000


def predict(source: Launch | Trace, chip: Chip = B200) -> Prediction:
    """`source` is a captured launch, which is run here, or what `record` made of one. Raises InputError
    for a kernel without a loop of tcgen05.mma, UnsupportedError for instructions whose cost is not known."""
    trace = record(source) if isinstance(source, Launch) else source
    machine = Machine(trace, chip)
    cycles = machine.run()
    start, stop, count, flops = _steady(machine)
    return Prediction(
        trace.kernel.name,
        chip,
        trace.ctas,
        cycles,
        (stop - start) / count,
        flops / count,
        machine.flops,
        _utilisation(machine, start, stop),
        _roles(machine, start, stop),
        machine,
        (start, stop),
    )


def sensitivity(trace: Trace, names: Sequence[str], chip: Chip = B200) -> dict[str, tuple[float, float]]:
    """Shares by which a step grows where one of the chip's numbers is half of what it is, and twice."""
    base = predict(trace, chip).cycles_per_step
    found = {}
    for name in names:
        changed: list[dict[str, Any]] = [{name: getattr(chip, name) * factor} for factor in (0.5, 2)]
        half, double = (predict(trace, dataclasses.replace(chip, **c)).cycles_per_step for c in changed)
        found[name] = half / base - 1, double / base - 1
    return found


def _steady(machine: Machine) -> tuple[float, float, int, float]:
    """(from, to, iterations, flops) of the loop's middle: of the first MMA instruction of those that were
    issued most often, without the first third and the last iteration."""
    if not machine.marks:
        raise InputError(
            "a kernel without tcgen05.mma", "one with a loop around them", "record another launch"
        )
    most = max(map(len, machine.marks.values()))
    index = min(i for i, times in machine.marks.items() if len(times) == most)
    times, flops = machine.marks[index], machine.flops_at[index]
    if most < 6:
        given = f"a loop of {most} iterations"
        raise InputError(given, "at least 6, so that there is a steady state", "record a longer sequence")
    first, last = most // 3, most - 2
    return times[first], times[last], last - first, flops[last] - flops[first]


def _share(counts: Bins, start: float, stop: float) -> float:
    """Share of the time from `start` to `stop` that was counted in bins that begin in it."""
    low, high = -(-int(start) // BIN), int(stop) // BIN
    return sum(counts.get(i, 0.0) for i in range(low, high)) / ((high - low) * BIN)


def _utilisation(machine: Machine, start: float, stop: float) -> dict[str, float]:
    home = machine.processors[0]
    cores = home.subcores
    found = {"tensor core": _share(home.tensor.busy, start, stop)}
    for name, unit in UNITS.items():
        found[name] = sum(_share(c.busy.get(unit, {}), start, stop) for c in cores) / SUBCORES
    found["issue"] = sum(_share(c.issued, start, stop) for c in cores) / SUBCORES
    found["shared memory"] = _share(home.shared.busy, start, stop)
    for name, servers in (("tensor memory loads", home.loads), ("tensor memory stores", home.stores)):
        found[name] = sum(_share(s.busy, start, stop) for s in servers) / SUBCORES
    found["copies"] = _share(home.copies.busy, start, stop)
    return found


def _roles(machine: Machine, start: float, stop: float) -> tuple[Role, ...]:
    groups: dict[str, list[Walker]] = {}
    for walker in machine.walkers:
        if walker.trace.rank == 0:
            groups.setdefault(role(walker), []).append(walker)
    return tuple(
        Role(
            name,
            tuple(w.trace.index for w in walkers),
            sum(_share(w.issued, start, stop) for w in walkers) / len(walkers),
            {
                cause: sum(_share(w.held.get(cause, {}), start, stop) for w in walkers) / len(walkers)
                for cause in sorted({cause for w in walkers for cause in w.held})
            },
        )
        for name, walkers in groups.items()
    )
