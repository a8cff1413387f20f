"""A second forward pipeline, defined here and registered by one line: all of the flow takes it from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.compiler import compile as compile_module
from fa4flex.compiler.signature import Signature
from fa4flex.kernels import dispatch
from fa4flex.kernels.fwd_sm90.plan import FWD_SM90, HopperPlan, plan_hopper
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.request import ForwardRequest
from fa4flex.kernels.plan.target import SM90A, SM100A
from fa4flex.lower import Given, Lowered, lower_forward
from fa4flex.primitives.schedule import Schedule
from fa4flex.view.gpu import inputs_of
from fa4flex.view.sizes import setting

TILE = (64, 80)


def plan_short(request: ForwardRequest) -> HopperPlan:
    return plan_hopper(replace(request, schedule=Schedule(tile=TILE)))


SHORT = replace(
    FWD_SM90,
    name="Hopper forward, short tiles",
    accepts=lambda problem, target, sizes: target.family == "sm90" and problem.head_dim == 40,
    plan=plan_short,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PIPELINES", (SHORT, *dispatch.PIPELINES))


def variant() -> fa4flex.Attention:
    """Variant with new code each time: nothing of it is compiled yet."""
    space: dict[str, Any] = {}
    exec("def capped(s, b, h, q, k):\n    return s * 0.75 + 0.01 * (q - k)", space)
    return fa4flex.compile(score_mod=space["capped"], mask=fa4flex.variants.causal)


def in_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = q @ k.mT * q.shape[-1] ** -0.5 * 0.75 + (0.01 * (queries - keys).double()).to(q.dtype)
    hidden = keys > queries + k.shape[2] - q.shape[2]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def lowered(attn: fa4flex.Attention, width: int) -> Lowered:
    program, changes = attn.program, {"head_dim": width}
    inputs = inputs_of(program, setting(program, 256, 256).shape, changes)
    return lower_forward(Given(program.facts, Schedule(), inputs, program.captured(), SM90A))


def test_it_is_chosen_by_what_it_accepts() -> None:
    assert dispatch.choose("forward", Problem(40, 40), SM90A) is SHORT
    assert dispatch.choose("forward", Problem(48, 48), SM90A) is FWD_SM90
    assert dispatch.choose("forward", Problem(40, 40), SM100A) not in (SHORT, FWD_SM90)
    assert dispatch.choose("backward", Problem(40, 40), SM90A) is not SHORT


def test_it_is_planned_explained_and_emitted() -> None:
    attn = variant()
    assert lowered(attn, 40).plan.tile == TILE != lowered(attn, 48).plan.tile
    assert "tile: 64 queries x 80 keys" in attn.source("plan", head_dim=40, arch="sm_90a")
    text = attn.source("forward", head_dim=40, arch="sm_90a")
    assert "tile_m=64" in text and "tile_n=80" in text
    assert "tile_n=80" not in attn.source("forward", head_dim=48, arch="sm_90a")


def test_a_plan_that_was_made_before_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = variant()
    before = lowered(attn, 40)
    monkeypatch.setattr(dispatch, "PIPELINES", dispatch.PIPELINES[1:])
    assert before.plan.tile == TILE != lowered(attn, 40).plan.tile


def test_it_is_compiled_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path))
    found, signature = lowered(variant(), 40), Signature()
    assert found.compile(signature).compiled
    monkeypatch.setattr(compile_module, "_kernels", {})
    assert not found.compile(signature).compiled, "another process takes the file"


def test_it_is_launched_on_a_simulated_gpu(seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, 40, dtype=torch.bfloat16) for length in (70, 90, 90))
    attn, taken = variant(), []
    plan = SHORT.plan

    def noted(request: ForwardRequest) -> Any:
        taken.append(request.problem)
        return plan(request)

    noting = replace(SHORT, plan=noted)
    with pytest.MonkeyPatch.context() as patch, ptxsim.device("sm_90a"):
        patch.setattr(dispatch, "PIPELINES", (noting, *dispatch.PIPELINES))
        out = attn(q, k, v)
    assert taken, "another pipeline was launched"
    exact, same = (in_pytorch(*(x.to(dtype) for x in (q, k, v))) for dtype in (torch.float64, torch.bfloat16))
    assert (attn(q.double(), k.double(), v.double()) - exact).abs().max() < 1e-12
    assert (out.double() - exact).abs().max() <= 2 * (same.double() - exact).abs().max()
