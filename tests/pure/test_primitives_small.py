"""Heads, sinks, precision and schedules: meaning and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.heads import ratio
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.sinks import Sinks


def test_query_heads_share_kv_heads() -> None:
    assert ratio(6, 2) == 3 and ratio(4, 4, enable_gqa=False) == 1


def test_precision_resolves() -> None:
    half, double = torch.bfloat16, torch.float64
    assert Precision().compute_dtype(half) == Precision().compute_dtype(torch.float32) == torch.float32
    assert Precision().compute_dtype(double) == double and Precision().output_dtype(half) == half
    assert Precision("float64", torch.float32).compute_dtype(half) == double
    assert Precision("float64", torch.float32).output_dtype(half) == torch.float32
    assert Precision("float32").compute_dtype(double) == torch.float32
    assert Precision(torch.float64) == Precision("float64")  # type: ignore[arg-type]
    for given in (Precision(), Precision("float64", torch.float16)):
        assert eval(repr(given), {"Precision": Precision, "torch": torch}) == given


def test_schedule_is_data() -> None:
    assert Schedule() == Schedule(None, False, "auto")
    given = Schedule([128, 64], deterministic=True, order="longest_first")  # type: ignore[arg-type]
    assert given.tile == (128, 64) and eval(repr(given)) == given


def test_sinks_check() -> None:
    Sinks(torch.zeros(4)).check(4, torch.device("cpu"))
    assert torch.equal(eval(repr(Sinks(torch.ones(2)))).logits, torch.ones(2))


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: ratio(6, 4),
        InputError,
        "6 query heads with 4 KV heads\n.*multiple.*\n.*check the layout",
    ),
    (lambda: ratio(2, 4), InputError, "2 query heads with 4 .*\n.*\n.*not swapped"),
    (lambda: ratio(0, 4), InputError, "0 query heads"),
    (lambda: ratio(4, 2, enable_gqa=False), InputError, "enable_gqa=False\n.*\n.*pass enable_gqa=True"),
    (lambda: ratio(5, 2), InputError, "5 query heads"),
    (lambda: Sinks(torch.zeros(2, 2)), InputError, r"sinks of shape \[2, 2\]"),
    (lambda: Sinks(torch.zeros(2).int()), InputError, "sinks of torch.int32\n  expected: a floating tensor"),
    (lambda: Sinks([0.0]), InputError, "sinks of list"),
    (lambda: Sinks(torch.zeros(2)).check(8, torch.device("cpu")), InputError, "2 sinks for 8 query heads"),
    (lambda: Sinks(torch.zeros(2)).check(2, torch.device("meta")), InputError, "sinks on cpu, q on meta"),
    (
        lambda: Precision("float8_e4m3fn"),
        UnsupportedError,
        "sums of 8 bits lose.*\n.*\n.*products of 8 bits are Precision",
    ),
    (lambda: Precision("bf16"), UnsupportedError, "loses the tails"),
    (lambda: Precision("tf32"), UnsupportedError, "exact here"),
    (lambda: Precision("double"), InputError, "compute='double'\n  expected: one of"),
    (lambda: Precision(output=torch.float8_e5m2), UnsupportedError, "output='float8_e5m2': sums of 8 bits"),
    (lambda: Precision(output=torch.int32), InputError, "output=torch.int32"),
    (lambda: Schedule((128,)), InputError, r"tile=\(128,\)\n  expected: two positive ints"),
    (lambda: Schedule((128, 0)), InputError, r"tile=\(128, 0\)"),
    (lambda: Schedule((128, True)), InputError, "tile="),
    (lambda: Schedule(128), InputError, "tile=128"),
    (lambda: Schedule(deterministic=1), InputError, "deterministic=1"),
    (
        lambda: Schedule(order="fastest"),
        InputError,
        "order='fastest'\n  expected: one of .'auto', 'row_major'",
    ),
    (
        lambda: Schedule(contents="guessed"),
        InputError,
        "contents='guessed'\n  expected: one of .'compared', 'counted'",
    ),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_says_what_was_given_and_what_to_do(number: int) -> None:
    make, kind, text = ERRORS[number]
    with pytest.raises(kind, match=text) as raised:
        make()
    assert "to fix:" in str(raised.value)
