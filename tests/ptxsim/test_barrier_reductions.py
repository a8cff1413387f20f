"""barrier.red: a barrier that also tells for how many threads a predicate holds."""

from __future__ import annotations

import pytest
import torch
from planted import run

from ptxsim.watch.findings import Fault

THREADS = 64


def told(how: str, limit: int, where: str = "0", given: str = "%p3") -> int:
    """Result of a barrier for all of 64 threads, of which the first `limit` have a predicate that holds."""
    kind, result = ("u32", "%r6") if how == "popc" else ("pred", "%p1")
    _, out = run(f"""
    shl.b32 %r5, %r1, 3;
    cvt.u64.u32 %rd2, %r5;
    setp.lt.u32 %p3, %r1, {limit};
    mov.pred %p1, {given};
    barrier.red.{how}.{kind} {result}, {where}, {given};
    {"" if how == "popc" else "selp.b32 %r6, 1, 0, %p1;"}
    shl.b32 %r7, %r1, 2;
    cvt.u64.u32 %rd2, %r7;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r6;
    """)
    assert len(out.unique()) == 1, out
    return int(out[0])


@pytest.mark.parametrize("limit", [0, 1, 33, 63, 64])
def test_all_threads_are_told_the_same(limit: int) -> None:
    assert told("popc", limit) == limit
    assert told("or", limit, "3, 64") == (limit > 0)
    assert told("and", limit) == (limit == THREADS)
    assert told("popc", limit, given="!%p3") == THREADS - limit


def test_it_is_a_barrier_like_others() -> None:
    """Writes before it may be read after it; without it, that is a race."""
    body = """
    st.shared.b32 [%r4], %r1;
    setp.lt.u32 %p3, %r1, 5;
    barrier.red.or.pred %p1, 1, 64, %p3;
    xor.b32 %r5, %r4, 128;
    ld.shared.b32 %r6, [%r5];
    """
    result, _ = run(body)
    assert not result.findings
    result, _ = run(body.replace("barrier.red.or.pred %p1, 1, 64, %p3;", ""))
    assert {finding.kind for finding in result.findings} == {"race", "uninitialised"}


@pytest.mark.parametrize("first", ["@%p2", "@!%p2"])
def test_it_is_not_mixed_with_others(first: str) -> None:
    second = "@!%p2" if first == "@%p2" else "@%p2"
    with pytest.raises(Fault, match="some reduce a predicate there"):
        result, _ = run(f"""
        setp.lt.u32 %p3, %r1, 5;
        {first} barrier.red.or.pred %p1, 1, 64, %p3;
        {second} barrier.sync 1, 64;
        """)
        if result.fault:
            raise Fault(result.fault)


def test_results_are_of_one_round() -> None:
    """The second round counts anew."""
    _, out = run("""
    setp.lt.u32 %p3, %r1, 7;
    barrier.red.popc.u32 %r6, 0, %p3;
    barrier.red.popc.u32 %r7, 0, %p3;
    st.global.b32 [%rd1], %r7;
    """)
    assert out[0] == 7 and torch.equal(out[1:], torch.full((63,), -1, dtype=torch.int32))
