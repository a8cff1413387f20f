"""The mask that travels through a model, and what is refused at a layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import FAMILIES, transformers
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import masking_utils

from fa4flex.errors import UnsupportedError
from fa4flex.integrations.model_mask import ModelMask, attention_mask
from fa4flex.integrations.transformers import attention_forward, check

FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "everything": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(6),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(5, torch.tensor([0, 3])),
}
if hasattr(masking_utils, "blockwise_overlay"):  # versions up to 5.8 have no such mask
    FUNCTIONS["a custom one"] = masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.arange(48).view(2, 24) // 4)
    )
LENGTHS = {"prompt": (12, 12, 0, 0), "chunk": (5, 17, 12, 0), "step": (1, 9, 16, 8), "static": (3, 24, 7, 0)}


def make(function: Any, lengths: tuple[int, int, int, int], padding: Tensor | None = None) -> ModelMask:
    q_len, kv_len, q_offset, kv_offset = lengths
    made = attention_mask(2, q_len, kv_len, torch.tensor(q_offset), kv_offset, function, padding)
    assert isinstance(made, ModelMask)
    return made


def pairs(mask: ModelMask) -> Tensor:
    """The mask_mod at every pair."""
    b, h, q, kv = (
        torch.arange(size).view([-1 if n == place else 1 for n in range(4)])
        for place, size in enumerate(mask.shape)
    )
    if mask.mask_mod is None:
        return torch.ones(mask.shape, dtype=torch.bool)
    return mask.mask_mod(b, h, q, kv).expand(mask.shape)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("tensors", [False, True])
def test_it_is_the_mask_of_sdpa(function: Any, lengths: Any, padded: bool, tensors: bool) -> None:
    q_len, kv_len, q_offset, kv_offset = lengths
    padding = None
    if padded:
        padding = torch.ones(2, q_offset + q_len, dtype=torch.bool)
        padding[0, :3] = False
    offset = torch.tensor(q_offset) if tensors else q_offset
    made = attention_mask(2, q_len, kv_len, offset, kv_offset, function, padding)
    assert isinstance(made, ModelMask)
    want = masking_utils.sdpa_mask(
        2, q_len, kv_len, q_offset, kv_offset, function, padding, allow_is_causal_skip=False
    )
    assert torch.equal(pairs(made), want) and torch.equal(made.dense(), want)


def test_it_does_not_change_with_the_cache() -> None:
    offset = torch.tensor(7)
    made = attention_mask(2, 3, 24, offset, 0, masking_utils.causal_mask_function)
    before = pairs(made), made.dense()
    offset.add_(3)
    assert torch.equal(pairs(made), before[0]) and torch.equal(made.dense(), before[1])


def test_a_step_without_padding_has_no_mask() -> None:
    ones = torch.ones(2, 17, dtype=torch.bool)
    assert attention_mask(2, 1, 17, 16, 0, masking_utils.causal_mask_function, ones).mask_mod is None
    window = masking_utils.sliding_window_causal_mask_function(9)
    assert attention_mask(2, 1, 9, 16, 8, window, ones).mask_mod is None
    assert attention_mask(2, 1, 10, 16, 7, window, ones).mask_mod is not None


def test_it_is_made_without_reading_a_device() -> None:
    with FakeTensorMode():
        padding, offset = torch.ones(2, 24, dtype=torch.bool, device="cuda"), torch.tensor(7, device="cuda")
        for function in FUNCTIONS.values():
            assert attention_mask(2, 3, 24, offset, 0, function, padding, device="cuda").shape == (
                2,
                1,
                3,
                24,
            )


def test_tensor_operations_see_the_tensor() -> None:
    mask = make(masking_utils.causal_mask_function, LENGTHS["chunk"])
    want = mask.dense()
    assert (mask.ndim, mask.dtype, mask.device, mask.shape) == (
        4,
        torch.bool,
        torch.device("cpu"),
        want.shape,
    )
    assert mask.contiguous() is mask and mask.to("cpu") is mask
    assert torch.equal(mask[:, :, :, :4], want[..., :4]) and torch.equal(
        mask.to(torch.int8), want.to(torch.int8)
    )
    scores = torch.randn(want.shape)
    assert torch.equal(torch.where(mask, scores, 0.0), torch.where(want, scores, 0.0))
    assert torch.equal(scores.masked_fill(~mask, -1.0), scores.masked_fill(~want, -1.0))
    assert torch.equal(mask & want, want) and torch.equal(scores * mask, scores * want)
    assert mask.logical_not().sum() == (~want).sum()
    with pytest.raises(AttributeError, match="no attribute nonsense"):
        _ = mask.nonsense


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(2, 1, 12, 12), (1, 4, 12, 12), (2, 1, 1, 12), (12, 12)], ids=str)
def test_masks_given_as_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, heads, 12, 8) for heads in (4, 2, 2))
    mask = torch.rand(shape) < 0.6 if dtype == torch.bool else torch.randn(shape)
    mask = mask | torch.eye(12, dtype=torch.bool)[0] if dtype == torch.bool else mask
    out, _ = attention_forward(torch.nn.Module(), q, k, v, mask)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, want.transpose(1, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_given_by_their_starts(causal: bool) -> None:
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    starts = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "is_causal": causal}
    out, _ = attention_forward(torch.nn.Module(), q, k, v, None, **given)
    for a, b in itertools.pairwise(starts):
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, a:b] for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        torch.testing.assert_close(out[:, a:b], want.transpose(1, 2))


@torch.no_grad()
@pytest.mark.parametrize("name", ["fa4flex", "fa4flex_flash"])
def test_packed_sequences_of_a_model(name: str) -> None:
    """Told by positions, by starts, and by both: each sequence is as it is alone."""
    model = FAMILIES["mistral"].build(name, torch.float64)
    ids = FAMILIES["mistral"].inputs(torch.float64)["input_ids"][:1]
    starts = torch.tensor([0, 9, 23], dtype=torch.int32)
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    told = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    alone = torch.cat([model(ids[:, :9]).logits, model(ids[:, 9:]).logits], 1)
    for given in ({"position_ids": positions}, {"position_ids": positions, **told}):
        torch.testing.assert_close(model(ids, use_cache=False, **given).logits, alone)
    whole = model(ids, use_cache=False, **told).logits  # rotated by other angles, which are relative
    torch.testing.assert_close(whole, alone)


def layer(mask: Any = None, keys: int = 5, **options: Any) -> Any:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, keys, 8)
    return attention_forward(torch.nn.Module(), q, k, k, mask, **options)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "head_mask"])
def test_arguments_that_would_be_ignored_are_refused(name: str) -> None:
    layer(**{name: None})
    with pytest.raises(UnsupportedError, match=f"pass {name}="):
        layer(**{name: torch.zeros(1)})


def test_keys_past_the_mask_are_refused() -> None:
    mask = attention_mask(1, 5, 5, mask_function=masking_utils.causal_mask_function)
    layer(mask)
    with pytest.raises(UnsupportedError, match="5 queries and 7 keys under a mask for 5 and 5"):
        layer(mask, keys=7)


def test_other_masks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="attention_mask of type str"):
        layer("causal")


def test_weights_above_the_stated_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    out, weights = layer(output_attentions=True)
    assert out.shape == (1, 5, 2, 8) and weights.shape == (1, 2, 5, 5)
    monkeypatch.setattr("fa4flex.weights.MOST", 49)
    with pytest.raises(UnsupportedError, match="50 numbers"):
        layer(output_attentions=True)


def test_a_part_that_ignores_it_is_found() -> None:
    """set_attn_implementation only warns, and changes nothing; check() raises."""
    model = FAMILIES["deberta_v2"].build("eager", torch.float32)
    model.set_attn_implementation("fa4flex")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UnsupportedError, match="DebertaV2"):
        check(model)
    check(FAMILIES["llama"].build("fa4flex", torch.float32))


def test_other_implementations_are_asked_as_before() -> None:
    with pytest.raises(ValueError, match="is not supported"):
        FAMILIES["llama"].build("no such attention", torch.float32)
    config = transformers.LlamaConfig(**FAMILIES["llama"].settings)
    assert transformers.LlamaForCausalLM(config).config._attn_implementation == "sdpa"
