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
from ptxsim.isa.bulk import REDUCTIONS, fault
from ptxsim.isa.mbarriers import barrier_at, cta_and_offset, distinct, must_know_init
from ptxsim.isa.operands import Read, items_of, read
from ptxsim.isa.syntax import Form
from ptxsim.isa.table import Act, translates
from ptxsim.ptx.nodes import WIDTHS, Instruction
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


@translates("st.async")
def st(instruction: Instruction, form: Form) -> Act:
    """[address], value or vector, [mbarrier]."""

    def store(cta: Cta, offsets: Values, values: Values) -> None:
        cta.shared.store(offsets, values)

    return _operation(instruction, _reads(instruction, WIDTHS[form.type]), store, reduces=False)


@translates("red.async")
def red(instruction: Instruction, form: Form) -> Act:
    """[address], value, [mbarrier]. Lanes act one after the other."""
    operation, kind = form.one_of(*REDUCTIONS), form.type

    def store(cta: Cta, offsets: Values, values: Values) -> None:
        for lane in range(len(offsets)):
            here = offsets[lane : lane + 1]
            before = cta.shared.load(here, values.dtype.itemsize, 1)
            after = reduce(
                operation, kind, before.view(DTYPES[kind]), values[lane : lane + 1].view(DTYPES[kind])
            )
            cta.shared.store(here, after.astype(DTYPES[kind]).view(values.dtype))

    return _operation(instruction, _reads(instruction, WIDTHS[kind]), store, reduces=True)


def _reads(instruction: Instruction, bits: int) -> list[Read]:
    return [read(item, f"u{bits}") for item in items_of(instruction.operands[1])]


def _operation(instruction: Instruction, sources: list[Read], store: Store, reduces: bool) -> Act:
    target, signal = locate(instruction.operands[0]), locate(instruction.operands[2])
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
