"""vLLM's backend, driven as its engine does: steps of prefill chunks and decoded tokens over one cache."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from engines import STUBS, Definition
from vllm_engine import APART, LAYOUTS, MOST_BLOCKS, SCALE, TOGETHER, Engine, run

from fa4flex.errors import UnsupportedError
from fa4flex.integrations import layers

SLOPES = [0.5, 0.25, 0.125, 0.0625]
LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 4},
    "softcap": {"logits_soft_cap": 0.8},
    "alibi": {"alibi_slopes": SLOPES, "logits_soft_cap": 0.8},
    "sinks": {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64), "sliding_window": 6},
}


@pytest.mark.parametrize("name", LAYERS)
def test_steps_are_by_definition(vllm: ModuleType, name: str) -> None:
    given = LAYERS[name]
    run(
        Engine(vllm, **given),
        Definition(
            SCALE,
            given.get("sliding_window"),
            given.get("logits_soft_cap"),
            given.get("alibi_slopes"),
            given.get("sinks"),
        ),
    )


@pytest.mark.parametrize("layout", [*LAYOUTS, *APART, TOGETHER, None])
def test_caches_may_be_laid_out_in_any_order(vllm: ModuleType, layout: str | None) -> None:
    run(Engine(vllm, layout), Definition(SCALE))


def test_values_may_be_narrower_than_keys(vllm: ModuleType) -> None:
    cache = torch.arange(5 * 2 * 8 * 12).view(5, 2, 8, 12)
    keys, values = Engine(vllm).impl._caches(cache)
    for block, head, place in [(1, 1, 2), (4, 0, 7)]:
        assert keys[block, place, head].equal(cache[block, head, place, :8])
        assert values[block, place, head].equal(cache[block, head, place, 8:])


def farther_is_less(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
    return score - 0.1 * (h + 1) * (q_idx + kv_len - q_len - kv_idx)


def test_assigned_mods_come_on_top_and_may_change(vllm: ModuleType) -> None:
    """A VARIANT by name, then functions for the layer's number; other layers are not meant."""
    engine = Engine(vllm, logits_soft_cap=0.8, sliding_window=9)
    layers.assign("softcap(0.3), sliding_window(3)", layers=[4])
    layers.assign("sliding_window(5)", layers="*.self_attn.attn")
    run(engine, Definition(SCALE, window=5, softcap=0.8))
    layers.assign(score_mod=farther_is_less, mask=lambda b, h, q, k: k % 3 != 1, layers=3)
    definition = Definition(
        SCALE, 9, 0.8, bias=lambda h, i, j: -0.1 * (h + 1) * (i - j), allows=lambda i, j: j % 3 != 1
    )
    found, q = engine.step({1: 4, 0: 1})
    torch.testing.assert_close(found, engine.history.expected(definition, q, {1: 4, 0: 1}))


def test_tables_are_replaced_and_shared_caches_are_not_written(vllm: ModuleType) -> None:
    engine = Engine(vllm)
    engine.step({0: 11, 1: 3})
    metadata = engine.builder.build(0, engine.common({0: 1, 1: 1}, 0))
    other, slots = torch.zeros(4, MOST_BLOCKS, dtype=torch.int32), torch.zeros(2, dtype=torch.long)
    replaced = engine.builder.update_block_table(metadata, other, slots)
    assert replaced.slot_mapping is slots and replaced.batch.lengths is metadata.batch.lengths
    assert torch.equal(replaced.batch.table, other[:2])
    sharing = type(engine.impl)(4, 8, SCALE, 2, kv_sharing_target_layer_name="model.layers.0.self_attn.attn")
    before, new = engine.cache.clone(), torch.ones(2, 2, 8, dtype=torch.float64)
    sharing.do_kv_cache_update(None, new, new, engine.cache, slots)
    assert engine.cache.equal(before) or torch.equal(engine.cache.nan_to_num(), before.nan_to_num())


