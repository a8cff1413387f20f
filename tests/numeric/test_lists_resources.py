"""The kernels for listed keys, compiled for Hopper and Blackwell: no more than one number spills, shared
memory is as planned."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.lists.plan import ListedPlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import CONTIGUOUS, in_pages, of_lists
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
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

REGISTERS = {
    SM90A: {(64, 2): 128, (64, 1): 240, (128, 1): 168},
    SM100A: {(64, 2): 96, (64, 1): 168, (128, 1): 168},
}
"""Registers per thread at the start, by rows of a tile and blocks of a multiprocessor."""


SLOT = {SM90A: 0, SM100A: 8}
"""Bytes of a thread's stack, at most. Blackwell's compiler keeps one number of a block there in some kernels,
however many registers there are: each role reads it once, or, of united lists, in its loop."""


@pytest.mark.slow
@pytest.mark.parametrize("many, united", [(False, 1), (True, 1), (False, 4)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", REGISTERS, ids=lambda target: target.name)
def test_nothing_spills(target: Target, name: str, many: bool, united: int) -> None:
    pieces, width, told = CASES[name]
    program = fa4flex.compile(**pieces).program
    kept, beside = told.get("kept", CONTIGUOUS), told.get("beside", False)
    keys = of_lists(kept, counted=True, beside=beside, many=many, united=united)
    lengths: Any = "used" if "kept" in told else "dense"
    inputs = Inputs(Shape(1, 128, 64, 600), 1, width, width, keys=keys, lengths=lengths)
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), target)
    lowered = lower_forward(given)
    plan = lowered.plan
    assert isinstance(plan, ListedPlan) and plan.rows == (128 if many else 64)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    signature = Signature(scalars=scalars)
    inspected = inspect(lowered.source, lowered.problem, signature, target.name, entry="lists")
    main, merging = inspected.resources, inspected.resources_of("combine")
    assert not main.ignored and not merging.ignored
    for found in (main, merging):
        assert found.stack_bytes <= SLOT[target] and bool(found.spill_bytes) <= bool(found.stack_bytes)
    assert main.registers == REGISTERS[target][plan.rows, plan.blocks]
    assert main.shared_bytes == plan.memory.total
