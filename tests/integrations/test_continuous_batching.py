"""Continuous batching of transformers under the second name: tokens equal those of generate() with eager."""

from __future__ import annotations

import pytest
import torch
from models import FAMILIES, transformers

from fa4flex.errors import UnsupportedError
from fa4flex.integrations import paged

PROMPTS = [list(range(3, 3 + length)) for length in (5, 17, 30, 1)]
NEW = 6


def greedy() -> transformers.GenerationConfig:
    return transformers.GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a batch, mixed with requests that decode; windows, soft caps, sinks."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    calls, attention = [], paged.attention
    monkeypatch.setattr(
        paged, "attention", lambda *args, **options: calls.append(1) or attention(*args, **options)
    )
    eager = FAMILIES[name].build("eager", torch.float32)
    model = FAMILIES[name].build("fa4flex_flash", torch.float32)
    sizes = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=24)
    made = model.generate_batch(PROMPTS, generation_config=greedy(), continuous_batching_config=sizes)
    found = [made[key].generated_tokens for key in sorted(made, key=lambda key: int(key.split("_")[-1]))]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        want = eager.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy())
        assert tokens == want[0, len(prompt) :].tolist()
    assert calls


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

    packed = masking_utils.packed_sequence_compatibility_function(
        masking_utils.sliding_window_causal_mask_function(4), torch.arange(5)[None], torch.zeros(1, 5)
    )
    paged._check_mask(attention_mask(1, 5, 5, mask_function=packed))
    own = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    with pytest.raises(UnsupportedError, match="a mask of its own"):
        paged._check_mask(attention_mask(1, 5, 5, mask_function=own))
    with pytest.raises(UnsupportedError, match="a mask of its own"):
        paged._check_mask(torch.ones(1, 1, 5, 5))


def test_block_tables_are_refused() -> None:
    layer = paged.PagedLayer(0, None, None, None)
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedError, match="block tables"):
        paged.paged_attention(None, layer, (q, q, q), None, {"block_table": torch.zeros(1, 1, 1)})
