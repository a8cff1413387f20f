"""vLLM's caches of 8 bits, encoders and batches that are not causal, captured graphs, and keys over ranks."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engines import History
from torch import Tensor
from vllm_engine import BLOCK_SIZE, LAYOUTS, NAME, SCALE, STEPS, Definition, Engine

import fa4flex
from fa4flex.errors import UnsupportedError
from fa4flex.integrations import layers, paged_cache, vllm_context
from fa4flex.integrations.vllm_context import local_lengths

E4M3 = torch.float8_e4m3fn

# --- 8 bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5]])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_caches_of_8_bits_are_written_with_scales_and_read(
    vllm: ModuleType, layout: str, name: str, per: str
) -> None:
    """Bytes are keys over the layer's scales, which may be its own for each head, and change."""
    shape = () if per == "tensor" else (2,)
    scales = {"_k_scale": torch.rand(shape) * 0.1 + 0.02, "_v_scale": torch.rand(shape) * 0.1 + 0.02}
    engine = Engine(
        vllm, layout, History(width=16), torch.uint8, scales, kv_cache_dtype=name, sliding_window=9
    )
    history, definition = engine.history, Definition(SCALE, window=9)
    for number, counts in enumerate(STEPS):
        found, q = engine.step(counts, padded=number % 2 * 3)
        for n in counts:
            for which, (kept, scale) in enumerate(zip((history.k, history.v), scales.values(), strict=True)):
                slots = torch.arange(history.length(n))
                blocks = engine.table[n][slots // BLOCK_SIZE].long()
                cells = engine.cache.view(E4M3)[blocks, :, slots % BLOCK_SIZE]
                held = cells[..., 16 * which : 16 * (which + 1)].double() * scale.double().view(-1, 1)
                assert ((held - kept[n]).abs() <= kept[n].abs() / 16 + scale.max() * 2**-9).all()
                kept[n] = held
        torch.testing.assert_close(found[: len(q)], history.expected(definition, q, counts))
        assert not found[len(q) :].any()


def test_layers_may_keep_16_bits_beside_them(vllm: ModuleType) -> None:
    impl = vllm.Backend.get_impl_cls()
    assert impl(4, 64, SCALE, 2, kv_cache_dtype="auto")._scales(None) is None


# --- encoders, and batches that are not causal ----------------------------------------------------------


def expected(q: Tensor, k: Tensor, v: Tensor, window: int | None, slopes: list[float] | None) -> Tensor:
    """All keys before and after, within a window to either side: q [n, H, D], the last of k and v."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    apart = (torch.arange(len(k) - len(q), len(k)).view(-1, 1) - torch.arange(len(k))).abs()
    s = torch.einsum("nhd,thd->hnt", q, k) * SCALE
    s = s if slopes is None else s - torch.tensor(slopes).view(-1, 1, 1) * apart
    s = s if window is None else s.masked_fill(apart >= window, -torch.inf)
    return torch.einsum("hnt,thd->nhd", s.softmax(-1), v)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 4},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [0, 3])
def test_encoders_attend_among_the_tokens_of_a_step(vllm: ModuleType, kind: str, padded: int) -> None:
    """No cache is read or written; vLLM's place of one is empty."""
    engine, asked = Engine(vllm, attn_type="encoder_only", **KINDS[kind]), KINDS[kind]
    assert vllm.Backend.supports_attn_type("encoder_only")
    engine.cache, engine.causal = torch.tensor([]), False
    for counts in ({0: 11, 1: 3, 2: 1}, {0: 1, 1: 1}, {0: 5}):
        engine.history = History()
        found, q = engine.step(counts, padded)
        want = [
            expected(
                part,
                engine.history.k[n],
                engine.history.v[n],
                asked.get("sliding_window"),
                asked.get("alibi_slopes"),
            )
            for n, part in zip(counts, q.split(list(counts.values())), strict=True)
        ]
        torch.testing.assert_close(found[: len(q)], torch.cat(want))
        assert not found[len(q) :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_not_causal_see_all_keys(vllm: ModuleType, kind: str) -> None:
    engine, asked = Engine(vllm, **KINDS[kind]), KINDS[kind]
    assert vllm.Backend.supports_non_causal()
    for number, counts in enumerate(STEPS):
        engine.causal = number % 2 == 0
        found, q = engine.step(counts)
        if not engine.causal:
            want = [
                expected(
                    part,
                    engine.history.k[n],
                    engine.history.v[n],
                    asked.get("sliding_window"),
                    asked.get("alibi_slopes"),
                )
                for n, part in zip(counts, q.split(list(counts.values())), strict=True)
            ]
            torch.testing.assert_close(found, torch.cat(want))


# --- captured graphs ------------------------------------------------------------------------------------


def config(ranks: int = 1) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks, pipeline_parallel_size=1),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_num_attention_heads=lambda parallel: 32),
    )


