"""Contents that change without torch's count, by every way: tables and lengths on a simulated device follow;
where nothing has changed, nothing is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_faults import drop_faults
from sequences_reference import corrected
from test_block_tables import BATCH, HEADS, KV_LEN, Q_LEN, SHAPE, classes_of, expected, tables_alone
from test_sequences import call_of, kernel_of
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import BlockMap, Schedule
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.tables.block_tables import DeviceTables, grid_of
from fa4flex.variants import causal, document

UNTOUCHED = 0x7A7A


def by_data(x: Tensor, new: Tensor) -> None:
    x.data.copy_(new)


def by_numpy(x: Tensor, new: Tensor) -> None:
    x.numpy()[...] = new.numpy()


def by_pointer(x: Tensor, new: Tensor) -> None:
    """A write as another library's kernel makes it, or a parameter that is unsharded."""
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.copy_(new)


WAYS: tuple[Callable[[Tensor, Tensor], None], ...] = by_data, by_numpy, by_pointer


def written(x: Tensor, new: Tensor) -> None:
    """`new` into x, which torch does not count."""
    before = x._version
    random.choice(WAYS)(x, new)
    assert x._version == before


def other_in_one_place(x: Tensor) -> Tensor:
    new = x.clone()
    place = random.choice((0, x.numel() - 1, random.randrange(x.numel())))
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), x.shape))
    new[at] = not new[at] if x.dtype == torch.bool else (int(new[at]) + 1) % 3
    return new


def two_exchanged(x: Tensor) -> Tensor:
    """The same elements in another order."""
    return x.roll(random.randint(1, x.shape[-1] - 1), -1)


CONTENTS: dict[str, Callable[[], tuple[Tensor, Any]]] = {}


def content(make: Callable[[], tuple[Tensor, Any]]) -> Callable[[], tuple[Tensor, Any]]:
    CONTENTS[make.__name__] = make
    return make


@content
def documents() -> tuple[Tensor, Any]:
    dtype = random.choice((torch.int32, torch.int64, torch.int16))
    ids = torch.randint(0, 3, (BATCH, KV_LEN)).sort(-1).values.to(dtype)
    return ids, causal & document(ids)


@content
def classes_of_an_odd_number_of_bytes() -> tuple[Tensor, Any]:
    classes = torch.randint(0, 3, (1, 1, 3, 3), dtype=torch.uint8)
    return classes, BlockMap.from_dense(classes, 128, Q_LEN, KV_LEN).mask(causal)


