"""Links between the ranks of a group, by torch.distributed, and the few words added where that fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.torch_internals import group_store

Arrival = Callable[[], Tensor]
"""Waits for rows that were sent, and returns them."""


class Links(Protocol):
    """The ranks of one group, as one of them sees it. All of them make the same calls in the same order."""

    rank: int
    size: int

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Arrival:
        """Send `sends[r]` of the rows to each rank r, in order; returns at once."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Objects from all ranks."""


class Group:
    """Links of a process group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Arrival:
        result = rows.new_empty(sum(receives), *rows.shape[1:])
        with self._named("an exchange of rows"):
            work = dist.all_to_all_single(
                result, rows.contiguous(), list(receives), list(sends), group=self.group, async_op=True
            )

        def arrival() -> Tensor:
            with self._named("an exchange of rows"):
                work.wait()
            return result

        return arrival

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        with self._named("the sum of gradients of captured tensors"):
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, value: Any) -> list[Any]:
        results: list[Any] = [None] * self.size
        with self._named("the comparison of shapes"):
            dist.all_gather_object(results, value, group=self.group)
        return results

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            error.add_note(
                f"in {what} between {self.size} ranks, of which this is {self.rank}: {_silent(self.group)}"
            )
            raise


# --- who is missing -----------------------------------------------------------------------------------------

ANSWER = 3.0
"""Seconds in which a rank whose exchange has failed must say so to be told from one that has ended."""

_failures: Counter[str] = Counter()
"""Exchanges that have failed in this process, by name of the group: failures are told apart by number, lest
an answer to an earlier one is taken for one to this."""


def _silent(group: dist.ProcessGroup) -> str:
    """Ranks that do not say, in the group's store, that their exchange has failed too, in words."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    _failures[group.group_name] += 1
    keys = [f"fa4flex/failure {_failures[group.group_name]}/{at}" for at in range(size)]
    silent = [at for at in range(size) if at != rank]
    end = time.monotonic() + ANSWER
    try:
        store = group_store(group)
        store.set(keys[rank], "failed")
        while silent and time.monotonic() < end:
            silent = [at for at in silent if not store.check([keys[at]])]
            time.sleep(0.05)
    except RuntimeError as error:
        return (
            "another one has ended, has raised, or makes other calls. Which one cannot be told, for the "
            f"group's store does not answer ({error}): it ends with the rank that keeps it, often rank 0"
        )
    if not silent:
        return "all others have met an error too; look at what each of them says"
    who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
    return (
        f"{who} did not answer within {ANSWER:g} s. A rank that does not answer has ended, has raised "
        "elsewhere, or still waits in this or another call; look at what it says"
    )


class Together(torch.autograd.Function):
    """Tensors that all ranks have alike: the same in the forward pass, gradients summed in the backward."""

    @staticmethod
    def forward(ctx: Any, links: Links, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.links = links
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, *(x if x is None else _summed(ctx.links, x) for x in gradients))


def _summed(links: Links, x: Tensor) -> Tensor:
    """The sum in float32 where x is of half precision."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return links.all_reduce(wide).to(x.dtype)


def agree(links: Links, description: Mapping[str, Any] | Exception) -> list[Mapping[str, Any]]:
    """Descriptions from all ranks, the same on all of them but for what begins with "own". Raises InputError
    on every rank where some rank says something else, or has met an error of its own, naming both."""
    descriptions = links.gather(f"{description}" if isinstance(description, Exception) else dict(description))
    failed = [(rank, x) for rank, x in enumerate(descriptions) if isinstance(x, str)]
    if failed:
        if isinstance(description, Exception):
            raise description
        rank, words = failed[0]
        raise InputError(
            f"rank {rank} of {links.size}: {words}", "calls that fit on every rank", f"look at rank {rank}"
        )
    for name in descriptions[0]:
        if name.startswith("own"):
            continue
        values = [repr(x.get(name)) for x in descriptions]
        usual, count = Counter(values).most_common(1)[0]
        if count < len(values):
            odd = next(rank for rank, x in enumerate(values) if x != usual)
            raise InputError(
                f"rank {odd} of {links.size} has {name} {values[odd]}, {count} rank(s) have {usual}",
                f"the same {name} on every rank",
                f"look at how rank {odd} makes its tensors",
            )
    return descriptions
