"""st.async and red.async: to shared memory of the cluster, signalled at an mbarrier beside it (PTX ISA,
"st.async", "red.async").

Lanes that signal the same mbarrier are one operation. What it writes is known to be over by those who wait
for the barrier's phase. Both work in the generic proxy: the barrier needs no proxy fence, but what TMA and
tensor cores read does, by one who has waited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxsim.isa.access import Accessor, bandwidth, granules, locate
from ptxsim.isa.asynchronous import Errand, submit
from ptxsim.isa.bulk import fault
from ptxsim.isa.mbarriers import barrier_at, cta_and_offset, distinct, must_know_init
from ptxsim.isa.operands import Read, read
from ptxsim.isa.table import Act, Unmodelled, translates
from ptxsim.ptx.nodes import WIDTHS, Instruction, Operand, Reg, Vector
from ptxsim.state.barriers import MBarrier
from ptxsim.state.cta import Cta, Warp
from ptxsim.state.memory import BadAccess
from ptxsim.state.registers import Mask
from ptxsim.units.reduction import DTYPES, reduce
from ptxsim.watch.findings import Fault, Finding
from ptxsim.watch.order import GENERIC

Values = NDArray[Any]
Store = Callable[[Cta, Values, Values], None]
"""Changes what lies at offsets [lanes] of a CTA's shared memory, by values [lanes, count]."""

COUNTS = {"v2": 2, "v4": 4}
STORED = {f"{kind}{bits}" for kind in "bus" for bits in (32, 64)} | {"f32", "f64"}
REDUCED = {
    "inc": {"u32"},
    "dec": {"u32"},
    "min": {"u32", "s32"},
    "max": {"u32", "s32"},
    "add": {"u32", "s32", "u64"},
    "and": {"b32"},
    "or": {"b32"},
    "xor": {"b32"},
}
"""Types that the ISA has for each operation."""
TO_CLUSTER = {"async", "shared::cluster", "mbarrier::complete_tx::bytes"}


@translates("st.async")
def st(instruction: Instruction) -> Act:
    """[address], value or vector, [mbarrier]."""
    given = set(instruction.modifiers)
    kinds, counts = given & STORED, given & set(COUNTS)
    extra = given - TO_CLUSTER - kinds - counts - {"weak", "cluster"}
    if extra or not given >= TO_CLUSTER or len(kinds) != 1 or len(counts) > 1:
        raise Unmodelled(instruction, f"modifiers {sorted(extra)}" if extra else "")
    count = COUNTS[counts.pop()] if counts else 1

    def store(cta: Cta, offsets: Values, values: Values) -> None:
        cta.shared.store(offsets, values)

    return _operation(instruction, _reads(instruction, WIDTHS[kinds.pop()], count), store, reduces=False)


@translates("red.async")
def red(instruction: Instruction) -> Act:
    """[address], value, [mbarrier]. Lanes act one after the other."""
    given = set(instruction.modifiers)
    operations = given & set(REDUCED)
    operation = operations.pop() if len(operations) == 1 else ""
    kinds = given & REDUCED.get(operation, set())
    extra = given - TO_CLUSTER - kinds - {operation, "relaxed", "cluster"}
    if extra or not given >= TO_CLUSTER or len(kinds) != 1:
        raise Unmodelled(instruction, f"modifiers {sorted(extra)}" if extra else "")
    kind = kinds.pop()

    def store(cta: Cta, offsets: Values, values: Values) -> None:
        for lane in range(len(offsets)):
            here = offsets[lane : lane + 1]
            before = cta.shared.load(here, values.dtype.itemsize, 1)
            after = reduce(
                operation, kind, before.view(DTYPES[kind]), values[lane : lane + 1].view(DTYPES[kind])
            )
            cta.shared.store(here, after.astype(DTYPES[kind]).view(values.dtype))

    return _operation(instruction, _reads(instruction, WIDTHS[kind], 1), store, reduces=True)


def _reads(instruction: Instruction, bits: int, count: int) -> list[Read]:
    operand: Operand = instruction.operands[1]
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count or len(instruction.operands) != 3:
        raise Unmodelled(instruction, f"{len(items)} registers for {count} values")
    if any(isinstance(item, Reg) and item.file != bits for item in items):
        raise Unmodelled(instruction, f"registers of another width than {bits} bits")
    return [read(item, f"u{bits}") for item in items]


def _operation(instruction: Instruction, sources: list[Read], store: Store, reduces: bool) -> Act:
    target, signal = (
        locate(instruction.operands[0], instruction),
        locate(instruction.operands[2], instruction),
    )
    access = Accessor(instruction, "shared")

    def run(warp: Warp, mask: Mask) -> None:
        values = np.stack([np.asarray(get(warp)) for get in sources], axis=1)
        for address, lanes in distinct(signal(warp), mask):
            barrier = barrier_at(access, warp, address)
            must_know_init(access, warp, barrier)
            cta, _ = cta_and_offset(access, warp, address)
            offsets = _offsets(access, warp, target(warp)[lanes], cta)
            who = f"a {instruction.name}.async of {warp}"
            errand = Errand.alone(warp, who, instruction, reduces, GENERIC)
            _start(warp, errand, barrier, (cta, offsets, values[lanes]), store, instruction)

    return Act(run)


def _offsets(access: Accessor, warp: Warp, addresses: Values, cta: Cta) -> Values:
    """Offsets of the values in the CTA of the mbarrier, which has to be that of the addresses."""
    places = [cta_and_offset(access, warp, int(address)) for address in addresses]
    if any(owner is not cta for owner, _ in places):
        text = f"{warp} writes to another CTA than CTA {cta.rank}, where the mbarrier is"
        raise Fault(Finding("barrier", text, access.instruction))
    return np.array([offset for _, offset in places])


def _start(
    warp: Warp,
    errand: Errand,
    barrier: MBarrier,
    what: tuple[Cta, Values, Values],
    store: Store,
    instruction: Instruction,
) -> None:
    cta, offsets, values = what
    width = values.dtype.itemsize * values.shape[1]

    def land() -> None:
        try:
            store(cta, offsets, values)
        except BadAccess as bad:
            raise fault(warp, instruction, bad) from None
        where = granules(offsets, width, cta.launch.granule)
        errand.moves(cta, bandwidth(offsets, width))
        cta.shadow.write(errand.number, where, errand.clock)
        barrier.learn(errand.load)
        barrier.deliver(values.nbytes)

    submit(warp, instruction, land, (barrier,))
