"""This library's forward kernels with their tensors, which can be run again with something changed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from cases import Captured, Size
from mutants import Mutant, can_matter, clean_to_its_end, mutants
from torch import Tensor

import fa4flex
from fa4flex.kernels.plan.arguments import COUNTERS
from fa4flex.runtime.cuda.launches import ready
from fa4flex.variants import causal
from ptxsim.active import simulated
from ptxsim.doors.capture import capturing
from ptxsim.doors.launch import Launch
from ptxsim.run.launch import Result
from ptxsim.run.program import Program

TIMINGS = (("late", 1), ("eager", 0), ("random", 2), ("random", 3))


@dataclass(frozen=True, eq=False)
class Noticing(Captured):
    """A launch that tells whether a synchronisation less is noticed."""

    def clean(self, timing: str, seed: int, program: Program | None = None) -> bool:
        """True if nothing is found or remarked, and the results are right."""
        result = self.run(timing, seed, program)
        return not result.findings and not result.remarks and self.error <= 2 * self.plain_error

    def noticed(self, mutant: Mutant) -> bool:
        """True if some timing shows the mutant."""
        return not all(clean_to_its_end(self.clean, *timing, mutant.program) for timing in TIMINGS)

    def that_matter(self) -> list[Mutant]:
        assert clean_to_its_end(self.clean, "late", 1)
        result = self.run("eager", 0)
        return [mutant for mutant in mutants(result) if can_matter(mutant, result)]


@dataclass(frozen=True, eq=False)
class Own(Noticing):
    """A launch of this library's kernel. A launch that does not end leaves its counters as they are."""

    counters: Tensor

    def run(self, timing: str, seed: int, program: Program | None = None) -> Result:
        self.counters.zero_()
        return super().run(timing, seed, program)


def captured_forward(
    arch: str,
    size: Size,
    masked: bool,
    planned: contextlib.AbstractContextManager[None] | None = None,
    **options: Any,
) -> Own:
    """The forward kernel, dense or causal, on one multiprocessor, or the two of a pair of CTAs, for which
    `planned`, if given, plans it."""
    torch.manual_seed(0)
    q = torch.randn(size.batch, size.q_len, size.heads, size.dim).bfloat16()
    k, v = (torch.randn(size.batch, size.kv_len, size.heads, size.dim).bfloat16() for _ in range(2))
    attn = fa4flex.compile(mask=causal if masked else None, layout="bshd", **options)
    seen: list[Launch] = []
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    with (
        torch.no_grad(),
        planned or contextlib.nullcontext(),
        patch.object(ready, "counters", lambda device: counters),
        capturing(arch, seen.append, None if planned else 1),
        simulated(arch),
    ):
        out: Any = attn(q, k, v)
    (launch,) = seen
    assert launch.grid == launch.cluster
    return Own(launch, q, k, v, out, masked, counters)
