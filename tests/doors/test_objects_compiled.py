"""Python objects around calls in one compiled graph: what is made, set and deleted between calls stays so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fa4flex
from fa4flex.variants import causal

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def attend(q: Tensor, kv: Tensor) -> Tensor:
    out: Tensor = fa4flex.attention(q, kv, kv, mask=causal)
    return out


class Layer:
    """A cache that becomes one at its first keys, as a DynamicLayer does."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, k: Tensor) -> Tensor:
        if self.keys is None:
            self.dtype, self.device = k.dtype, k.device
            self.keys = torch.tensor([], dtype=self.dtype, device=self.device)
        self.keys = torch.cat([self.keys, k], -2)
        return self.keys


class Space:
    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            setattr(self, name, value)


class Slotted:
    __slots__ = ("kv",)


class Growing(list[Tensor]):
    total = 0


@dataclass
class State:
    kv: Tensor
    steps: list[int] = field(default_factory=list)


def caches(q: Tensor) -> Tensor:
    layers = [Layer() for _ in range(3)]
    for layer in layers * 2:
        q = attend(q, layer.update(q))
    return q + sum(layer.keys.sum() for layer in layers if layer.keys is not None)


def attributes_set_before_between_and_after(q: Tensor) -> Tensor:
    space = Space(first=q)
    q = attend(q, space.first)
    space.second, space.first = q * 2, q + 1
    q = attend(q, space.second)
    del space.second
    space.third = attend(q, space.first)
    assert not hasattr(space, "second")
    out: Tensor = space.third + sum(vars(space).values())
    return out


def slots_dataclasses_and_lists(q: Tensor) -> Tensor:
    slotted, state, growing = Slotted(), State(q), Growing()
    for n in range(3):
        slotted.kv = state.kv
        state.kv = attend(q, slotted.kv) * 0.5
        state.steps.append(n)
        growing.append(state.kv)
        growing.total += n
    return sum(growing) * growing.total + len(state.steps)


def attributes_of_functions(q: Tensor) -> Tensor:
    def step(x: Tensor) -> Tensor:
        step.calls += 1
        step.last = attend(x, x) * step.calls
        return step.last

    step.calls = 0
    q = step(step(q)) + attend(q, step.last)
    step.name = "twice"
    return q * step.calls + len(step.name)


def modules_made_in_the_graph(q: Tensor) -> Tensor:
    module = nn.Identity()
    module.seen = attend(module(q), q)
    module.twice = attend(q, module.seen)
    return module.seen + module.twice


def objects_made_in_a_mod(q: Tensor) -> Tensor:
    box = Space(slope=0.5)

    def biased(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        inner = Space(distance=i - j)
        inner.scaled = inner.distance * box.slope
        return s - inner.scaled

    for n in range(3):
        q = fa4flex.attention(q, q, q, score_mod=biased)
        box.slope, box.last = box.slope * 2, n
    return q * box.last


GRAPHS: list[Callable[[Tensor], Tensor]] = [
    caches,
    attributes_set_before_between_and_after,
    slots_dataclasses_and_lists,
    attributes_of_functions,
    modules_made_in_the_graph,
    objects_made_in_a_mod,
]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda f: f.__name__)
def test_objects_keep_what_is_set_between_calls(graph: Callable[[Tensor], Tensor]) -> None:
    q = torch.randn(1, 2, 8, 16)
    found = torch.compile(graph, fullgraph=True, backend="eager")(q)
    torch.testing.assert_close(found, graph(q))


class Counting(nn.Module):
    """A model that remembers its last output, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.calls, self.history = 0, dict[int, Tensor]()

    def forward(self, q: Tensor) -> Tensor:
        for _ in range(2):
            q = attend(q, q) * self.scale
            self.calls += 1
            self.last = q
            self.history[self.calls] = q
        return q


def test_objects_from_outside_are_changed_as_in_eager_mode() -> None:
    q = torch.randn(1, 2, 8, 16)
    eager, compiled = Counting(), Counting()
    run = torch.compile(compiled, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(run(q), eager(q))
    assert compiled.calls == eager.calls == 4 and compiled.history.keys() == eager.history.keys()
    torch.testing.assert_close(compiled.last, eager.last)
