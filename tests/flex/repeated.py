"""Calls that are repeated: how they are composed, counted and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.runtime.flex import engine as engines
from fa4flex.runtime.flex.block_mask import Classifier
from fa4flex.runtime.flex.compiled import Compiled, Graph
from fa4flex.runtime.flex.known import Repeat
from fa4flex.runtime.programs import Published
from fa4flex.runtime.recent import KnownCall

S = 200


def engines_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal programs share an engine within a test, and with no other test."""
    made: dict[Published, engines.Engine] = {}

    def engine(program: Published) -> engines.Engine:
        return made.setdefault(program, engines.Engine(program.facts, program.schedule, program.precision))

    monkeypatch.setattr(Published, "flex", property(engine))


class Counts:
    """Calls that entered Dynamo, and block masks that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.masks = 0, 0
        self._count(monkeypatch, Compiled, "__call__", "entered")
        self._count(monkeypatch, Classifier, "classes", "masks")

    def _count(self, monkeypatch: pytest.MonkeyPatch, of: type, method: str, name: str) -> None:
        inner = getattr(of, method)

        def counted(this: Any, *given: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return inner(this, *given)

        monkeypatch.setattr(of, method, counted)

    @property
    def now(self) -> tuple[int, int]:
        return self.entered, self.masks


def qkv(length: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, n, length, 16, dtype=dtype) for n in (2, 1, 1)]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


Looks = Callable[[list[Tensor]], list[Tensor]]
LAID_OUT: dict[str, Looks] = {
    "shape": lambda x: [y[:, :, :150].contiguous() for y in x],
    "fewer keys": lambda x: [x[0], *[y[:, :, :S - 1].contiguous() for y in x[1:]]],
    "batch": lambda x: [torch.cat([y, y]) for y in x],
    "strides of q": lambda x: [transposed(x[0]), *x[1:]],
    "strides of v": lambda x: [*x[:2], transposed(x[2])],
    "one tensor twice": lambda x: [x[0], x[1], x[1]],
}  # fmt: skip
"""Tensors of q, k and v of other shapes, strides or identities."""


class Held:
    """Tensors and numbers that the functions of `composed` capture."""

    def __init__(self) -> None:
        self.ids, self.bias = torch.arange(S) // 50, torch.randn(2, S)
        self.window, self.cap = 150, 2.0


def composed(held: Held, backend: Any = "flex", **options: Any) -> fa4flex.Attention:
    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return held.cap * torch.tanh(s / held.cap) + held.bias[h, kv_idx]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = held.ids[q_idx] == held.ids[kv_idx]
        return same & (q_idx - kv_idx < held.window) & (q_idx >= kv_idx)

    return fa4flex.compile(score, mask, backend=backend, **options)


def right(attn: fa4flex.Attention, given: list[Tensor], held: Held, **call: Any) -> None:
    plain = composed(held, "auto", layout=attn.variant.layout, scale=attn.variant.scale)
    torch.testing.assert_close(attn(*given, **call), plain(*given, **call))


def repeated(held: Held, **options: Any) -> tuple[fa4flex.Attention, list[Tensor]]:
    """An Attention with a way to such calls."""
    attn, given = composed(held, **options), qkv()
    if options.get("layout") == "bshd":
        given = [x.transpose(1, 2).contiguous() for x in given]
    for _ in range(3):
        right(attn, given, held)
    (one,) = kept(attn)
    assert graph_of(one) is not None
    return attn, given


def kept(attn: fa4flex.Attention) -> tuple[KnownCall, ...]:
    recent = attn._caller.recent  # type: ignore[union-attr]
    assert recent is not None
    return recent.known.kept


def served(attn: fa4flex.Attention, qkv: Sequence[Tensor]) -> bool:
    """True if such a call is like an earlier one."""
    recent = attn._caller.recent  # type: ignore[union-attr]
    assert recent is not None
    q, k, v = qkv
    return recent.serve(attn.variant, (q, k, v), None, None, None, ()) is not None


def graph_of(one: KnownCall) -> Graph | None:
    assert isinstance(one.launch, Repeat)
    return one.launch.graph
