"""Two blocks of Blackwell's kernel for few rows share a multiprocessor: each lets the other allocate."""

from __future__ import annotations

from decoding import Size, drawn
from mutants import lacking
from own_calls import Own

import fa4flex

RELINQUISH = "tcgen05.relinquish_alloc_permit"


def test_a_permit_that_is_kept() -> None:
    qkv, attn = drawn(Size(8, 2, 2, 200, 128)), fa4flex.compile()
    own = Own("sm_100a", "decode", lambda: attn(*qkv) is not None)
    (result,), _ = own.run("eager", 0)
    assert result.program.kernel.resident > 1 and not result.findings
    (mutant,) = lacking(result, RELINQUISH)
    (result,), _ = own.run("eager", 0, mutant)
    assert {finding.kind for finding in result.findings} == {"tensor memory"}
    assert all(RELINQUISH in str(finding) for finding in result.findings)
