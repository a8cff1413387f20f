"""The kernels for latent rows, compiled: nothing spills, shared memory is as planned."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.mla_decode_sm90.plan import LatentPlan
from fa4flex.kernels.mla_decode_sm100.plan import BlackwellLatentPlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import LatentKeys, in_pages
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.lower import Given, lower_forward
from fa4flex.variants import alibi, causal, sliding_window, softcap, tree

CHAIN = range(-1, 15)


def remainders(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """No key interval: it is asked of every pair."""
    return (kv_idx * 7 + q_idx + h) % 3 != 0


def paged(rows: int) -> LatentKeys:
    pages = in_pages(rows)
    return LatentKeys(pages.loader, pages.together, pages.rows)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal, used lengths": ({"mask": causal}, {"lengths": "used"}),
    "alibi, used lengths": ({"score_mod": alibi, "mask": causal}, {"lengths": "used"}),
    "soft cap, window": ({"score_mod": softcap(20.0), "mask": causal & sliding_window(90)}, {}),
    "alibi, all value": ({"score_mod": alibi, "mask": causal}, {"head_dim": 512}),
    "tree": ({"mask": tree(CHAIN)}, {}),
    "remainders": ({"mask": remainders}, {}),
    "causal, float32 output": ({"mask": causal}, {"out_dtype": "float32"}),
    "alibi, pages of 64": ({"score_mod": alibi, "mask": causal}, {"lengths": "used", "keys": paged(64)}),
    "alibi, pages of 8": ({"score_mod": alibi, "mask": causal}, {"lengths": "used", "keys": paged(8)}),
}
"""Composition, and fields of Inputs."""


PLANS = {"Hopper": (SM90A, LatentPlan), "Blackwell": (SM100A, BlackwellLatentPlan)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chip", PLANS)
def test_nothing_spills(chip: str, name: str) -> None:
    (target, kind), (pieces, more) = PLANS[chip], CASES[name]
    program = fa4flex.compile(**pieces).program
    tensors = program.captured().operands
    operands = tuple((str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors)
    fields = {"keys": LatentKeys(), "head_dim": 576, **more}
    inputs = Inputs(Shape(1, 16, 1, 600), 1, head_dim_v=512, captured=operands, **fields)
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), target)
    lowered = lower_forward(given)
    assert isinstance(lowered.plan, kind)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    signature = Signature(
        scalars=scalars, given=("seqused_k",) if "lengths" in more and "keys" not in more else ()
    )
    inspected = inspect(lowered.source, lowered.problem, signature, target.name, "decode")
    main, merging = inspected.resources, inspected.resources_of("combine")
    for found in (main, merging):
        assert not found.spill_bytes and not found.stack_bytes and not found.ignored
    if chip == "Hopper":
        assert main.registers == 168, "65536 registers of 384 threads"
    else:
        assert main.registers <= lowered.plan.registers
    assert main != merging, "one kernel's report was taken for another's"
    assert main.shared_bytes == lowered.plan.memory.total
