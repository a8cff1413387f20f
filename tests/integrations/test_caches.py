"""Caches that change after a mask is made: the mask of a call is the mask at the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import FAMILIES, since, transformers
from torch import Tensor

from fa4flex.integrations import model_mask

CHUNKS = (8, 8, 1, 5, 1)


def logits(name: str, implementation: str, sizes: tuple[int, ...], padding: Tensor | None = None) -> Tensor:
    family = FAMILIES[name]
    model, inputs = family.build(implementation, torch.float64), family.inputs(torch.float64)
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    made, start = [], 0
    for size in sizes:
        piece = inputs["input_ids"][:, start : start + size]
        start += size
        real = None if padding is None else padding[:, :start]
        made.append(model(piece, attention_mask=real, past_key_values=cache, use_cache=True).logits)
    return torch.cat(made, 1)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(23,), (19, 1, 1, 1, 1), CHUNKS], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3"])
def test_static_cache(name: str, sizes: tuple[int, ...]) -> None:
    """The cache advances its length in place before the layers read the mask."""
    found, eager = logits(name, "fa4flex", sizes), logits(name, "eager", sizes)
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-5)  # eager takes its softmax in float32


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4"])
def test_padding_that_is_not_read_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a mask without padding is not known to be one, and all rows go through it."""
    padding = torch.ones(2, 23, dtype=torch.long)
    expected = logits(name, "eager", CHUNKS, padding)
    monkeypatch.setattr(model_mask, "_known_to_be_full", lambda padding: False)
    torch.testing.assert_close(logits(name, "fa4flex", CHUNKS, padding), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize(
    "name",
    [
        "llama", "gemma2", "gpt_oss", "paligemma",
        pytest.param("t5", marks=since(15, "T5 computes its attention itself, which is refused")),
    ],
)  # fmt: skip
def test_generate(name: str, cache: str) -> None:
    made = []
    for implementation in ("eager", "fa4flex"):
        family = FAMILIES[name]
        model, inputs = family.build(implementation, torch.float64), family.inputs(torch.float64)
        inputs.pop("decoder_input_ids", None)
        made.append(
            model.generate(
                **inputs, max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation=cache
            )
        )
    assert torch.equal(*made)


@torch.no_grad()
def test_beams_reorder_the_cache() -> None:
    made: list[Any] = []
    for implementation in ("eager", "fa4flex"):
        model = FAMILIES["mistral"].build(implementation, torch.float64)
        inputs = FAMILIES["mistral"].inputs(torch.float64)
        made.append(model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0))
    assert torch.equal(*made)


@torch.no_grad()
@pytest.mark.slow
@since(18, "generate() compiles twice, for eager as well")
@pytest.mark.parametrize("padded", [0, 5])
def test_generate_compiles_once(padded: int) -> None:
    """Masks are made outside the graph and given to it, one per step; offsets and padding are its inputs."""
    from torch._dynamo.utils import counters

    made = []
    for implementation in ("eager", "fa4flex"):
        model = FAMILIES["llama"].build(implementation, torch.float64)
        ids = FAMILIES["llama"].inputs(torch.float64)["input_ids"]
        padding = torch.ones_like(ids)
        padding[0, :padded] = 0
        compiling = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
        compiling._compile_all_devices = True
        torch._dynamo.reset()
        counters.clear()
        made.append(
            model.generate(
                ids, attention_mask=padding, max_new_tokens=8, min_new_tokens=8, do_sample=False,
                pad_token_id=0, cache_implementation="static", compile_config=compiling,
            )
        )  # fmt: skip
        assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(*made)
