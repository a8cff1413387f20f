"""Casts to narrow integers wrap as torch's do, and so does arithmetic on what was cast: by every door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.utils._pytree import tree_map

import fa4flex

S = 40
BYTES = torch.randint(0, 256, (S,), dtype=torch.uint8)
SHORT = torch.randint(-(1 << 15), 1 << 15, (S,), dtype=torch.int16)
LONG = torch.randint(-(1 << 40), 1 << 40, (S,))
LIKE = torch.zeros((), dtype=torch.int8)
FACTOR = 2654435761


def hashed(b: Any, h: Any, q: Any, k: Any) -> Any:
    x = (q * 73856093 ^ k * 19349663).int()
    x = x ^ (x >> 16)
    x = x * 0x45D9F3B
    return ((x ^ (x >> 16)) & 7) < 3


MASKS: dict[str, Callable[..., Any]] = {
    "to int32": lambda b, h, q, k: ((q * S + k) * FACTOR).to(torch.int32) >= 0,
    "int": lambda b, h, q, k: ((q * S + k) * FACTOR).int() % 3 == 0,
    "short": lambda b, h, q, k: (q * k * 997).short() > 0,
    "char": lambda b, h, q, k: (q * k - 7 * k).char() >= 0,
    "byte": lambda b, h, q, k: (q * k - 7 * k).byte() < 128,
    "to dtype=": lambda b, h, q, k: (q * k).to(dtype=torch.int8) > 0,
    "to a tensor": lambda b, h, q, k: (q * k).to(LIKE) > 0,
    "type": lambda b, h, q, k: (q * 5000 - k * 300).type(torch.int16) > 0,
    "type_as": lambda b, h, q, k: (q * k).type_as(LIKE) > 0,
    "uint16": lambda b, h, q, k: (q * 5000 - k * 300).to(torch.uint16).to(torch.int64) > 30000,
    "uint32": lambda b, h, q, k: ((q - k) * FACTOR).to(torch.uint32).to(torch.int64) > 1 << 31,
    "one to another": lambda b, h, q, k: (q * k).to(torch.uint8).to(torch.int8) > 0,
    "a hash": hashed,
    "arithmetic of int32": lambda b, h, q, k: (q.int() * FACTOR + k.int() * 1000003) >= 0,
    "arithmetic of bytes": lambda b, h, q, k: BYTES[q] - BYTES[k] < 100,
    "negative bytes": lambda b, h, q, k: -BYTES[q] < ~BYTES[k],
    "products of shorts": lambda b, h, q, k: SHORT[q] * SHORT[k] > 0,
    "bytes and chars": lambda b, h, q, k: BYTES[q] + k.char() > 100,
    "shifts": lambda b, h, q, k: (q.byte() << 4) > (k.byte() << 9) + 100,
    "long tables": lambda b, h, q, k: LONG[q].int() > LONG[k].int(),
    "beyond 64 bits": lambda b, h, q, k: ((q * FACTOR + k) * FACTOR * FACTOR).int() >= 0,
    "numbers": lambda b, h, q, k: (q.int() - k.int()) * 100000 < 2**32 - 5,
    "floats": lambda b, h, q, k: (q * 50.25 - k * 31.5).to(torch.int8) > 0,
    "floats to bytes": lambda b, h, q, k: (q * 50.25 - k * 31.5).byte() > 100,
    "floats to shorts": lambda b, h, q, k: (q * 5000.25 - k * 3100.5).short() > 0,
    "floats to ints": lambda b, h, q, k: (q * 1.75 - k * 1.25).int() > 0,
    "bool": lambda b, h, q, k: ((q - k) // 3).to(torch.bool),
    "of a bool": lambda b, h, q, k: (q > k).char() * 100 + 100 > 0,
    "minimum": lambda b, h, q, k: torch.minimum((q * 7).char(), (k * 11).char()) > 0,
    "where": lambda b, h, q, k: torch.where(q > k, (q * 7).char(), (k * 11).byte()) > 90,
}  # fmt: skip


def exact(qkv: tuple[Tensor, ...], allowed: Tensor) -> Tensor:
    q, k, v = (x.double() for x in qkv)
    return (q @ k.mT / 8**0.5).masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0) @ v


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", ["auto", pytest.param("flex", marks=pytest.mark.slow)])
def test_masks_allow_the_pairs_that_torch_allows(name: str, backend: str) -> None:
    mask = MASKS[name]
    allowed = create_mask(mask, None, None, S, S, device="cpu")[0, 0]
    given = [torch.randn(1, 1, S, 8) for _ in range(3)]
    attend = fa4flex.compile(mask=mask, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(attend.mask.tile_map(S, S, (1, 1)).classes()[0, 0].ne(0), allowed)
    torch.testing.assert_close(attend(*given).double(), exact(tuple(given), allowed), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["to int32", "a hash", "arithmetic of bytes", "floats", "numbers"])
def test_programs_as_text_wrap(name: str) -> None:
    mask = MASKS[name]
    allowed = create_mask(mask, None, None, S, S, device="cpu")[0, 0]
    given = [torch.randn(1, 1, S, 8) for _ in range(3)]
    attend = torch.compile(
        lambda q, k, v: fa4flex.attention(q, k, v, mask=mask), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(attend(*given).double(), exact(tuple(given), allowed), atol=1e-5, rtol=1e-5)


def test_gradients_of_scores_with_casts() -> None:
    """A cast to an integer is a constant to autograd."""
    given = [torch.randn(1, 1, S, 8, requires_grad=True) for _ in range(3)]
    table = torch.randn(256, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[(q * 37 - k * 91).byte().long()] + 0.25 * (q * k).char()

    out = fa4flex.attention(*given, score_mod=mod)
    i = torch.arange(S)
    index = (i[:, None] * 37 - i * 91).byte().long()
    q, k, v = given
    scores = q @ k.mT / 8**0.5 + table[index] + 0.25 * (i[:, None] * i).char()
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(out)
    mine, theirs = (torch.autograd.grad(x, (*given, table), upstream) for x in (out, expected))
    tree_map(lambda a, c: torch.testing.assert_close(a, c, atol=1e-4, rtol=1e-4), mine, theirs)


def test_casts_that_change_nothing_leave_no_arithmetic() -> None:
    """A value that a narrow dtype holds anyway stays an index, which analysis knows."""
    mask = lambda b, h, q, k: (q.int() - k.int() < 4) & (q.int() >= k.to(torch.int32))  # noqa: E731
    assert fa4flex.compile(mask=mask).program.facts.keys is not None
