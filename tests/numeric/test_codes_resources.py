"""Forward kernels of codes, compiled for sm_90a: nothing spills, shared memory is as planned, and products
are those of 8 bits."""

from __future__ import annotations

from typing import Any

import pytest

import fa4flex
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.compiler.inspect import Inspection, inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.fwd_8bit_sm90.plan import CodesPlan
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.keys import Codes, of_codes
from fa4flex.kernels.plan.target import SM90A, Target
from fa4flex.lower import Given, lower_forward
from fa4flex.variants import alibi, causal, sliding_window, softcap

ALIBI: dict[str, Any] = {"score_mod": alibi, "mask": causal}
CAPPED: dict[str, Any] = {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)}
INT8 = Codes("int8", "float8_e4m3fn", True, True)
E4M3 = Codes("float8_e4m3fn", "float8_e4m3fn", True, True)
HALF = Codes("int8", "bfloat16", True)
FEW: dict[str, Any] = {
    "plain 128, e4m3": ({}, (128, 128), E4M3),
    "causal 128, int8": ({"mask": causal}, (128, 128), INT8),
}
MORE: dict[str, Any] = {
    f"{mods} {d}, {name}": (pieces, (d, dv), codes)
    for mods, pieces in (("plain", {}), ("causal", {"mask": causal}), ("alibi", ALIBI), ("soft cap", CAPPED))
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    for name, codes in (("e4m3", E4M3), ("int8", INT8), ("int8, 16-bit values", HALF))
}
PRODUCTS = {"int8": "s32.s8.s8", "float8_e4m3fn": "f32.e4m3.e4m3", "bfloat16": "f32.bf16.bf16"}


def compiled(
    pieces: dict[str, Any], widths: tuple[int, int], codes: Codes, target: Target = SM90A
) -> tuple[Any, Inspection]:
    program = fa4flex.compile(**pieces).program
    inputs = Inputs(
        Shape(1, 8, 4096, 4096), 8, *widths, dtype=codes.qk, out_dtype="bfloat16", keys=of_codes(codes)
    )
    given = Given(program.facts, fa4flex.Schedule(), inputs, program.captured(), target)
    lowered = lower_forward(given)
    scalars = tuple("float" if isinstance(x, float) else "int" for x in given.captured.scalars)
    signature = Signature(scalars=scalars)
    return lowered.plan, inspect(lowered.source, lowered.problem, signature, target.name, entry="fwd")


def check(plan: CodesPlan, found: Inspection) -> None:
    resources = found.resources
    assert not resources.spill_bytes and not resources.stack_bytes and not resources.ignored
    assert resources.shared_bytes == plan.memory.total
    for kind in (plan.codes.qk, plan.codes.pv):
        assert PRODUCTS[kind] in found.ptx
    assert ("cvt.rn.satfinite.e4m3x2.f32" in found.ptx) == plan.codes.transposed


@pytest.mark.parametrize("name", FEW)
def test_nothing_spills(name: str) -> None:
    check(*compiled(*FEW[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_nothing_spills_in_others(name: str) -> None:
    check(*compiled(*MORE[name]))
