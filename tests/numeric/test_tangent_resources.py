"""Kernels of attention and its tangents, compiled for sm_90a: shared memory is as planned, products overlap,
and nothing spills, or little that is put away outside of loops. A run compiles some; `-m exhaustive` all."""

from __future__ import annotations

import importlib.util
import random
from functools import partial
from unittest.mock import patch

import pytest
from kernel_programs import KINDS, Width
from test_backward_resources import assert_products_overlap

from fa4flex.compiler.inspect import inspect
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import lower_tangents
from fa4flex.runtime.cuda import engine
from fa4flex.runtime.cuda.calls.signatures import signature_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl, which exists for Linux"
)
EVERY = "q", "k", "v"
CASES: dict[tuple[str, Width, tuple[str, ...]], int] = {
    ("plain", (64, 64), EVERY): 0,
    ("plain", (128, 128), EVERY): 0,
    ("plain", (128, 128), ("q",)): 0,
    ("plain", (128, 128), ("v",)): 0,
    ("causal", (64, 64), EVERY): 0,
    ("causal", (96, 96), EVERY): 0,
    ("causal", (128, 128), EVERY): 0,
    ("causal, packed", (128, 128), EVERY): 0,
    ("causal, float16", (128, 128), EVERY): 0,
    ("sliding_window", (128, 128), EVERY): 0,
    ("alibi", (128, 128), EVERY): 0,
    ("softcap", (64, 64), EVERY): 0,
    ("softcap", (128, 128), EVERY): 8,
    ("t5_bias", (64, 64), EVERY): 0,
    ("t5_bias", (128, 128), EVERY): 0,
    ("natten", (64, 64), EVERY): 16,
    ("natten", (128, 128), EVERY): 48,
}
"""Bytes that kernels may spill, stores and loads together: a register that is put away once for each tile of
queries; and beside masks from tables some more."""


def check(name: str, width: Width, moved: tuple[str, ...]) -> None:
    taken, call = KINDS[name].called(width)
    lower = partial(lower_tangents, moved=moved)
    with patch.object(engine, "target_of", lambda device: SM90A):
        lowered, _, _ = engine.lowered_for(taken, call, taken.schedule, lower)
    plan, signature = lowered.plan, signature_of(taken.kinds, call)
    plan.check()
    lowered.source.load()  # imports the compiler
    inspected = inspect(lowered.source, lowered.problem, signature, SM90A.name)
    found, most = inspected.resources, CASES[name, width, moved]
    where = f"{name}, {width}, {moved}: {found}"
    assert found.spill_bytes <= most and (most or found.stack_bytes == 0), where
    assert not found.ignored, "the compiler dropped what the kernel asks for"
    assert found.shared_bytes == plan.memory.total <= SM90A.shared_memory
    assert_products_overlap(where, inspected, "jvp_sm90kernel")


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_kernels(draw: int) -> None:
    check(*random.sample(sorted(CASES, key=str), 2)[draw])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "width", "moved"), CASES, ids=str)
def test_kernel(name: str, width: Width, moved: tuple[str, ...]) -> None:
    check(name, width, moved)
