"""Block tables that a simulated device makes, against every element of the mask."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mask_zoo import dense, tile_classes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fa4flex
import ptxsim
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.build import build
from fa4flex.lower import Lowered
from fa4flex.primitives.blocks import BlockMap
from fa4flex.reference import attention
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.tables.block_tables import DeviceTables, grid_of
from fa4flex.runtime.cuda.tables.host_tables import BlockTables
from fa4flex.variants import causal, document, natten, sliding_window

Call = Any
BATCH, HEADS, Q_LEN, KV_LEN = 2, 2, 300, 340
SHAPE = Shape(BATCH, HEADS, Q_LEN, KV_LEN)


def documents() -> Tensor:
    return torch.randint(0, 4, (BATCH, KV_LEN)).sort(-1).values


def of_table(p: float) -> Callable[..., Any]:
    table = torch.rand(Q_LEN, KV_LEN) < p
    table[:128, 128:256], table[128:256, :128] = False, True
    return lambda b, h, q, kv: table[q, kv]


def of_lookup(ids: Tensor) -> Callable[..., Any]:
    """A mask that reads at what it has read: bounds leave all of its tiles open."""
    near = torch.rand(8, 8) < 0.5
    return lambda b, h, q, kv: near[ids[b, q], ids[b, kv]]


def masks() -> dict[str, Any]:
    ids = documents()
    classes = torch.randint(0, 3, (BATCH, HEADS, 5, 6), dtype=torch.uint8)
    return {
        "documents": causal & document(ids),
        "documents in no order": document(ids[:, torch.randperm(KV_LEN)]),
        "blocks": BlockMap.from_dense(classes, 64, Q_LEN, KV_LEN).mask(causal),
        "a table": of_table(0.5),
        "looked up": of_lookup(ids),
        "natten": natten((15, 20), (5, 5)),
        "padding": lambda b, h, q, kv: ((ids[b, kv] != 3) | (q // 7 == kv // 7)) & (q >= kv),
    }


NAMES = tuple(masks())


@contextmanager
def tables_alone() -> Iterator[None]:
    """Within, kernels that make tables are launched, and none that reads them; nothing is kept for others."""
    key, compile_kernel, this = Engine.key, Lowered.compile, object()

    def of_tables(self: Engine, call: Call, *bits: Any) -> Any:
        found = key(self, call, *bits)
        return None if found is None else ((this, *found[0]), found[1])

    def compiled(lowered: Lowered, signature: Any) -> Any:
        if lowered.direction in ("forward", "backward"):
            return SimpleNamespace(launch=lambda *given: None, key=lowered.source.key)
        return compile_kernel(lowered, signature)

    with patch.object(Engine, "key", of_tables), patch.object(Lowered, "compile", compiled):
        yield


def made(mask: Any, arch: str, **how: Any) -> tuple[list[tuple[DeviceTables, BlockTables]], Any, Any]:
    """The tables of the forward and the backward pass, the variant, and the simulated device."""
    found: list[tuple[DeviceTables, BlockTables]] = []
    make = DeviceTables.__call__

    def noted(self: DeviceTables, call: Call, *lengths: Any) -> BlockTables:
        tables = make(self, call, *lengths)
        found.append((self, tables))
        return tables

    attn = fa4flex.compile(mask=mask)
    qkv = [torch.randn(BATCH, HEADS, n, 64).bfloat16().requires_grad_() for n in (Q_LEN, KV_LEN, KV_LEN)]
    noting = patch.object(DeviceTables, "__call__", noted)
    with tables_alone(), noting, ptxsim.device(arch, **how) as gpu:
        attn(*qkv).sum().backward()
    return found, attn, gpu


def copied(tables: BlockTables) -> BlockTables:
    return BlockTables(*[None if x is None else x.clone() for x in tables])  # type: ignore[arg-type]


def classes_of(tables: BlockTables, rows: int, columns: int) -> Tensor:
    """uint8 [B, H, rows, columns]: 0 empty, 1 partial, 2 full."""
    dense = torch.zeros(BATCH, HEADS, rows, columns, dtype=torch.uint8)
    lists = (tables.partial_ptr, tables.partial_tiles), (tables.full_ptr, tables.full_tiles)
    for kind, (pointers, tiles) in enumerate(lists, 1):
        for b in range(BATCH):
            for h in range(HEADS):
                for row, (first, last) in enumerate(pointers[b, h].tolist()):
                    listed = tiles[first:last].tolist()
                    assert listed == sorted(set(listed)), "tiles of a row are listed once, in order"
                    dense[b, h, row, listed] = kind
    return dense


def expected(attn: Any, tile: tuple[int, int], by_keys: bool) -> Tensor:
    """The same of every element. Full tiles lie before the end of what a row lists."""
    program = build(attn.variant)
    classes = tile_classes(dense(program.facts.mask, SHAPE, program.captured()), tile)
    last = classes[:, :, Q_LEN // tile[0] :] if by_keys else classes[:, :, :, KV_LEN // tile[1] :]
    last.clamp_(max=1)
    return classes.transpose(2, 3) if by_keys else classes


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tables_of_a_device_are_those_of_all_elements(name: str) -> None:
    arch, timing = random.choice(("sm_90a", "sm_100a")), random.choice(("eager", "late", "random"))
    found, attn, gpu = made(masks()[name], arch, timing=timing)
    assert not gpu.findings, gpu.report()
    passes = (False,) if name == "padding" else (False, True)  # queries that see a key are an interval there
    assert len(found) == len(passes), "the device makes the tables"
    for (one, tables), by_keys in zip(found, passes, strict=True):
        grid = grid_of(one.plan, SHAPE)
        classes = classes_of(tables, grid.rows, grid.columns)
        assert torch.equal(classes, expected(attn, one.plan.tile, by_keys)), (name, arch, by_keys)


# --- ends of rows, which hold while captured tensors are sorted -------------------------------------------


def pairs(mask: Any) -> Tensor:
    """True for each pair that takes part, bool [B, H, Q_LEN, KV_LEN]."""
    program = build(fa4flex.compile(mask=mask).variant)
    return dense(program.facts.mask, SHAPE, program.captured())


def launched(mask: Any, turns: list[Callable[[], Any]], make: Any, **how: Any) -> list[float]:
    """The error of one kernel after each of `turns`, over that of PyTorch; `make` stands in for
    DeviceTables.__call__. All rows have keys."""
    attn = fa4flex.compile(mask=mask)
    qkv = [torch.randn(BATCH, HEADS, n, 64).bfloat16() for n in (Q_LEN, KV_LEN, KV_LEN)]
    errors = []
    for turn in turns:
        turn()
        allowed = pairs(mask)
        exact = attention(*qkv, mask=lambda b, h, q, kv, table=allowed: table[b, h, q, kv])[0]
        plain = scaled_dot_product_attention(*qkv, attn_mask=allowed)
        with patch.object(DeviceTables, "__call__", make), ptxsim.device("sm_90a", **how) as gpu:
            found = attn(*qkv)
        assert not gpu.findings, gpu.report()
        errors.append(float((found - exact).norm() / (plain - exact).norm()))
    return errors


@pytest.mark.slow
def test_one_kernel_compares_ends_of_rows_or_asks_pairs() -> None:
    """Sequences with ids in order and in none, in one launch; then the other way round."""
    ids = documents().to(random.choice((torch.int32, torch.int64)))
    made: list[Any] = []
    mask = random.choice((document(ids), causal & document(ids), causal & document(ids) & sliding_window(90)))
    make = DeviceTables.__call__

    def noted(self: DeviceTables, call: Call, *lengths: Any) -> BlockTables:
        tables = make(self, call, *lengths)
        made.append(copied(tables))  # the next launch writes them anew
        return tables

    def mixed() -> None:
        ids[1] = ids[1, torch.randperm(KV_LEN)]

    def exchanged() -> None:
        ids.copy_(ids.flip(0))

    errors = launched(mask, [mixed, exchanged], noted, timing=random.choice(("eager", "late", "random")))
    assert [tables.in_order[:, 0].tolist() for tables in made] == [[1, 0], [0, 1]]
    assert max(errors) <= 2, errors
    allowed, (lo, hi) = pairs(mask)[1].int(), made[-1].row_ends[:, 1]  # the second one is in order by now
    assert torch.equal(lo.long(), allowed.argmax(-1))
    assert torch.equal(hi.long(), KV_LEN - allowed.flip(-1).argmax(-1))


@pytest.mark.slow
def test_pairs_are_asked_where_sorted_ids_are_too_large_to_be_searched() -> None:
    """Kernels that were compiled for small ids compute with 32 bits."""
    ids, make = documents(), DeviceTables.__call__
    made: list[Any] = []

    def noted(self: DeviceTables, call: Call, *lengths: Any) -> BlockTables:
        tables = make(self, call, *lengths)
        made.append(copied(tables))  # the next launch writes them anew
        return tables

    errors = launched(causal & document(ids), [lambda: None, lambda: ids.add_(1 << 33)], noted)
    assert [int(tables.in_order.min()) for tables in made] == [1, 0]
    assert max(errors) <= 2, errors


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["ends of another row", "in order where nothing is"])
def test_what_stands_beside_tables_is_what_kernels_read(planted: str) -> None:
    ids, make = documents(), DeviceTables.__call__

    def wrong(self: DeviceTables, call: Call, *lengths: Any) -> BlockTables:
        tables = make(self, call, *lengths)
        if planted.startswith("ends"):
            return tables._replace(row_ends=tables.row_ends.roll(40, -1))
        return tables._replace(in_order=torch.ones(BATCH, HEADS, dtype=torch.int32))

    def change() -> None:
        if planted.startswith("in order"):
            ids.copy_(ids[:, torch.randperm(KV_LEN)])

    (error,) = launched(causal & document(ids), [change], wrong)
    assert error > 20
