"""The Hopper backward kernel for listed keys, compiled for sm_90a: nothing spills, shared memory is as
planned."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.bwd_lists_sm90.plan import ListsBackwardPlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import CONTIGUOUS, of_lists
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, lower_backward
from fa4flex.variants import alibi, causal, sliding_window, softcap


def remainders(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No key interval: it is asked of every pair."""
    return (kv_idx * 7 + q_idx + h) % 3 != 0


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "plain 128": ({}, 128),
    "causal 64": ({"mask": causal}, 64),
    "causal 128": ({"mask": causal}, 128),
    "alibi 128": ({"score_mod": alibi, "mask": causal}, 128),
    "soft cap, window 128": ({"score_mod": softcap(20.0), "mask": causal & sliding_window(90)}, 128),
    "remainders 128": ({"mask": remainders}, 128),
}
"""Composition, and width of heads."""


@pytest.mark.slow
@pytest.mark.parametrize("united, beside", [(1, False), (4, True)])
@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str, united: int, beside: bool) -> None:
    pieces, width = CASES[name]
    program = fa4flex.compile(**pieces).program
    keys = of_lists(CONTIGUOUS, counted=True, beside=beside, united=united)
    inputs = Inputs(Shape(1, 16, 64, 600), 1, width, width, keys=keys)
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), SM90A)
    lowered = lower_backward(given)
    plan = lowered.plan
    assert isinstance(plan, ListsBackwardPlan)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    inspected = inspect(lowered.source, lowered.problem, Signature(scalars=scalars), entry="bwd_lists")
    found = inspected.resources
    assert not found.spill_bytes and not found.stack_bytes and not found.ignored
    assert found.registers == 128 and found.shared_bytes == plan.memory.total
