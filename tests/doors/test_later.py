"""Contents of block maps that nobody waits for: what does not fit is left out, and a later call tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fa4flex import later
from fa4flex.errors import EarlierError
from fa4flex.primitives import block_lists, blocks
from fa4flex.primitives.blocks import BlockMap
from fa4flex.runtime.cuda.device import faults


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Contents are those of a device: the host looks at none."""
    for module in (block_lists, blocks):
        monkeypatch.setattr(module, "checked_here", lambda x: False)
    monkeypatch.setattr(later, "awaited", type(later.awaited)())
    yield


def counts(*rows: int) -> torch.Tensor:
    return torch.tensor([[rows]], dtype=torch.int32)


def indices(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([[rows]], dtype=torch.int32)


ROWS = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2])
LISTS: dict[str, tuple[Callable[[], Any], list[list[int]], str]] = {
    "as it should be": (
        lambda: BlockMap.from_counts(counts(1, 2), indices([2, 9], [0, 1]), 16, 32, 48),
        [[0, 0, 1], [1, 1, 0]],
        "",
    ),
    "a block that is not there": (
        lambda: BlockMap.from_counts(counts(1, 2), indices([7, 0], [0, -1]), 16, 32, 48),
        [[0, 0, 0], [1, 0, 0]],
        "a key block outside the map",
    ),
    "a count beyond the list": (
        lambda: BlockMap.from_counts(counts(3, 1), indices([0, 1], [2, 2]), 16, 32, 48),
        [[1, 1, 0], [0, 0, 1]],
        "a count beyond the listed blocks",
    ),
    "a block twice": (
        lambda: BlockMap.from_counts(counts(2, 0), indices([1, 1], [0, 0]), 16, 32, 48),
        [[0, 1, 0], [0, 0, 0]],
        "a block is listed more than once",
    ),
    "partial and full": (
        lambda: BlockMap.from_counts(
            counts(1, 0), indices([1], [0]), 16, 32, 48, counts(2, 0), indices([0, 1], [0, 0])
        ),
        [[2, 2, 0], [0, 0, 0]],
        "a block is both partial and full",
    ),
    "a class that is none": (
        lambda: BlockMap.from_dense(torch.tensor([[1, 3]], dtype=torch.uint8), 16),
        [[1, 3]],
        "a class above 2",
    ),
    "rows of a sparse pattern": (
        lambda: BlockMap.from_csr(*ROWS, (2, 3), 16),
        [[0, 1, 0], [1, 0, 1]],
        "",
    ),
    "columns outside of a sparse pattern": (
        lambda: BlockMap.from_csr(ROWS[0], torch.tensor([1, 5, -1]), (2, 3), 16),
        [[0, 1, 0], [0, 0, 0]],
        "a key block outside the map",
    ),
    "rows that fall": (
        lambda: BlockMap.from_csr(torch.tensor([0, 4, 3]), ROWS[1], (2, 3), 16),
        [[1, 1, 1], [0, 0, 0]],
        "row_starts that do not rise from 0",
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_what_does_not_fit_is_told_later(elsewhere: None, name: str) -> None:
    make, classes, message = LISTS[name]
    assert make().classes[0, 0].tolist() == classes
    if message:
        with pytest.raises(EarlierError, match=message):
            faults.check()
    faults.check()


def test_what_has_not_arrived_is_waited_for_by_no_one(elsewhere: None) -> None:
    later.require(torch.tensor(False), "the first")
    later.require(torch.tensor(False), "the second")
    arrives, *_ = later.awaited[0]
    arrives.fill_(later.UNKNOWN)
    faults.check()
    arrives.fill_(0)
    for message in ("the first", "the second"):
        with pytest.raises(EarlierError, match=message):
            faults.check()
    assert not later.awaited


def test_conditions_on_their_way_are_few(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for _ in range(later.MOST_AWAITED + 1):
        later.require(torch.tensor(True), "nothing")
    assert len(later.awaited) == 0
