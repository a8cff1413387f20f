"""Continuous batching of transformers: tokens are those that eager finds."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from engines import Definition, History
from models import FAMILIES, since, transformers
from torch import Tensor

from fa4flex.errors import UnsupportedError
from fa4flex.integrations import paged
from fa4flex.integrations.transformers import attention_forward

NEW = 6
serves = since(19, "caches are asked otherwise, which is refused")


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    """The same at each call: other weights and prompts may have two tokens of equal logits."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 60, (n,), generator=generator).tolist() for n in lengths]


def greedy() -> transformers.GenerationConfig:
    return transformers.GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1
    )


def generated(model: Any, requests: list[list[int]], **sizes: int) -> list[list[int]]:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    cache = ContinuousBatchingConfig(**sizes)
    if model.device.type == "cpu":  # which transformers does not see where there is a GPU
        cache.use_async_batching, cache.use_cuda_graph = False, False
    made = model.generate_batch(
        requests, generation_config=greedy(), continuous_batching_config=cache, progress_bar=False
    )
    return [made[key].generated_tokens for key in sorted(made, key=lambda key: int(key.split("_")[-1]))]


@torch.no_grad()
def most_likely(model: Any, requests: list[list[int]], found: list[list[int]]) -> list[list[int]]:
    """The model's choice at each place of `found`, after the prompt and what was found before. Where that is
    what was found, generate() finds it too."""
    rows = [torch.tensor(prompt + tokens) for prompt, tokens in zip(requests, found, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # causal: padding behind changes nothing
    chosen = model(ids).logits.argmax(-1)
    return [
        row[len(prompt) - 1 : len(prompt) + len(tokens) - 1].tolist()
        for row, prompt, tokens in zip(chosen, requests, found, strict=True)
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of a layer, and of those with a block table."""
    counted: Counter[str] = Counter()
    for name in ("_composed", "_in_pages"):
        real = getattr(paged, name)
        monkeypatch.setattr(
            paged, name, lambda *args, name=name, real=real: counted.update([name]) or real(*args)
        )
    return counted


@serves
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_eager(name: str, calls: Counter[str]) -> None:
    """32 requests: prompts longer than a batch, mixed with requests that decode; windows, soft caps, sinks.
    The model is given back under the name that it came with."""
    requests = prompts(32)
    model = FAMILIES[name].build("fa4flex", torch.float32)
    found = generated(model, requests, page_size=8, num_blocks=256, max_batch_tokens=48)
    assert model.config._attn_implementation == "fa4flex"
    assert 0 <= calls["_in_pages"] < calls["_composed"] and bool(calls["_in_pages"]) == (name == "llama")
    assert {len(tokens) for tokens in found} == {NEW}
    assert found == most_likely(FAMILIES[name].build("eager", torch.float32), requests, found)


@serves
@pytest.mark.parametrize("name", ["fa4flex_flash", "paged|fa4flex", "paged|fa4flex_flash"])
def test_other_names_serve_it_too(name: str, calls: Counter[str]) -> None:
    requests = prompts(3)
    model = FAMILIES["llama"].build("eager", torch.float32)
    model.set_attn_implementation(name)
    found = generated(model, requests, page_size=4, num_blocks=64, max_batch_tokens=24)
    assert calls["_in_pages"] and model.config._attn_implementation == name.removeprefix("paged|")
    model.set_attn_implementation("eager")
    ids = torch.tensor([requests[0]])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy())
    assert found[0] == want[0, len(requests[0]) :].tolist()
    assert found == most_likely(model, requests, found)


@serves
def test_block_tables_are_left_out_on_request(calls: Counter[str]) -> None:
    """Other implementations are answered as before."""
    requests = prompts(3)
    model = FAMILIES["llama"].build("fa4flex", torch.float32)
    sizes = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 24}
    found = generated(model, requests, **sizes, max_blocks_per_request=0)
    assert calls["_composed"] and not calls["_in_pages"]
    model.set_attn_implementation("sdpa")
    before = calls.total()
    assert generated(model, requests, **sizes) == found and calls.total() == before


class Cache:
    """PagedAttentionCache where all requests decode: it names its pages, and stores nothing."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.pages = {"k_cache": k, "v_cache": v}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        kwargs |= self.pages
        return key_states, value_states


@pytest.mark.parametrize("padded", [0, 3])
def test_a_decoded_token_is_written_and_read_in_its_pages(padded: int) -> None:
    """Padding, as captured graphs have it: rows past the requests, and requests of length 0."""
    history, page_size = History(), 4
    history.grow({0: 9, 1: 3, 2: 4})
    k, v = (torch.full((20, page_size, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2))
    table = torch.randperm(20)[:9].view(3, 3).int()
    for cache, each in ((k, history.k), (v, history.v)):
        for n, tokens in each.items():
            for t, token in enumerate(tokens):
                cache[table[n, t // page_size], t % page_size] = token
    table = torch.cat([table, torch.full((padded, 3), -1).int()])
    before = k.isnan().sum()
    q, new_k, new_v = history.grow({0: 1, 1: 1, 2: 1})
    rows = [
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2 * padded), value=7.0).transpose(0, 1)[None]
        for x in (q, new_k, new_v)
    ]
    lengths = torch.tensor([0, 10, 4, 5, *[0] * padded]).cumsum(0).int()
    options = {"block_table": table, "cu_seq_lens_k": lengths}
    found = paged.paged_attention(Cache(k, v), paged.PagedLayer(0, 0.5, 2.0, None), rows, None, options)
    want = history.expected(Definition(0.5, softcap=2.0), q, {0: 1, 1: 1, 2: 1})
    torch.testing.assert_close(found[0, :3], want)
    assert not found[0, 3:].any() and before - k.isnan().sum() == 3 * 2 * 8


def test_models_that_ask_the_cache_themselves_are_served() -> None:
    """They hand over what the cache gave them, and the step's indices."""
    torch.manual_seed(seed := torch.seed() % 2**32)
    pages = [torch.randn(6, 4, 2, 8) for _ in range(2)]
    q, k, v = (torch.randn(1, heads, 2, 8) for heads in (4, 2, 2))
    step = {
        "block_table": torch.tensor([[3, 1], [2, 5]], dtype=torch.int32), "read_index": [], "write_index": [],
        "cu_seq_lens_q": torch.tensor([0, 1, 2]), "cu_seq_lens_k": torch.tensor([0, 6, 8]),
    }  # fmt: skip
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    mine, theirs = ([x.clone() for x in pages] for _ in range(2))
    asks = attention_forward(module, q, k, v, None, cache=Cache(*mine), **step)[0]
    given = {"k_cache": theirs[0], "v_cache": theirs[1]}
    asked = attention_forward(module, q, k, v, None, **step, **given)[0]
    torch.testing.assert_close(asked, asks, rtol=0, atol=0, msg=lambda text: f"seed {seed}: {text}")
    torch.testing.assert_close(theirs, mine)
    assert not torch.equal(mine[0], pages[0])


class Earlier:
    """A cache that takes its indices one by one."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Any) -> Any:
        raise AssertionError("it was asked")


def test_caches_of_earlier_versions_are_refused() -> None:
    rows = [torch.randn(1, 2, 3, 8)] * 3
    with pytest.raises(UnsupportedError, match=r"(?s)continuous batching of transformers.*5\.19 or later"):
        paged.paged_attention(Earlier(), paged.PagedLayer(0, None, None, None), tuple(rows), None, {})


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_second_name_is_the_same_elsewhere(name: str) -> None:
    family = FAMILIES[name]
    inputs = family.inputs(torch.float64)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :5] = 0
    found, want = (
        family.build(each, torch.float64)(**inputs, attention_mask=mask).logits
        for each in ("fa4flex_flash", "fa4flex")
    )
    torch.testing.assert_close(found, want)


def test_masks_of_its_own_are_refused() -> None:
    from transformers import masking_utils

    from fa4flex.integrations.model_mask import attention_mask

    window = masking_utils.sliding_window_causal_mask_function(4)
    same = masking_utils.packed_sequence_mask_function(torch.zeros(1, 5))
    packed = masking_utils.and_masks(window, same)
    paged._check_mask(attention_mask(1, 5, 5, mask_function=packed))
    own = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    with pytest.raises(UnsupportedError, match="a mask of its own"):
        paged._check_mask(attention_mask(1, 5, 5, mask_function=own))
    with pytest.raises(UnsupportedError, match="a mask of its own"):
        paged._check_mask(torch.ones(1, 1, 5, 5))


def test_rows_after_the_requests_take_no_part() -> None:
    """Captured graphs have more queries and keys than the requests."""
    history, counts = History(), {0: 3, 1: 1}
    history.grow({0: 2, 1: 6})
    q, *_ = history.grow(counts)
    k, v = (torch.cat([each[0], each[1]]) for each in (history.k, history.v))
    q, k, v = (torch.cat([x, torch.full_like(x[:4], torch.nan)]) for x in (q, k, v))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 4, 4], [0, 5, 12, 12]))
    out = paged._composed(None, None, 0.5, "")(q, k, v, varlen=paged._padded((q, k), cu_q, cu_k))
    torch.testing.assert_close(out[:4], history.expected(Definition(0.5), q[:4], counts))
    assert not out[4:].any()


@serves
def test_versions_that_ask_elsewhere_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import continuous_batching
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    from fa4flex.integrations.transformers import register

    name = f"{continuous_batching.__name__}.initialization"
    monkeypatch.delattr(continuous_batching, "initialization")
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", "theirs")
    register()
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn == "theirs"


@serves
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])  # routers of experts are discontinuous
@torch.no_grad()
def test_tokens_are_those_of_eager_on_a_gpu(name: str, graphs: bool, calls: Counter[str]) -> None:
    """In bfloat16, tokens count as equal whose logits differ by no more than twice what eager itself rounds.
    With graphs, batches are padded."""
    requests = prompts(32)
    model = FAMILIES[name].build("fa4flex", torch.bfloat16).cuda()
    sizes = {"page_size": 16, "num_blocks": 256, "max_batch_tokens": 64}
    found = generated(model, requests, **sizes, use_cuda_graph=graphs)
    assert calls["_composed"] and bool(calls["_in_pages"]) == (name == "llama")
    rounded, exact = (FAMILIES[name].build("eager", x) for x in (torch.bfloat16, torch.float32))
    exact.load_state_dict({key: value.float() for key, value in rounded.state_dict().items()})
    for prompt, tokens in zip(requests, found, strict=True):
        ids = torch.tensor([prompt + tokens])
        logits, theirs = (x(ids).logits[0, len(prompt) - 1 : -1].float() for x in (exact, rounded))
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= 2 * (theirs - logits).abs().max()
