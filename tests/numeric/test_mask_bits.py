"""Masks of a tile as bits, on a CPU: mask hooks and spans keep what their definitions allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import pytest
import torch
from cutlass import Float32, Int32, cute, select_
from hook_runner import fake

from fa4flex.kernels.common import bits, pointwise
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise
from fa4flex.kernels.common.pointwise import Fragment, prepare_rows

TILES = (16, 80, 128, 176)
ROW_OFFSETS = (0, 8)
LANES, Q_LEN, FIRST_ROW = 4, 40, 3


@pytest.fixture(autouse=True)
def without_assembly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain code in place of inline PTX: of one instruction of a GPU, and of a hint to its compiler."""

    def with_bit(word: Any, place: int, condition: Any) -> Any:
        return select_(condition, word | bits.bit(place), word)

    monkeypatch.setattr(pointwise, "with_bit", with_bit)
    monkeypatch.setattr(pointwise, "compute_before", lambda words: None)
    yield


@cute.jit
def visit(
    scores: cute.Tensor, kv_len: Int32, kv_first: Int32, hooks: cutlass.Constexpr, tile_n: cutlass.Constexpr
) -> None:
    """scores (lane, row, column): four lanes that share rows."""
    columns = tuple(8 * (c // 2) + c % 2 for c in range(tile_n // 4))
    for lane in range(LANES):
        at = At(q_len=Int32(Q_LEN), kv_len=kv_len)
        rows = prepare_rows(hooks, at, Int32(FIRST_ROW), ROW_OFFSETS)
        fragment = Fragment(at, rows, ROW_OFFSETS, columns, Int32(FIRST_ROW), 2 * lane)
        grid = scores[lane, None, None]
        fragment.mask(grid, kv_first, fragment.allowed(hooks, kv_first))


def kept(hooks: Hooks, tile_n: int) -> Any:
    """Function of (kv_len, kv_first) that returns bool [rows, keys]: scores that are not -inf."""
    compiled = cute.compile(
        visit, fake(Float32, 3), Int32(0), Int32(0), hooks, tile_n, options="--enable-tvm-ffi"
    )

    def run(kv_len: int, kv_first: int) -> torch.Tensor:
        scores = torch.zeros(LANES, len(ROW_OFFSETS), tile_n // 4)
        compiled(scores, kv_len, kv_first)
        # lane, row, (eight keys, pair) -> row, (eight keys, lane, pair)
        pairs = scores.unflatten(2, (-1, 2)).permute(1, 2, 0, 3)
        return pairs.reshape(len(ROW_OFFSETS), tile_n) == 0

    return run


def scattered(q: Any, kv: Any) -> Any:
    """True and false without order, the same for numbers of Python, torch and the device."""
    return (q * 5 + kv * kv * 3 + (kv >> 2)) & 6 != 0


HOOKS = {
    "mask hook": (
        Hooks(
            mask=Pointwise(
                lambda at: scattered(at.row[0], at.column[0]),
                row=lambda at: (at.q + 1,),
                column=lambda at: (at.kv + 2,),
            )
        ),
        lambda q, kv: scattered(q + 1, kv + 2),
    ),
    "every pair": (Hooks(mask=Pointwise(lambda at: at.kv >= 0)), lambda q, kv: kv >= 0 * q),
    "no hook": (Hooks(), lambda q, kv: kv >= 0 * q),
    "one span": (Hooks(spans=lambda at: ((None, at.q + 60),)), lambda q, kv: kv < q + 60),
    "two spans": (
        Hooks(spans=lambda at: ((at.q + 30, at.q + 75), (at.q * 0 + 96, None))),
        lambda q, kv: ((kv >= q + 30) & (kv < q + 75)) | (kv >= 96),
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_is_kept_of_a_tile(name: str) -> None:
    hooks, allowed = HOOKS[name]
    q = FIRST_ROW + torch.tensor(ROW_OFFSETS)[:, None]
    for tile_n in TILES:
        run = kept(hooks, tile_n)
        for kv_first in (0, tile_n, 3 * tile_n):
            for kv_len in (1, 7, 16, 65, 111, 128, 3 * tile_n + 1, 3 * tile_n + 63, 1000):
                kv = kv_first + torch.arange(tile_n)
                # Past the end, a hook is asked about the last key; what it says does not count.
                wanted = allowed(q, kv) & (kv < kv_len)
                assert torch.equal(run(kv_len, kv_first), wanted), (tile_n, kv_first, kv_len)


def test_a_bit_is_a_number_of_32_bits_with_a_sign() -> None:
    assert [bits.bit(place) & 0xFFFFFFFF for place in range(32)] == [1 << place for place in range(32)]
    assert all(-(2**31) <= bits.bit(place) < 2**31 for place in range(32))
