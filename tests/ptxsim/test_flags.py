"""Flags in shared and in global memory by which warps and CTAs wait for each other, and what they order."""

from __future__ import annotations

import pytest
from planted import run

TIMINGS = ("eager", "late", "random")
FLAG = """
    @%p1 st.shared.b32 [%r3+512], 0;
    bar.sync 0;
    @%p2 bra WRITE;
LOOK:
    READ %r5, [%r3+512];
    setp.ne.s32 %p3, %r5, 7;
    @%p3 bra LOOK;
    ACQUIRE
    ld.shared.b32 %r6, [%r4+-128];
    bra END;
WRITE:
    st.shared.b32 [%r4], %r1;
    bar.warp.sync -1;
    RELEASE
    @%p1 SET [%r3+512], 7;
END:
"""
"""Warp 0 writes, and sets a flag; warp 1 reads what it wrote once it has found the flag set."""
Pattern = tuple[str, str, str, str]
FENCE = "fence.acq_rel.cta;"
ORDERED: dict[str, Pattern] = {
    "fences and relaxed": ("ld.relaxed.cta.shared.b32", FENCE, FENCE, "st.relaxed.cta.shared.b32"),
    "fences and volatile": ("ld.volatile.shared.b32", FENCE, FENCE, "st.volatile.shared.b32"),
    "membar": ("ld.volatile.shared.b32", "membar.cta;", "membar.cta;", "st.volatile.shared.b32"),
    "acquire and release": ("ld.acquire.cta.shared.b32", "", "", "st.release.cta.shared.b32"),
    "acquire and fence": ("ld.acquire.cta.shared.b32", "", FENCE, "red.shared.add.u32"),
    "fence and release": ("ld.relaxed.cta.shared.b32", FENCE, "", "red.release.cta.shared.add.u32"),
}
UNORDERED: dict[str, Pattern] = {
    "no fence after": ("ld.relaxed.cta.shared.b32", "", FENCE, "st.relaxed.cta.shared.b32"),
    "no fence before": ("ld.relaxed.cta.shared.b32", FENCE, "", "st.relaxed.cta.shared.b32"),
    "a weak write": ("ld.relaxed.cta.shared.b32", FENCE, FENCE, "st.shared.b32"),
    "a weak read": ("ld.shared.b32", FENCE, FENCE, "st.relaxed.cta.shared.b32"),
}


def body(pattern: Pattern, flag: str = FLAG) -> str:
    for name, part in zip(("READ", "ACQUIRE", "RELEASE", "SET"), pattern, strict=True):
        flag = flag.replace(name, part, 1)
    return flag


timings = pytest.mark.parametrize("timing", TIMINGS)


@timings
@pytest.mark.parametrize("name", ORDERED)
def test_a_flag_orders(name: str, timing: str) -> None:
    result, _ = run(body(ORDERED[name]), timing=timing)
    assert not result.findings


@timings
@pytest.mark.parametrize("name", UNORDERED)
def test_half_a_pattern_does_not(name: str, timing: str) -> None:
    result, _ = run(body(UNORDERED[name]), timing=timing)
    assert {finding.kind for finding in result.findings} == {"race"}


@timings
def test_another_write_to_a_flag_ends_what_it_told(timing: str) -> None:
    """Warp 1 sees the flag without acquiring, sets it itself and acquires that."""
    pattern = ("ld.relaxed.cta.shared.b32", "SELF", "", "st.release.cta.shared.b32")
    self = "st.relaxed.cta.shared.b32 [%r3+512], 8;\n ld.acquire.cta.shared.b32 %r5, [%r3+512];"
    result, _ = run(body(pattern).replace("SELF", self), timing=timing)
    assert {finding.kind for finding in result.findings} == {"race"}
    result, _ = run(body(pattern).replace("SELF", self.splitlines()[1]), timing=timing)
    assert not result.findings
