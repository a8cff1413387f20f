"""One finding, however often it is met, and how often that was."""

from __future__ import annotations

from planted import EXCHANGE, run

from ptxsim.doors.device import Gpu
from ptxsim.run import report

TURNS = 5
LOOP = f"""
    mov.u32 %r7, 0;
TURN:
{EXCHANGE.replace("bar.sync 0;", "")}
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p3, %r7, {TURNS};
    @%p3 bra TURN;
"""
STORES = "".join(f"@%p2 st.shared.b32 [%r3+{4 * i}], %r1;\n" for i in range(TURNS))
"""Each is read by one load: as many races with one instruction."""


def races(body: str) -> list[tuple[int, int]]:
    """(PTX line, times) of the races."""
    found = [f for f in run(body)[0].findings if f.kind == "race"]
    return [(f.instruction.line if f.instruction else 0, f.times) for f in found]


def test_turns_of_a_loop() -> None:
    found = races(LOOP)
    assert len(found) == len({line for line, _ in found}) and max(times for _, times in found) >= TURNS - 1


def test_many_partners_of_one_instruction() -> None:
    """Warp 1 reads what warp 0 wrote by several instructions."""
    body = f"{STORES} shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r3; @!%p2 ld.shared.b32 %r6, [%r5+-128];"
    ((_, times),) = races(body)
    assert times == TURNS


def test_the_report_says_how_often() -> None:
    result, _ = run(LOOP)
    (most, *_) = sorted(result.findings, key=lambda finding: -finding.times)
    assert f", {most.times} times\n" in report.text(result)


def test_launches_of_one_kernel() -> None:
    """Findings of a kernel are told once, with their sum; later launches refer to them."""
    gpu = Gpu("sm_90a", "eager", 0)
    gpu.results += [run(LOOP)[0] for _ in range(3)]
    once = gpu.results[0].findings
    assert [f.times for f in gpu.findings] == [3 * f.times for f in once]
    said = gpu.report()
    assert said.count("race: ") == sum(f.kind == "race" for f in once)
    assert said.count(f"findings: {len(once)}, {len(once)} of them as before") == 2
