"""No backward kernel of a variant spills registers on Blackwell, and its shared memory is what the plan lays
out. A run compiles some of them; `-m exhaustive` all."""

from __future__ import annotations

import importlib.util
import random
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cuda_cases
import pytest
import torch
from cuda_cases import FEW, VARIANTS, Draw, Sizes

import fa4flex
from fa4flex.codegen.plan.target import SM100A
from fa4flex.runtime.cuda import backward, engine
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.inspect import inspect

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl, which exists for Linux"
)
DRAWS = {"plain": FEW["dense"], **{name: draws[0] for name, draws in VARIANTS.items()}}
WIDTHS = (32, 64, 96, 128)


def launched(draw: Draw, width: int) -> tuple[Any, tuple[Any, ...]]:
    """The plan that gradients of a call make, and what they have compiled."""
    torch.manual_seed(0)  # what is proved may depend on the contents of tables
    sizes = draw.sizes(Sizes()).wide(width, width)
    prepared = fa4flex.compile(**draw.make(sizes)).prepared
    qkv = sizes.qkv()
    given = prepared.program.tensors(), prepared.sinks, NO_LENGTHS, prepared.scalars, prepared.scale(qkv[0])
    saved = backward.Saved(torch.empty_like(qkv[0]), torch.empty(qkv[0].shape[:3]), qkv[0], None)
    planned, asked = [], []

    def program(*known: Any) -> Any:
        planned.append(whole(*known))
        return planned[-1]

    def compile_kernel(*known: Any) -> Any:
        asked.append(known)
        return SimpleNamespace(launch=None)

    whole = backward.program
    with (
        patch.object(backward, "program", program),
        patch.object(backward, "compile_kernel", compile_kernel),
        patch.object(engine, "target_of", lambda device: SM100A),
    ):
        backward._make_ready(prepared.engine, Call(*qkv, *given, True, ("lse",)), saved, (), False)
    ((plan, _),), ((*found, _),) = planned, asked
    return plan, tuple(found)


def check(name: str, width: int) -> None:
    with patch.object(cuda_cases, "DEVICE", torch.device("cpu")):
        plan, (source, problem, signature) = launched(DRAWS[name], width)
    source.load()  # imports the compiler
    found = inspect(source, problem, signature, SM100A.name, entry="bwd_sm100").resources
    assert found.spill_bytes == 0 and found.stack_bytes == 0, f"{name}, {width}: {found}"
    assert not found.ignored, "the compiler dropped what the kernel asks for"
    assert found.shared_bytes == plan.memory.total <= SM100A.shared_memory


@pytest.mark.parametrize(("name", "width"), random.sample(sorted(product(DRAWS, WIDTHS)), 2))
def test_some_kernels(name: str, width: int) -> None:
    check(name, width)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", DRAWS)
def test_kernel(name: str, width: int) -> None:
    check(name, width)