def test_runs_without_metadata_write_zeros(vllm: ModuleType) -> None:
    engine = Engine(vllm)
    q = torch.randn(3, 4, 8)
    output = torch.full((3, 4, 8), torch.nan)
    assert not engine.impl.forward(None, q, q, q, engine.cache, None, output).any()
    assert engine.impl.forward(None, q[:0], q[:0], q[:0], engine.cache, None, output[:0]).shape == (0, 4, 8)


def test_what_cannot_be_done_is_refused(vllm: ModuleType) -> None:
    impl = vllm.Backend.get_impl_cls()
    for kind in ("encoder", "encoder_decoder"):
        with pytest.raises(UnsupportedError, match=f"{kind} attention"):
            impl(4, 8, SCALE, 2, attn_type=kind)
    with pytest.raises(UnsupportedError, match="a cache of fp8_e5m2"):
        impl(4, 8, SCALE, 2, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(UnsupportedError, match="heads of 8 in a cache of fp8_e4m3"):
        impl(4, 8, SCALE, 2, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedError, match="chunk_lookback"):
        impl(4, 8, SCALE, 2, chunk_lookback=3)
    assert impl(4, 8, SCALE, 2, chunk_lookback=-1, anything=None).scale == SCALE
    for shape in [
        (3, 5, 8, 2, 8),
        (5, 2, 8, 3, 8),
        (5, 2, 8, 2, 16),
        (5, 3, 8, 16),
        (5, 2, 8, 8),
        (5, 8, 16),
    ]:
        with pytest.raises(UnsupportedError, match=r"a cache of shape .* for 2 heads of 8"):
            impl(4, 8, SCALE, 2)._caches(torch.zeros(shape))
    engine = Engine(vllm)
    engine.history.grow({0: 2})
    common = engine.common({0: 2}, 0)
    common.causal = torch.tensor([True])
    with pytest.raises(UnsupportedError, match="some sequences are causal"):
        engine.builder.build(0, common)
    q = torch.randn(3, 4, 8)
    with pytest.raises(UnsupportedError, match="quantised output"):
        engine.impl.forward(None, q, q, q, engine.cache, None, q, torch.ones(1))


def reasons(backend: Any, **asked: Any) -> list[str]:
    """vLLM's reasons not to take this backend for a layer; releases differ in what they ask besides."""
    usual = {
        "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "attn_type": "decoder", "device_capability": None,
    }  # fmt: skip
    parameters = inspect.signature(backend.validate_configuration).parameters
    given = {name: usual.get(name, False) for name in parameters}
    return list(backend.validate_configuration(**given | {k: v for k, v in asked.items() if k in parameters}))


def test_vllm_has_no_reason_against_it(vllm: ModuleType) -> None:
    backend = vllm.Backend
    assert not reasons(backend) and not reasons(backend, has_sink=True, has_sliding_window=True)
    for asked in ({"head_size": 100}, {"block_size": 12}, {"kv_cache_dtype": "fp8_e5m2"}, {"use_mla": True}):
        assert len(reasons(backend, **asked)) == 1
    sizes = backend.get_supported_kernel_block_sizes
    assert [size.base for size in sizes()] == [size.base for size in sizes(None)] == [8]
    assert not backend.supports_device_cpu_query_lens_mismatch()


def test_it_registers_as_custom(vllm: ModuleType) -> None:
    from vllm.v1.attention.backends import registry

    vllm.register()
    assert registry.AttentionBackendEnum.CUSTOM.is_overridden()
    assert vllm.Backend.get_impl_cls() is vllm.Impl and vllm.Backend.supports_sink()
    assert vllm.Backend.supports_head_size(128) and not vllm.Backend.supports_head_size(100)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_itself_finds_the_backend(vllm: ModuleType) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is vllm.Backend


@pytest.mark.slow
def test_importing_fa4flex_imports_no_engine() -> None:
    code = "import sys, fa4flex, fa4flex.integrations.layers; print({'vllm', 'sglang'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": f"{STUBS.parents[2]}:{STUBS}"},
    )  # fmt: skip
    assert found.stdout.strip() == "set()"
