"""At which differences kv - q the start of a tile may read a table, on a CPU: those of rows that exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import pytest
import torch
from cutlass import Float32, Int32, cute
from hook_runner import fake

from fa4flex.kernels.common import pointwise
from fa4flex.kernels.common.hooks import At, Hooks, Pointwise
from fa4flex.kernels.common.pointwise import Fragment, prepare_rows

ROW_OFFSETS, TILE_N, KV_FIRST, Q_LEN = (0, 8), 64, 128, 40
COLUMNS = tuple(8 * (c // 2) + c % 2 for c in range(TILE_N // 4))


@pytest.fixture(autouse=True)
def without_assembly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pointwise, "computed_once", lambda x: x)
    yield


@cute.jit
def started(scores: cute.Tensor, first_row: Int32, hooks: cutlass.Constexpr) -> None:
    """Starts the scores (row, column) of the first lane."""
    at = At(q_len=Int32(Q_LEN), kv_len=Int32(1000))
    rows = prepare_rows(hooks, at, first_row, ROW_OFFSETS)
    fragment = Fragment(at, rows, ROW_OFFSETS, COLUMNS, first_row, Int32(0))
    fragment.start(hooks, scores, Int32(KV_FIRST), False)


def place(at: At) -> Any:
    """Offset at which a load by steps would read."""
    return (at.offset_base + at.offset_step).to(Float32)


HOOKS = {
    "once per difference": Hooks(
        start=Pointwise(lambda at: at.diagonal[0], diagonal=lambda at: (place(at),))
    ),
    "once per pair": Hooks(start=Pointwise(place)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_rows_past_the_end_read_where_others_do(name: str) -> None:
    compiled = cute.compile(started, fake(Float32, 2), Int32(0), HOOKS[name], options="--enable-tvm-ffi")
    kv = KV_FIRST + torch.tensor(COLUMNS)
    for first_row in (3, Q_LEN - 9, Q_LEN - 8, Q_LEN - 1, Q_LEN, Q_LEN + 150):
        scores = torch.zeros(len(ROW_OFFSETS), len(COLUMNS))
        compiled(scores, first_row)
        q = first_row + torch.tensor(ROW_OFFSETS)
        inside = q < Q_LEN
        assert torch.equal(scores[inside], (kv - q[inside, None]).float())
        assert scores.min() >= KV_FIRST - (Q_LEN - 1), "before any row's first key"
        assert scores.max() <= kv.max() - min(first_row, Q_LEN - 1), "after the first row's last key"
