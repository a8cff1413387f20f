"""SGLang's backend, driven as its model runner does: extended and decoding batches over a pool of tokens."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Definition, History
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.integrations import layers

SCALE = 0.4
REQUESTS, CONTEXT, TOKENS = 5, 48, 160
PLACES = {0: 3, 1: 1, 2: 4}
"""Each sequence's row of the pool of requests."""
STEPS = [{0: 11, 1: 3}, {2: 17, 1: 5, 0: 1}, {2: 1, 0: 1, 1: 1}, {1: 1, 2: 1}]


class Mode(SimpleNamespace):
    """ForwardMode: "extend", "decode", "idle", "verify" or "diffusion"."""

    def is_idle(self) -> bool:
        return self.name == "idle"

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_mixed(self) -> bool:
        return False

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_dllm_extend(self) -> bool:
        return self.name == "diffusion"


class Pool:
    """Keys and values of single tokens, [tokens, Hkv, D]."""

    def __init__(self, history: History, tokens: int = TOKENS) -> None:
        shape = tokens, history.kv_heads, history.width
        self.k, self.v = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2))

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.k[slots], self.v[slots] = k, v


class SmallPool(Pool):
    """The same of 8 bits, which SGLang's own writes do not reach."""

    dtype = torch.float8_e4m3fn

    def __init__(self, history: History, tokens: int = TOKENS) -> None:
        super().__init__(history, tokens)
        self.k, self.v = (x.to(self.dtype) for x in (self.k, self.v))

    def set_kv_buffer(self, *args: Any) -> None:
        raise AssertionError("not with scales")


class TwoPools(Pool):
    """Layers' own pool and a smaller one for layer 3, whose slots are those of tokens that it still holds."""

    layers_mapping: dict[int, tuple[int, bool]] = {3: (0, True), 4: (0, False)}  # noqa: RUF012

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.small, self.mapping = Pool(history, 64), torch.full((TOKENS + 1,), -1)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.small.k if layer_id == 3 else self.k

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.small.v if layer_id == 3 else self.v

    def translate_loc_from_full_to_swa(self, slots: Tensor) -> Tensor:
        return self.mapping[slots]

    def set_kv_buffer(self, layer: Any, slots: Any, k: Tensor, v: Tensor) -> None:
        """SGLang gives slots of both pools from 0.5.14 on, and before it those of the first."""
        first = getattr(slots, "loc", slots)
        if layer.layer_id != 3:
            super().set_kv_buffer(layer, first, k, v)
        else:
            self.small.set_kv_buffer(layer, getattr(slots, "swa_loc", self.mapping[first]), k, v)

    def hold(self, slots: Tensor) -> None:
        free = [slot for slot in range(64) if slot not in self.mapping.tolist()]
        self.mapping[slots] = torch.tensor(free[: len(slots)])

    def drop(self, slots: Tensor) -> None:
        self.mapping[slots] = -1


