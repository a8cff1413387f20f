"""Ranks of a group simulated by threads of one process, each with links to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SECONDS = 60.0
"""Longest that a rank waits for the others."""


class Board:
    """Values that ranks put for each other, call by call."""

    def __init__(self, size: int) -> None:
        self.put: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, what: Any) -> list[Any]:
        self.put[rank] = what
        self.barrier.wait(SECONDS)
        found = list(self.put)
        self.barrier.wait(SECONDS)
        return found


class Threads:
    """Links of one rank among threads (see fa4flex.parallel.links); counts the bytes that it receives."""

    def __init__(self, rank: int, size: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, size, board
        self.received = 0

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Callable[[], Tensor]:
        assert sum(sends) == len(rows)
        parts = [x[self.rank] for x in self.board.exchange(self.rank, rows.split(list(sends)))]
        assert [len(x) for x in parts] == list(receives)
        row = rows.element_size() * rows.shape[1:].numel()
        self.received += (sum(receives) - receives[self.rank]) * row
        found = torch.cat(parts)
        return lambda: found

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.board.exchange(self.rank, x)).sum(0)

    def gather(self, value: Any) -> list[Any]:
        return self.board.exchange(self.rank, value)


def on_ranks(size: int, run: Callable[[Threads], Any]) -> list[Any]:
    """Results of `run` by rank; the first error of a rank is raised here."""
    board = Board(size)
    found: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def main(rank: int) -> None:
        try:
            found[rank] = run(Threads(rank, size, board))
        except BaseException as error:
            errors[rank] = error
            board.barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    own = [x for x in errors if x is not None and not isinstance(x, threading.BrokenBarrierError)]
    if own or any(errors):
        raise (own or [x for x in errors if x is not None])[0]
    return found
