"""The Hopper kernel for listed latent rows, compiled for sm_90a: nothing spills, shared memory is as
planned."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.mla_lists_sm90.plan import ListedRowsPlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import CONTIGUOUS, in_pages, of_lists
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, lower_forward
from fa4flex.variants import alibi, causal, sliding_window, softcap, tree

CHAIN = range(-1, 15)


def remainders(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No key interval: it is asked of every pair."""
    return (kv_idx * 7 + q_idx + h) % 3 != 0


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"mask": causal}, {}),
    "alibi, beside": ({"score_mod": alibi, "mask": causal}, {"beside": True}),
    "soft cap, window, beside": (
        {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
        {"beside": True},
    ),
    "alibi, all value": ({"score_mod": alibi, "mask": causal}, {"width": 512, "beside": True}),
    "tree": ({"mask": tree(CHAIN)}, {}),
    "remainders, beside": ({"mask": remainders}, {"beside": True}),
    "causal, pages of 1": ({"mask": causal}, {"kept": in_pages(1)}),
    "alibi, beside, pages of 64": (
        {"score_mod": alibi, "mask": causal},
        {"beside": True, "kept": in_pages(64)},
    ),
}
"""Composition, what `of_lists` is told, and columns of a row."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(name: str) -> None:
    pieces, told = CASES[name]
    program = fa4flex.compile(**pieces).program
    tensors = program.captured().operands
    operands = tuple((str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors)
    kept, beside = told.get("kept", CONTIGUOUS), told.get("beside", False)
    keys = of_lists(kept, counted=True, beside=beside, latent=True)
    lengths: Any = "used" if "kept" in told else "dense"
    width = told.get("width", 576)
    inputs = Inputs(Shape(1, 128, 4, 600), 1, width, 512, keys=keys, lengths=lengths, captured=operands)
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), SM90A)
    lowered = lower_forward(given)
    plan = lowered.plan
    assert isinstance(plan, ListedRowsPlan)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    inspected = inspect(lowered.source, lowered.problem, Signature(scalars=scalars), entry="lists")
    main, merging = inspected.resources, inspected.resources_of("combine")
    print(name, main)
    for found in (main, merging):
        assert not found.spill_bytes and not found.stack_bytes and not found.ignored
    assert main.registers == 168, "65536 registers of 384 threads"
    assert main.shared_bytes == plan.memory.total
