"""Plans for maps of small blocks: tiles that no edge cuts, and blocks that share a multiprocessor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fa4flex
from fa4flex import BlockMap, Schedule
from fa4flex.codegen.analyze.blocks import block_size
from fa4flex.codegen.analyze.tiles import Shape, tile_map
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.target import SM90A
from fa4flex.variants import causal
from fa4flex.view.gpu import KernelView


def mask_of(size: Any, length: int = 768) -> Any:
    rows, columns = (-(-length // edge) for edge in ((size, size) if isinstance(size, int) else size))
    return BlockMap.from_dense(torch.ones(2, rows, columns, dtype=torch.uint8), size, length, length)


def planned(size: Any, schedule: Schedule = Schedule(), **problem: Any) -> Any:
    attn = fa4flex.compile(blocks=mask_of(size), mask=causal, schedule=schedule)
    return KernelView(attn.program, problem).lowered.plan


TILES = {
    64: (64, 64), (64, 32): (64, 32), (64, 16): (64, 16), (64, 96): (64, 48), (64, 128): (64, 64),
    192: (64, 64), (128, 64): (64, 64), 128: (128, 128), 256: (128, 128), 32: (128, 128), (64, 8): (128, 128),
    (96, 64): (128, 128),
}  # fmt: skip
"""Tiles of forward passes by the blocks of a map."""


@pytest.mark.parametrize("size", TILES, ids=str)
def test_no_edge_cuts_a_tile(size: Any) -> None:
    plan = planned(size)
    small = TILES[size] != (128, 128)
    assert plan.tile == TILES[size] and plan.problem.blocks == (TILES[size] if small else None)
    backward = planned(size, direction="backward")
    assert backward.problem.blocks == plan.problem.blocks and (backward.tile == (64, 64) or not small)
    for one in (plan, backward):
        one.check()


@pytest.mark.parametrize("lengths", ["dense", "packed", "used"])
@pytest.mark.parametrize("width, blocks", [(64, 3), (96, 3), (128, 2)])
def test_blocks_fit_a_multiprocessor(width: int, blocks: int, lengths: str) -> None:
    plan = planned(64, head_dim=width, lengths=lengths)
    config = plan.config()
    assert config.blocks == blocks and config.workers == blocks * SM90A.multiprocessors
    reserved = 1024
    assert blocks * (plan.memory.total + reserved) <= SM90A.shared_memory + reserved
    registers = config.producer_registers + config.consumer_registers
    assert 128 * registers * blocks <= SM90A.registers
    assert f"{blocks} blocks per multiprocessor take the next tile from a counter" in plan.explain()
    plan.check()


@pytest.mark.parametrize("width, blocks", [(64, 2), (96, 2), (128, 1)])
def test_backward_blocks_fit_a_multiprocessor(width: int, blocks: int) -> None:
    plan = planned(64, head_dim=width, direction="backward")
    config = plan.config()
    assert config.blocks == plan.blocks == blocks
    assert not config.persistent or config.workers == blocks * SM90A.multiprocessors
    assert blocks * (plan.memory.total + 1024) <= SM90A.shared_memory + 1024
    registers = config.producer_registers + config.consumers * config.consumer_registers
    assert 128 * registers * blocks <= SM90A.registers
    assert blocks == 1 or f"{blocks} blocks per multiprocessor take" in plan.explain()
    plan.check()


def test_too_many_registers_or_bytes_are_refused() -> None:
    plan = planned(64, head_dim=64)
    with pytest.raises(PlanError, match="registers per thread"):
        replace(plan, registers=replace(plan.registers, consumer=144)).check_resources()
    with pytest.raises(fa4flex.UnsupportedError, match="of shared memory"):
        replace(plan, kv_stages=plan.kv_stages + 1).check_resources()


def test_other_problems_have_usual_tiles() -> None:
    """Wide heads, and schedules that ask for tiles."""
    assert planned(64, head_dim=192).tile[0] == 128
    asked = planned(64, Schedule(tile=(128, 64)))
    assert asked.tile == (128, 64) and asked.config().blocks == 1


@pytest.mark.parametrize("inner", [None, causal], ids=["full", "partial"])
def test_only_partial_blocks_need_the_mask(inner: Any) -> None:
    """Tiles that are other blocks are listed as full, or not at all."""
    classes = torch.randint(0, 3, (1, 2, 12, 12), dtype=torch.uint8)
    program = fa4flex.compile(mask=BlockMap(classes, 64, 768, 768).mask(inner)).program
    facts = program.facts
    tiles = tile_map(facts.mask, facts.keys, Shape(1, 2, 768, 768), program.captured(), (64, 64))
    full = int((tiles.stop - tiles.start)[tiles.full].sum())
    below = torch.ones(12, 12).tril(-1).bool()
    whole = classes > 0 if inner is None else classes == 2
    assert full == int((whole | ((classes == 1) & below)).sum())
    assert inner is not None or tiles.full.all()


def test_blocks_of_masks() -> None:
    program = fa4flex.compile(blocks=mask_of((64, 32)), mask=causal).program
    assert block_size(program.facts.mask, program.captured().scalars) == (64, 32)
    both = fa4flex.compile(mask=mask_of(64).mask() & mask_of(128).mask()).program
    assert block_size(both.facts.mask, both.captured().scalars) is None
    none = fa4flex.compile(mask=causal).program
    assert block_size(none.facts.mask, none.captured().scalars) is None
