"""Engines that are asked for results that do not depend on the batch: bits of a sequence's results, alone and
among others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_refused_at_start import runner
from torch import Tensor

import ptxsim
from fa4flex.errors import UnsupportedError
from fa4flex.integrations.layers import LayerSettings
from fa4flex.integrations.paged_cache import INVARIANT, Batch, Caches, attend, write

HEADS, KV_HEADS, SIZE = 4, 2, 8


class Sequence:
    """New queries and all keys and values of one sequence."""

    def __init__(self, queries: int, keys: int, width: int, dtype: torch.dtype) -> None:
        self.q = (torch.randn(queries, HEADS, width) * 2).to(dtype)
        self.k, self.v = ((torch.randn(keys, KV_HEADS, width) * 2).to(dtype) for _ in range(2))


def laid_out(batch: list[Sequence]) -> tuple[Tensor, Caches, Tensor, Tensor, Tensor]:
    """Queries, caches, table, lengths and starts of a step, in pages of any order."""
    keys, used = [len(one.k) for one in batch], [-(-len(one.k) // SIZE) for one in batch]
    pages, spare = torch.randperm(sum(used) + 4), random.randrange(3)
    like = batch[0].k
    shape = len(pages), SIZE, *like.shape[1:]
    caches = torch.full(shape, torch.nan).to(like), torch.full(shape, torch.nan).to(like)
    table, slots = torch.full((len(batch), max(used) + spare), 0, dtype=torch.int32), []
    for row, (count, length) in enumerate(zip(used, keys, strict=True)):
        mine, pages = pages[:count], pages[count:]
        table[row, :count] = mine
        tokens = torch.arange(length)
        slots.append(mine[tokens // SIZE] * SIZE + tokens % SIZE)
    write(
        caches, (torch.cat([one.k for one in batch]), torch.cat([one.v for one in batch])), torch.cat(slots)
    )
    starts = torch.tensor([0, *(len(one.q) for one in batch)]).cumsum(0).int()
    return torch.cat([one.q for one in batch]), caches, table, torch.tensor(keys).int(), starts


def result(attn: Any, batch: list[Sequence], mine: Sequence, padding: int = 0) -> Tensor:
    q, caches, table, lengths, starts = laid_out(batch)
    q = torch.cat([q, q.new_full((padding, *q.shape[1:]), torch.nan)])
    out = attend(attn, q, caches, Batch.of_starts(table, lengths, starts, starts, invariant=True))
    assert out.shape == q.shape and not out[len(q) - padding :].any()
    at = next(n for n, one in enumerate(batch) if one is mine)
    return out[starts[at] : starts[at + 1]]


LAYERS = {
    "full": LayerSettings(0.3),
    "window": LayerSettings(0.3, window=9),
    "cap and ALiBi": LayerSettings(0.3, softcap=5.0, slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_bit_of_a_sequence_differs_whatever_else_is_in_its_batch(layer: str, dtype: torch.dtype) -> None:
    """30 batches of each kind and dtype: 270."""
    settings = LAYERS[layer]
    attn = LayerSettings(
        settings.scale, settings.window, settings.softcap, settings.slopes, INVARIANT
    ).attention({})

    def drawn() -> Sequence:
        queries = random.choice([1, 1, 1, 2, 5, random.randrange(1, 50)])
        return Sequence(queries, queries + random.choice([0, 3, random.randrange(120)]), 16, dtype)

    batches = 0
    for queries, keys in [(1, 1), (1, 40), (1, 90), (2, 30), (13, 13), (40, 77)]:
        mine = Sequence(queries, keys, 16, dtype)
        alone = result(attn, [mine], mine)
        assert alone.isfinite().all()
        for _ in range(5):
            others = [drawn() for _ in range(random.randrange(1, 7))]
            others.insert(random.randrange(len(others) + 1), mine)
            found = result(attn, others, mine, random.randrange(3))
            assert torch.equal(found, alone)
            batches += 1
    assert batches == 30


def test_single_queries_are_always_computed_by_the_launch_for_them() -> None:
    """Kernels differ in bits: which one computes a sequence follows from its own queries."""
    attn = LayerSettings(0.3, schedule=INVARIANT).attention({})
    calls: list[int] = []

    def recorded(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(q.ndim)
        if q.ndim == 4:
            assert q.shape[2] == 1
        else:
            assert (options["varlen"].cu_seqlens_q.diff() != 1).all()
        return attn(q, *args, **options)

    spy: Any = type("Spy", (), {"variant": attn.variant, "__call__": staticmethod(recorded)})()
    for counts in ([3, 1, 1], [1, 3, 1], [3, 1, 2, 1], [1, 1], [1, 0, 2, 1]):
        batch = [Sequence(n, n + 5, 16, torch.float32) for n in counts]
        q, caches, table, lengths, starts = laid_out(batch)
        found = attend(spy, q, caches, Batch.of_starts(table, lengths, starts, starts, invariant=True))
        exact = attend(
            attn,
            q.double(),
            (caches[0].double(), caches[1].double()),
            Batch.of_starts(table, lengths, starts, starts),
        )
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    assert calls == [4, 3, 4, 3, 4, 3, 4, 4, 3]


def test_tables_of_other_pools_follow_the_order() -> None:
    batch = [Sequence(n, n + 20, 16, torch.float32) for n in (3, 1, 2, 1)]
    q, caches, table, lengths, starts = laid_out(batch)
    attn = LayerSettings(0.3, schedule=INVARIANT).attention({})
    made = Batch.of_starts(table, lengths, starts, starts, invariant=True)
    out = attend(attn, q, caches, made)
    order = torch.randperm(len(caches[0]))
    moved = caches[0][order], caches[1][order]
    other = torch.argsort(order)[table.long()].int()
    assert torch.equal(attend(attn, q, moved, made.with_table(other)), out)
    assert not torch.equal(attend(attn, q, moved, made), out)


@contextmanager
def simulated(arch: str) -> Iterator[None]:
    with torch.no_grad(), ptxsim.device(arch, random.randrange(99), "random", sms=2) as gpu:
        yield
    assert not gpu.findings, gpu.report()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("queries", [1, 5])
def test_no_bit_differs_on_a_gpu(arch: str, queries: int) -> None:
    """Alone, in front of a chunk and behind it."""
    attn = LayerSettings(0.3, schedule=INVARIANT).attention({})
    mine = Sequence(queries, 150, 64, torch.bfloat16)
    one, chunk = Sequence(1, 40, 64, torch.bfloat16), Sequence(70, 90, 64, torch.bfloat16)
    found = []
    for batch in ([mine], [mine, chunk, one], [one, chunk, mine]):
        with simulated(arch):
            found.append(result(attn, batch, mine))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_vllm_is_asked_by_its_variable(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_engine import SCALE, STEPS, Definition, Engine

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    engine = Engine(vllm)
    assert vllm.Backend.supports_batch_invariance()
    assert engine.impl._attention(None, torch.device("cpu")).variant.schedule == INVARIANT
    for number, counts in enumerate([*STEPS, {0: 3, 1: 1, 2: 1}]):
        found, q = engine.step(counts, padded=number % 2 * 3)
        torch.testing.assert_close(found[: len(q)], engine.history.expected(Definition(SCALE), q, counts))
        metadata = engine.builder.build(0, engine.common(counts, 0))
        assert metadata.batch.singles == sum(n == 1 for n in counts.values())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    plain = Engine(vllm)
    assert plain.impl._attention(None, torch.device("cpu")).variant.schedule.split is None


OPTIONS = {
    "enable_chunked_prefill": "--no-enable-chunked-prefill",
    "enable_prefix_caching": "--no-enable-prefix-caching",
    "speculative_config": "no --speculative-config",
}


@pytest.mark.parametrize("asked", [*((name,) for name in OPTIONS), tuple(OPTIONS)[:2], tuple(OPTIONS)])
def test_vllm_may_not_cut_prompts_then(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]
) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill="enable_chunked_prefill" in asked),
        cache_config=SimpleNamespace(enable_prefix_caching="enable_prefix_caching" in asked),
        speculative_config=SimpleNamespace() if "speculative_config" in asked else None,
    )
    vllm.MetadataBuilder(None, [], config, torch.device("cpu"))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    options = " ".join(OPTIONS[name] for name in asked)
    with pytest.raises(UnsupportedError, match=f"{' and '.join(asked)}: (.|\\n)*serve with {options},"):
        vllm.MetadataBuilder(None, [], config, torch.device("cpu"))


def test_sglang_is_asked_by_its_setting(sglang: ModuleType) -> None:
    asked = {"enable_deterministic_inference": True, "chunked_prefill_size": -1}
    assert sglang.Backend(runner(settings=asked)).schedule == INVARIANT
    assert sglang.Backend(runner()).schedule is None
    with pytest.raises(UnsupportedError, match="--chunked-prefill-size -1"):
        sglang.Backend(runner(settings=asked | {"chunked_prefill_size": 8192}))
    sglang.Backend(runner(settings={"chunked_prefill_size": 8192}))


def test_sglang_knows_the_name_for_deterministic_inference(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import server_args

    known: list[str] = []
    monkeypatch.setattr(server_args, "DETERMINISTIC_ATTENTION_BACKEND_CHOICES", known, raising=False)
    monkeypatch.setattr(
        server_args, "add_deterministic_attention_backend_choices", known.extend, raising=False
    )
    sglang.register()
    sglang.register()
    assert known == ["fa4flex"]
