"""Every kind of planted fault is found, its corrected twin is not; what reports and pictures say."""

from __future__ import annotations

import struct
from xml.etree import ElementTree

import pytest
import torch
from planted import ARRIVE, EXCHANGE, FAULTS, START, STORE, WORDS, Fault, run, text

from ptxsim import Result, Shape, launch
from ptxsim.doors.device import Gpu
from ptxsim.errors import InputError
from ptxsim.isa.table import Unmodelled
from ptxsim.run import report, scheduler, timeline
from ptxsim.run.timing import Timing

TIMINGS = ("eager", "late", "random")
ENDS = {"hang", "barrier", "divergence", "out of bounds", "misaligned", "tensor memory", "trap"}
"""Kinds that end a launch."""

faults = pytest.mark.parametrize("fault", [pytest.param(f, id=f.name.replace(" ", "-")) for f in FAULTS])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops are given up soon."""
    monkeypatch.setattr(scheduler, "SPINS", 1)


def outcome(fault: Fault, body: str, timing: str) -> Result:
    return run(body, fault.arch, fault.threads, timing)[0]


@faults
def test_planted_fault(fault: Fault) -> None:
    result = outcome(fault, fault.spoilt, "eager")
    found = [*result.findings, *result.remarks]
    assert {finding.kind for finding in found} == fault.kinds
    assert {remark.kind for remark in result.remarks} == fault.kinds & {"no waits"}
    assert any(fault.says in str(finding) for finding in found)
    at = [finding.instruction for finding in found]
    assert not fault.at or any(i is not None and i.opcode.startswith(fault.at) for i in at)
    assert (result.fault is not None) == bool(fault.kinds & ENDS)
    if result.fault is not None:
        assert result.fault in result.findings


@faults
@pytest.mark.parametrize("timing", ["late", "random"])
def test_planted_fault_under_other_timings(fault: Fault, timing: str) -> None:
    result = outcome(fault, fault.spoilt, timing)
    found = {finding.kind for finding in (*result.findings, *result.remarks)}
    assert found & fault.kinds or found == {"uninitialised"}


@faults
@pytest.mark.parametrize("timing", TIMINGS)
def test_corrected_twin(fault: Fault, timing: str) -> None:
    result = outcome(fault, fault.body, timing)
    assert not result.findings and not result.remarks


# --- words --------------------------------------------------------------------------------------------------


def test_a_race_names_both_instructions_and_warps() -> None:
    result, _ = run(EXCHANGE.replace("bar.sync 0;", ""))
    races = [str(finding) for finding in result.findings if finding.kind == "race"]
    assert any("warp 0 of CTA 0" in race and "warp 1 of CTA 0" in race for race in races)
    lines = f"st.shared.b32 (PTX line {START})", f"ld.shared.b32 (PTX line {START + 3})"
    assert all(line in race for race in races for line in lines)


def test_a_hang_names_the_barrier_and_every_warp_that_waits() -> None:
    result, _ = run(ARRIVE.replace("@%p2 mbarrier.arrive.shared::cta.b64 _, [bar];", ""))
    said = str(result.fault)
    assert said.startswith("hang: nobody can go on")
    for warp in range(2):
        assert f"warp {warp} of CTA 0 waits for the mbarrier at 0x800 of CTA 0, phase 0" in said
    assert "which awaits 32 of 32 arrivals" in said


def test_a_fault_ends_the_launch_where_it_is_met() -> None:
    result, out = run(f"{STORE}\n@%p1 st.shared.b32 [%r3+1], %r1;\nst.global.b32 [%rd1], %r1;")
    assert result.fault is not None and result.fault.kind == "misaligned"
    assert out.tolist() == list(range(WORDS)), "what was stored before"


def test_the_report() -> None:
    clean, _ = run(STORE)
    spoilt, _ = run(STORE.replace("cp.async.bulk.wait_group.read 0;", ""))
    said = report.text(clean)
    assert said.startswith("planted on sm_90a: grid 1x1x1, block 64x1x1, cluster 1x1x1, ")
    assert "findings: none" in said and "clocks of one multiprocessor: mma 0" in said
    assert "of shared memory: stores 2, copies out 2" in said
    assert "copies, warp 0: cp.async 3" in said and "other, warp 1: " in said
    found = report.text(spoilt)
    assert (
        "  unfinished: warp 0 of CTA 0" in found
        and "findings: 1" in found
        and f"(PTX line {START + 4})" in found
    )
    gpu = Gpu("sm_90a", "eager", 0)
    assert gpu.report() == "nothing was launched"
    gpu.results += [clean, spoilt]
    assert gpu.report().startswith(f"{said}\n{found}\nplanted: executed ")
    assert gpu.findings == spoilt.findings


@pytest.mark.parametrize("timing", TIMINGS)
def test_the_timeline_has_a_row_for_each_warp(timing: str) -> None:
    result, _ = run(EXCHANGE, threads=96, timing=timing)
    names = {"svg": "http://www.w3.org/2000/svg"}
    root = ElementTree.fromstring(timeline.svg(result))
    title, *labels = [node.text or "" for node in root.findall("svg:text", names)]
    assert "planted on sm_90a" in title
    assert [label.split(" ")[:4] for label in labels] == [["CTA", "0", "warp", str(i)] for i in range(3)]
    bars = root.findall("svg:rect", names)
    assert len({bar.get("y") for bar in bars}) == 3 and len(bars) == len(result.turns)
    _, _, width, _ = map(float, root.attrib["viewBox"].split())
    assert all(0 <= float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width for bar in bars)


# --- before anything runs -----------------------------------------------------------------------------------


def test_an_unknown_instruction_is_refused_with_its_line_before_anything_runs() -> None:
    out = torch.full((WORDS,), -1, dtype=torch.int32)
    body = "st.global.b32 [%rd1], %r1;\nfrobnicate.b32 %r1, %r2;"
    with pytest.raises(Unmodelled, match=rf"frobnicate\.b32 \(PTX line {START + 1}\)"):
        launch(text(body), "planted", Shape((1, 1, 1), (32, 1, 1)), struct.pack("<Q", out.data_ptr()))
    assert (out == -1).all()


def test_an_unknown_modifier_is_refused() -> None:
    with pytest.raises(Unmodelled, match="bogus"):
        run("st.shared.bogus.b32 [%r4], %r1;")


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(InputError, match=r"'other'.*\n.*planted"):
        launch(text(EXCHANGE), "other", Shape((1, 1, 1), (32, 1, 1)), bytes(8))


def test_too_few_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="4 bytes of parameters"):
        launch(text(EXCHANGE), "planted", Shape((1, 1, 1), (32, 1, 1)), bytes(4))


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("together", (1, 3))
def test_clusters_wait_for_each_other(timing: str, together: int) -> None:
    """CTA n adds to a counter once n others have, whether they run beside it, before it, or are let in."""
    body = """
    mov.u32 %r5, %ctaid.x;
LOOK:
    ld.acquire.gpu.global.b32 %r6, [%rd1];
    setp.ne.s32 %p3, %r6, %r5;
    @%p3 bra LOOK;
    bar.sync 0;
    @%p1 red.release.gpu.global.add.s32 [%rd1], 1;
    """
    out = torch.zeros(1, dtype=torch.int32)
    last_first = body.replace("%ctaid.x;", "%ctaid.x;\n    sub.s32 %r5, 2, %r5;")
    for ordered in (body, last_first):
        out.zero_()
        shape, parameters = Shape((3, 1, 1), (64, 1, 1)), struct.pack("<Q", out.data_ptr())
        drawn = Timing(timing, int(torch.randint(1000, ())))
        result = launch(text(ordered), "planted", shape, parameters, timing=drawn, together=together)
        assert not result.findings and result.fault is None and out.item() == 3
