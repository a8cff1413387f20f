"""Plans with other answers to questions about speed are right on the simulated GPUs, whatever these answers
are: what one of them was compiled for serves calls of other sizes until their own kernel is there."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import cumulative, drawn_device, poisoned
from paged_pools import Size, drawn
from test_forward_paged import chunks, expected
from test_simulated_backward import COMPOSED, judged
from torch import Tensor

import fa4flex
from fa4flex import Varlen
from fa4flex import lower as lower_module
from fa4flex.kernels.plan.sizes import Question, Sizes
from fa4flex.runtime import launch, programs
from fa4flex.variants import alibi, causal, sliding_window

CHIPS = "sm_90a", "sm_100a"
POWERS = 1, 2, 8, 64


class Answers(dict[Question, int]):
    """Answers of nobody's call: each question about speed has one that is drawn, and keeps it."""

    def get(self, question: Question, own: Any = None) -> int:
        drawn = random.choice(POWERS) if question[0] == "batch power" else random.randint(0, 1)
        return self.setdefault(question, drawn)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """All sizes that are asked from now on, whose questions about speed get drawn answers. Nothing is ready
    from other tests."""
    made: list[Sizes] = []

    class Asked(Sizes):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._others = others
            made.append(self)

    others = Answers()
    monkeypatch.setattr(lower_module, "Sizes", Asked)
    monkeypatch.setattr(launch, "publish", programs.Published)
    monkeypatch.setattr(programs, "_engine", programs._engine.__wrapped__)
    monkeypatch.setattr(launch, "_prepared", weakref.WeakKeyDictionary())
    return made


def right(attn: fa4flex.Attention, given: Callable[..., Any], chip: str, dtype: torch.dtype) -> list[str]:
    """Asserts that results are as near to those in float64 as rounding allows, and returns the names of the
    kernels. given: makes the call, `exactly` or as drawn."""
    with torch.no_grad(), poisoned(), drawn_device(chip) as gpu:
        out, lse = given(attn, return_lse=True)
    found = [finding for finding in gpu.findings if not expected(finding)]
    assert not found, gpu.report()
    exact, exact_lse = given(attn, exactly=True, return_lse=True)
    rounding = torch.finfo(dtype).eps / 2
    assert (out.double() - exact).abs().max().item() <= 2 * rounding * exact.abs().max().item()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=0)
    return [result.kernel for result in gpu.results]


def plain(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen | None = None) -> Callable[..., Any]:
    def call(attn: fa4flex.Attention, exactly: bool = False, **more: Any) -> Any:
        given = (x.double() if exactly else x for x in (q, k, v))
        return attn(*given, varlen=varlen, **more)

    return call


MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"mask": causal},
    {"score_mod": alibi, "mask": sliding_window(70)},
    {"mask": lambda b, h, q, k: (q * 7 + k * 3) % 5 != 0},
)


def dense(chip: str) -> list[str]:
    """Few queries or many, of groups of heads or not."""
    kv_heads, width = random.choice((1, 2, 8)), random.choice((40, 64, 128))
    q_len, kv_len = random.choice((1, 3, 8, 70, 200, 300)), random.choice((1, 60, 128, 300))
    shapes = ((2, 8, q_len, width), (2, kv_heads, kv_len, width), (2, kv_heads, kv_len, width))
    given = plain(*[torch.randn(*shape).bfloat16() for shape in shapes])
    attn = fa4flex.compile(**random.choice(MASKS))
    return right(attn, given, chip, torch.bfloat16)


def packed(chip: str) -> list[str]:
    """Short sequences or long ones, several or many."""
    lengths = random.choice(((1, 70, 3), (130,), (8,) * 9, (300, 1, 64)))
    kv_heads, width = random.choice((1, 2, 8)), random.choice((64, 128))
    total, cu = sum(lengths), cumulative(lengths).to(torch.int32)
    shapes = ((total, heads, width) for heads in (8, kv_heads, kv_heads))
    given = plain(*[torch.randn(*shape).bfloat16() for shape in shapes], Varlen(cu))
    attn = fa4flex.compile(**random.choice(MASKS[:3]))
    return right(attn, given, chip, torch.bfloat16)


def paged(chip: str) -> list[str]:
    """One query of each sequence, or some, or chunks of them."""
    size = Size(heads=8, kv_heads=random.choice((1, 2)), q_len=random.choice((1, 5, 70)), d=128, dv=128)
    given = drawn(size)
    if random.random() < 0.3:
        given = chunks(given, (70, 3))
    return right(fa4flex.compile(mask=causal), given, chip, torch.bfloat16)


def trained(chip: str) -> list[str]:
    """Both passes."""
    kv_heads, width = random.choice((1, 2, 4)), random.choice((40, 64, 96, 128))
    q_len, kv_len = random.choice((1, 64, 130, 200)), random.choice((60, 128, 130, 200))
    name = random.choice(sorted(COMPOSED))
    if name in ("documents", "unseen keys"):
        q_len = kv_len = 200
    shapes = ((1, 4, q_len, width), (1, kv_heads, kv_len, width), (1, kv_heads, kv_len, width))
    where = f"{name}, {shapes}, {chip}"
    return [result.kernel for result in judged(where, COMPOSED[name], shapes, drawn_device(chip)).results]


KINDS = dense, packed, paged, trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_some(kind: Callable[[str], list[str]], answers: list[Sizes]) -> None:
    assert kind(random.choice(CHIPS))
    assert answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("draw", range(12))
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_many(kind: Callable[[str], list[str]], chip: str, draw: int, answers: list[Sizes]) -> None:
    kind(chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip, many", [("sm_90a", "fwd_sm90"), ("sm_100a", "fwd_sm100")])
def test_the_kernel_for_many_queries_takes_one(
    chip: str, many: str, answers: list[Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "get", lambda self, question, own: 0)
    shapes = ((2, 8, 1, 64), (2, 1, 150, 64), (2, 1, 150, 64))
    given = plain(*[torch.randn(*shape).bfloat16() for shape in shapes])
    (kernel,) = right(fa4flex.compile(mask=causal), given, chip, torch.bfloat16)
    assert many in kernel, kernel
