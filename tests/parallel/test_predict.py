"""Estimates of what attention over many ranks would cost."""

from __future__ import annotations

import pytest

import fa4flex
from fa4flex import variants as v
from fa4flex.__main__ import main
from fa4flex.parallel import plan
from fa4flex.parallel.predict import Machine, count_of, estimates, ranks_of
from fa4flex.parallel.traffic import Model

MODEL = Model(heads=8, kv_heads=4, dim=64, dim_v=64)


def costs(mask: object, tokens: int, ranks: int) -> dict[str, tuple[float, float]]:
    attn = fa4flex.compile(mask=mask)  # type: ignore[arg-type]
    found, *others = (plan(attn, tokens, ranks, placement=kind) for kind in (None, "contiguous", "head-tail"))  # type: ignore[arg-type]
    return {
        x.name.partition(",")[0]: (x.moved, x.balance) for x in estimates(found, Machine(), MODEL, *others)
    }


def test_what_moves() -> None:
    row = 2 * 4 * 64 * 2 * 2  # keys and values there, gradients back
    found = costs(v.causal & v.sliding_window(1024), 65536, 4)
    assert found["fa4flex"][0] == 1024 * row  # those before a rank's first query, in whole chunks
    assert found["all-gather"][0] == 49152 * row
    # Heads: queries and outputs take twice what keys and values do, of a quarter of three quarters.
    sums = 16384 * 3 * 2 * 4  # log-sum-exps of a rank's tokens, of the other ranks' two heads each
    assert found["heads (Ulysses)"][0] == 3 * 65536 * 3 / 16 * row + sums
    assert "heads (Ulysses)" not in costs(v.causal, 8192, 8)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-parallel", "causal", "--ranks", "2..4", "--tokens", "2k"]) == 0
    said = capsys.readouterr().out
    assert "2 ranks" in said and "4 ranks" in said and "head-tail" in said
    assert main(["plan-parallel", "causal", "--tokens", "many"]) == 2


def test_numbers_as_people_write_them() -> None:
    assert (count_of("1M"), count_of("64k"), count_of("300")) == (1 << 20, 65536, 300)
    assert (ranks_of("8..64"), ranks_of("3,5"), ranks_of("7")) == ([8, 16, 32, 64], [3, 5], [7])
