"""Reports say which share of a kernel was executed, by all of its launches together."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from planted import START, text

from ptxsim.doors.device import Gpu
from ptxsim.doors.launch import Launch
from ptxsim.ptx.nodes import Instruction
from ptxsim.run.coverage import Coverage, coverage

BODY = """
    setp.lt.u32 %p3, %r1, 32;
    @%p3 bra FIRST;
    bar.sync 1, 32;
    bra END;
FIRST:
    bar.sync 2, 32;
    mov.u32 %r5, 1;
END:
    bar.sync 0;
"""
LAUNCH = Launch("planted", text(BODY), (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, b"")


@pytest.fixture
def gpu() -> Gpu:
    return Gpu("sm_90a", "eager", 0)


def launch(gpu: Gpu, threads: int) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    gpu.run(replace(LAUNCH, block=(threads, 1, 1), params=struct.pack("<Q", out.data_ptr())))


def test_what_one_warp_does_not_reach(gpu: Gpu) -> None:
    launch(gpu, 32)
    (found,) = coverage(gpu.results)
    line = START + BODY.strip().split("\n").index("    bar.sync 1, 32;")
    assert [(i.opcode, i.line) for i in found.missed] == [("bar.sync", line), ("bra", line + 1)]
    size = len(found.body)
    said = f"executed {size - 2} of {size} instructions and 2 of 3 barriers, not those on PTX lines {line}"
    assert str(found) == said and gpu.report().splitlines()[-1] == f"planted: {said}"


def test_launches_add_up(gpu: Gpu) -> None:
    launch(gpu, 32)
    launch(gpu, 64)
    (found,) = coverage(gpu.results)
    assert not found.missed
    assert str(found) == f"executed {len(found.body)} of {len(found.body)} instructions and 3 of 3 barriers"


def test_what_was_never_executed_is_listed(gpu: Gpu) -> None:
    """Opcodes with their lines, those of which most are left first."""
    launch(gpu, 64)
    (found,) = coverage(gpu.results)
    assert not found.missed and gpu.report(unexecuted=True) == gpu.report()
    more = Gpu("sm_90a", "eager", 0)
    launch(more, 32)
    (found,) = coverage(more.results)
    line = START + BODY.strip().split("\n").index("    bar.sync 1, 32;")
    listed = [
        f"  never executed: 1 {name}, PTX lines {at}" for name, at in (("bar.sync", line), ("bra", line + 1))
    ]
    assert more.report(unexecuted=True).splitlines() == [*more.report().splitlines(), *listed]
    assert "never executed" not in more.report()


def test_lines_that_follow_one_another_are_joined() -> None:
    moves = (Instruction("mov.b32", (), line) for line in (4, 5, 6, 9, 12, 11))
    missed = (*moves, Instruction("ret", (), 13))
    told = Coverage("planted", missed, missed).unexecuted()
    assert told.splitlines() == [
        "  never executed: 6 mov.b32, PTX lines 4-6, 9, 11-12",
        "  never executed: 1 ret, PTX lines 13",
    ]
