"""Ways to write to a tensor, most of which torch does not count; for tests of what is kept between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

Write = Callable[[Tensor, Tensor], None]
"""Gives a tensor new contents."""


def in_place(x: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        x.copy_(new)


def by_data(x: Tensor, new: Tensor) -> None:
    x.data.copy_(new)


def behind_the_count(x: Tensor, new: Tensor) -> None:
    """FSDP2 fills a parameter that it has gathered in this way."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
        x.copy_(new)


def in_memory_of_numpy(x: Tensor, new: Tensor) -> None:
    x.detach().numpy()[...] = new.numpy()


def averaged(x: Tensor, new: Tensor) -> None:
    """Averages of weights are updated in this way."""
    x.data.mul_(0.1).add_(new, alpha=0.9)


def other_memory(x: Tensor, new: Tensor) -> None:
    x.data = new.clone()


def memory_used_again(x: Tensor, new: Tensor) -> None:
    """`x.data` goes elsewhere and comes back to where it was, as an allocator gives memory out again."""
    place = copy.copy(x.data)
    x.data = torch.empty_like(new)
    place.copy_(new)
    x.data = place


WRITES: dict[str, Write] = {
    "in place": in_place,
    "data": by_data,
    "behind the count": behind_the_count,
    "numpy": in_memory_of_numpy,
    "average": averaged,
    "other memory": other_memory,
    "memory used again": memory_used_again,
}
