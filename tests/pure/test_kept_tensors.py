"""Tensors of indices that are kept between calls: few, small, and only where they mean the same at the next
call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fa4flex.primitives import kept as module
from fa4flex.primitives.kept import kept, steps, where_seen

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kept", type(module._kept)())


def test_the_same_numbers_are_the_same_tensor() -> None:
    assert steps(3, 4, 5, CPU).tolist() == [3, 8, 13, 18]
    assert steps(3, 4, 5, CPU) is steps(3, 4, 5, CPU) is not steps(3, 4, 6, CPU)


def test_few_and_small_ones_are_kept() -> None:
    first = steps(0, 7, 1, CPU)
    for n in range(module.MOST):
        steps(0, 7, 1, CPU)  # the one that is used stays
        steps(n + 1, 7, 1, CPU)
    assert len(module._kept) == module.MOST and steps(0, 7, 1, CPU) is first
    large = module.MOST_BYTES // 8 + 1
    assert steps(0, large, 1, CPU) is not steps(0, large, 1, CPU)


def test_nothing_is_kept_of_what_others_trace_or_transform() -> None:
    with FakeTensorMode():
        assert isinstance(steps(0, 5, 1, CPU), FakeTensor)
    assert torch.vmap(lambda x: x + steps(0, 5, 1, CPU))(torch.zeros(2, 5)).tolist() == [list(range(5))] * 2
    assert not module._kept
    graph = torch.compile(lambda x: x + steps(0, 5, 1, CPU), backend="eager", fullgraph=True)
    assert graph(torch.zeros(5)).tolist() == list(range(5)) and not module._kept


def test_what_was_made_in_inference_mode_takes_part_in_gradients() -> None:
    with torch.inference_mode():
        steps(1, 5, 1, CPU)
    x = torch.randn(5, requires_grad=True)
    (x * steps(1, 5, 1, CPU)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 2, 3, 4, 5]


def test_a_stream_and_a_capture_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that a stream made may not be there on another, and a captured graph fills its own at each
    replay."""
    made: list[Tensor] = []

    def make() -> Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    gpu, stream = torch.device("cuda:0"), 1
    monkeypatch.setattr(module, "current_stream", lambda index: stream)
    monkeypatch.setattr(module, "on_stream_of_graph_trees", lambda index, stream: stream == 7)
    assert kept("x", gpu, make) is kept("x", gpu, make) and len(made) == 1
    stream = 2
    assert kept("x", gpu, make) is kept("x", gpu, make) and len(made) == 2
    stream = 7
    assert kept("x", gpu, make) is not kept("x", gpu, make)
    stream = 1
    monkeypatch.setattr(module, "capturing", lambda: True)
    assert kept("x", gpu, make) is not kept("x", gpu, make) and len(module._kept) == 2


def test_what_is_not_seen() -> None:
    x = torch.tensor([1.0, torch.nan, 3.0], dtype=torch.float64, requires_grad=True)
    seen = torch.tensor([True, False, True])
    for fill in (-torch.inf, 0.0):
        found = where_seen(x, seen, fill)
        assert found.dtype == x.dtype and found.tolist() == [1.0, fill, 3.0]
        assert torch.autograd.grad(found[::2].sum(), x)[0].tolist() == [1.0, 0.0, 1.0]


def test_nothing_comes_from_the_host() -> None:
    """Operations would copy it to the device, and wait."""
    x = torch.randn(2, 3, device="meta")
    assert where_seen(x, x > 0).device.type == "meta"
    assert module._kept and all(tensor.device.type == "meta" for tensor in module._kept.values())