def spec(**asked: Any) -> Any:
    usual = {"head_size": 128, "num_kv_heads": 8, "block_size": 16, "dtype": torch.bfloat16}
    return SimpleNamespace(**usual | asked)


GRAPHS: dict[str, tuple[tuple[int, int], dict[str, Any], int, bool]] = {
    "Hopper": ((9, 0), {}, 1, True),
    "Hopper, 256": ((9, 0), {"head_size": 256}, 1, True),
    "Hopper, 8 bits": ((9, 0), {"dtype": torch.uint8}, 1, True),
    "Blackwell": ((10, 0), {}, 1, True),
    "Blackwell, 256": ((10, 0), {"head_size": 256}, 1, True),
    "Blackwell, 8 bits": ((10, 0), {"dtype": torch.uint8}, 1, False),
    "older": ((8, 0), {}, 1, False),
    "ranks": ((9, 0), {}, 2, False),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_graphs_of_decoding_are_captured_where_pages_are_read_in_place(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    capability, asked, ranks, captured = GRAPHS[case]
    ask = vllm.MetadataBuilder.get_cudagraph_support
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ask(config(ranks), spec(**asked)) == AttentionCGSupport.NEVER
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    wanted = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if captured else AttentionCGSupport.NEVER
    assert ask(config(ranks), spec(**asked)) == wanted
    encoder = type("EncoderOnlyAttentionSpec", (SimpleNamespace,), {})(**vars(spec(**asked)))
    assert ask(config(ranks), encoder) == AttentionCGSupport.NEVER


def test_replays_read_buffers_of_the_same_addresses(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured call was handed vLLM's buffers: with other contents, the same call has the results of the
    next step, which has fewer requests than it was captured for."""
    engine, calls = Engine(vllm), []
    engine.step({0: 11, 1: 3, 2: 6})
    engine.history.grow({0: 1, 1: 1, 2: 1})
    common = engine.common({0: 1, 1: 1, 2: 1}, 0)
    names = "block_table_tensor", "seq_lens", "slot_mapping", "query_start_loc"
    buffers = {name: getattr(common, name) for name in names}
    metadata = engine.builder.build_for_cudagraph_capture(common)

    def recorded(attn: Any, q: Tensor, caches: Any, batch: Any, **options: Any) -> Tensor:
        calls.append(batch)
        return paged_cache.attend(attn, q, caches, batch, **options)

    monkeypatch.setattr(vllm, "attend", recorded)
    q, output = torch.randn(3, 4, 8, dtype=torch.float64), torch.empty(3, 4, 8, dtype=torch.float64)
    engine.impl.forward(engine.layer, q, q, q, engine.cache, metadata, output)
    (batch,) = calls
    assert batch.starts is None and batch.others is None and batch.moved is None
    assert batch.table.data_ptr() == buffers["block_table_tensor"].data_ptr()
    assert batch.lengths.data_ptr() == buffers["seq_lens"].data_ptr()
    assert metadata.slot_mapping.data_ptr() == buffers["slot_mapping"].data_ptr()

    engine.history = History()
    engine.cache.fill_(torch.nan)
    engine.step({0: 4, 2: 9})
    counts = {2: 1, 0: 1}
    q2, k, v = engine.history.grow(counts)
    new = engine.common(counts, 1)  # one request of padding
    for name in names:
        buffers[name].copy_(getattr(new, name))
    k, v = (torch.cat([x, x[:1]]) for x in (k, v))
    engine.impl.do_kv_cache_update(engine.layer, k, v, engine.cache, metadata.slot_mapping)
    q.copy_(torch.cat([q2, q2[:1]]))
    engine.impl.forward(engine.layer, q, q, q, engine.cache, metadata, output)
    torch.testing.assert_close(output[:2], engine.history.expected(Definition(SCALE), q2, counts))
    assert output.isfinite().all()


@pytest.mark.parametrize("counts", [{0: 2, 1: 1}, {0: 1, 1: 3}, {0: 2}])
def test_graphs_of_chunks_are_refused(vllm: ModuleType, counts: dict[int, int]) -> None:
    engine = Engine(vllm)
    engine.history.grow(counts)
    with pytest.raises(UnsupportedError, match=r"a captured graph of \d queries of \d sequences"):
        engine.builder.build_for_cudagraph_capture(engine.common(counts, 0))


# --- keys over ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 4])
def test_tokens_of_a_rank_are_counted(ranks: int, interleave: int) -> None:
    lengths = torch.arange(40)
    for rank in range(ranks):
        found = local_lengths(lengths, ranks, rank, interleave)
        assert found.tolist() == [
            sum(t // interleave % ranks == rank for t in range(n)) for n in lengths.tolist()
        ]


RANKS, HEADS, WIDTH = 2, 4, 8


def as_rank(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Layers that are made from now on are those of one of so many ranks."""
    monkeypatch.setattr(vllm.Impl, "dcp_world_size", RANKS, raising=False)
    monkeypatch.setattr(vllm.Impl, "dcp_rank", rank, raising=False)
    if importlib.util.find_spec("vllm.distributed") is not None:
        state = importlib.import_module("vllm.distributed.parallel_state")
        monkeypatch.setattr(state, "get_dcp_world_size_and_rank", lambda sharded: (RANKS, rank))


class Ranks:
    """Ranks of one layer, in turn: each has some query heads, the same KV head, and its share of the keys."""

    def __init__(
        self, vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, interleave: int, **options: Any
    ) -> None:
        self.interleave, self.history = interleave, History(HEADS * RANKS, 1, WIDTH)
        parallel = SimpleNamespace(cp_kv_cache_interleave_size=interleave, dcp_comm_backend="ag_rs")
        monkeypatch.setattr(vllm, "current_config", lambda: SimpleNamespace(parallel_config=parallel))
        monkeypatch.setattr(vllm_context, "_collectives", lambda by_all_to_all: (self, self.combine))
        self.impls, self.caches = [], []
        for rank in range(RANKS):
            as_rank(vllm, monkeypatch, rank)
            self.impls.append(vllm.Impl(HEADS, WIDTH, SCALE, 1, **options))
            self.caches.append(torch.full((20, 1, BLOCK_SIZE, 2 * WIDTH), torch.nan, dtype=torch.float64))
        self.table = torch.randperm(20)[: 3 * 4].view(3, 4).int()
        self.q = self.parts = None

    def all_gather(self, q: Tensor, dim: int) -> Tensor:
        assert dim == 1 and torch.equal(q, self.q[:, self.rank * HEADS : (self.rank + 1) * HEADS])
        return self.q

    def combine(self, out: Tensor, lse: Tensor, group: Any, return_lse: bool) -> tuple[Tensor, Tensor]:
        """Results of this rank's heads, by natural log-sum-exps [T, heads], as vLLM combines."""
        assert group is self and return_lse
        torch.testing.assert_close((out, lse.T), self.parts[self.rank])
        whole, sums = fa4flex.merge(*zip(*self.parts, strict=True))
        mine = slice(self.rank * HEADS, (self.rank + 1) * HEADS)
        return whole[:, mine], sums[mine].T

    def step(self, vllm: ModuleType, counts: dict[int, int], padded: int) -> tuple[Tensor, Tensor]:
        """(output of all heads, queries)"""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        q, k, v = self.history.grow(counts)
        starts = torch.tensor([0, *counts.values(), *[0] * padded]).cumsum(0).int()
        lengths = torch.tensor([*(self.history.length(n) for n in counts), *[0] * padded]).int()
        table = torch.cat([self.table[list(counts)], torch.zeros(padded, 4, dtype=torch.int32)])
        builder = vllm.MetadataBuilder(None, [], None, torch.device("cpu"))
        made = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(lengths),
            num_actual_tokens=len(q), max_query_len=max(counts.values()), max_seq_len=int(lengths.max()),
            block_table_tensor=table, slot_mapping=torch.empty(0), causal=True,
        )  # fmt: skip
        metadata, layer, outputs = builder.build(0, made), SimpleNamespace(layer_name=NAME), []
        for rank, (impl, cache) in enumerate(zip(self.impls, self.caches, strict=True)):
            slots = [
                self.slot(n, t) if t // self.interleave % RANKS == rank else -1
                for n, count in counts.items()
                for t in range(self.history.length(n) - count, self.history.length(n))
            ]
            impl.do_kv_cache_update(layer, k, v, cache, torch.tensor(slots))
        self.q = q
        self.parts = [
            impl._over_ranks.over_context(q, impl._caches(cache), metadata)
            for impl, cache in zip(self.impls, self.caches, strict=True)
        ]
        for rank, (impl, cache) in enumerate(zip(self.impls, self.caches, strict=True)):
            self.rank = rank
            mine = torch.cat([q, q.new_full((padded, *q.shape[1:]), 7.0)])[:, rank * HEADS :][:, :HEADS]
            output = torch.full((len(mine), HEADS, WIDTH), torch.nan, dtype=q.dtype)
            impl.forward(layer, mine, k, v, cache, metadata, output)
            assert not output[len(q) :].any()
            outputs.append(output[: len(q)])
        return torch.cat(outputs, 1), q

    def slot(self, n: int, t: int) -> int:
        place = int(local_lengths(torch.tensor(t), RANKS, t // self.interleave % RANKS, self.interleave))
        return int(self.table[n, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("cap", [None, 0.8])
def test_ranks_together_have_the_results_of_one(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, interleave: int, cap: float | None
) -> None:
    """Also where a rank has no key of a sequence, and where no sequence has earlier ones."""
    ranks = Ranks(vllm, monkeypatch, interleave, logits_soft_cap=cap)
    impl = ranks.impls[0]
    assert impl.can_return_lse_for_decode and impl.lse_base_on_e and impl.supports_dcp
    for number, counts in enumerate([{0: 11, 1: 2}, {0: 1, 1: 5, 2: 17}, {2: 1, 0: 1, 1: 1}, {1: 2, 0: 1}]):
        found, q = ranks.step(vllm, counts, number % 2)
        torch.testing.assert_close(found, ranks.history.expected(Definition(SCALE, softcap=cap), q, counts))


REFUSED: dict[str, dict[str, Any]] = {
    "sliding windows": {"sliding_window": 4},
    "ALiBi": {"alibi_slopes": [0.5] * 4},
    "sinks": {"sinks": torch.zeros(4)},
    "2 KV heads on each rank": {"num_kv_heads": 2},
    "a cache of fp8": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_layers_that_need_positions_are_refused_over_ranks(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    as_rank(vllm, monkeypatch, 0)
    usual = {"num_heads": 4, "head_size": 64, "scale": SCALE, "num_kv_heads": 1}
    assert vllm.Impl(**usual)._over_ranks is not None
    with pytest.raises(UnsupportedError, match=f"decode_context_parallel_size with {words}\n"):
        vllm.Impl(**usual | REFUSED[words])


def test_mods_are_refused_over_ranks(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(vllm, monkeypatch, 1)
    layers.assign("softcap(3.0)")
    with pytest.raises(UnsupportedError, match="decode_context_parallel_size with mods of layers"):
        ranks.step(vllm, {0: 3}, 0)
