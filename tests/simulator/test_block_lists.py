"""Classes of blocks from lists by the kernel, on simulated GPUs: as written down one by one, whatever memory
held before; nothing outside the lists is read, and what is wrong in them is told."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

import pytest
import torch
from paged_pools import guarded
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import BlockMap, InputError
from fa4flex.primitives.block_lists import Lists, classes_there
from fa4flex.runtime.block_lists import block_classes
from fa4flex.runtime.cuda.device import faults

ARCHS = ("sm_90a", "sm_100a")
POISON = (-1, 1 << 30, -(1 << 31))
"""Entries behind the last that counts."""


@dataclass(frozen=True)
class Sizes:
    """Batch entries, heads and rows of a map, its columns, and entries of a row's lists. full: whether full
    blocks are listed; wide: lists are int64; strided: rows of lists have gaps."""

    batch: int = 2
    heads: int = 1
    rows: int = 5
    columns: int = 40
    room: int = 43
    full: bool = False
    wide: bool = False
    strided: bool = False


SIZES = {
    "partial": Sizes(),
    "full": Sizes(full=True),
    "a map per head": Sizes(heads=3, full=True),
    "int64": Sizes(full=True, wide=True),
    "strided": Sizes(full=True, strided=True),
    "one column": Sizes(columns=1, room=1, full=True),
    "long rows": Sizes(1, 1, 2, 777, 800, full=True),
    "no room": Sizes(room=0, full=True),
    "one block": Sizes(1, 1, 1, 32, 32),
}


def lists_of(sizes: Sizes) -> Lists:
    """Any blocks in any order, each at most once; rows without some, and poison behind the last."""
    shape = sizes.batch, sizes.heads, sizes.rows
    dtype = torch.int64 if sizes.wide else torch.int32
    made = []
    for _ in range(2):
        counts = torch.zeros(shape, dtype=dtype)
        indices = torch.tensor(POISON, dtype=dtype)[torch.randint(len(POISON), (*shape, sizes.room))]
        made += [counts, indices]
    for place in torch.cartesian_prod(*map(torch.arange, shape)).view(-1, 3).tolist():
        order = torch.randperm(min(sizes.columns, sizes.room))
        first = random.choice([0, len(order), random.randint(0, len(order))])
        last = random.randint(first, len(order))
        for counts, indices, some in zip(made[::2], made[1::2], (order[:first], order[first:last])):
            counts[*place] = len(some)
            indices[*place, : len(some)] = some.to(dtype)
    if sizes.strided:
        made = [x.repeat_interleave(2, 2)[:, :, ::2] for x in made]
    else:
        made = [guarded(x) if x.numel() else x for x in made]
    return (made[0], made[1], made[2], made[3]) if sizes.full else (made[0], made[1], None, None)


def written_down(lists: Lists, sizes: Sizes) -> Tensor:
    """The classes, block by block."""
    classes = torch.zeros(sizes.batch, sizes.heads, sizes.rows, sizes.columns, dtype=torch.uint8)
    for kind, counts, indices in ((1, *lists[:2]), (2, *lists[2:])):
        if counts is None or indices is None:
            continue
        for place in torch.cartesian_prod(*map(torch.arange, counts.shape)).view(-1, 3).tolist():
            for block in indices[*place].tolist()[: max(int(counts[*place]), 0)]:
                if 0 <= block < sizes.columns:
                    classes[*place, block] = kind
    return classes


def made(lists: Lists, sizes: Sizes) -> Tensor:
    return block_classes(*lists, sizes.columns)


def assert_classes(lists: Lists, sizes: Sizes) -> None:
    faults.check()
    result = made(lists, sizes)
    assert torch.equal(result, written_down(lists, sizes))
    assert torch.equal(result, classes_there(lists, sizes.columns))
    faults.check()


def assert_told(lists: Lists, sizes: Sizes, words: str) -> None:
    """The next call tells, and classes are right but for what is wrong."""
    faults.check()
    assert torch.equal(made(lists, sizes), written_down(lists, sizes))
    assert re.search(words, told())


def told() -> str:
    """The error of the next call; of a fault that a broken kernel left without its kind, no words."""
    try:
        faults.check()
    except (InputError, StopIteration) as error:
        return str(error)
    return ""


FAULTS = {
    "count": r"99 blocks in a row .*\n.* 0 to 43",
    "block": r"key block 77 .*\n.* 0 to 39",
    "both": r"more than once in row 3 .* .batch 1, head 2",
}


def with_fault(lists: Lists, name: str) -> Lists:
    """The lists with a fault in the row that FAULTS names."""
    counts, indices, full_counts, full_indices = lists
    assert full_counts is not None and full_indices is not None
    row = 1, 2, 3
    counts[row], full_counts[row] = 1, 0
    indices[row] = 77 if name == "block" else 1
    if name == "count":
        counts[row] = 99
    elif name == "both":
        full_counts[row], full_indices[row] = 1, 1
    return lists


@pytest.mark.parametrize("name", SIZES)
def test_classes(name: str) -> None:
    timing, arch, sizes = random.choice(["eager", "late", "random"]), random.choice(ARCHS), SIZES[name]
    torch.use_deterministic_algorithms(True)  # memory is poisoned
    try:
        with ptxsim.device(arch, random.randrange(99), timing) as gpu:
            assert_classes(lists_of(sizes), sizes)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not gpu.findings, f"{timing} {arch}: {gpu.report()}"
    assert ["block_lists" in result.kernel for result in gpu.results] == [True]


def test_other_sizes_are_the_same_kernel() -> None:
    with ptxsim.device("sm_90a") as gpu:
        for sizes in (Sizes(), Sizes(1, 4, 3, 70, 70), Sizes(3, 1, 9, 2, 2)):
            assert_classes(lists_of(sizes), sizes)
    assert len({result.kernel for result in gpu.results}) == 1 and len(gpu.results) == 3
    assert not gpu.findings, gpu.report()


ONE = Sizes(1, 1, 1, 6, 4, full=True)
WRONG: dict[str, tuple[list[int], list[int], int, str]] = {
    "negative count": ([0, 1, 2, 3], [5, 4, 0, 0], -1, "-1 blocks in a row .*\n.* 0 to 4"),
    "count beyond": ([0, 1, 2, 3], [5, 4, 0, 0], 9, "9 blocks in a row .*\n.* 0 to 4"),
    "negative block": ([0, -3, 2, 7], [5, 4, 0, 0], 3, "key block -3 .*\n.* 0 to 5"),
    "block beyond": ([0, 6, 2, 7], [5, 4, 0, 0], 3, "key block 6 .*\n.* 0 to 5"),
    "partial twice": ([0, 2, 2, 3], [5, 4, 0, 0], 3, "more than once in row 0 .* .batch 0, head 0"),
    "full twice": ([0, 1, 2, 3], [5, 5, 0, 0], 3, "more than once in row 0"),
    "partial and full": ([0, 1, 5, 3], [5, 4, 0, 0], 3, "more than once in row 0"),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_later_and_left_out(name: str, wide: bool) -> None:
    partial, full, count, words = WRONG[name]
    dtype = torch.int64 if wide else torch.int32
    rows = [torch.tensor([[x]], dtype=dtype) for x in ([count], [partial], [2], [full])]
    lists = guarded(rows[0]), guarded(rows[1]), guarded(rows[2]), guarded(rows[3])
    with ptxsim.device(random.choice(ARCHS)) as gpu:
        assert_told(lists, replace(ONE, wide=wide), words)
    assert not gpu.findings, gpu.report()


def test_blocks_with_other_upper_bits_do_not_exist() -> None:
    lists = torch.tensor([[[1]]]), torch.tensor([[[[1 << 32]]]]), None, None
    with ptxsim.device("sm_90a"):
        assert_told(lists, ONE, "key block 4294967296")


def test_maps_of_calls_are_made_in_one_launch() -> None:
    """Also of lists that are written anew behind torch's back, within inference mode, and of a BlockMask."""
    sizes = Sizes(1, 1, 2, 4, 4, full=True)
    lists = lists_of(sizes)
    with ptxsim.device("sm_90a") as gpu:
        for _ in range(2):
            found = BlockMap.from_counts(lists[0], lists[1], 64, 128, 256, *lists[2:])
            assert torch.equal(found.classes, written_down(lists, sizes))
            lists[0].data.fill_(0)
    assert len(gpu.results) == 2 and not gpu.findings, gpu.report()


def test_validation_has_the_host_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa4flex.contents.VALIDATE", True)
    lists = torch.tensor([[[1]]]), torch.tensor([[[[7]]]])
    with ptxsim.device("sm_90a") as gpu, pytest.raises(InputError, match="key block 7 in indices"):
        BlockMap.from_counts(*lists, 64, 64, 256)
    assert not gpu.results


def test_a_later_call_of_attention_tells() -> None:
    q = torch.randn(1, 1, 64, 64).bfloat16()
    with ptxsim.device("sm_90a"), pytest.raises(InputError, match="key block 7"):
        blocks = BlockMap.from_counts(torch.tensor([[[1]]]), torch.tensor([[[[7]]]]), 64, 64, 64)
        fa4flex.attention(q, q, q, blocks=blocks)
