"""Time on the device and on the host. Clocks are objects, so that the arithmetic is tested without a GPU."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from fa4flex.torch_internals import sleep_on_gpu

Call = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)

SAMPLE_SECONDS = 0.02
"""Seconds of back-to-back calls in one sample: long against the resolution of events and the gaps between
kernels."""
HEAD_START_CYCLES = 4_000_000
"""The device waits about 2 ms in front of a sample, so that the host is ahead and kernels follow closely."""
MOST_HEAD_START = 64 * HEAD_START_CYCLES
MOST_CALLS = 200
"""Most calls of one sample: a backward pass is some four launches, and past about 1000 the host waits."""
HOST_CALLS = 200
"""Calls of one host sample: below the about 1000 launches after which CUDA makes the host wait."""


@dataclass(frozen=True)
class Samples:
    """Seconds per call, one number per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        low, high = self.quartiles
        return (high - low) / self.median


class Clock(Protocol):
    def time(self, call: Call, calls: int) -> float:
        """Seconds per call of `calls` calls in a row."""
        ...


class DeviceClock:
    """CUDA events around back-to-back calls, behind a head start for the host: a longer one from the first
    sample on for which it did not suffice. What calls cost the host is then never what is read here."""

    def __init__(self) -> None:
        self.before, self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self.cycles = HEAD_START_CYCLES

    def time(self, call: Call, calls: int) -> float:
        while True:
            torch.cuda.synchronize()
            self.before.record()
            sleep_on_gpu(self.cycles)
            self.start.record()
            queueing = time.perf_counter()
            for _ in range(calls):
                call()
            queueing = time.perf_counter() - queueing
            self.stop.record()
            self.stop.synchronize()
            if self.cycles >= MOST_HEAD_START or 1e3 * queueing < self.before.elapsed_time(self.start):
                return float(self.start.elapsed_time(self.stop)) / 1e3 / calls
            self.cycles *= 2


class WallClock:
    """For a CPU, where a call has ended when it returns."""

    def time(self, call: Call, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls


class HostClock:
    """Only the host's share of a call: the device still works when the clock is read."""

    def time(self, call: Call, calls: int) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            sleep_on_gpu(HEAD_START_CYCLES)
        return WallClock().time(call, calls)


def clock_for(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else WallClock()


def interleave(
    calls: Mapping[Key, Call], clock: Clock, rounds: int, seconds: float = SAMPLE_SECONDS
) -> dict[Key, Samples]:
    """Every round takes one sample of each call, in an order of its own.

    The chip's clocks drift with heat and power, and a call inherits what the one before it left: in random
    order, that reaches all alike.
    """
    with torch.no_grad():
        repeats = {key: _repeats(call, clock, seconds) for key, call in calls.items()}
        results: dict[Key, list[float]] = {key: [] for key in calls}
        for _ in range(rounds):
            for key in random.sample(list(calls), len(calls)):
                results[key].append(clock.time(calls[key], repeats[key]))
    return {key: Samples(tuple(times)) for key, times in results.items()}


def _repeats(call: Call, clock: Clock, seconds: float) -> int:
    """Number of calls that fill a sample. The first calls warm up and are not counted."""
    clock.time(call, 2)
    return min(MOST_CALLS, max(1, round(seconds / max(clock.time(call, 3), 1e-6))))


def host_overhead(calls: Mapping[Key, Call], rounds: int, clock: Clock | None = None) -> dict[Key, Samples]:
    """Seconds that a call keeps the host, by problems whose kernels are shorter than that."""
    clock = HostClock() if clock is None else clock
    with torch.no_grad():
        for call in calls.values():
            clock.time(call, HOST_CALLS)
        turns = [{key: clock.time(call, HOST_CALLS) for key, call in calls.items()} for _ in range(rounds)]
    return {key: Samples(tuple(turn[key] for turn in turns)) for key in calls}
