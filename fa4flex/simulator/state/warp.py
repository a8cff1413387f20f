"""A warp: 32 lanes, their registers and where each of them is.

Registers are numpy arrays of 32 lanes, one per virtual register, with a view for every type that instructions
read them as: `warp.f32[7]` and `warp.u32[7]` share the bits of the eighth 32-bit register.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa4flex.simulator.state.memory import fresh

if TYPE_CHECKING:
    from fa4flex.simulator.ptx.nodes import Instruction
    from fa4flex.simulator.state.barriers import Meeting
    from fa4flex.simulator.state.cta import Cta
    from fa4flex.simulator.watch.clock import Clock

LANES = 32
Mask = NDArray[np.bool_] | None
"""Which lanes an instruction acts for, bool [32] with at least one set; None is all 32."""

POISON = 0xA5
"""Every byte of a register nobody wrote: a large odd value in any type, the same in each run."""


class Warp:
    """`index` counts warps of the CTA. `agent` is its number for happens-before tracking.

    pred[i] is bool [32]; u16 s16 f16, u32 s32 f32, u64 s64 f64 are lists of arrays [32] over shared bits.
    """

    def __init__(self, cta: Cta, index: int, threads: int, registers: dict[int, int], agent: int) -> None:
        self.cta, self.index, self.agent = cta, index, agent
        self.live = np.arange(LANES) < threads
        """Lanes that exist and have not exited."""
        self.whole = threads >= LANES
        """Whether all 32 lanes are alive."""
        self.groups: dict[int, NDArray[np.bool_]] = {0: self.live.copy()}
        """Where its lanes are: indices into Kernel.body, and who is there."""
        self.pred = list(np.zeros((registers.get(1, 0), LANES), np.bool_))
        for bits, kinds in ((16, "usf"), (32, "usf"), (64, "usf")):
            storage = np.full((registers.get(bits, 0), LANES * bits // 8), POISON, np.uint8)
            for kind in kinds:
                dtype = np.dtype(f"{ {'u': 'u', 's': 'i', 'f': 'f'}[kind] }{bits // 8}")
                setattr(self, f"{kind}{bits}", list(storage.view(dtype)))
        wide = np.full((registers.get(128, 0), LANES, 2), 0, np.uint64)
        self.u128 = list(wide)
        """[32, 2], the low half first."""
        self.local = fresh(f"the local memory of {self}", 0, LANES * cta.launch.local_bytes)
        """The lanes' bytes one after the other: local addresses tell lanes apart."""
        self.ticket: tuple[Meeting, int, Clock, set[int]] | None = None
        """The barrier the warp has come to, its round, and what is gathered there; held while the warp
        waits."""
        self.cluster_ticket: tuple[Meeting, int, Clock, set[int]] | None = None
        self.gives_up = False
        """Whether the next try_wait answers false instead of waiting."""
        self.busy: dict[tuple[int, int], Instruction] = {}
        """Registers, by file and index, that a wgmma in flight reads or writes."""
        self.unfenced: set[tuple[int, int]] = set()
        """Registers used by other instructions since the last wgmma.fence."""
        self.fenced = False
        """Whether there was a wgmma.fence at all."""
        self.started: dict[str, Any] = {}
        """Asynchronous operations by kind, in groups as they were committed (isa/asynchronous.Groups)."""
        self.carry = np.zeros(LANES, np.bool_)
        """The carry flag of add.cc and its kin."""

    def leave(self, lanes: NDArray[np.bool_]) -> None:
        """These lanes exit."""
        self.live &= ~lanes
        self.whole = False

    def __str__(self) -> str:
        return f"warp {self.index} of CTA {self.cta.rank}"

    u16: list[NDArray[np.uint16]]
    s16: list[NDArray[np.int16]]
    f16: list[NDArray[np.float16]]
    u32: list[NDArray[np.uint32]]
    s32: list[NDArray[np.int32]]
    f32: list[NDArray[np.float32]]
    u64: list[NDArray[np.uint64]]
    s64: list[NDArray[np.int64]]
    f64: list[NDArray[np.float64]]
