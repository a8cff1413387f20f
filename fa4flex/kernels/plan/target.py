"""Target: the limits and rates of a chip, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4flex.errors import UnsupportedError


@dataclass(frozen=True)
class Target:
    """capability                                 CUDA's name for what the chip can do, (major, minor)
    family                                     of chips that share plans and kernels: how their folders end
    multiprocessors, clock                     SMs, and their boost clock in Hz
    shared_memory                              bytes that one block may own
    registers                                  32-bit registers of one SM
    register_step, register_least, register_most   what a warpgroup may ask for, per thread (setmaxnreg)
    named_barriers                             hardware barriers of a block; number 0 is __syncthreads
    mma_rows                                   rows of one matrix instruction: those of a softmax warpgroup
    most_consumers                             softmax warpgroups of a block
    key_step, most_keys                        legal key-tile lengths: multiples, and the largest
    tensor_flops                               dense 16-bit FLOP per clock and SM
    special_results, fp32_results, load_lanes  results per clock and SM: ex2 or tanh, fp32 FMA, load lanes
    l2_bytes, hbm_bytes_per_second             cache size, memory bandwidth
    tensor_columns                             of tensor memory, 32 bits wide; 0 where there is none

    Sources: CUDA C++ Programming Guide, tables of technical specifications and of arithmetic throughput for
    compute capability 9.0; PTX ISA, `setmaxnreg` and `wgmma` (k = 16 fixes key_step: keys are the inner
    dimension of P V); NVIDIA H100 and H200 data sheets.
    """

    name: str
    chip: str
    capability: tuple[int, int]
    family: str
    multiprocessors: int
    clock: float
    shared_memory: int
    registers: int
    register_step: int
    register_least: int
    register_most: int
    named_barriers: int
    mma_rows: int
    most_consumers: int
    key_step: int
    most_keys: int
    tensor_flops: int
    special_results: int
    fp32_results: int
    load_lanes: int
    l2_bytes: int
    hbm_bytes_per_second: float
    tensor_columns: int = 0

    @property
    def peak_flops(self) -> float:
        """Dense 16-bit FLOP per second of the whole chip."""
        return self.per_second(self.tensor_flops)

    def per_second(self, per_clock: float) -> float:
        """A rate per clock and SM, for the whole chip and per second."""
        return per_clock * self.multiprocessors * self.clock

    def leaving(self, margin: int) -> Target:
        """The chip without so many of its multiprocessors, which other kernels use. Raises UnsupportedError
        where none is left."""
        if margin >= self.multiprocessors:
            raise UnsupportedError(
                f"sm_margin={margin} on a GPU of {self.multiprocessors} multiprocessors",
                "some multiprocessors for attention",
                "leave fewer to others: Schedule(sm_margin=8)",
            )
        return replace(self, multiprocessors=self.multiprocessors - margin) if margin else self

    def named(self, device: str) -> Target:
        """The chip that a GPU of this name is, if one of MEMORY: others of its capability differ in that."""
        chip = next((chip for chip in MEMORY if chip in device), None)
        return self if chip is None else replace(self, chip=chip, hbm_bytes_per_second=MEMORY[chip])

    def register_pool(self, warpgroups: int) -> int:
        """Registers per thread that `warpgroups` warpgroups share: a launch gives all alike, in steps."""
        each = self.registers // (128 * warpgroups) // self.register_step * self.register_step
        return each * warpgroups

    def shared_memory_of(self, blocks: int) -> int:
        """Bytes of shared memory that each block may have where so many share a multiprocessor, which takes
        RESERVED of each."""
        return (self.shared_memory + RESERVED) // blocks - RESERVED


ALL_SHARED = 100
"""Percent of a multiprocessor's memory that is shared memory: blocks that share it need all of it."""

RESERVED = 1024
"""Bytes of shared memory of each block that the system takes, from compute capability 9.0 on."""

MEMORY = {"H100": 3.35e12, "H200": 4.8e12, "B200": 8e12, "B300": 8e12}
"""Bytes per second of the memory of chips, by data sheets (H100 SXM), by what their names contain."""

SM90A = Target(
    name="sm_90a",
    chip="H200",
    capability=(9, 0),
    family="sm90",
    multiprocessors=132,
    clock=1.83e9,
    shared_memory=232448,
    registers=65536,
    register_step=8,
    register_least=24,
    register_most=240,
    named_barriers=16,
    mma_rows=64,
    most_consumers=3,
    key_step=16,
    most_keys=256,
    tensor_flops=4096,
    special_results=16,
    fp32_results=128,
    load_lanes=32,
    l2_bytes=50 << 20,
    hbm_bytes_per_second=4.8e12,
)

SM100A = Target(
    name="sm_100a",
    chip="B200",
    capability=(10, 0),
    family="sm100",
    multiprocessors=148,
    clock=1.85e9,
    shared_memory=232448,
    registers=65536,
    register_step=8,
    register_least=24,
    register_most=256,
    named_barriers=16,
    mma_rows=128,
    most_consumers=2,
    key_step=16,
    most_keys=128,
    tensor_flops=8192,
    special_results=16,
    fp32_results=128,
    load_lanes=32,
    l2_bytes=126 << 20,
    hbm_bytes_per_second=8e12,
    tensor_columns=512,
)

SM103A = replace(SM100A, name="sm_103a", chip="B300", capability=(10, 3), special_results=32)
"""Blackwell Ultra doubles the rate of exponentials."""

TARGETS = (SM90A, SM100A, SM103A)