class Runner:
    """Model runner with one layer: slots in random order, runs of page_size kept together."""

    def __init__(self, sglang: ModuleType, page_size: int = 1, pool: type[Pool] = Pool, **asked: Any) -> None:
        width = asked.get("qk_head_dim", 8)
        self.history, self.page_size = History(width=width), page_size
        pages = torch.randperm(TOKENS // page_size)[: REQUESTS * CONTEXT // page_size // 2]
        slots = (pages.view(-1, 1) * page_size + torch.arange(page_size)).flatten()
        unused = 10**6 if pool is Pool else 0  # TwoPools translates all slots of a row
        self.table = torch.full((REQUESTS, CONTEXT), unused, dtype=torch.int32)
        for row, mine in zip(PLACES.values(), slots.split(CONTEXT // 2 // page_size * page_size)):
            self.table[row, : len(mine)] = mine
        self.token_to_kv_pool = pool(self.history)
        self.req_to_token_pool = SimpleNamespace(req_to_token=self.table)
        self.backend = sglang.Backend(self)
        settings = {
            "scaling": SCALE, "layer_id": 3, "logit_cap": 0.0, "sliding_window_size": -1, "v_head_dim": width,
            "tp_q_head_num": 4, "qk_head_dim": 8, "is_cross_attention": False, "pos_encoding_mode": "NONE",
        }  # fmt: skip
        self.layer = SimpleNamespace(**settings | asked)

    def batch(self, counts: dict[int, int], name: str) -> Any:
        lengths = [self.history.length(n) for n in counts]
        slots = [
            self.table[PLACES[n], length - counts[n] : length]
            for n, length in zip(counts, lengths, strict=True)
        ]
        return SimpleNamespace(
            batch_size=len(counts), spec_info=None, forward_mode=Mode(name=name),
            req_pool_indices=torch.tensor([PLACES[n] for n in counts]),
            seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens=torch.tensor(list(counts.values())),
            extend_seq_lens_cpu=list(counts.values()), out_cache_loc=torch.cat(slots).long(),
        )  # fmt: skip

    def step(self, counts: dict[int, int], **options: Any) -> tuple[Tensor, Tensor]:
        """(output [T, Hq, D], its queries)"""
        q, k, v = self.history.grow(counts)
        batch = self.batch(counts, "decode" if set(counts.values()) == {1} else "extend")
        if isinstance(self.token_to_kv_pool, TwoPools):
            self.token_to_kv_pool.hold(batch.out_cache_loc)
        self.backend.init_forward_metadata(batch)
        return self.backend.forward(q.flatten(1), k, v, self.layer, batch, **options).view(q.shape), q


SINKS = torch.linspace(-1, 1, 4, dtype=torch.float64)
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], Definition]] = {
    "full": ({}, {}, Definition(SCALE)),
    "window": ({"sliding_window_size": 3}, {}, Definition(SCALE, window=4)),
    "softcap": ({"logit_cap": 0.8}, {}, Definition(SCALE, softcap=0.8)),
    "sinks": ({"sliding_window_size": 0}, {"sinks": SINKS}, Definition(SCALE, window=1, sinks=SINKS)),
}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_are_by_definition(sglang: ModuleType, name: str, page_size: int) -> None:
    asked, options, definition = LAYERS[name]
    runner = Runner(sglang, page_size, **asked)
    for counts in STEPS:
        found, q = runner.step(counts, **options)
        torch.testing.assert_close(found, runner.history.expected(definition, q, counts))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("scaled", [True, False])
def test_pools_of_8_bits_are_written_with_scales_and_read(
    sglang: ModuleType, page_size: int, scaled: bool
) -> None:
    scales = (torch.tensor(0.05), torch.tensor([0.03])) if scaled else (None, None)
    asked = {"qk_head_dim": 16, "k_scale": scales[0], "v_scale": scales[1], "sliding_window_size": 8}
    runner = Runner(sglang, page_size, SmallPool, **asked)
    pool, history = runner.token_to_kv_pool, runner.history
    for counts in STEPS:
        found, q = runner.step(counts)
        for n in counts:
            slots = runner.table[PLACES[n], : history.length(n)].long()
            for kept, buffer, scale in zip((history.k, history.v), (pool.k, pool.v), scales, strict=True):
                held = buffer[slots].double() * (1.0 if scale is None else scale.double())
                least = 2**-9 if scale is None else scale.item() * 2**-9
                assert ((held - kept[n]).abs() <= kept[n].abs() / 16 + least).all()
                kept[n] = held
        torch.testing.assert_close(found, history.expected(Definition(SCALE, window=9), q, counts))


def test_assigned_mods_are_found_by_number(sglang: ModuleType) -> None:
    layers.assign("sliding_window(2)", layers=4)
    layers.assign_from("0,2-4 = softcap(0.5); *.9.* = alibi")
    runner = Runner(sglang)
    found, q = runner.step({0: 7})
    expected = runner.history.expected(Definition(SCALE, softcap=0.5), q, {0: 7})
    torch.testing.assert_close(found, expected)


