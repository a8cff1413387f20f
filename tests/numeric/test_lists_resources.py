"""The Hopper kernel for listed keys, compiled for sm_90a: nothing spills, shared memory is as planned."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.lists_sm90.plan import ListsPlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import CONTIGUOUS, in_pages, of_lists
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, lower_forward
from fa4flex.variants import alibi, causal, sliding_window, softcap


def remainders(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No key interval: it is asked of every pair."""
    return (kv_idx * 7 + q_idx + h) % 3 != 0


CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "causal 64": ({"mask": causal}, 64, {}),
    "causal 128": ({"mask": causal}, 128, {}),
    "alibi 128, beside": ({"score_mod": alibi, "mask": causal}, 128, {"beside": True}),
    "soft cap, window 192": ({"score_mod": softcap(20.0), "mask": causal & sliding_window(90)}, 192, {}),
    "alibi 256": ({"score_mod": alibi, "mask": causal}, 256, {}),
    "remainders 128": ({"mask": remainders}, 128, {}),
    "causal 128, pages of 1": ({"mask": causal}, 128, {"kept": in_pages(1)}),
}
"""Composition, width of heads, and what `of_lists` is told."""


@pytest.mark.slow
@pytest.mark.parametrize("consumers, united", [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str, consumers: int, united: int) -> None:
    pieces, width, told = CASES[name]
    program = fa4flex.compile(**pieces).program
    kept, beside = told.get("kept", CONTIGUOUS), told.get("beside", False)
    keys = of_lists(kept, counted=True, beside=beside, many=consumers == 2, united=united)
    lengths: Any = "used" if "kept" in told else "dense"
    inputs = Inputs(Shape(1, 128, 64, 600), 1, width, width, keys=keys, lengths=lengths)
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), SM90A)
    lowered = lower_forward(given)
    plan = lowered.plan
    assert isinstance(plan, ListsPlan) and plan.consumers == consumers
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    inspected = inspect(lowered.source, lowered.problem, Signature(scalars=scalars), entry="lists")
    main, merging = inspected.resources, inspected.resources_of("combine")
    for found in (main, merging):
        assert not found.spill_bytes and not found.stack_bytes and not found.ignored
    assert main.registers == {(1, 2): 128, (1, 1): 240, (2, 1): 168}[plan.consumers, plan.blocks]
    assert main.shared_bytes == plan.memory.total
