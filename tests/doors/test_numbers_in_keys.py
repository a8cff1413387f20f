"""Numbers that compare equal and are not the same, one after the other in one attention: each call must find
what was made for its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fa4flex
from fa4flex import reference
from fa4flex.exact import exactly

S = 40
PAIRS: dict[str, tuple[Any, Any]] = {
    "the sign of zero": (0.0, -0.0),
    "a float and an int": (1.0, 1),
    "an int and a bool": (1, True),
    "a zero and false": (0.0, False),
    "large": (float(2**53), 2**53 + 1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_text_is_that_of_one_number(name: str) -> None:
    a, b = PAIRS[name]
    assert exactly(a) == exactly(a) != exactly(b)
    assert exactly(1.5, (a, 2)) != exactly(1.5, (b, 2))
    assert exactly(float("nan")) == exactly(float("nan")) and exactly(0.1) != exactly(0.1 + 2**-55)


TABLE = torch.arange(S)


Mod = Callable[..., Any]


def sign_of_table(number: list[Any]) -> Mod:
    """A mask that reads a tensor besides."""
    return lambda b, h, q_idx, kv_idx: 1.0 / (number[0] * (TABLE[kv_idx] + 1.0)) > 0


def sign_alone(number: list[Any]) -> Mod:
    return lambda b, h, q_idx, kv_idx: 1.0 / (number[0] * (kv_idx + 1.0)) > 0


def span_of_keys(number: list[Any]) -> Mod:
    """Keys from a place on that follows from the number alone."""
    return lambda b, h, q_idx, kv_idx: kv_idx >= torch.where(1.0 / (number[0] * (b + 1.0)) > 0, 7, 21)


def span_of_a_number(number: list[Any]) -> Mod:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= torch.where(torch.reciprocal(torch.as_tensor(number[0])) > 0, 7, 21)

    return mask


MASKS = {f.__name__: f for f in (sign_of_table, sign_alone, span_of_keys, span_of_a_number)}


@pytest.mark.parametrize("queries", (1, S))
@pytest.mark.parametrize("backend", ("auto", "flex"))
@pytest.mark.parametrize("name", MASKS)
def test_masks_tell_the_signs_of_zero_apart(name: str, backend: Any, queries: int) -> None:
    number: list[Any] = [0.0]
    mask = MASKS[name](number)
    attn = fa4flex.compile(mask=mask, backend=backend)
    q, k, v = (torch.randn(1, 2, n, 16) for n in (queries, S, S))
    for value in (0.0, -0.0, 0.0, 0.0, -0.0, -0.0, 2.0, -0.0):
        number[0] = value
        exact, _ = reference.attention(q, k, v, None, mask)
        torch.testing.assert_close(attn(q, k, v).double(), exact, atol=1e-5, rtol=1e-5)


def test_scales_tell_the_signs_of_zero_apart() -> None:
    """Flex has modules that have the scale as text."""

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(1.0 / (s * 0.0 + 0.0 * s) > 0, kv_idx * 0.1, kv_idx * -0.1)

    attn = fa4flex.compile(score, backend="flex")
    q, k, v = (torch.rand(1, 2, S, 16) + 0.1 for _ in "qkv")  # all products are positive
    for scale in (0.0, -0.0, 0.0, 0.0, -0.0, -0.0):
        exact, _ = reference.attention(q, k, v, score, scale=scale)
        found = attn(q, k, v, scale=scale).double()
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
