"""Classes of the units of lists by the kernel, on simulated GPUs: as operations of torch make them, whatever
stands in the lists, under all timings, whatever memory held before; nothing outside the lists is read."""

from __future__ import annotations

import random

import pytest
import torch
from paged_pools import guarded
from torch import Tensor

import ptxsim
from fa4flex import Lists
from fa4flex.primitives.block_parts import listed
from fa4flex.runtime.cuda import block_lists as kernels

TIMINGS = [("eager", 0), ("late", 1), ("random", 2)]


def drawn(columns: int, entries: int, wide: bool) -> Tensor:
    """Ids [2, 3, 5, entries] in any order, some twice, some below 0 or past the columns."""
    ids = torch.randint(-2, columns + 2, (2, 3, 5, entries))
    ids[0, 0, :, : entries // 2] = ids[0, 0, :, entries - entries // 2 :]
    ids[torch.rand(ids.shape) < 0.1] = random.choice([-1, 1 << 30, -(1 << 31)])
    return ids if wide else ids.int()


@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("columns", "entries"), [(1, 1), (33, 8), (128, 40), (300, 0)])
def test_listed_units(columns: int, entries: int, counted: bool, wide: bool, chip: str) -> None:
    ids = drawn(columns, entries, wide)
    counts = torch.randint(-1, entries + 3, (2, 3, 5)) if counted else None
    counts = counts if counts is None or random.random() < 0.5 else counts.int()
    wanted = listed(ids, counts, columns).to(torch.uint8)
    given = guarded(ids) if ids.numel() else ids
    timing, seed = random.choice(TIMINGS)
    with ptxsim.device(chip, seed, timing) as gpu:
        found = kernels.listed_units(given, counts, columns)
    assert len(gpu.results) == 1 and not gpu.findings, f"{timing} {seed}: {gpu.report()}"
    assert found is not None and torch.equal(found, wanted)


def test_lists_of_any_strides_are_one_launch() -> None:
    ids = torch.randint(-1, 9, (5, 4, 2, 3), dtype=torch.int32).permute(2, 3, 0, 1)
    lists = Lists(ids, kv_len=70, unit=8, queries=4, q_len=18)
    wanted = lists.map()
    with ptxsim.device("sm_90a") as gpu:
        found = lists.map()
    assert len(gpu.results) == 1 and not gpu.findings
    assert torch.equal(found.classes, wanted.classes) and type(found) is type(wanted)
