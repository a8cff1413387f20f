"""Chip as the model of time has it: rates per clock and multiprocessor, latencies in clocks.

Nothing here is fitted to a kernel's measured time. A comment behind each number says where it is from:

paper     Zadouri et al. 2026, FlashAttention-4, "Roofline analysis"
guide     NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions"
gemm      public microbenchmarks of B200 behind a hand-written FP8 GEMM (two CTAs, 256 x 256 x 128)
umma      public microbenchmark of tcgen05.mma on B200
triton    latencies measured on B200 for Triton's modulo scheduler (LatencyModel.cpp, Meta)
pipes     public microbenchmarks of B300 by SASS opcode (same multiprocessor but for special functions)
H200      measured with `python -m ptxsim.model.latencies`: the generation before
estimate  none of these
"""

from __future__ import annotations

from dataclasses import dataclass

SUBCORES = 4
"""Number of sub-cores of a multiprocessor; warp w issues on sub-core w % 4."""


@dataclass(frozen=True)
class Chip:
    """Rates are lanes (or bytes, or operations) per clock of one multiprocessor."""

    name: str
    processors: int
    gigahertz: float
    mma_flops: int
    """FLOPs of MMAs of 16-bit inputs; 8-bit inputs have twice as many."""
    shared_bytes: int
    special: float
    fma: float
    packed_fma: float
    alu: float
    integer_multiply: float
    sync: float
    """Barrier instructions."""
    tensor_load_bytes: float
    tensor_store_bytes: float
    tma_bytes: float
    """From L2 into shared memory."""

    alu_latency: int
    special_latency: int
    uniform_latency: int
    shared_latency: int
    global_latency: int
    tensor_load_latency: int
    tensor_store_latency: int
    """From the last word stored to the end of tcgen05.wait::st."""
    arrive_latency: int
    """From an arrival's issue to the completed phase."""
    remote_latency: int
    """The same where the mbarrier is in the other CTA of a cluster, in addition."""
    wait_latency: int
    """From a completed phase to the next instruction of the warp that waits."""
    named_latency: int
    """From the last arrival at a named barrier to the next instruction of those that wait."""
    mma_latency: int
    """From the issue of a tcgen05.mma to its first multiplication on an idle tensor core."""
    mma_gap: float
    """Between one tcgen05.mma and the next."""
    commit_latency: int
    """From the last multiplication to the phase that its commit completes."""
    tma_latency: int
    """From the issue of a load that hits L2 to its first bytes; and of a store to its first read."""

    @property
    def peak_tflops(self) -> float:
        """Peak TFLOPS of dense 16-bit MMAs."""
        return self.processors * self.mma_flops * self.gigahertz / 1000


B200 = Chip(
    name="B200",
    processors=148,
    gigahertz=1.85,  # paper: its peak of 2,250 TFLOP/s is at 1.856; gemm and umma ran at 1.813 and 1.845
    mma_flops=8192,  # paper
    shared_bytes=128,  # paper
    special=16,  # paper; H200: 8.0 clocks for a warp instruction
    fma=128,  # guide, pipes
    packed_fma=64,  # pipes: FFMA2, FADD2, FMUL2 hold both halves of the pipe
    alu=64,  # pipes: integer, FMNMX, FSEL; F2FP: gemm and H200, 2 clocks
    integer_multiply=64,  # pipes: IMAD
    sync=12,  # pipes: BAR and SYNCS, 0.36 to 0.5 warp instructions a clock
    tensor_load_bytes=512,  # estimate: 128 lanes of 4 bytes; published figures contradict each other
    tensor_store_bytes=512,  # pipes: 98 to 131 TB/s of tcgen05.st
    tma_bytes=70,  # pipes: 20.3 TB/s of L2 over 148 multiprocessors at 1.94 GHz
    alu_latency=4,  # pipes; H200: 4.9 with its loop
    special_latency=17,  # H200
    uniform_latency=6,  # estimate
    shared_latency=25,  # gemm: ld.shared.v4
    global_latency=300,  # pipes: a hit of L2
    tensor_load_latency=36,  # pipes: a tcgen05.ld.x16 and its wait take 36 to 41 clocks
    tensor_store_latency=32,  # triton: 64 and 96 clocks for 64 and 128 columns
    arrive_latency=40,  # H200: 99 from warp to warp, 50 of them the wait, 10 the loop
    remote_latency=50,  # H200: 149 from CTA to CTA
    wait_latency=47,  # gemm; H200: 50
    named_latency=32,  # H200: 42 with its loop
    mma_latency=50,  # gemm: with commit and wait 153 clocks more than the multiplications themselves
    mma_gap=3.4,  # gemm: in a pipelined loop four MMAs of 128 clocks take 525.6
    commit_latency=56,  # the rest of the 153: how it is split with mma_latency changes nothing
    tma_latency=370,  # gemm: 419 with its wait; H200: 325
)
