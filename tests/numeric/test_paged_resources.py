"""Kernels that read pages in place for many queries, and the one that appends to pages, compiled for sm_90a:
nothing spills, shared memory is as planned."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Ragged
from fa4flex.codegen.plan.inputs import Inputs
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import SM90A
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.fwd_sm90.plan import HopperPlan
from fa4flex.kernels.mixed_sm90.plan import MixedPlan
from fa4flex.lower import Given, lower_forward
from fa4flex.runtime.cuda.append import _source
from fa4flex.variants import alibi, causal, sliding_window, softcap

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "alibi": {"score_mod": alibi, "mask": causal},
    "soft cap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
}
WIDTHS = (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)
USUAL = {("plain", (64, 64), "used", 16), ("alibi", (128, 128), "packed", 8)}
"""Without a mask and with narrow heads, a consumer's code leaves the producer least."""

CASES = [
    pytest.param(*case, marks=() if case in USUAL else pytest.mark.exhaustive)
    for case in product(VARIANTS, WIDTHS, ("used", "packed"), (8, 16, 64))
]


@pytest.mark.parametrize("name, width, lengths, page_rows", CASES)
def test_nothing_spills(name: str, width: tuple[int, int], lengths: Any, page_rows: int) -> None:
    program = fa4flex.compile(**VARIANTS[name]).program
    inputs = Inputs(Ragged(2, 8, 600, 600), 2, *width, lengths=lengths, keys_used=True, page_rows=page_rows)
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), SM90A)
    lowered = lower_forward(given)
    assert isinstance(lowered.plan, HopperPlan) and lowered.plan.config().paged
    assert isinstance(lowered.plan, MixedPlan) == (lengths == "packed" and max(width) <= 128)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    found = inspect(lowered.source, lowered.problem, Signature(scalars=scalars)).resources
    assert not found.spill_bytes and not found.stack_bytes and not found.ignored
    assert found.shared_bytes == lowered.plan.memory.total


@pytest.mark.parametrize("together, interleaved", [(8, False), (8, True), (1, True)])
def test_appending_spills_nothing(together: int, interleaved: bool) -> None:
    source = _source(f"Config(packed=True, together={together}, interleaved={interleaved})")
    signature = Signature(given=("seqused_q", "cos", "sin", "q", "rotated"))
    found = inspect(source, Problem(64, 64, lengths="packed"), signature).resources
    assert not found.spill_bytes and not found.stack_bytes and not found.ignored and found.registers <= 64
