"""From PTX as it was executed to instructions as a multiprocessor issues them.

ptxas does not keep the order of PTX: within a basic block it issues what is ready, as far as registers
suffice. So does `scheduled`, for one warp alone, by source order among what is ready at the same time;
barriers, memory accesses and copies keep their order. How many registers a thread has, setmaxnreg says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ptxsim.model.chip import Chip
from ptxsim.model.costs import FREE_COST, Cost, cost, multiply
from ptxsim.model.events import Event
from ptxsim.model.flow import Flow, Register, mixes, operands_of, width
from ptxsim.model.recorder import WarpTrace
from ptxsim.ptx.nodes import Imm, Instruction, Kernel

REGISTERS = 65536
"""Registers of a multiprocessor, 32 bits each."""


@dataclass(slots=True, eq=False)
class Op:
    """One machine instruction. `index` is that of its PTX instruction in the kernel's body."""

    cost: Cost
    reads: tuple[Register, ...]
    writes: tuple[Register, ...]
    index: int


@dataclass(eq=False)
class Stretch:
    """Instructions of the kernel's body without a branch into or out of them, in the order of issue.
    `renamed` are registers that folded instructions leave at its end, with those they were made from."""

    first: int
    stop: int
    ops: list[Op] = field(default_factory=list)
    renamed: list[tuple[Register, tuple[Register, ...]]] = field(default_factory=list)


Piece = tuple[Stretch, dict[int, Event]]
"""A stretch, executed, and what its instructions did, by their index."""


