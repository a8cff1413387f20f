"""The modules generated for variants, as files short enough to read: hooks, without the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa4flex.codegen.build import build
from fa4flex.codegen.emit import emit_backward, emit_forward
from fa4flex.codegen.emit.module import Captions
from fa4flex.kernels.bwd_sm90.config import Config as BackwardConfig
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.plan.problem import Problem
from fa4flex.variant import compose
from fa4flex.variants import (
    alibi,
    causal,
    document,
    learned_bias,
    mla,
    natten,
    sliding_window,
    softcap,
    t5_bias,
)

IDS = torch.arange(8, dtype=torch.int32) // 3
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("spans", {"mask": causal}),
    "alibi": ("none", {"score_mod": alibi(torch.ones(4))}),
    "softcap": ("spans", {"score_mod": softcap(30.0), "mask": causal}),
    "alibi window": ("spans", {"score_mod": alibi, "mask": sliding_window(1024)}),
    "document": ("tables", {"mask": causal & document(IDS)}),
    "relative table": ("none", {"score_mod": learned_bias(torch.zeros(4, 15))}),
    "natten": ("tables", {"mask": natten((8, 8), (3, 5))}),
    "mla": ("spans", {"scale": mla().scale, "mask": causal}),
}
LONGEST = 200


@pytest.mark.parametrize("name", VARIANTS)
def test_generated(name: str, golden: Callable[[str], None]) -> None:
    mask_form, composition = VARIANTS[name]
    program = build(compose(**composition))
    problem = Problem(128, 128, mask_form=mask_form)
    plan = SimpleNamespace(
        problem=problem,
        target=SimpleNamespace(name="sm_90a"),
        module="fa4flex.kernels.fwd_sm90",
        config=lambda: Config(128, 128, 128, 128),
    )
    captions = Captions(name, [x.name for x in program.operands], program.scalar_names)
    origins = {k: v for t in (program.score, program.mask) if t is not None for k, v in t.origins.items()}
    text = emit_forward(program.facts, plan, captions, origins).text
    assert text.count("\n") <= LONGEST
    assert max(map(len, text.splitlines())) <= 130
    golden(without_places(text))


def without_places(text: str) -> str:
    """Source without line numbers and without the configuration."""
    without_config = re.sub(r"CONFIG = Config\(.*?\n\)\n", "", text, flags=re.DOTALL)
    return re.sub(r"(\.py):\d+", r"\1", without_config)


LEARNED: dict[str, tuple[str, dict[str, Any]]] = {
    "capped slopes": ("sum", {"score_mod": alibi(torch.ones(4)) >> softcap(30.0)}),
    "relative table": ("sum", {"score_mod": learned_bias(torch.zeros(4, 15))}),
    "dense bias": ("once", {"score_mod": learned_bias(torch.zeros(2, 4, 8, 8))}),
    "copied bias": ("once in pairs", {"score_mod": learned_bias(torch.zeros(2, 4, 8, 8).bfloat16())}),
    "buckets": ("sum", {"score_mod": t5_bias(torch.zeros(32, 4))}),
}


@pytest.mark.parametrize("name", LEARNED)
def test_backward_of_captured_tensors(name: str, golden: Callable[[str], None]) -> None:
    """Contributions of pairs to their gradients."""
    adding, composition = LEARNED[name]
    program = build(compose(**composition))
    (slot,) = {term.slot for term in program.facts.gradient.captured}
    plan = SimpleNamespace(
        problem=Problem(128, 128, gradients=((slot, adding),), operands=(("bfloat16", 4),)),
        copies=True,
        target=SimpleNamespace(name="sm_90a"),
        module="fa4flex.kernels.bwd_sm90",
        config=lambda: BackwardConfig(128, 128),
    )
    captions = Captions(name, [x.name for x in program.operands], program.scalar_names)
    golden(without_places(emit_backward(program.facts, plan, captions).text))
