"""No kernel for sums per key spills registers. A run compiles some of them; `-m exhaustive` all."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch

import fa4flex
from fa4flex.codegen.expr import walk
from fa4flex.compiler.inspect import inspect
from fa4flex.compiler.signature import Signature
from fa4flex.variants import alibi, causal, document, sliding_window, softcap
from fa4flex.view.gpu import KernelView

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl, which exists for Linux"
)
BIAS = torch.zeros(16, 512)


def tabled(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + BIAS[h, kv_idx] + BIAS[h, (q_idx - kv_idx).abs() % 512]


def striped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * 7 + kv_idx) % 5 != 0


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "alibi, window": {"score_mod": alibi, "mask": causal & sliding_window(700)},
    "softcap": {"score_mod": softcap(30.0), "mask": causal},
    "documents": {"mask": document(torch.arange(2048) // 100) & causal},
    "tables": {"score_mod": tabled, "mask": striped},
}
WIDTHS = (64, 128, 192, 256)


def check(name: str, width: int, lengths: str = "dense") -> None:
    program = fa4flex.compile(**VARIANTS[name]).program
    sizes = {"batch": 1, "heads": 16, "q_len": 2048, "kv_len": 2048, "head_dim": width, "arch": "sm_90a"}
    view = KernelView(program, {**sizes, "direction": "mass", "lengths": lengths})
    entry, source = "mass_sm90kernel", view.lowered.source
    source.load()  # imports the compiler
    kinds = {node.value: node.kind for node in walk(*program.facts.roots) if node.op == "scalar"}
    signature = Signature(scalars=tuple(kinds[slot] for slot in range(len(program.scalars))))
    found = inspect(source, view.lowered.problem, signature, "sm_90a", entry=entry).resources
    assert found.spill_bytes == 0 and found.stack_bytes == 0, f"{name}, {width}: {found}"
    assert not found.ignored, "the compiler dropped what the kernel asks for"


@pytest.mark.slow
def test_some() -> None:
    check(random.choice(sorted(VARIANTS)), random.choice(WIDTHS), random.choice(("dense", "packed")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lengths", ("dense", "packed", "used"))
def test_all(name: str, width: int, lengths: str) -> None:
    check(name, width, lengths)
