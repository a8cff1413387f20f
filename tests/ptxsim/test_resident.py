"""CTAs that share a multiprocessor share its tensor memory, and the right to allocate it."""

from __future__ import annotations

import struct

import pytest
import torch
from planted import TENSOR, text

from ptxsim import Finding, Shape, launch

RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
BODY = TENSOR.replace("[bar], 32;", f"[bar], 32;\n    {RELINQUISH}", 1)
WIDE = BODY.replace("[bar], 32;", "[bar], 512;").replace("%r5, 32;", "%r5, 512;")


def findings(body: str, resident: int, shared_bytes: int = 0) -> list[Finding]:
    """Findings of a kernel that wants room for so many CTAs."""
    out = torch.zeros(64, dtype=torch.int32)
    kernel = text(body, "sm_100a").replace("out)\n{", f"out)\n.minnctapersm {resident}\n{{")
    shape = Shape((1, 1, 1), (32, 1, 1), shared_bytes=shared_bytes)
    return launch(kernel, "planted", shape, struct.pack("<Q", out.data_ptr())).findings


@pytest.mark.parametrize("resident", [1, 2])
def test_a_permit_that_is_kept(resident: int) -> None:
    assert not findings(BODY, resident)
    found = findings(BODY.replace(RELINQUISH, ""), resident)
    assert [finding.kind for finding in found] == ["tensor memory"] * (resident - 1)
    assert all("without tcgen05.relinquish_alloc_permit" in str(finding) for finding in found)


def test_more_columns_than_a_share() -> None:
    assert not findings(WIDE, 1)
    (found,) = findings(WIDE, 2)
    assert found.kind == "tensor memory" and "holds 512 columns; 2 CTAs" in str(found)
    assert not findings(WIDE.replace("512", "256"), 2)
    (found,) = findings(WIDE.replace("512", "256"), 3)


def test_shared_memory_decides_too() -> None:
    """CTAs for which there is no room in shared memory do not share tensor memory."""
    assert len(findings(WIDE, 2, 100 << 10)) == 1
    assert not findings(WIDE, 2, 120 << 10)


def test_an_allocation_after_the_permit_is_gone() -> None:
    again = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [bar], 32;"
    (found,) = findings(BODY.replace(RELINQUISH, f"{RELINQUISH}\n{again}"), 1)[:1]
    assert found.kind == "tensor memory" and "after tcgen05.relinquish_alloc_permit" in str(found)
