"""One synchronisation less is noticed in this library's Blackwell backward, which is right as it stands."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mutants import Mutant, can_matter, mutants
from pairs import in_pairs
from torch import Tensor

import fa4flex
from fa4flex.runtime.cuda import backward
from fa4flex.runtime.cuda.simulated import simulated
from fa4flex.simulator.doors.capture import capturing
from fa4flex.simulator.doors.device import Gpu
from fa4flex.simulator.doors.launch import Launch
from fa4flex.simulator.run.launch import Result, Shape, execute, module_of, program_of
from fa4flex.simulator.run.program import Program
from fa4flex.simulator.run.timing import Timing
from fa4flex.variants import causal

TIMINGS = (("late", 1), ("eager", 0), ("random", 2), ("random", 3))
HEADS, QUERIES, KEYS, DIM, WIDE = 2, 384, 128, 128, 192
"""One block takes three tiles of queries of each of two heads, or what is causal of them: its rings go
round. A pair of CTAs takes those of one head, whose keys are twice as many."""


@dataclass(frozen=True, eq=False)
class Own:
    """A launch of the main kernel, whatever it reads, and what it wrote when nothing was changed: sums of dQ,
    dK and dV. Only one block adds to an element of dQ, so results are the same bits in every timing."""

    launch: Launch
    kept: tuple[Any, ...]
    results: tuple[Tensor, Tensor, Tensor]
    expected: tuple[Tensor, Tensor, Tensor]

    def run(self, timing: str, seed: int, program: Program | None = None) -> Result:
        """Once more, into poisoned outputs and cleared sums."""
        at = self.launch
        for x, start in zip(self.results, (0.0, math.nan, math.nan), strict=True):
            x.fill_(start)
        shape = Shape(at.grid, at.block, at.cluster, at.shared_bytes)
        whole = program or program_of(at.ptx, at.kernel)
        return execute(module_of(at.ptx), whole, shape, at.params, None, Timing(timing, seed))

    def clean(self, timing: str, seed: int, program: Program | None = None) -> bool:
        """Whether nothing is found or remarked, and the results are those of the kernel as it stands."""
        result = self.run(timing, seed, program)
        same = all(torch.equal(x, y) for x, y in zip(self.results, self.expected, strict=True))
        return not result.findings and not result.remarks and same

    def noticed(self, mutant: Mutant) -> bool:
        """Whether some timing tells."""
        return not all(self.clean(timing, seed, mutant.program) for timing, seed in TIMINGS)

    def that_matter(self) -> list[Mutant]:
        for timing, seed in TIMINGS:
            assert self.clean(timing, seed)
        result = self.run("eager", 0)
        return [mutant for mutant in mutants(result) if can_matter(mutant, result)]


@lru_cache
def main_kernel(masked: bool, ctas: int = 1, dim: int = DIM) -> Own:
    """dim: of q and k."""
    torch.manual_seed(0)
    heads = HEADS // ctas
    q = torch.randn(1, heads, QUERIES, dim).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 1, KEYS * ctas, d).bfloat16().requires_grad_() for d in (dim, DIM))
    attn = fa4flex.compile(mask=causal if masked else None)
    seen: list[Launch] = []
    given: list[tuple[Any, ...]] = []
    gpu = Gpu("sm_100a", "eager", 0)

    def launched(launch: Launch) -> None:
        seen.append(launch)
        gpu.run(launch)

    make_ready = backward._make_ready

    def kept(*call: Any) -> Any:
        ready = make_ready(*call)
        launch = ready.launch
        object.__setattr__(ready, "launch", lambda *x: (given.append(x), launch(*x)))
        return ready

    with (
        capturing("sm_100a", launched),
        simulated("sm_100a"),
        patch.object(backward, "_make_ready", kept),
        in_pairs() if ctas == 2 else contextlib.nullcontext(),
    ):
        attn(q, k, v).backward(torch.randn(1, heads, QUERIES, DIM).bfloat16())
    _, _, launch, _ = seen
    assert launch.grid == launch.cluster == (ctas, 1, 1) and not gpu.findings
    (tensors,) = given
    results = tensors[9], tensors[11], tensors[12]
    return Own(launch, tensors, results, tuple(x.clone() for x in results))  # type: ignore[arg-type]


KERNELS = pytest.mark.parametrize("masked", [False, True], ids=["dense", "causal"])


def implied(mutant: Mutant, ctas: int) -> bool:
    """Whether what it lacks is known not to matter. Of the fences after the initialisation of barriers, any
    one will do. In a pair, the warp that waits for dS has a fence for what the other CTA sends, which covers
    what threads of its own CTA wrote before theirs; and no CTA frees tensor memory before the other one has
    read its own, without which a plan is refused, but here each frees its own."""
    body, opcode = mutant.program.kernel.body, mutant.instruction.opcode
    if ctas == 1 or opcode.startswith("fence.mbarrier_init"):
        return opcode.startswith("fence.mbarrier_init")
    told = ("mbarrier", "tcgen05")
    later = next((x.opcode for x in body[mutant.index + 1 :] if x.opcode.startswith(told)), "")
    if opcode.startswith("fence.proxy.async"):
        return later.startswith("mbarrier.arrive.shared.b64")
    return opcode.startswith("mbarrier.try_wait") and later.startswith("tcgen05.dealloc")


def some(ctas: int, masked: bool, count: int, dim: int = DIM) -> None:
    own = main_kernel(masked, ctas, dim)
    for mutant in random.sample([m for m in own.that_matter() if not implied(m, ctas)], count):
        assert own.noticed(mutant), mutant


@KERNELS
def test_some(masked: bool) -> None:
    some(1, masked, 6)


def test_some_of_wide_heads() -> None:
    some(1, random.random() < 0.5, 3, WIDE)


@pytest.mark.exhaustive
@KERNELS
def test_some_of_a_pair(masked: bool) -> None:
    some(2, masked, 2)


@pytest.mark.exhaustive
@KERNELS
@pytest.mark.parametrize(("ctas", "dim"), [(1, DIM), (2, DIM), (1, WIDE)])
def test_all(masked: bool, ctas: int, dim: int) -> None:
    """Every mutant that can matter is noticed but for 2 of about 85, and 5 of about 120 of a pair."""
    own = main_kernel(masked, ctas, dim)
    tried = own.that_matter()
    left = [mutant for mutant in tried if not own.noticed(mutant)]
    for mutant in left:
        print("not noticed:", mutant)
        assert dim == WIDE or implied(mutant, ctas), mutant
    print(len(left), "of", len(tried))
    assert len(tried) >= 50 and len(left) <= 0.05 * len(tried)
