"""Barriers that are misused, and where reports say that accesses meet."""

from __future__ import annotations

import pytest
from planted import ARRIVE, CLUSTER, EXCHANGE, LOAD, run


def test_a_second_arrival_at_a_cluster_barrier_is_reported_once() -> None:
    arrive, wait = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"
    body = CLUSTER.replace(arrive, f"{arrive}\n {arrive}").replace(wait, f"{wait}\n {wait}")
    result, _ = run(body)
    (finding,) = result.findings
    assert finding.kind == "barrier" and "again" in finding.text and result.fault is None


@pytest.mark.parametrize("read", [4, 12])
def test_a_race_is_where_the_accesses_meet(read: int) -> None:
    """Thread 0 writes 16 bytes, of which thread 32 may still read 4: the barrier lets warp 1 go on first."""
    body = f"""
    @%p1 st.shared.v4.b32 [%r3], {{%r1, %r1, %r1, %r1}};
    bar.sync 0;
    setp.eq.u32 %p3, %r1, 32;
    @%p3 ld.shared.b32 %r5, [%r3+{read}];
    @%p1 st.shared.v4.b32 [%r3], {{%r1, %r1, %r1, %r1}};
    """
    (finding,) = run(body)[0].findings
    assert (
        finding.kind == "race" and "still read" in finding.text and f"at {0x400 + read:#x} of" in finding.text
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (EXCHANGE.replace("bar.sync 0;", "bar.sync 16;"), "barrier 16"),
        (ARRIVE.replace("[bar], 32;", "[bar], 0;"), "0 arrivals"),
        (ARRIVE.replace("[bar], 32;", "[bar], 1048576;"), "1048576 arrivals"),
        (LOAD.replace("[bar], 256;\n    cp", "[bar], 1048576;\n    cp"), "1048576 bytes"),
    ],
)
def test_numbers_that_barriers_do_not_have(body: str, says: str) -> None:
    found = [f for f in run(body)[0].findings if f.kind == "barrier"]
    assert found and says in found[0].text
