"""Maps of blocks that are smaller than usual tiles: tiles are blocks, and several blocks of threads share a
multiprocessor. Both passes are right on the simulated GPU, and nothing is found."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest.mock import patch

import captured_cases
import pytest
import torch
from helpers import (
    SMS,
    Width,
    called,
    cumulative,
    drawn_timing,
    forward_on_cpu,
    of_backward,
    of_passes,
    poisoned,
    widths,
    worst,
)
from test_simulated_backward import judged
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import BlockMap, Schedule, Varlen
from fa4flex.kernels.fwd_sm90 import registers
from fa4flex.kernels.fwd_sm90.registers import Split
from fa4flex.variants import alibi, causal, document, sliding_window, softcap

Size = tuple[int, int]
HEADS = 4
SIZES: tuple[Size, ...] = ((64, 64), (64, 32), (64, 16), (64, 48), (64, 128), (192, 64))
"""Queries and keys of blocks."""

IDS = torch.arange(400) // 90
TABLE = torch.randn(HEADS, 900) / 2
INNER: dict[str, Any] = {
    "no mask": None,
    "causal": causal,
    "window": sliding_window(90),
    "documents": document(IDS) & causal,
}
SCORES: dict[str, Any] = {
    "plain": {},
    "alibi": {"score_mod": alibi},
    "softcap": {"score_mod": softcap(20.0)},
    "captured table": {"score_mod": lambda score, b, h, q, k: score + TABLE[h, q - k + 400]},
}


def map_of(size: Size, q_len: int, kv_len: int, batch: int = 1, heads: int = HEADS) -> BlockMap:
    """A random map, a third of whose rows of blocks are empty in some head."""
    rows, columns = -(-q_len // size[0]), -(-kv_len // size[1])
    density = random.choice((0.2, 0.5, 0.9))
    classes = torch.randint(1, 3, (batch, heads, rows, columns)) * (torch.rand(columns) < density)
    classes *= torch.rand(batch, heads, rows, 1) > random.choice((0.0, 0.3))
    return BlockMap(classes.to(torch.uint8), size, q_len, kv_len)


def timed(sms: int | None = SMS) -> tuple[str, Any]:
    timing, seed = drawn_timing()
    return f"{timing} {seed}", ptxsim.device("sm_90a", seed, timing, sms=sms)


def seen(out: Tensor, lse: Tensor) -> list[Tensor]:
    """Results, and which rows see nothing; the log-sum-exps of these are 0."""
    return [out, lse.masked_fill(lse == -math.inf, 0.0), (lse == -math.inf).float()]


def close(
    where: str, composition: dict[str, Any], lengths: Size, width: Width, kv_heads: int = 2, **options: Any
) -> Any:
    """The simulated GPU whose results are at most twice as far from the oracle's as those of the same maths
    in PyTorch, in the worst element and the worst row."""
    (wide, wide_v), (q_len, kv_len), (told, device) = widths(width), lengths, timed()
    where = f"{where}, {lengths}, width {width}, {kv_heads} KV heads, {told}"
    shapes = (1, HEADS, q_len, wide), (1, kv_heads, kv_len, wide), (1, kv_heads, kv_len, wide_v)
    qkv = tuple(torch.randn(shape).bfloat16() for shape in shapes)

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        exact = called(fa4flex.compile(**composition), *(x.double() for x in given))
        return seen(*exact), seen(*captured_cases.plain(composition, *given))

    with torch.no_grad(), poisoned(), device as gpu:
        got = seen(*called(fa4flex.compile(**composition, **options), *qkv))
    assert not gpu.findings, f"{where}: {gpu.report()}"
    exact, budgets = captured_cases.over_draws(once, qkv)
    captured_cases.judge(where, got, exact, budgets)
    of_row = worst(got[0], exact[0])[1]
    assert of_row <= max(2 * budgets[0] * math.sqrt(wide_v), 2**-8 * exact[0].norm(dim=-1).max().item()), (
        where
    )
    return gpu


def resident(gpu: Any) -> tuple[int, int]:
    """Threads of a block of the pass, and blocks that share a multiprocessor."""
    (result,) = of_passes(gpu)
    return result.shape.block[0], result.program.kernel.resident


def composed(name: str, inner: str, blocks: BlockMap) -> dict[str, Any]:
    return {"mask": blocks.mask(INNER[inner]), **SCORES[name]}


LENGTHS: tuple[Size, ...] = ((128, 256), (150, 200), (64, 333), (190, 129))


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(3))
def test_some_maps(draw: int) -> None:
    size, lengths, width = (
        random.choice(SIZES),
        random.choice(LENGTHS),
        random.choice((64, 128, 96, (128, 64))),
    )
    name, inner = random.choice(sorted(SCORES)), random.choice(sorted(INNER))
    gpu = close(
        f"{name}, {inner}, blocks {size}", composed(name, inner, map_of(size, *lengths)), lengths, width
    )
    threads, blocks = resident(gpu)
    assert threads == 256 and blocks in (2, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("width", (64, 128), ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_all_maps(size: Size, width: Width, inner: str) -> None:
    for lengths in LENGTHS:
        for name in SCORES:
            close(f"{name}, {inner}, {size}", composed(name, inner, map_of(size, *lengths)), lengths, width)


@pytest.mark.slow
@pytest.mark.parametrize("width, blocks", [(64, 3), (128, 2)])
def test_a_multiprocessor_has_room_for_several_blocks(width: int, blocks: int) -> None:
    """Maps of full and empty blocks: no mask is evaluated but past the last key, as the table lists full
    tiles. Blocks of all multiprocessors take tiles from a counter, and leave it as it was."""
    lengths = 64 * SMS * blocks * 2, 128
    gpu = close("full blocks", {"mask": map_of((64, 64), *lengths).mask()}, lengths, width)
    (result,) = of_passes(gpu)
    assert result.shape.grid == (SMS * blocks, 1, 1) and resident(gpu) == (256, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["packed", "used"])
def test_sequences_of_their_own_lengths(lengths: str) -> None:
    counts, width = [70, 130, 1, 190], random.choice((64, 128))
    (told, device), blocks = timed(), map_of((64, 64), 190, 190, len(counts))
    attn = fa4flex.compile(mask=causal, blocks=blocks)
    if lengths == "packed":
        q, k, v = (torch.randn(sum(counts), n, width).bfloat16() for n in (HEADS, 2, 2))
        varlen = Varlen(cumulative(counts))
    else:
        q, k, v = (torch.randn(len(counts), n, 190, width).bfloat16() for n in (HEADS, 2, 2))
        used = torch.tensor(counts, dtype=torch.int32)
        varlen = Varlen(seqused_q=used, seqused_k=used)
    with torch.no_grad(), device as gpu:
        out = attn(q, k, v, varlen=varlen)
    assert not gpu.findings, f"{told}: {gpu.report()}"
    assert resident(gpu)[1] == (3 if width == 64 else 2)
    exact = attn(*(x.double() for x in (q, k, v)), varlen=varlen)
    assert (out.double() - exact).abs().max() <= 2 * 2**-8 * exact.abs().max(), told


# --- gradients --------------------------------------------------------------------------------------------


def close_gradients(
    where: str, composition: dict[str, Any], lengths: Size, width: Width, **options: Any
) -> Any:
    """The backward kernel's launch."""
    (wide, wide_v), (q_len, kv_len), (told, device) = widths(width), lengths, timed()
    shapes = (1, HEADS, q_len, wide), (1, 2, kv_len, wide), (1, 2, kv_len, wide_v)
    where = f"{where}, {lengths}, width {width}, {options}, {told}"
    with forward_on_cpu():
        return of_backward(judged(where, composition, shapes, device, **options))[1]


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_gradients(draw: int) -> None:
    size, lengths, width = random.choice(SIZES), random.choice(LENGTHS), (64, random.choice((96, 128)))[draw]
    name, inner = random.choice(("plain", "alibi", "softcap")), random.choice(sorted(INNER))
    composition = composed(name, inner, map_of(size, *lengths))
    main = close_gradients(f"{name}, {inner}, blocks {size}", composition, lengths, width)
    alone = width <= 96
    assert main.shape.block[0] == (256 if alone else 384)
    assert main.program.kernel.resident == (2 if alone else 1)


