"""Kernels that read pages in place for many queries, compiled for both chips, and the one that appends to
pages: nothing spills, shared memory is as planned."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import fa4flex
from fa4flex.codegen.analyze.domain import Ragged
from fa4flex.compiler.inspect import Resources, inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.fwd_sm90.plan import HopperPlan
from fa4flex.kernels.fwd_sm100.plan import BlackwellPlan
from fa4flex.kernels.mixed_sm90.plan import MixedPlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
from fa4flex.lower import Given, Lowered, lower_forward
from fa4flex.runtime.call import name_of
from fa4flex.runtime.cuda.append import _source
from fa4flex.variants import alibi, causal, document, sliding_window, softcap

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "alibi": {"score_mod": alibi, "mask": causal},
    "soft cap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
    "documents": {"mask": causal & document(torch.zeros(2, 600, dtype=torch.int32))},
}
WIDTHS = (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)
USUAL = {
    *(("plain", (64, 64), "used", rows) for rows in (1, 16)),
    *(("alibi", (128, 128), "packed", rows) for rows in (1, 8)),
    ("soft cap, window", (256, 256), "used", 1),
    ("documents", (128, 128), "packed", 16),
}
"""Without a mask and with narrow heads, a consumer's code leaves the producer least."""

CASES = [
    pytest.param(*case, marks=() if case in USUAL else pytest.mark.exhaustive)
    for case in product(VARIANTS, WIDTHS, ("used", "packed"), (1, 8, 16, 64))
]


Case = tuple[str, tuple[int, int], Any, int]
"""Name of a variant, widths of heads, lengths, and keys that surely lie together."""


def compiled(case: Case, target: Target) -> tuple[Lowered, Resources]:
    """A kernel of which nothing is spilled, and its resources."""
    name, width, lengths, page_rows = case
    program = fa4flex.compile(**VARIANTS[name]).program
    captured = program.captured()
    read = tuple((name_of(x.dtype), tuple(x.shape)) for x in captured.operands)
    how = {"lengths": lengths, "keys_used": True, "keys": in_pages(page_rows), "captured": read}
    inputs = Inputs(Ragged(2, 8, 600, 600), 2, *width, **how)
    given = Given(program.facts, fa4flex.Schedule(), inputs, captured, target)
    lowered = lower_forward(given)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    signature = Signature(scalars=scalars, unit_strides=(True,) * len(read), even_rows=(True,) * len(read))
    inspected = inspect(lowered.source, lowered.problem, signature, target.name)
    kernels = [inspected.resources_of("kernelForward")]
    if lowered.plan.splitting is not None and not isinstance(lowered.plan, MixedPlan):
        kernels.append(inspected.resources_of("combine"))
    for found in kernels:
        assert not found.spill_bytes and not found.stack_bytes and not found.ignored
    return lowered, kernels[0]


@pytest.mark.slow
@pytest.mark.parametrize("name, width, lengths, page_rows", CASES)
def test_nothing_spills(name: str, width: tuple[int, int], lengths: Any, page_rows: int) -> None:
    lowered, found = compiled((name, width, lengths, page_rows), SM90A)
    assert isinstance(lowered.plan, HopperPlan) and lowered.plan.config().paged
    assert isinstance(lowered.plan, MixedPlan) == (lengths == "packed" and max(width) <= 128)
    assert found.shared_bytes == lowered.plan.memory.total


BLACKWELL_WIDTHS = (32, 32), (64, 64), (96, 96), (64, 128), (128, 128), (192, 128)
BLACKWELL_USUAL = {("alibi", (192, 128), "packed", 16)}
"""Eight boxes of a tile: with their copies written out, the warp that loads spills."""

ON_BLACKWELL = [
    pytest.param(*case, marks=() if case in BLACKWELL_USUAL else pytest.mark.exhaustive)
    for case in product(VARIANTS, BLACKWELL_WIDTHS, ("used", "packed"), (2, 16, 64))
]


@pytest.mark.slow
@pytest.mark.parametrize("name, width, lengths, page_rows", ON_BLACKWELL)
def test_nothing_spills_on_blackwell(name: str, width: tuple[int, int], lengths: Any, page_rows: int) -> None:
    lowered, found = compiled((name, width, lengths, page_rows), SM100A)
    assert isinstance(lowered.plan, BlackwellPlan) and lowered.plan.config().paged
    assert found.shared_bytes == lowered.plan.memory.total


@pytest.mark.parametrize("together, interleaved", [(8, False), (8, True), (1, True)])
def test_appending_spills_nothing(together: int, interleaved: bool) -> None:
    source = _source(f"Config(packed=True, together={together}, interleaved={interleaved})")
    signature = Signature(given=("seqused_q", "cos", "sin", "q", "rotated"))
    found = inspect(source, Problem(64, 64, lengths="packed"), signature).resources
    assert not found.spill_bytes and not found.stack_bytes and not found.ignored and found.registers <= 64
