"""This library's backward kernels with their tensors, which can be run again with something changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from mutants import Mutant, can_matter, clean_to_its_end, mutants
from torch import Tensor

from fa4flex.kernels.plan.arguments import BACKWARD
from fa4flex.runtime.cuda import backward
from ptxsim.active import simulated
from ptxsim.doors.capture import capturing
from ptxsim.doors.device import Gpu
from ptxsim.doors.launch import Launch
from ptxsim.run.launch import Result, Shape, execute, module_of, program_of
from ptxsim.run.program import Program
from ptxsim.run.timing import Timing

SUMS = BACKWARD.names.index("dq_sum")
TIMINGS = (("late", 1), ("eager", 0), ("random", 2), ("random", 3))


@dataclass(frozen=True, eq=False)
class Own:
    """A launch of the main kernel, whatever it reads, and what it wrote when nothing was changed: sums of dQ,
    or dQ itself, dK and dV. Only one block adds to an element of dQ, so results are the same bits in every
    timing. Sums of rows past a sequence's end, which nothing clears or reads, are expected to be NaN, and not
    compared."""

    launch: Launch
    kept: tuple[Any, ...]
    results: tuple[Tensor, ...]
    expected: tuple[Tensor, ...]

    @property
    def sums(self) -> Tensor | None:
        """Sums of dQ; None where a block writes it itself."""
        sums: Tensor | None = self.kept[SUMS]
        return sums

    def run(self, timing: str, seed: int, program: Program | None = None) -> Result:
        """Runs once more, into poisoned outputs and cleared sums; the counts of what blocks cleared, too, and
        the tile counter, which a launch that does not end leaves as it is."""
        at = self.launch
        first = 0.0 if self.results[0] is self.sums else math.nan
        for i, x in enumerate(self.results):
            x.fill_(math.nan if i else first)
        for counts in self.kept[-2:]:
            if counts is not None:
                counts.zero_()
        shape = Shape(at.grid, at.block, at.cluster, at.shared_bytes)
        whole = program or program_of(at.ptx, at.kernel)
        return execute(module_of(at.ptx), whole, shape, at.params, None, Timing(timing, seed))

    def clean(self, timing: str, seed: int, program: Program | None = None) -> bool:
        """True if nothing is found or remarked, and the results are those of the kernel as it stands."""
        result = self.run(timing, seed, program)
        pairs = zip(self.results, self.expected, strict=True)
        same = all(torch.equal(x[~y.isnan()], y[~y.isnan()]) for x, y in pairs)
        return not result.findings and not result.remarks and same

    def noticed(self, mutant: Mutant) -> bool:
        """True if some timing shows the mutant."""
        return not all(clean_to_its_end(self.clean, *timing, mutant.program) for timing in TIMINGS)

    def that_matter(self) -> list[Mutant]:
        for timing, seed in TIMINGS:
            assert clean_to_its_end(self.clean, timing, seed)
        result = self.run("eager", 0)
        return [mutant for mutant in mutants(result) if can_matter(mutant, result)]


OF_KERNELS = {"OfValues": ("dv",), "OfKeys": ("dq_sum", "dk")}
"""Tensors that each of two main kernels writes, by a part of its name."""


def captured_two(arch: str, attn: Any, qkv: tuple[Tensor, Tensor, Tensor]) -> dict[str, Own]:
    """Both main kernels of attn's gradients, by a part of their names."""
    seen, tensors = launches(arch, attn, qkv)
    found = {}
    for name, written in OF_KERNELS.items():
        results = tuple(tensors[BACKWARD.names.index(one)] for one in written)
        launch = next(one for one in seen if name in one.kernel)
        found[name] = Own(launch, tensors, results, tuple(x.clone() for x in results))
    return found


def captured(arch: str, attn: Any, qkv: tuple[Tensor, Tensor, Tensor], sms: int | None = None) -> Own:
    """The main kernel of attn's gradients, run once on a GPU of so many multiprocessors."""
    seen, tensors = launches(arch, attn, qkv, sms)
    sums, dq, dk, dv = (tensors[BACKWARD.names.index(name)] for name in ("dq_sum", "dq", "dk", "dv"))
    results = dq if sums is None else sums, dk, dv
    assert all(int((~x.isnan()).sum()) >= y.numel() for x, y in zip(results, qkv, strict=True))
    return Own(seen[2], tensors, results, tuple(x.clone() for x in results))


def launches(
    arch: str, attn: Any, qkv: tuple[Tensor, Tensor, Tensor], sms: int | None = None
) -> tuple[list[Launch], tuple[Any, ...]]:
    """All launches of a call and its gradients, and the arguments of those of the backward pass."""
    inputs = [x.requires_grad_() for x in qkv]
    seen: list[Launch] = []
    given: list[tuple[Any, ...]] = []
    gpu = Gpu(arch, "eager", 0)

    def launched(launch: Launch) -> None:
        seen.append(launch)
        gpu.run(launch)

    with capturing(arch, launched, sms), simulated(arch), kept_arguments(given):
        out = attn(*inputs)
        out.backward(torch.randn_like(out))
    assert not gpu.findings, gpu.report()
    (tensors,) = given
    return seen, tensors


@contextlib.contextmanager
def kept_arguments(given: list[tuple[Any, ...]]) -> Iterator[None]:
    """Collects the arguments of backward launches in `given`, with sums of dQ poisoned."""
    made = backward.launch_function

    def kept(schema: Any, launch: Any, *rest: Any) -> Any:
        def poisoned(*tensors: Any) -> None:
            if tensors[SUMS] is not None:
                tensors[SUMS].fill_(math.nan)
            given.append(tensors)
            launch(*tensors)

        return made(schema, poisoned, *rest)

    with patch.object(backward, "launch_function", kept):
        yield