@content
def table_of_pairs() -> tuple[Tensor, Any]:
    table = torch.rand(Q_LEN - 1, KV_LEN + 1) < 0.5
    return table, lambda b, h, q, kv: table[q.clamp(max=Q_LEN - 2), kv] & (q // 64 >= kv // 64)


@content
def every_other_element() -> tuple[Tensor, Any]:
    """Elements that do not lie behind each other: they are read anew at each launch."""
    ids = torch.randint(0, 3, (BATCH, 2 * KV_LEN))[:, ::2]
    return ids, document(ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENTS)
def test_tables_follow_changes_that_nobody_counts(name: str) -> None:
    x, mask = CONTENTS[name]()
    attn, found, make = fa4flex.compile(mask=mask), [], DeviceTables.__call__

    def noted(self: DeviceTables, call: Any, *lengths: Any) -> Any:
        found.append((self, make(self, call, *lengths)))
        return found[-1][1]

    qkv = [torch.randn(BATCH, HEADS, n, 64).bfloat16() for n in (Q_LEN, KV_LEN, KV_LEN)]
    noting = patch.object(DeviceTables, "__call__", noted)
    with torch.no_grad(), tables_alone(), noting, ptxsim.device("sm_90a") as gpu:
        for change in (None, other_in_one_place, other_in_one_place, two_exchanged):
            if change is not None:
                written(x, change(x))
            attn(*qkv)
            assert not gpu.findings, gpu.report()
            one, tables = found[-1]
            grid = grid_of(one.plan, SHAPE)
            assert torch.equal(
                classes_of(tables, grid.rows, grid.columns), expected(attn, one.plan.tile, False)
            )
            tables.partial_ptr.fill_(UNTOUCHED)
            attn(*qkv)
            stands = bool((tables.partial_ptr == UNTOUCHED).all())
            assert found[-1][1] is tables and stands == (name != "every_other_element")


@pytest.mark.slow
def test_tables_of_no_contents_are_made_once() -> None:
    """There is no digest that could differ. A number that the mask reads has tables of its own."""
    limit = SimpleNamespace(n=1.0)
    attn, found, make = (
        fa4flex.compile(mask=lambda b, h, q, kv: (q - kv + 0.5) / limit.n > 0),
        [],
        DeviceTables.__call__,
    )

    def noted(self: DeviceTables, call: Any, *lengths: Any) -> Any:
        found.append((self, make(self, call, *lengths)))
        return found[-1][1]

    qkv = [torch.randn(BATCH, HEADS, n, 64).bfloat16() for n in (Q_LEN, KV_LEN, KV_LEN)]
    noting = patch.object(DeviceTables, "__call__", noted)
    with torch.no_grad(), tables_alone(), noting, ptxsim.device("sm_90a") as gpu:
        for n in (1.0, -1.0, 1.0):
            limit.n = n
            for _ in range(2):
                attn(*qkv)
            one, tables = found[-1]
            grid = grid_of(one.plan, SHAPE)
            assert torch.equal(
                classes_of(tables, grid.rows, grid.columns), expected(attn, one.plan.tile, False)
            )
    assert not gpu.findings and len(gpu.results) == 4, "two kernels for each number"


@pytest.mark.slow
def test_lengths_follow_changes_that_nobody_counts() -> None:
    """Wrong ones are told of at each launch, until they are right."""
    cu = torch.tensor([0, 100, 350, 700], dtype=random.choice((torch.int32, torch.int64)))
    used = torch.tensor([80, 20, 330])
    call = call_of((cu, cu.clone(), used, None), 700, 700)

    def right() -> bool:
        given = [None if x is None else x.tolist() for x in call.lengths]
        wanted = [corrected(given[side], given[side + 2], 700) for side in range(2)]
        pairs = zip(kernel(call)[0], (wanted[0][0], wanted[1][0], wanted[0][1], wanted[1][1]), strict=True)
        return all(x is None or x.tolist() == expected for x, expected in pairs)

    with ptxsim.device("sm_90a") as gpu:
        kernel = kernel_of(causal, call, (128, 128))
        assert right()
        for x, new in ((cu, [0, 90, 360, 700]), (used, [3, 0, 330]), (cu, [0, 90, 361, 700])):
            written(x, x.new_tensor(new))
            assert right()
            found, order = kernel(call)
            found.seqused_q.fill_(UNTOUCHED)  # type: ignore[union-attr]
            order.fill_(UNTOUCHED)  # type: ignore[union-attr]
            again, _ = kernel(call)
            assert again is found and bool(
                (found.seqused_q == UNTOUCHED).all() and (order == UNTOUCHED).all()
            )
        written(cu, cu.new_tensor([0, 90, 80, 700]))
        for _ in range(2):
            assert right()
            assert drop_faults()
        written(cu, cu.new_tensor([0, 90, 180, 700]))
        assert right() and not faults.pending.value
    assert not gpu.findings, gpu.report()


@pytest.mark.slow
def test_torch_counts_where_the_user_says_so() -> None:
    """No launch but the first, until torch counts a change."""
    ids = torch.arange(KV_LEN) // 50
    attn = fa4flex.compile(mask=document(ids), schedule=Schedule(contents="counted"))
    qkv = [torch.randn(1, 1, n, 64).bfloat16() for n in (KV_LEN, KV_LEN, KV_LEN)]
    with torch.no_grad(), tables_alone(), ptxsim.device("sm_90a") as gpu:

        def launches() -> int:
            before = len(gpu.results)
            attn(*qkv)
            return len(gpu.results) - before

        assert launches() > 0 and launches() == 0
        written(ids, ids.flip(0))
        assert launches() == 0
        ids.copy_(ids.flip(0))
        assert launches() > 0 and launches() == 0
