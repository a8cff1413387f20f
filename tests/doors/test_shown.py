"""GPU stages that `source` and `explain` show are what a call of the same look has compiled and launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_changes import recording
from test_gpu_calls import Recorder, call_of

import fa4flex
from fa4flex import lower as lower_module
from fa4flex.kernels.plan.target import SM90A
from fa4flex.runtime.cuda import tangents
from fa4flex.runtime.cuda.backward import run_backward
from fa4flex.runtime.cuda.launches.ready_backward import Saved
from fa4flex.runtime.cuda.launches.ready_tangents import Tangents
from fa4flex.runtime.cuda.mass import key_mass
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.variants import alibi, causal, document, sliding_window
from fa4flex.view import gpu

S = 300
IDS = torch.arange(S) // 37
BIAS = torch.randn(4, S, requires_grad=True)


def scattered(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 7 + k) % 5 != 0


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scores and key intervals": {"score_mod": alibi, "mask": sliding_window(70)},
    "documents": {"mask": document(IDS)},
    "block tables": {"mask": scattered},
    "a learned table": {"score_mod": lambda s, b, h, q, k: s + BIAS[h, k], "mask": causal},
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    recorder, found = recording(monkeypatch), []

    def compile_kernel(source: Any, problem: Any, *rest: Any) -> Any:
        if source.name != "block tables":
            found.append((source, problem))
        return Recorder.compile(recorder, source, problem, *rest)

    monkeypatch.setattr(lower_module, "compile_kernel", compile_kernel)
    monkeypatch.setattr(lower_module, "compile_ahead", lambda *given: None)
    return found


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("direction", gpu.DIRECTIONS)
def test_what_is_shown_is_what_is_launched(
    compiled: list[tuple[Any, Any]], name: str, direction: str
) -> None:
    attn = fa4flex.compile(**VARIANTS[name])
    engine, call = call_of(attn)
    if direction == "forward":
        engine.run(call)
    elif direction == "tangents":
        moved = (torch.randn_like(x) for x in (call.q, call.kv.k, call.kv.v))
        tangents._make_ready(engine, call._replace(statistics=("lse",)), Tangents(*moved))
    elif direction == "mass":
        keys = Contiguous(call.kv.k, call.kv.k)
        key_mass(engine, call._replace(kv=keys), torch.randn(call.q.shape[:3]))
    else:
        wanted = tuple(slot for slot, x in enumerate(call.operands) if x.requires_grad)
        lse = torch.randn(call.q.shape[:3])
        run_backward(engine, call, Saved(call.q, lse, call.q, None), wanted)
    ((source, problem),) = compiled
    batch, heads, *_ = call.q.shape
    given = {
        "batch": batch,
        "heads": heads,
        "kv_heads": call.kv.k.shape[1],
        "head_dim": 64,
        "arch": SM90A.name,
    }
    view = gpu.KernelView(attn.program, {"q_len": S, "direction": direction, **given})
    shown = view.lowered
    assert shown.problem == problem and shown.source.key == source.key
    # What is printed has the user's names in it, and is made of the same pass.
    assert attn.source(direction, q_len=S, **given) == view.source.text


def test_another_direction_is_refused() -> None:
    with pytest.raises(fa4flex.InputError, match="direction='sideways'"):
        fa4flex.compile(mask=causal).source("plan", direction="sideways")


@pytest.mark.parametrize(
    ("arch", "direction"),
    [("sm_90a", x) for x in gpu.DIRECTIONS] + [("sm_100a", x) for x in ("forward", "backward")],
)
def test_every_plan_is_explained(arch: str, direction: str) -> None:
    attn = fa4flex.compile(score_mod=alibi, mask=causal)
    for width in (64, 128, 192)[: 2 if direction == "tangents" else 3]:
        text = attn.source("plan", head_dim=width, head_dim_v=min(width, 128), arch=arch, direction=direction)
        assert text.startswith(f"{direction} kernel for {arch}") and "shared memory:" in text
