"""Block tables of ragged batches, packed, padded and in pages, made by a simulated device: every sequence's
own, against every element of the mask; and calls whose lengths and contents change, which follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mask_zoo import dense, tile_classes
from paged_pools import Size, drawn
from test_block_tables import tables_alone
from test_forward_paged import chunks
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Varlen
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.build import build
from fa4flex.runtime.cuda.tables.block_tables import DeviceTables, HostTables
from fa4flex.runtime.cuda.tables.host_tables import BlockTables, TurnTables
from fa4flex.variants import causal, document

Lengths = list[tuple[int, int]]
HEADS = 2
LENGTHS: Lengths = [(70, 130), (0, 20), (300, 340), (1, 0), (129, 257), (0, 0), (128, 128)]
"""Queries and keys of each sequence."""

TIMINGS = "eager", "late", "random"


def masks() -> dict[str, Any]:
    ids = torch.randint(0, 4, (len(LENGTHS), 340)).sort(-1).values
    table = torch.rand(340, 340) < 0.5
    table[:128, 128:256], table[128:256, :128] = False, True
    near, first = torch.rand(HEADS, 7, 7) < 0.6, torch.randint(0, 300, (len(LENGTHS), HEADS))
    return {
        "documents": causal & document(ids),
        "in no order, by the end": lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) | (kv % 7 == q % 3),
        "a table": lambda b, h, q, kv: table[q, kv],
        "heads": lambda b, h, q, kv: near[h, q // 50, kv // 50] & (q < first[b, h]),
    }


NAMES = tuple(masks())
KINDS = "packed", "packed, used", "padded"


def vector(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def call_of(kind: str, lengths: Lengths) -> tuple[list[Tensor], Varlen | None]:
    """q, k, v, and lengths of which these are used."""
    used = [vector([pair[side] for pair in lengths]) for side in range(2)]
    if kind in ("padded", "dense"):
        tensors = [torch.randn(len(lengths), HEADS, n, 64) for n in (310, 340, 340)]
        return [x.bfloat16() for x in tensors], Varlen(seqused_q=used[0], seqused_k=used[1])
    more = random.randint(1, 60) if "used" in kind else 0
    cu = [torch.cat((vector([0]), (x + more).cumsum(0).int())) for x in used]
    tensors = [torch.randn(int(ends[-1]), HEADS, 64) for ends in (cu[0], cu[1], cu[1])]
    return [x.bfloat16() for x in tensors], Varlen(*cu, *(used if more else ()))


@contextmanager
def poisoned_integers() -> Iterator[None]:
    """Elements that nobody writes are no numbers of tiles."""
    empty = Tensor.new_empty

    def filled(x: Tensor, *shape: Any, **how: Any) -> Tensor:
        made = empty(x, *shape, **how)
        return made if made.is_floating_point() else made.fill_(0x7F7F7F7F)

    with patch.object(Tensor, "new_empty", filled):
        yield


def noted() -> tuple[Any, list[tuple[DeviceTables, BlockTables]]]:
    """A patch that notes the tables that are made on the device; none may be on the host."""
    found: list[tuple[DeviceTables, BlockTables]] = []
    make = DeviceTables.__call__

    def noting(self: DeviceTables, call: Any, *lengths: Any) -> BlockTables:
        found.append((self, make(self, call, *lengths)))
        return found[-1][1]

    return patch.object(DeviceTables, "__call__", noting), found


def never_on_the_host() -> Any:
    return patch.object(HostTables, "__call__", side_effect=AssertionError("tables were made on the host"))


def classes_of(tables: BlockTables, b: int, h: int, rows: int, columns: int) -> Tensor:
    """uint8 [rows, columns] of one sequence and head: 0 empty, 1 partial, 2 full."""
    classes = torch.zeros(rows, columns, dtype=torch.uint8)
    lists = (tables.partial_ptr, tables.partial_tiles), (tables.full_ptr, tables.full_tiles)
    for kind, (pointers, tiles) in enumerate(lists, 1):
        for row, (first, last) in enumerate(pointers[b, h].tolist()):
            listed = tiles[first:last].tolist()
            assert listed == sorted(set(listed)) and 0 <= first <= len(tiles)
            if row >= rows:
                assert not listed, "a sequence has no tiles past its end"
            else:
                classes[row, listed] = kind
    return classes


def expected(attn: Any, tile: tuple[int, int], lengths: Lengths) -> Iterator[Tensor]:
    """Classes of the tiles of each sequence, uint8 [HEADS, query tiles, key tiles], by all elements."""
    program, (height, width) = build(attn.variant), tile
    for b, (q_len, kv_len) in enumerate(lengths):
        if not q_len or not kv_len:
            yield torch.zeros(HEADS, -(-q_len // height), -(-kv_len // width), dtype=torch.uint8)
        else:
            shape = Shape(1, HEADS, q_len, kv_len, b)
            yield tile_classes(dense(program.facts.mask, shape, program.captured()), tile)[0]


def check_tables(attn: Any, one: DeviceTables, tables: BlockTables, lengths: Lengths) -> None:
    (height, width), by_keys = one.plan.tile, one.plan.by_keys
    for b, classes in enumerate(expected(attn, one.plan.tile, lengths)):
        q_len, kv_len = lengths[b]
        last = classes[:, q_len // height :] if by_keys else classes[:, :, kv_len // width :]
        last.clamp_(max=1)  # full tiles lie before the end of what a row lists
        classes = classes.transpose(1, 2) if by_keys else classes
        for h in range(HEADS):
            assert torch.equal(classes_of(tables, b, h, *classes.shape[1:]), classes[h]), (b, h, by_keys)
            if not by_keys:  # one tile at least is taken, whatever a row lists
                firsts = tables.partial_ptr[b, h, : classes.shape[1], 0].long()
                taken = tables.partial_tiles[firsts[(classes[h] == 1).any(1) | ~(classes[h] == 2).any(1)]]
                assert bool(((taken >= 0) & (taken < max(classes.shape[2], 1))).all())


def check_turns(attn: Any, one: DeviceTables, turns: TurnTables, lengths: Lengths) -> None:
    """Entries of every tile of keys, and how many tiles of keys behind it list the same queries."""
    height, width = one.plan.tile
    for b, classes in enumerate(expected(attn, one.plan.tile, lengths)):
        q_len, kv_len = lengths[b]
        classes[:, q_len // height :].clamp_(max=1)
        classes[:, :, kv_len // width :].clamp_(max=1)
        for h in range(HEADS):
            there = classes[h] > 0
            later = there.flip(1).cumsum(1).flip(1) - there.int()
            for row, (first, last) in enumerate(turns.pointers[b, h].tolist()):
                if row >= there.shape[1]:
                    assert first == last, "a sequence has no tiles past its end"
                    continue
                queries = there[:, row].nonzero()[:, 0]
                entries = 2 * queries + (classes[h, queries, row] == 1)
                assert torch.equal(turns.entries[first:last].long(), entries), (b, h, row)
                assert torch.equal(turns.ranks[first:last].long(), later[queries, row]), (b, h, row)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_tables_of_every_sequence_are_those_of_all_elements(name: str, kind: str) -> None:
    arch, timing, lengths = random.choice(("sm_90a", "sm_100a")), random.choice(TIMINGS), LENGTHS[:]
    random.shuffle(lengths)
    attn, (qkv, varlen), (noting, found) = (
        fa4flex.compile(mask=masks()[name]),
        call_of(kind, lengths),
        noted(),
    )
    with (
        tables_alone(), noting, never_on_the_host(), poisoned_integers(),
        ptxsim.device(arch, timing=timing) as gpu,
    ):  # fmt: skip
        attn(*(x.requires_grad_() for x in qkv), varlen=varlen).sum().backward()
    assert not gpu.findings, gpu.report()
    assert [one.plan.by_keys for one, _ in found] == [False, True]
    for one, tables in found:
        check_tables(attn, one, tables, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", *KINDS])
@pytest.mark.parametrize("name", [*NAMES, "causal"])
def test_turns_are_those_of_all_elements(name: str, kind: str) -> None:
    """Sums in one order; masks whose keys are intervals have turns, too."""
    lengths, arch = LENGTHS[:], random.choice(("sm_90a", "sm_100a"))
    random.shuffle(lengths)
    qkv, varlen = call_of(kind, lengths)
    if kind == "dense":
        lengths, varlen = [(310, 340)] * len(lengths), None
    schedule = fa4flex.Schedule(deterministic=True)
    attn = fa4flex.compile(mask=masks().get(name, causal), schedule=schedule)
    noting, found = noted()
    with (
        tables_alone(), noting, never_on_the_host(), poisoned_integers(),
        ptxsim.device(arch, timing=random.choice(TIMINGS)) as gpu,
    ):  # fmt: skip
        attn(*(x.requires_grad_() for x in qkv), varlen=varlen).sum().backward()
    assert not gpu.findings, gpu.report()
    *_, (one, turns) = found
    assert one.plan.by_keys and isinstance(turns, TurnTables)
    check_turns(attn, one, turns, lengths)


@pytest.mark.slow
def test_rows_are_counted_beyond_a_warp() -> None:
    """More than 32 tiles of keys, and of queries."""
    table = torch.rand(2, 40, 40) < 0.5
    lengths = [(4900, 4700), (130, 4500)]
    attn = fa4flex.compile(
        mask=lambda b, h, q, kv: table[h, q // 128, kv // 128],
        schedule=fa4flex.Schedule(deterministic=True),
    )
    qkv, varlen = call_of("packed", lengths)
    noting, found = noted()
    with tables_alone(), noting, poisoned_integers(), ptxsim.device("sm_90a"):
        attn(*(x.requires_grad_() for x in qkv), varlen=varlen).sum().backward()
    check_turns(attn, *found[-1], lengths)  # type: ignore[arg-type]


@pytest.mark.slow
def test_tables_of_pages() -> None:
    """Keys in pages, of packed queries: their numbers are those of the call, as they are given."""
    given = drawn(Size(heads=HEADS, kv_heads=1, lengths=(300, 0, 33, 1)))
    queries = (150, 9, 0, 129)
    name, (noting, found) = random.choice(NAMES), noted()
    attn = fa4flex.compile(mask=masks()[name])
    with tables_alone(), noting, poisoned_integers(), ptxsim.device("sm_90a") as gpu:
        chunks(given, queries)(attn)
    assert not gpu.findings, gpu.report()
    ((one, tables),) = found
    check_tables(attn, one, tables, list(zip(queries, (300, 0, 33, 1), strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_changed_lengths_and_contents_are_seen(kind: str) -> None:
    """Also where torch counts no change: see test_uncounted_changes."""
    ids = torch.randint(0, 4, (len(LENGTHS), 340)).sort(-1).values
    attn, (noting, found) = fa4flex.compile(mask=causal & document(ids)), noted()
    qkv, varlen = call_of(kind, LENGTHS)
    with torch.no_grad(), tables_alone(), noting, never_on_the_host(), ptxsim.device("sm_90a"):

        def check(lengths: Lengths) -> None:
            for _ in range(2):
                attn(*qkv, varlen=varlen)
                check_tables(attn, *found[-1], lengths)

        check(LENGTHS)
        ids.data.copy_(ids.flip(0))
        check(LENGTHS)
        turned = LENGTHS[::-1]
        if kind == "padded":
            for x in (varlen.seqused_q, varlen.seqused_k):
                x.data.copy_(x.flip(0))  # type: ignore[union-attr]
        else:
            for side, x in enumerate((varlen.cu_seqlens_q, varlen.cu_seqlens_k)):
                x.data[1:] = vector([pair[side] for pair in turned]).cumsum(0)  # type: ignore[index]
        check(turned)


def test_the_host_makes_what_there_is_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tables, where sequences are packed and where keys lie in pages."""
    monkeypatch.setattr("fa4flex.runtime.cuda.tables.block_tables.MOST_BYTES", 64)
    made: list[Any] = []
    make = HostTables.__call__

    def noting(self: HostTables, *given: Any) -> Any:
        made.append((given[0], make(self, *given)))
        return made[-1][1]

    attn = fa4flex.compile(mask=masks()["documents"])
    given = chunks(drawn(Size(heads=HEADS, kv_heads=1, lengths=(300, 0, 33, 1))), (150, 9, 0, 129))
    qkv, varlen = call_of("packed", LENGTHS)
    with (
        torch.no_grad(), tables_alone(), patch.object(HostTables, "__call__", noting),
        ptxsim.device("sm_90a"),
    ):  # fmt: skip
        attn(*qkv, varlen=varlen)
        given(attn)
    program = build(attn.variant)
    assert len(made) == 2
    for (_, tables), lengths in zip(made, (LENGTHS, [(150, 300), (9, 0), (0, 33), (129, 1)]), strict=True):
        for b, (q_len, kv_len) in enumerate(lengths):
            if not q_len or not kv_len:
                continue
            allowed = dense(program.facts.mask, Shape(1, HEADS, q_len, kv_len, b), program.captured())
            classes = tile_classes(allowed, (128, 128))
            classes[:, :, :, kv_len // 128 :].clamp_(max=1)
            assert torch.equal(classes_of(tables, b, 0, *classes.shape[2:]), classes[0, 0])
