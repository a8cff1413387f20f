"""Asynchronous operations on their way: issued, not yet landed.

When one lands is the choice of the timing policy (run/timing.py). Operations of one queue land in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ptxsim.errors import SimulatorError
from ptxsim.ptx.nodes import Instruction
from ptxsim.watch.findings import Fault, Finding


@dataclass(eq=False)
class Operation:
    """`land` performs it. `signals` are the objects (barriers, groups) on which its end can be waited for.

    `queue` names the queue whose operations complete in order; None stands alone.
    """

    instruction: Instruction
    land: Callable[[], None]
    signals: tuple[object, ...] = ()
    queue: Hashable = None
    holds: Mapping[tuple[int, int], Instruction] = field(default_factory=dict)
    """Registers, by file and index, that belong to it until it has been waited for; the value is its
    instruction."""
    landed: bool = field(default=False, init=False)


class Units:
    """All operations of a cluster that have not landed, in the order in which they were issued."""

    def __init__(self) -> None:
        self.pending: list[Operation] = []
        self._signalling: dict[int, list[Operation]] = {}
        """Those that signal an object, by its id: it lives as long as they do, and need not be hashable."""
        self.eager = True
        self.landings = 0

    def submit(self, operation: Operation) -> None:
        self.pending.append(operation)
        for signal in set(map(id, operation.signals)):
            self._signalling.setdefault(signal, []).append(operation)
        if self.eager:
            self.land(operation)

    def land(self, operation: Operation) -> None:
        """Land it, and before it what its queue holds before it."""
        if operation.landed:
            return
        if operation.queue is not None:
            for earlier in [o for o in self.pending if o.queue == operation.queue]:
                self._land(earlier)
                if earlier is operation:
                    return
        self._land(operation)

    def _land(self, operation: Operation) -> None:
        operation.landed = True
        self.pending.remove(operation)
        for signal in set(map(id, operation.signals)):
            self._signalling[signal].remove(operation)
            if not self._signalling[signal]:
                del self._signalling[signal]  # another object may get this id
        self.landings += 1
        try:
            operation.land()
        except SimulatorError as error:
            # A descriptor that the unit cannot follow: a fault of the kernel, or what is not modelled.
            text = f"an operation cannot be carried out: {error}"
            raise Fault(Finding("misuse", text, operation.instruction)) from error

    def signalling(self, on: object) -> Sequence[Operation]:
        """Those whose end a waiter for `on` may be waiting for, in the order in which they were issued."""
        return self._signalling.get(id(on), ())
