"""Hugging Face models on folded sequences: logits and gradients of every sequence alone under eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from fa4flex.errors import UnsupportedError  # noqa: E402
from fa4flex.integrations.transformers import folded_inputs, register  # noqa: E402
from fa4flex.trees import Folded, fold  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
GPT2 = {
    "vocab_size": 97, "n_embd": 64, "n_head": 4, "n_layer": 2, "bos_token_id": 1, "eos_token_id": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SIZES, "MistralForCausalLM": {**SIZES, "sliding_window": 6},
    "Gemma2ForCausalLM": {**SIZES, "sliding_window": 6}, "Qwen3ForCausalLM": SIZES, "GPT2LMHeadModel": GPT2,
}  # fmt: skip
NEAR = {"atol": 2e-5, "rtol": 2e-5}
"""Models round angles of positions, and eager its weights, to float32."""


def model(family: str) -> Any:
    register()
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    made = kind._from_config(kind.config_class(**FAMILIES[family]), attn_implementation="fa4flex")
    for p in made.parameters():
        p.data.mul_(3.0 if p.ndim > 1 else 1.0)  # so that what a token sees shows
    return made.double().train()


def rollouts() -> list[Tensor]:
    prompt, other = torch.randint(3, 95, (9,)), torch.randint(3, 95, (5,))
    ends = [torch.randint(3, 95, (n,)) for n in (3, 7, 1, 0)]
    return [*(torch.cat([prompt, x]) for x in ends), other]


def gradients(made: Any, loss: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_sequences(family: str) -> None:
    made, sequences = model(family), rollouts()
    folded = fold(sequences)
    assert folded.saved == 27
    logits = made(**folded_inputs(made, folded)).logits[0]
    weights = [torch.randn(len(x), dtype=torch.float64) for x in sequences]
    found = gradients(made, -(folded.log_probs(logits) * folded.fold_weights(weights)).sum())
    made.set_attn_implementation("eager")
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, weight, own in zip(sequences, weights, folded.unfold(logits), strict=True):
        alone = made(tokens[None], use_cache=False).logits[0]
        torch.testing.assert_close(own, alone, **NEAR)
        loss = loss - (alone[:-1].log_softmax(1).gather(1, tokens[1:, None])[:, 0] * weight[1:]).sum()
    wanted = gradients(made, loss)
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max()) or 1.0
        torch.testing.assert_close(found[name] / scale, gradient / scale, **NEAR)


def changed(n: int) -> Folded:
    return fold(torch.randint(3, 5, (4, 6 + n)))


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_other_trees_compile_nothing_anew(family: str) -> None:
    made = model(family)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    for n in range(4):
        inputs = folded_inputs(made, changed(n))
        torch.testing.assert_close(compiled(**inputs).logits, made(**inputs).logits)
    assert counter.frame_count == 2  # the first number of tokens is taken for a constant


def test_what_is_refused() -> None:
    made, folded = model("LlamaForCausalLM"), changed(0)
    inputs = folded_inputs(made, folded)
    with pytest.raises(UnsupportedError, match="a mask for all queries and keys"):
        cache = transformers.DynamicCache(config=made.config)
        made(torch.randint(3, 95, (1, 4)), past_key_values=cache)
        made(**{**inputs, "use_cache": True}, past_key_values=cache)
    made.config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(UnsupportedError, match="of kind 'chunked_attention'"):
        made(**inputs)
    made.config.layer_types = ["sliding_attention"] * 2
    with pytest.raises(UnsupportedError, match="that names its window"):
        made(**inputs)
    made.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError, match="attn_implementation='eager'"):
        folded_inputs(made, folded)
