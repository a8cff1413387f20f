"""One synchronisation less is noticed, in kernels that are right as they stand."""

from __future__ import annotations

import pytest
import torch
from cases import Captured, Size, fa4_forward
from mutants import Mutant, can_matter, clean_to_its_end, mutants

from ptxsim.run.program import Program

TIMINGS = (("late", 1), ("eager", 0), ("random", 2), ("random", 3))


def clean(captured: Captured, timing: str, seed: int, program: Program | None = None) -> bool:
    return not captured.run(timing, seed, program).findings


def noticed(captured: Captured, mutant: Mutant) -> bool:
    """True if some timing makes a finding of the mutant."""
    return not all(clean_to_its_end(clean, captured, *timing, mutant.program) for timing in TIMINGS)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dim", "implied"), [("sm_100a", 128, 7), ("sm_90a", 64, 3)])
def test_dropped_synchronisation(arch: str, dim: int, implied: int) -> None:
    """Every mutant that can matter is reported; at most `implied` are not, of about 100 and 40.

    Those are known not to matter: without them every pair of accesses is still ordered by what is left, which
    vector clocks tell for all timings of the launch at once. On sm_100a three are waits of the load warp
    before it exits; two are waits for Q's buffers, whose readers come before those of the V buffer that is
    waited for next; two are waits of softmax and correction for each other that the waits for S and O
    imply. On sm_90a it is the barrier by which warpgroups take turns, which is there for speed; the one
    before O is written over Q, of which each warp overwrites the rows that it alone has read; and a
    wgmma.fence that follows another one with no use of the registers between them.
    """
    captured = fa4_forward(arch, Size(batch=3, kv_len=384, dim=dim), False, sms=1)
    assert clean_to_its_end(clean, captured, *TIMINGS[0])
    result = captured.run("eager", 0)
    assert not result.findings
    right = captured.out.clone()
    tried = [mutant for mutant in mutants(result) if can_matter(mutant, result)]
    left = [mutant for mutant in tried if not noticed(captured, mutant)]
    for mutant in left:
        print("not noticed:", mutant)
        assert mutant.instruction.opcode.startswith(("mbarrier.try_wait", "bar.sync", "wgmma.fence"))
        run = captured.run("random", 5, mutant.program)
        assert run.fault is None and torch.equal(captured.out, right)
    print(len(left), "of", len(tried))
    assert len(tried) >= 35 and len(left) <= implied
