"""Launches that begin before the one before is over: what they may touch before griddepcontrol.wait."""

from __future__ import annotations

import struct

import pytest
import torch

from ptxsim import Finding, Shape, launch
from ptxsim.state.memory import HostMemory
from ptxsim.watch.launches import Launches

TEXT = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to)
{{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    ld.param.b64 %rd1, [from];
    ld.param.b64 %rd2, [to];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd1, %rd1, %rd3;
    add.s64 %rd2, %rd2, %rd3;
    {before}
    ld.global.b32 %r2, [%rd1];
    {between}
    st.global.b32 [%rd2], %r2;
    {after}
    ret;
}}
"""
WAIT, DEPENDENTS = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


class Stream:
    """Launches of `copy`, one after another, by blocks of two warps."""

    def __init__(self) -> None:
        self.memory = HostMemory(launches=Launches())

    def copy(
        self, source: torch.Tensor, to: torch.Tensor, *, before: str = "", between: str = "", after: str = "",
        early: bool = True,
    ) -> list[Finding]:  # fmt: skip
        text = TEXT.format(before=before, between=between, after=after)
        parameters = struct.pack("<QQ", source.data_ptr(), to.data_ptr())
        shape = Shape((1, 1, 1), (64, 1, 1), early=early)
        result = launch(text, "copy", shape, parameters, self.memory)
        assert torch.equal(source, to)  # launches do run one after another
        return result.findings


@pytest.fixture
def abc() -> list[torch.Tensor]:
    return [torch.arange(i, i + 64, dtype=torch.int32) for i in range(4)]


def kinds(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.instruction.opcode if finding.instruction else "") for finding in found]


READ, WRITE = ("launch order", "ld.global.b32"), ("launch order", "st.global.b32")


@pytest.mark.parametrize("trigger", ["", DEPENDENTS])
def test_results_are_read_after_the_wait(abc: list[torch.Tensor], trigger: str) -> None:
    a, b, c, _ = abc
    for wait, expected in ((WAIT, []), ("", [READ])):
        stream = Stream()
        assert not stream.copy(a, b, before=trigger)
        found = stream.copy(b, c, before=wait)
        assert kinds(found) == expected
        assert not found or "reads what an earlier launch writes" in str(found[0])
    stream = Stream()
    stream.copy(a, b, before=trigger)
    assert kinds(stream.copy(b, c, between=WAIT)) == [READ]


def test_a_launch_that_is_not_early_needs_no_wait(abc: list[torch.Tensor]) -> None:
    a, b, c, _ = abc
    stream = Stream()
    stream.copy(a, b, before=DEPENDENTS)
    assert not stream.copy(b, c, early=False)


def test_results_and_inputs_are_overwritten_after_the_wait(abc: list[torch.Tensor]) -> None:
    a, b, c, d = abc
    for trigger, reads in ((DEPENDENTS, [WRITE]), ("", [])):  # without it, all CTAs have exited
        stream = Stream()
        stream.copy(a, b, before=trigger)
        assert kinds(stream.copy(c, a)) == reads
        stream = Stream()
        stream.copy(a, b, before=trigger)
        assert kinds(stream.copy(d, b)) == [WRITE]
        stream = Stream()
        stream.copy(a, b, before=trigger)
        assert not stream.copy(c, a, between=WAIT)


def test_a_wait_is_learned_of_at_barriers(abc: list[torch.Tensor]) -> None:
    a, b, c, _ = abc
    for barrier, expected in (("bar.sync 0;", []), ("", [READ])):
        stream = Stream()
        stream.copy(a, b)
        assert kinds(stream.copy(b, c, before=f"@%p1 {WAIT} {barrier}")) == expected


def test_a_launch_that_did_not_wait_leaves_those_before_it_running(abc: list[torch.Tensor]) -> None:
    a, b, c, _ = abc
    other, copied = a.clone(), a.clone()
    for before, after, third, expected in (
        (WAIT + DEPENDENTS, "", "", []),  # the third begins when the first is over
        (DEPENDENTS, WAIT, "", [READ]),
        (DEPENDENTS, WAIT, WAIT, []),  # the second is over when it has waited
        (DEPENDENTS, "", WAIT, [READ]),
        ("", WAIT, "", []),
    ):
        stream = Stream()
        stream.copy(a, b, before=DEPENDENTS)
        assert not stream.copy(other, copied, before=before, after=after)
        assert kinds(stream.copy(b, c, before=third)) == expected, (before, after, third)


def test_memory_that_the_host_has_used_again_is_forgotten(abc: list[torch.Tensor]) -> None:
    a, b, c, _ = abc
    stream = Stream()
    stream.copy(a, b)
    b += 1000
    assert not stream.copy(b, c)
    stream = Stream()
    stream.copy(a, b)
    b[:32] = -1
    assert kinds(stream.copy(b, c)) == [READ]
