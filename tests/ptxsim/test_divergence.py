"""Lanes that go separate ways meet where a mask names them, and only there."""

from __future__ import annotations

import pytest
from planted import run

APART = """
    setp.lt.u32 %p3, %r1, 16;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    mov.b32 %r7, 0x0000ffff;
    mov.b32 %r8, 0xffff0000;
    @%p3 bra LOW;
    {barrier} {high};
    st.global.b32 [%rd3], 2;
    bra END;
LOW:
    {barrier} {low};
    st.global.b32 [%rd3], 1;
END:
"""
"""Each half of a warp comes to a barrier of its own."""


@pytest.mark.parametrize("barrier", ["bar.warp.sync", "barrier.warp.sync"])
@pytest.mark.parametrize(
    ("low", "high"), [("0xffff", "0xffff0000"), ("%r7", "%r8")], ids=["literal", "register"]
)
def test_a_barrier_of_some_lanes_does_not_wait_for_the_others(barrier: str, low: str, high: str) -> None:
    result, out = run(APART.format(barrier=barrier, low=low, high=high), threads=32)
    assert not result.findings
    assert out[:32].tolist() == 16 * [1] + 16 * [2]


@pytest.mark.parametrize("barrier", ["bar.warp.sync", "barrier.warp.sync"])
def test_a_barrier_of_all_lanes_waits_for_all(barrier: str) -> None:
    result, _ = run(APART.format(barrier=barrier, low="0xffffffff", high="0xffffffff"), threads=32)
    assert result.fault is not None and result.fault.kind == "divergence"