@pytest.mark.slow
def test_gradients_in_one_order() -> None:
    lengths = random.choice(LENGTHS)
    composition = {"mask": map_of((64, 64), *lengths).mask(causal)}
    close_gradients("ordered", composition, lengths, 64, schedule=Schedule(deterministic=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("width", (64, 96, 128), ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_all_gradients(size: Size, width: Width, inner: str) -> None:
    for lengths in LENGTHS:
        for name in SCORES:
            composition = composed(name, inner, map_of(size, *lengths))
            close_gradients(f"{name}, {inner}, {size}", composition, lengths, width)


# --- which kernels ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_block_size_is_another_kernel() -> None:
    """One program: the numbers of a map are captured."""
    q, k, v = (torch.randn(1, 1, 256, 64).bfloat16() for _ in range(3))
    found = []
    for edge in (64, 128, 64):
        blocks = BlockMap.from_dense(torch.rand(1, 256 // edge, 256 // edge) < 0.7, edge)
        attn = fa4flex.compile(blocks=blocks)
        with torch.no_grad(), ptxsim.device("sm_90a", sms=SMS) as gpu:
            out = attn(q, k, v)
        exact = attn(q.double(), k.double(), v.double())
        assert not gpu.findings and (out.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
        found.append(resident(gpu))
    assert found == [(256, 3), (384, 1), (256, 3)]


@pytest.mark.slow
def test_a_schedule_that_asks_for_tiles_gets_them() -> None:
    lengths = 150, 200
    composition = {"mask": map_of((64, 64), *lengths).mask(causal)}
    gpu = close("asked", composition, lengths, 64, schedule=Schedule(tile=(128, 64)))
    assert resident(gpu) == (384, 1)


@pytest.mark.slow
def test_registers_beyond_a_block_s_share_are_noticed() -> None:
    """Blocks that ask for more than they were launched with would wait for ever."""
    lengths = 64, 128
    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (64, 128, 128))
    split = {**registers.SHARED, 3: Split(24, 144)}
    with (
        patch.object(registers, "SHARED", split),
        patch.object(Split, "check", lambda *given: None),
        torch.no_grad(),
        ptxsim.device("sm_90a", sms=1) as gpu,
    ):
        fa4flex.compile(mask=map_of((64, 64), *lengths, heads=1).mask())(q, k, v)
    assert {finding.kind for finding in gpu.findings} == {"registers"}
