"""Calls of this library whose kernels can be run again with something changed: those that one call launches
beside others, and those that host code allocates memory for."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from executed import uncompared
from mutants import Mutant, can_matter, clean_to_its_end, mutants, unsaid

import ptxsim
from fa4flex.torch_internals import is_wrapped
from ptxsim.doors import device
from ptxsim.run import launch as launching
from ptxsim.run.launch import Result
from ptxsim.run.program import Program
from ptxsim.state.memory import HostMemory

TIMINGS = (("late", 1), ("eager", 0), ("random", 2), ("random", 3))


@dataclass(frozen=True, eq=False)
class Own:
    """`call` launches kernels, of which those whose names contain `kernel` are changed, and says whether its
    results are right."""

    arch: str
    kernel: str
    call: Callable[[], bool]
    sms: int | None = None

    def run(self, timing: str, seed: int, mutant: Mutant | None = None) -> tuple[list[Result], bool]:
        """The results of the kernels and whether they are right, in memory that is poisoned before."""
        with (
            torch.no_grad(),
            poisoned(),
            _bounded(),
            _planted(mutant),
            ptxsim.device(self.arch, seed, timing, self.sms) as gpu,
        ):
            right = self.call()
        return [result for result in gpu.results if self.kernel in result.kernel], right

    def clean(self, timing: str, seed: int, mutant: Mutant | None = None) -> bool:
        results, right = self.run(timing, seed, mutant)
        assert results
        return right and not any(result.findings or result.remarks for result in results)

    def told(self, timing: str, seed: int) -> str:
        """Findings of a run, and whether its results are right, in words."""
        results, right = self.run(timing, seed)
        found = [line for result in results for line in (*result.findings, *result.remarks)]
        return "\n".join([f"{len(results)} launches, results right: {right}", *map(str, found)])

    def noticed(self, mutant: Mutant) -> bool:
        """True if some timing shows the mutant."""
        return not all(clean_to_its_end(self.clean, *timing, mutant) for timing in TIMINGS)

    def that_matter(self) -> list[Mutant]:
        """Mutants of all kernels that can matter, once for each kernel."""
        assert clean_to_its_end(self.clean, "late", 1), self.told("late", 1)
        results, _ = self.run("eager", 0)
        once = {result.program.kernel.body: result for result in results}
        return [
            mutant
            for result in once.values()
            for mutant in (*(m for m in mutants(result) if can_matter(m, result)), *unsaid(result))
        ]


Implied = Callable[[Mutant], bool]
"""Question whether what a mutant lacks is known not to matter."""


def some_are_noticed(one: Own, implied: Implied) -> None:
    """At most one of four mutants that can matter, chosen at random, may be left."""
    tried = random.sample([m for m in one.that_matter() if not implied(m)], 4)
    left = [mutant for mutant in tried if not one.noticed(mutant)]
    assert len(left) <= 1, left


def nearly_all_are_noticed(one: Own, implied: Implied, least: int) -> None:
    """At most 3 % of the mutants that can matter, which are at least so many, may be left."""
    tried = [mutant for mutant in one.that_matter() if not implied(mutant)]
    left = [mutant for mutant in tried if not one.noticed(mutant)]
    print(len(left), "of", len(tried), *left, sep="\n")
    assert len(tried) >= least and len(left) <= 0.03 * len(tried)


def wait_left_out(mutant: Mutant) -> bool:
    """True if a wait for an mbarrier is left out. Of the kernels for latent rows, some do not matter: a
    warpgroup waits for pieces of the other one's block, which that one has told it of."""
    return "try_wait" in mutant.instruction.opcode


def is_first(mutant: Mutant, *kinds: str) -> bool:
    """True if the mutant's instruction is the first of its kind in the kernel, and of one of these."""
    opcode, before = mutant.instruction.opcode, mutant.program.kernel.body[: mutant.index]
    kind = next((kind for kind in kinds if opcode.startswith(kind)), None)
    return kind is not None and not any(other.opcode.startswith(kind) for other in before)


@contextlib.contextmanager
def _planted(mutant: Mutant | None) -> Iterator[None]:
    """Within, launches of the kernel that the mutant is one of execute the mutant."""
    program_of, planted = launching.program_of, []

    def changed(text: str, kernel: str) -> Program:
        program = program_of(text, kernel)
        body = program.kernel.body
        if mutant is None or mutant.index >= len(body) or body[mutant.index] is not mutant.instruction:
            return program
        planted.append(mutant)
        return mutant.program

    plain = contextlib.nullcontext() if mutant is None else uncompared()
    with patch.object(launching, "program_of", changed), plain:
        yield
    assert mutant is None or planted, "the kernel was not launched, or was parsed anew"


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within, torch.empty fills memory with NaN or the greatest integers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Within, kernels reach tensors of this process and nothing else: an address that went wrong is found,
    and harms nobody."""

    def memory(**more: Any) -> HostMemory:
        made = HostMemory(strict=True, **more)
        gc.unfreeze()  # what is frozen is not among the objects
        for tensor in gc.get_objects():
            # Tensors of transforms and sparse tensors have no memory at one address.
            plain = type(tensor) is torch.Tensor and not is_wrapped(tensor) and tensor.layout is torch.strided
            if plain and tensor.device.type == "cpu" and tensor.numel():
                storage = tensor.untyped_storage()
                made.register("a tensor", storage.data_ptr(), storage.nbytes())
        return made

    with patch.object(device, "HostMemory", memory):
        yield