class Lowering:
    """Lowering of one kernel for one chip. `threads` are those of a CTA."""

    def __init__(self, kernel: Kernel, chip: Chip, threads: int) -> None:
        self._body, self._chip, self._flow = kernel.body, chip, Flow.of(kernel)
        self._registers = min(255, REGISTERS // threads // 8 * 8)
        self._made: dict[tuple[int, int, int], Stretch] = {}

    def pieces(self, trace: WarpTrace) -> Iterator[Piece]:
        """Pieces that a warp executes, stretch by stretch."""
        first = stop = -1
        events: dict[int, Event] = {}
        registers = self._registers
        for start, end, event in trace.entries:
            if start != stop or start in self._flow.leaders:
                if stop > first:
                    yield self.stretch(first, stop, registers), events
                    registers = self._limit(first, stop, registers)
                first, events = start, {}
            stop = end
            if event is not None:
                events[end - 1] = event
        if stop > first:
            yield self.stretch(first, stop, registers), events

    def _limit(self, first: int, stop: int, registers: int) -> int:
        """Registers of a thread after a stretch."""
        for instruction in self._body[first:stop]:
            if instruction.name == "setmaxnreg" and isinstance(instruction.operands[0], Imm):
                registers = int(instruction.operands[0].value)
        return registers

    def stretch(self, first: int, stop: int, registers: int) -> Stretch:
        found = self._made.get((first, stop, registers))
        if found is None:
            plain = self._folded(first, stop)
            found = scheduled(plain, self._chip, self._pressure(plain, registers))
            self._made[first, stop, registers] = found
        return found

    def _folded(self, first: int, stop: int) -> Stretch:
        """In the order of PTX, without what costs nothing."""
        made = Stretch(first, stop)
        alias: dict[Register, tuple[Register, ...]] = {}
        fused = _shifts_into_additions(self._body, first, stop)
        for index in range(first, stop):
            instruction = self._body[index]
            reads, writes = operands_of(instruction)
            roots = tuple(dict.fromkeys(r for register in reads for r in alias.get(register, (register,))))
            what = self._cost(instruction, reads)
            if index in fused:
                what = FREE_COST if instruction.name == "shl" else multiply(self._chip)
            if not what.issues:
                alias |= dict.fromkeys(writes, roots)
                continue
            for register in writes:
                alias.pop(register, None)
            made.ops.append(Op(what, roots, writes, index))
        made.renamed = list(alias.items())
        return made

    def _cost(self, instruction: Instruction, reads: tuple[Register, ...]) -> Cost:
        uniform = all(self._flow.uniform.get(r, True) for r in reads) and not mixes(instruction)
        return cost(instruction, self._chip, uniform)

    def _pressure(self, plain: Stretch, registers: int) -> Pressure:
        leader = max(i for i in self._flow.leaders if i <= plain.first)
        alias = dict(plain.renamed)
        needed = {root for r in self._flow.needed[leader] for root in alias.get(r, (r,))}
        lanes = {r: width(r) for op in plain.ops for r in (*op.reads, *op.writes)}
        lanes |= {r: width(r) for r in (*self._flow.entering[leader], *needed)}
        sizes = {r: size for r, size in lanes.items() if size and not self._flow.uniform.get(r)}
        uses = Counter(r for op in plain.ops for r in set(op.reads))
        holding = {r for r in self._flow.entering[leader] if r in sizes}
        return Pressure(registers, sizes, needed, uses, holding)


def _shifts_into_additions(body: tuple[Instruction, ...], first: int, stop: int) -> set[int]:
    """Shifts to the left by a constant whose only reader is an addition behind them, and those additions."""
    readers: dict[Register, list[int]] = {}
    shifts: dict[Register, int] = {}
    for index in range(first, stop):
        reads, writes = operands_of(body[index])
        for register in reads:
            readers.setdefault(register, []).append(index)
        if body[index].name == "shl" and isinstance(body[index].operands[2], Imm):
            shifts[writes[0]] = index
    # What a fused shift is read by may be a move, so that the addition is behind that.
    moves = {i: operands_of(body[i])[1] for i in range(first, stop) if body[i].name == "mov"}
    fused: set[int] = set()
    for register, at in shifts.items():
        by = readers.get(register, [])
        while len(by) == 1 and by[0] in moves and len(moves[by[0]]) == 1:
            by = readers.get(moves[by[0]][0], [])
        if len(by) == 1 and by[0] > at and body[by[0]].name == "add":
            fused |= {at, by[0]}
    return fused


# --- the order of issue -------------------------------------------------------------------------------------


@dataclass
class Pressure:
    """Registers in use while a stretch is put in order: `sizes` of those that lanes hold, which of them are
    `needed` at its end, how often each is still read (`uses`), which are `holding` something."""

    limit: int
    sizes: dict[Register, int]
    needed: set[Register]
    uses: Counter[Register]
    holding: set[Register]

    def __post_init__(self) -> None:
        self.taken = sum(self.sizes[r] for r in self.holding)

    def growth(self, op: Op) -> int:
        """Number of registers more in use behind an instruction."""
        made = sum(self.sizes.get(r, 0) for r in op.writes if r not in self.holding and self._kept(r))
        return made - sum(self.sizes[r] for r in set(op.reads) if self._last(r))

    def fits(self, op: Op) -> bool:
        growth = self.growth(op)
        return growth <= 0 or self.taken + growth <= self.limit

    def issue(self, op: Op) -> None:
        for register in set(op.reads):
            if self._last(register):
                self.holding.discard(register)
                self.taken -= self.sizes[register]
            self.uses[register] -= 1
        for register in op.writes:
            if register in self.sizes and register not in self.holding and self._kept(register):
                self.holding.add(register)
                self.taken += self.sizes[register]

    def _kept(self, register: Register) -> bool:
        return self.uses[register] > 0 or register in self.needed

    def _last(self, register: Register) -> bool:
        """True if the next read of a register is its last."""
        return self.uses[register] == 1 and register not in self.needed and register in self.holding


def scheduled(plain: Stretch, chip: Chip, pressure: Pressure) -> Stretch:
    """The stretch in the order in which one warp, alone on its sub-core, would issue what is ready first.
    What takes more registers than there are waits; where everything does, the source's order decides."""
    ops = plain.ops
    before, after = _dependences(ops)
    waiting = [len(b) for b in before]
    ready = [i for i, n in enumerate(waiting) if not n]
    earliest = [0.0] * len(ops)
    units: dict[str, float] = {}
    order: list[Op] = []
    clock = 0.0
    while ready:
        able = [i for i in ready if pressure.fits(ops[i])]
        if not able:
            able = [min(ready)]
        at, best = min((max(clock, units.get(ops[i].cost.unit, 0.0), earliest[i]), i) for i in able)
        ready.remove(best)
        op = ops[best]
        order.append(op)
        pressure.issue(op)
        clock = at + op.cost.issues
        if op.cost.unit:
            units[op.cost.unit] = at + op.cost.hold
        for follower, latency in after[best]:
            earliest[follower] = max(earliest[follower], at + latency)
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return Stretch(plain.first, plain.stop, order, plain.renamed)


def _dependences(ops: list[Op]) -> tuple[list[set[int]], list[list[tuple[int, float]]]]:
    """(what each must follow, what follows each and how many clocks later)"""
    before: list[set[int]] = [set() for _ in ops]
    after: list[list[tuple[int, float]]] = [[] for _ in ops]
    writer: dict[Register, int] = {}
    readers: dict[Register, list[int]] = {}
    last = -1

    def follows(i: int, j: int, latency: float) -> None:
        if j != i and j not in before[i]:
            before[i].add(j)
            after[j].append((i, latency))

    for i, op in enumerate(ops):
        for register in op.reads:
            if register in writer:
                follows(i, writer[register], ops[writer[register]].cost.latency)
            readers.setdefault(register, []).append(i)
        for register in op.writes:
            for j in readers.pop(register, ()):
                follows(i, j, 0)
            if register in writer:
                follows(i, writer[register], 1)
            writer[register] = i
        if op.cost.ordered:
            if last >= 0:
                follows(i, last, 1)
            last = i
    if ops and ops[-1].cost.name == "branch":
        for j in range(len(ops) - 1):
            follows(len(ops) - 1, j, 0)
    return before, after
