"""Kernels for few query rows over an e4m3 cache, compiled for sm_90a: nothing spills, shared memory is as
planned, and what the inner loop is made of is there."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import Inspection, inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.decode_fp8_sm90.plan import DecodePlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import eight_bit
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, lower_forward
from fa4flex.variants import alibi, causal, sliding_window, softcap

ALIBI: dict[str, Any] = {"score_mod": alibi, "mask": causal}
CAPPED: dict[str, Any] = {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)}
FEW: dict[str, Any] = {
    "plain 128": ({}, 128, 1, "head"),
    "alibi 128, by token, used": (ALIBI, 128, 1, "token used"),
}
MORE: dict[str, Any] = {
    "causal 128, by page": ({"mask": causal}, 128, 1, "page paged"),
    "alibi 192, by token": (ALIBI, 192, 1, "token used"),
    "alibi 256": (ALIBI, 256, 1, "head"),
    "soft cap 64, 32 rows": (CAPPED, 64, 8, ""),
    "alibi 64, 64 rows": (ALIBI, 64, 16, "head"),
}


def compiled(pieces: dict[str, Any], width: int, q_len: int, how: str) -> tuple[DecodePlan, Inspection]:
    per, _, lengths = how.partition(" ")
    paged = lengths == "paged"
    program = fa4flex.compile(**pieces).program
    inputs = Inputs(
        Shape(1, 8, q_len, 600), 2, width, width,
        lengths="used" if lengths else "dense", keys=eight_bit(16 * paged, per, per),  # type: ignore[arg-type]
    )  # fmt: skip
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), SM90A)
    lowered = lower_forward(given)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    signature = Signature(scalars=scalars, given=("seqused_k",) if lengths == "used" else ())
    return lowered.plan, inspect(lowered.source, lowered.problem, signature, entry="decode")


def check(plan: DecodePlan, found: Inspection) -> None:
    resources = found.resources
    assert not resources.spill_bytes and not resources.stack_bytes and not resources.ignored
    assert resources.registers == 65536 // (256 * plan.blocks) - 16 * (plan.blocks == 1)
    assert resources.shared_bytes == plan.memory.total
    assert "cvt.rn.f16x2.e4m3x2" in found.ptx and "mma.sync.aligned.m16n8k16" in found.ptx


@pytest.mark.parametrize("name", FEW)
def test_nothing_spills(name: str) -> None:
    check(*compiled(*FEW[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_nothing_spills_in_others(name: str) -> None:
    check(*compiled(*MORE[name]))
