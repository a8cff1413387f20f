"""Hugging Face models on fa4flex: logits of prefill and cached decoding, with padding, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DRAWS, no_worse, worst
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import fa4flex  # noqa: E402
from fa4flex import reference  # noqa: E402
from fa4flex.errors import UnsupportedError  # noqa: E402
from fa4flex.integrations.transformers import register  # noqa: E402

register()
COMMON = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 5.0},
    "GptOss": {"head_dim": 16, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def build(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**COMMON, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if name == "GptOss":
        model.set_experts_implementation("eager")  # the grouped product has no fp64 form
    for parameter in model.parameters():  # initial weights give near-uniform attention, which hides errors
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


STEPS = (3, 14, 15, 92)


@torch.no_grad()
def run(model: Any, implementation: str, ids: Tensor, padding: Tensor) -> list[Tensor]:
    """Logits of each row's real tokens in a prefill, then in four cached steps: [tokens + 4, vocabulary]."""
    model.set_attn_implementation(implementation)
    step = model(ids, attention_mask=padding, use_cache=True)
    logits = [row[real.bool()] for row, real in zip(step.logits, padding, strict=True)]
    for token in STEPS:
        padding = torch.cat([padding, padding.new_ones(len(padding), 1)], 1)
        next_ids = torch.full((len(ids), 1), token)
        step = model(next_ids, attention_mask=padding, past_key_values=step.past_key_values, use_cache=True)
        logits = [torch.cat(both) for both in zip(logits, step.logits, strict=True)]
    return logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [0, 9])
def test_logits_agree_with_eager(name: str, padded: int) -> None:
    """Within twice eager's own error; exact logits of a padded row are those of its tokens alone, in fp64."""
    ours, plain = [], []
    for _ in range(DRAWS):
        model, ids = build(name), torch.randint(0, 97, (2, 50))
        padding = torch.ones_like(ids)
        padding[0, :padded] = 0
        model.double()
        rows = [row[real.bool()][None] for row, real in zip(ids, padding, strict=True)]
        exact = [run(model, "eager", row, torch.ones_like(row))[0] for row in rows]
        model.float()
        found, eager = run(model, "fa4flex", ids, padding), run(model, "eager", ids, padding)
        ours.append([error for f, x in zip(found, exact, strict=True) for error in worst(f, x)])
        plain.append([error for e, x in zip(eager, exact, strict=True) for error in worst(e, x)])
    no_worse(ours, plain)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_generation_agrees_with_eager(name: str) -> None:
    model, ids = build(name).double(), torch.randint(0, 97, (2, 21))
    made = []
    for implementation in ("eager", "fa4flex"):
        model.set_attn_implementation(implementation)
        made.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        )
    assert torch.equal(*made)


def test_gradients_agree_with_eager() -> None:
    model, ids = build("Gemma2").double(), torch.randint(0, 97, (2, 30))
    found = {}
    for implementation in ("eager", "fa4flex"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found[implementation] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for name, gradient in found["eager"].items():
        torch.testing.assert_close(
            found["fa4flex"][name], gradient, rtol=1e-5, atol=1e-6
        )  # eager takes its softmax in fp32


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_weights_agree_with_eager(name: str) -> None:
    """Those of real tokens of a prefill with padding, and of a cached step; the same logits as without."""
    model, ids = build(name).double(), torch.randint(0, 97, (2, 30))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    grown = torch.cat([padding, padding.new_ones(2, 1)], 1)
    found = {}
    for implementation in ("eager", "fa4flex"):
        model.set_attn_implementation(implementation)
        made = model(ids, attention_mask=padding, output_attentions=True, use_cache=True)
        step = model(
            ids[:, :1], attention_mask=grown, past_key_values=made.past_key_values, output_attentions=True
        )
        found[implementation] = made, step
    for ours, eager in zip(found["fa4flex"], found["eager"], strict=True):
        assert len(ours.attentions) == len(eager.attentions) == 2
        for weights, right in zip(ours.attentions, eager.attentions, strict=True):
            assert weights.shape == right.shape and weights.dtype == right.dtype
            for row, truth, real in zip(weights, right, padding.bool(), strict=True):
                rows = real if row.shape[1] > 1 else slice(None)
                torch.testing.assert_close(row[:, rows], truth[:, rows], rtol=1e-4, atol=1e-6)
    model.set_attn_implementation("fa4flex")
    torch.testing.assert_close(model(ids, attention_mask=padding).logits, found["fa4flex"][0].logits)


def test_gradients_of_weights_agree_with_eager() -> None:
    """Losses on attention, as distillation has them."""
    model, ids, found = build("Gemma2").double(), torch.randint(0, 97, (2, 20)), {}
    target = torch.rand(2, 4, 20, 20, dtype=torch.float64)
    for implementation in ("eager", "fa4flex"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        made = model(ids, output_attentions=True)
        loss = sum((weights * target).square().sum() for weights in made.attentions)
        (loss + made.logits.square().mean()).backward()
        found[implementation] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert found["eager"].keys() == found["fa4flex"].keys()
    for name, gradient in found["eager"].items():
        torch.testing.assert_close(found["fa4flex"][name], gradient, rtol=1e-4, atol=1e-5)


def test_attention_dropout_in_training(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those of eager attention that drops the same pairs; none in evaluation."""
    model, ids = build("Llama").double(), torch.randint(0, 97, (2, 30))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3

    def dropped(weights: Any, p: float, training: bool) -> Any:
        if not training or p == 0:
            return weights
        drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64)
        dropout = fa4flex.Dropout(p, drawn)
        return weights * reference.kept_pairs(dropout, weights.shape) / (1 - dropout.rate)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropped)
    found: dict[str, Any] = {}
    for implementation in ("eager", "fa4flex"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        torch.manual_seed(11)
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            found[implementation] = loss, model.eval()(ids).logits, gradients
    (loss, logits, gradients), (wanted, of_eager, true) = found["fa4flex"], found["eager"]
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits, of_eager, rtol=1e-5, atol=1e-6)
    for name, gradient in true.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("version", ["5.4.0", "4.57.0"])
def test_versions_with_other_masks_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The module that the adapter sees: transformers puts another object in its place when it loads models.
    monkeypatch.setattr(f"{register.__module__}.transformers.__version__", version)
    with pytest.raises(UnsupportedError, match=f"transformers {version}"):
        register()
