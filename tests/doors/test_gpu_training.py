"""Eager calls with gradients on a GPU, without one: what autograd keeps, and what both passes launch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from launch_changes import HEADS, S, calls_on_gpu, mod
from test_gpu_calls import Recorder, inputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
from fa4flex.errors import EarlierError
from fa4flex.kernels.plan.arguments import SCHEMAS
from fa4flex.kernels.plan.faults import PLACES, ROWS, WORDS
from fa4flex.reference import attention as reference
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.known import Shortlist
from fa4flex.runtime.recent import KnownCall
from fa4flex.variants import causal

NAMES = {len(schema.names): schema.names for which, schema in SCHEMAS.items() if which != "tangents"}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return calls_on_gpu(monkeypatch)


def launched(recorder: Recorder) -> list[dict[str, Any]]:
    """Arguments by name of the launches until now; those of backward passes have a "dout"."""
    found = [dict(zip(NAMES[len(given)], given, strict=True)) for given in recorder.launches]
    recorder.launches.clear()
    return found


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs(S)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def step(attn: fa4flex.Attention, qkv: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    out = attn(*qkv, **options)
    out, *lse = out if isinstance(out, tuple) else (out,)
    total = out.float().sum() + sum(x.sum() for x in lse)
    return torch.autograd.grad(total, qkv)


def fast(attn: fa4flex.Attention) -> bool:
    return bool(paths(attn))


def paths(attn: fa4flex.Attention) -> list[KnownCall]:
    """Launches that serve calls just like the last ones, the youngest first."""
    assert attn._caller is not None and attn._caller.recent is not None
    return [one for one in attn._caller.recent.known.kept if one.valid is None]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_repeated_steps_launch_the_same(recorder: Recorder, layout: Any, return_lse: bool) -> None:
    attn = fa4flex.compile(mod, causal, sinks=torch.randn(HEADS), layout=layout)
    qkv = leaves()
    if layout == "bshd":
        qkv = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv)  # type: ignore[assignment]
    steps = []
    for _ in range(4):
        gradients = step(attn, qkv, return_lse=return_lse)
        steps.append(launched(recorder))
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in qkv]
        forward, backward = steps[-1]
        assert all(forward[name].data_ptr() == x.data_ptr() for name, x in zip("qkv", qkv))
        assert all(backward[name].data_ptr() == x.data_ptr() for name, x in zip("qkv", qkv))
        assert backward["out"].data_ptr() == forward["out"].data_ptr()
        assert backward["lse"].data_ptr() == forward["lse"].data_ptr()
        assert (backward["dlse"] is not None) == return_lse
        assert all(backward[f"d{name}"].data_ptr() == x.data_ptr() for name, x in zip("qkv", gradients))
    assert fast(attn) and len(recorder.problems) == 2, "compiled once for each pass"
    for one in steps[1:]:
        for first, other in zip(steps[0], one, strict=True):
            for name, x in first.items():
                like = isinstance(x, Tensor) and (x.shape, x.stride(), x.dtype)
                assert not like or (other[name].shape, other[name].stride(), other[name].dtype) == like, name
                assert isinstance(x, (Tensor, tuple)) or other[name] == x, name


def test_a_call_while_a_fast_path_is_made_has_gradients(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads call at the same time."""
    attn, qkv, others = fa4flex.compile(mod, causal), leaves(), list[Tensor]()
    narrow = Shortlist.narrow

    def meanwhile(shortlist: Shortlist[Any], *given: Any) -> None:
        monkeypatch.setattr(Shortlist, "narrow", narrow)
        others.append(attn(*qkv))
        narrow(shortlist, *given)

    monkeypatch.setattr(Shortlist, "narrow", meanwhile)
    for _ in range(4):
        attn(*qkv)
    assert fast(attn) and [x.requires_grad for x in others] == [True]


@pytest.mark.parametrize("return_lse", [False, True])
def test_modes_of_gradients_are_told_apart(recorder: Recorder, return_lse: bool) -> None:
    attn, qkv = fa4flex.compile(mask=causal), leaves()
    still = tuple(x.detach() for x in qkv)

    def trains(*given: Tensor) -> bool:
        found = []
        for _ in range(3):
            results = attn(*given, return_lse=return_lse)
            found.append((results[0] if return_lse else results).requires_grad)
        assert len(set(found)) == 1 and any(path.guard(*given) for path in paths(attn))
        return found[0]

    assert trains(*qkv)
    launched(recorder)
    with torch.no_grad():
        assert not trains(*qkv)
    assert [x["lse"] is not None for x in launched(recorder)] == [return_lse] * 3
    for _ in range(3):
        assert trains(*qkv) and not trains(*still) and trains(qkv[0], *still[1:])
        with torch.no_grad():
            assert not trains(*qkv)