def test_sliding_layers_have_a_pool_of_their_own(sglang: ModuleType) -> None:
    """Tokens behind the window are dropped from it; the other layers still read all of them."""
    runner = Runner(sglang, pool=TwoPools, sliding_window_size=3)
    pool = runner.token_to_kv_pool
    assert isinstance(pool, TwoPools)
    for counts in STEPS:
        found, q = runner.step(counts)
        expected = runner.history.expected(Definition(SCALE, window=4), q, counts)
        torch.testing.assert_close(found, expected)
        for sequence, row in PLACES.items():
            pool.drop(runner.table[row, : max(runner.history.length(sequence) - 4, 0)].long())


def test_slots_are_those_of_both_pools_where_there_are_two(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, slots = Runner(sglang, pool=TwoPools), torch.tensor([3, 5])
    pool = runner.token_to_kv_pool
    assert isinstance(pool, TwoPools)
    pool.mapping[slots] = torch.tensor([1, 0])
    module = SimpleNamespace(KVWriteLoc=lambda loc, swa_loc: (loc, swa_loc.tolist()))
    for name in ("sglang.srt.mem_cache", "sglang.srt.mem_cache.memory_pool"):
        monkeypatch.setitem(sys.modules, name, module)
    assert runner.backend._places(slots) == (slots, [1, 0])
    assert Runner(sglang).backend._places(slots) is slots
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.memory_pool", None)
    assert runner.backend._places(slots) is slots


def capture(backend: Any, decode: Any, bs: int, *, early: bool) -> None:
    """Before a graph of `bs` sequences is captured, by the hooks of SGLang up to 0.5.12 if `early`."""
    requests, lengths = torch.zeros(bs, dtype=torch.long), torch.ones(bs, dtype=torch.long)
    if early:
        backend.init_forward_metadata_capture_cuda_graph(bs, bs, requests, lengths, None, decode, None)
        return
    batch = SimpleNamespace(
        batch_size=bs, forward_mode=decode, req_pool_indices=requests, seq_lens=lengths, seq_lens_cpu=lengths,
        spec_info=None,
    )  # fmt: skip
    backend.init_forward_metadata_out_graph(batch, in_capture=True)


def before_replay(backend: Any, batch: Any, *, early: bool) -> None:
    if not early:
        backend.init_forward_metadata_out_graph(batch)
        return
    given = batch.req_pool_indices, batch.seq_lens, 0, None, batch.forward_mode, None, batch.seq_lens_cpu
    backend.init_forward_metadata_replay_cuda_graph(batch.batch_size, *given)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("pool", [Pool, TwoPools])
def test_replays_read_buffers_that_were_captured(
    sglang: ModuleType, pool: type[Pool], *, early: bool
) -> None:
    """A graph keeps addresses: after the capture nothing but contents may change."""
    page_size, asked = (4, {}) if pool is Pool else (1, {"sliding_window_size": 3})
    runner = Runner(sglang, page_size, pool, **asked)
    counts = {2: 1, 0: 1, 1: 1}
    runner.step({0: 11, 1: 3, 2: 6})
    backend, decode = runner.backend, Mode(name="decode")
    backend.init_cuda_graph_state(4, 4)
    for bs in (4, 3):
        capture(backend, decode, bs, early=early)
    step = backend._step
    held = [step.full.table, step.full.lengths, *([] if step.sliding is None else [step.sliding.table])]
    addresses = [x.data_ptr() for x in held]
    for _ in range(3):
        q, k, v = runner.history.grow(counts)
        given = runner.batch(counts, "decode")
        if isinstance(runner.token_to_kv_pool, TwoPools):
            runner.token_to_kv_pool.hold(given.out_cache_loc)
        before_replay(backend, given, early=early)
        assert backend._step is step and [x.data_ptr() for x in held] == addresses
        found = backend.forward(q.flatten(1), k, v, runner.layer, given).view(q.shape)
        layer = Definition(SCALE, window=4 if asked else None)
        torch.testing.assert_close(found, runner.history.expected(layer, q, counts))


def test_only_graphs_of_decoding_are_captured(sglang: ModuleType) -> None:
    backend = Runner(sglang).backend
    backend.init_cuda_graph_state(4, 4)
    for mode in ("extend", "verify"):
        with pytest.raises(UnsupportedError, match="other passes than decoding"):
            capture(backend, Mode(name=mode), 2, early=False)


def test_engine_finds_what_it_reads_of_a_backend(sglang: ModuleType) -> None:
    runner = Runner(sglang)
    assert runner.backend.token_to_kv_pool is runner.token_to_kv_pool
    assert runner.backend.req_to_token_pool is runner.req_to_token_pool
    assert runner.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_graphs_over_gathered_pages_are_refused(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa4flex.integrations import paged_cache
    from fa4flex.kernels.plan.target import TARGETS

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for target in TARGETS:
        monkeypatch.setattr(paged_cache, "target_of", lambda device, target=target: target)
        assert paged_cache.reads_pages(), target.name

    def unknown(device: torch.device) -> None:
        raise UnsupportedError("a GPU", "another", "move the tensors")

    monkeypatch.setattr(paged_cache, "target_of", unknown)
    assert not paged_cache.reads_pages()
    with pytest.raises(UnsupportedError, match="--disable-cuda-graph"):
        Runner(sglang).backend.init_cuda_graph_state(4, 4)


def test_idle_passes_and_padding_give_zeros(sglang: ModuleType) -> None:
    runner = Runner(sglang)
    batch = SimpleNamespace(forward_mode=Mode(name="idle"), out_cache_loc=torch.zeros(0, dtype=torch.long))
    runner.backend.init_forward_metadata(batch)
    q = torch.randn(2, 32, dtype=torch.float64)
    assert not runner.backend.forward_extend(q, None, None, runner.layer, batch).any()
    q, k, v = runner.history.grow({0: 3})
    batch = runner.batch({0: 3}, "extend")
    runner.backend.init_forward_metadata(batch)
    runner.token_to_kv_pool.set_kv_buffer(runner.layer, batch.out_cache_loc, k, v)
    padded = torch.cat([q.flatten(1), torch.ones(2, 32, dtype=torch.float64)])
    found = runner.backend.forward_extend(padded, None, None, runner.layer, batch)
    torch.testing.assert_close(found[:3].view(q.shape), runner.history.expected(Definition(SCALE), q, {0: 3}))
    assert not found[3:].any()


def test_what_cannot_be_done_is_refused(sglang: ModuleType) -> None:
    runner = Runner(sglang)
    runner.history.grow({0: 3})
    for mode, given in (("verify", "drafted tokens"), ("diffusion", "blocks of a diffusion model")):
        batch = runner.batch({0: 3}, mode)
        with pytest.raises(UnsupportedError, match=given):
            runner.backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedError, match="k_rope"):
        runner.backend.forward_extend(None, None, None, runner.layer, batch, k_rope=torch.ones(1))
    runner.layer.use_irope = True
    with pytest.raises(UnsupportedError, match="use_irope"):
        runner.backend.forward_extend(None, None, None, runner.layer, batch)
    runner.layer.use_irope, runner.layer.is_cross_attention = False, True
    with pytest.raises(UnsupportedError, match="not a decoder's own"):
        runner.backend.forward_extend(None, None, None, runner.layer, batch)
    with pytest.raises(UnsupportedError, match=r"torch\.float64 for queries of torch\.float16"):
        runner.backend._caches(3, torch.float16)


def test_it_registers_by_its_name(sglang: ModuleType) -> None:
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    sglang.register()
    sglang.register()
    assert ATTENTION_BACKENDS["fa4flex"] is sglang.Backend
    assert server_args.ATTENTION_BACKEND_CHOICES.count("fa4flex") == 1


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_sglang_itself_makes_the_backend(sglang: ModuleType) -> None:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    assert issubclass(sglang.Backend, AttentionBackend) and not sglang.Backend.__abstractmethods__
