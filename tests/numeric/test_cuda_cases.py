"""The judge of the GPU tests, on a CPU: it accepts plain PyTorch and rejects every kind of wrong result."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from cuda_cases import FEW, Sizes, judge, judge_exact_lse, on_device, oracle_takes, plain, plain_packed
from torch import Tensor

from fa4flex import reference
from fa4flex import variants as v

SMALL = Sizes(1, 2, 1, 90, 130, 16, 16)


def results(name: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Exact ones, and plain PyTorch's with lse in float32, where a row without keys gives -inf."""
    qkv, known = SMALL.qkv(), oracle_takes(FEW[name].make(SMALL))
    out, lse = plain(*qkv, known)
    return reference.attention(*qkv, **known), (out, lse.float())


@pytest.mark.parametrize(
    "name", ["dense", "causal", "alibi causal", "document", "relative table", "sinks window"]
)
def test_plain_pytorch_is_close_to_the_oracle(name: str) -> None:
    exact, same = results(name)
    judge(same, exact, same)
    worst = (same[0].double() - exact[0]).abs().max()
    assert 0 < worst < 0.1, "bf16 errors, and no more"


def damaged(out: Tensor, lse: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    wrong, unwritten, off, hidden = (x.clone() for x in (out, out, lse, lse))
    wrong[0, 1, 70, 3] += 0.3
    unwritten[0, 0, 89, 15] = math.nan
    off[0, 1, 60] += 0.5
    hidden[0, 0, 5] = -math.inf
    return {
        "one wrong element": (wrong, lse),
        "one unwritten element": (unwritten, lse),
        "one wrong lse": (out, off),
        "a row taken for empty": (out, hidden),
        "lse in bf16": (out, lse.bfloat16()),
        "a transposed result": (out.mT, lse),
    }


@pytest.mark.parametrize("kind", damaged(torch.zeros(1, 2, 90, 16), torch.zeros(1, 2, 90)))
def test_damage_is_noticed(kind: str) -> None:
    exact, same = results("causal")
    with pytest.raises(AssertionError):
        judge(damaged(*same)[kind], exact, same)


def test_a_leaked_key_shows_in_the_lse() -> None:
    """One key too many among about 600: below bf16's noise in out."""
    sizes = Sizes(1, 2, 2, 600, 700)
    q, k, v_ = sizes.qkv()
    exact = reference.attention(q, k, v_, mask=v.causal)[1]
    leaking = reference.attention(q, k, v_, mask=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 101)[1]
    judge_exact_lse(exact.float(), exact)
    with pytest.raises(AssertionError):
        judge_exact_lse(leaking[:, :, 500:].float(), exact[:, :, 500:])


def test_plain_packed_is_plain_of_each_sequence() -> None:
    q, k, v_ = (x[0].transpose(0, 1) for x in Sizes(1, 2, 1, 70, 90, 16, 16).qkv())
    ranges = [(0, 40), (40, 40), (40, 70)], [(0, 50), (50, 55), (55, 90)]

    def at_sequence(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * b

    composition = {"score_mod": at_sequence, "mask": v.causal}
    exact = reference.varlen((q, k, v_), ranges, **composition)
    judge_like = plain_packed((q, k, v_), ranges, composition)
    torch.testing.assert_close(judge_like[0].double(), exact[0], atol=0.05, rtol=0.05)
    torch.testing.assert_close(judge_like[1].double(), exact[1], atol=0.05, rtol=0.05)


def test_captured_tensors_move_and_code_stays() -> None:
    bias, nested = torch.randn(4), (torch.randn(3, requires_grad=True), [torch.randn(2)])

    def inner(scale: float, h: int) -> Tensor:
        return bias[h] * scale + nested[0][0] + nested[1][0][1]

    def mod(score: float, h: int, shift: Tensor = bias) -> Tensor:
        return functools.partial(inner, 2.0)(h) + score + shift[0]

    moved = on_device(mod, torch.device("meta"))
    captured = on_device(mod, torch.device("cpu"))
    assert torch.equal(captured(1.0, 2), mod(1.0, 2)) and not captured(1.0, 2).requires_grad
    assert moved(1.0, 2).is_meta and moved.__code__ is mod.__code__