def test_what_was_saved_and_changed_since_is_refused(recorder: Recorder) -> None:
    attn, qkv = fa4flex.compile(mask=causal), leaves()
    for _ in range(4):
        q = qkv[0] * 1
        out = attn(q, *qkv[1:])
        q.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_faults_are_told_by_repeated_calls_and_backward_passes(recorder: Recorder) -> None:
    """Whichever comes next, and once."""
    attn, qkv = fa4flex.compile(mask=causal), leaves()
    still = tuple(x.detach() for x in qkv)
    number = PLACES["cu_seqlens_q starts"]

    def planted() -> None:
        rows = torch.frombuffer(
            (ctypes.c_int64 * (ROWS * WORDS)).from_address(faults.table()), dtype=torch.int64
        )
        rows = rows.view(ROWS, WORDS)
        rows[1 + number, :2] = torch.tensor([1, 7])
        rows[0, 0] = 1

    for given in (qkv, still):
        for _ in range(3):
            out = attn(*given)
        assert fast(attn)
        planted()
        with pytest.raises(EarlierError, match="cu_seqlens_q starts at 7, in a call before this one"):
            attn(*given)
        out = attn(*given)
    out = attn(*qkv)
    planted()
    with pytest.raises(EarlierError, match="cu_seqlens_q starts at 7"):
        out.sum().backward(retain_graph=True)
    out.sum().backward()


def test_saved_tensors_are_those_that_hooks_hand_out(recorder: Recorder) -> None:
    attn, qkv = fa4flex.compile(mask=causal), leaves()
    for _ in range(4):
        packed: list[Tensor] = []

        def pack(x: Tensor) -> Tensor:
            packed.append(x)  # noqa: B023
            return x.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attn(*qkv)
        launched(recorder)
        out.sum().backward()
        (backward,) = launched(recorder)
        assert {x.shape for x in packed} == {qkv[0].shape, qkv[1].shape, (2, HEADS, S)}
        assert backward["q"].data_ptr() != qkv[0].data_ptr()


def test_second_derivatives_are_computed_another_way(recorder: Recorder) -> None:
    """From the tensors alone, in PyTorch's operations."""
    attn, qkv = fa4flex.compile(mask=causal), leaves()
    for _ in range(4):
        (dq,) = torch.autograd.grad(attn(*qkv).float().sum(), qkv[0], create_graph=True)
        launched(recorder)
        found = torch.autograd.grad(dq.float().sum(), qkv)
        assert not launched(recorder)
        wide = [x.detach().double().requires_grad_() for x in qkv]
        (dq,) = torch.autograd.grad(reference(*wide, mask=causal)[0].sum(), wide[0], create_graph=True)
        for mine, true in zip(found, torch.autograd.grad(dq.sum(), wide), strict=True):
            assert (mine.double() - true).norm() <= 0.01 * true.norm()


def test_gradients_of_other_dtypes_are_computed_another_way(recorder: Recorder) -> None:
    """There is no kernel for them: PyTorch's operations compute them, and nothing is launched."""
    attn, qkv = fa4flex.compile(mask=causal, precision=fa4flex.Precision(output=torch.float16)), leaves()
    for _ in range(4):
        out = attn(*qkv)
        launched(recorder)
        gradients = torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert launched(recorder) == [] and [x.shape for x in gradients] == [x.shape for x in qkv]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, list[torch.Size]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        shapes = [x.shape for x in args if isinstance(x, Tensor)]
        self.shapes[function.__name__] = shapes
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_modes_see_the_operator_of_the_backward_pass(recorder: Recorder, layout: Any) -> None:
    attn, qkv = fa4flex.compile(mask=causal, layout=layout), leaves()
    given = qkv if layout == "bhsd" else tuple(x.transpose(1, 2) for x in qkv)
    for _ in range(4):
        out = attn(*given)
        with Seen() as seen:
            gradients = torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert seen.shapes["attention_gradients.default"] == [x.shape for x in qkv], "in bhsd"
        assert [x.shape for x in gradients] == [x.shape for x in qkv]


def test_a_captured_parameter_keeps_its_gradient(recorder: Recorder) -> None:
    table = torch.nn.Parameter(torch.linspace(-1, 1, 1024).view(2, 512))

    def learned(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[kv_idx % 2, q_idx]

    attn, qkv = fa4flex.compile(learned, causal), tuple(x.detach() for x in leaves())
    for _ in range(4):
        table.grad = None
        attn(*qkv).float().sum().backward()
        assert table.grad is not None and table.grad.shape == table.shape
    assert fast(attn)
    with torch.no_grad():
        table.mul_(2)
    launched(recorder)
    attn(*qkv)
    assert launched(recorder)[0]["operands"][0].data_ptr() == table.data_ptr(), "read where it is now"
