"""Documents in one row, told apart by position_ids alone or by cu_seq_lens: each as if it were alone, with
every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from fa4flex.integrations.transformers import register  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 6}, "Gemma2": {"sliding_window": 6}, "Qwen2": {},
}  # fmt: skip
LENGTHS = (7, 13, 1, 1, 10)
NEAR = {"atol": 1e-5, "rtol": 1e-5}
"""Models round angles of positions, and eager its weights, to float32."""


def model(family: str) -> Any:
    register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    made = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="fa4flex")
    for p in made.parameters():
        p.data.mul_(3.0 if p.ndim > 1 else 1.0)  # so that what a token sees shows
    return made.double().train()


def documents() -> list[Tensor]:
    return [torch.randint(2, 95, (n,)) for n in LENGTHS]


def packed(docs: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(docs)[None], torch.cat([torch.arange(len(d)) for d in docs])[None]


def alone(made: Any, docs: list[Tensor]) -> Tensor:
    return torch.cat([made(d[None], use_cache=False).logits[0] for d in docs])


@pytest.mark.parametrize("cache", ["default", "none", "dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_start_anew_start_a_document(family: str, cache: str) -> None:
    made, docs = model(family), documents()
    ids, positions = packed(docs)
    given: dict[str, Any] = {"default": {}, "none": {"use_cache": False}}.get(cache, {"use_cache": True})
    if cache == "dynamic":
        given["past_key_values"] = transformers.DynamicCache(config=made.config)
    if cache == "static":
        given["past_key_values"] = transformers.StaticCache(config=made.config, max_cache_len=48)
    with torch.no_grad():
        found = made(ids, position_ids=positions, **given).logits[0]
        torch.testing.assert_close(found, alone(made, docs))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_first_document_of_a_call_goes_on_from_the_cache(kind: str) -> None:
    made, (first, second) = model("Llama"), documents()[:2]
    cache = transformers.DynamicCache(config=made.config)
    if kind == "static":
        cache = transformers.StaticCache(config=made.config, max_cache_len=48)
    rest = torch.cat([first[4:], second])[None]
    positions = torch.cat([torch.arange(4, len(first)), torch.arange(len(second))])[None]
    with torch.no_grad():
        made(first[None, :4], past_key_values=cache)
        found = made(rest, position_ids=positions, past_key_values=cache).logits[0]
        torch.testing.assert_close(found, alone(made, [first, second])[4:])


def test_rows_of_a_batch_have_documents_of_their_own() -> None:
    made = model("Mistral")
    rows = [torch.randint(2, 95, (12,)) for _ in range(2)]
    cuts = [(5, 7), (9, 3)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in cut]) for cut in cuts])
    with torch.no_grad():
        found = made(torch.stack(rows), position_ids=positions).logits
        for row, cut, each in zip(rows, cuts, found, strict=True):
            torch.testing.assert_close(each, alone(made, list(row.split(cut))))


def test_positions_that_go_on_or_skip_are_one_document() -> None:
    made, ids = model("Llama"), documents()[1][None]
    skipping = torch.arange(13)[None] + (torch.arange(13) > 6) * 20
    eager = model("Llama")
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        for positions in (torch.arange(13)[None] + 5, skipping):
            expected = eager(ids, position_ids=positions).logits
            found = made(ids, position_ids=positions).logits
            torch.testing.assert_close(found, expected, **NEAR)


def gradients(made: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(made.parameters())))


@pytest.mark.parametrize("collated", ["positions", "cu_seq_lens", "both"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_what_the_flattening_collator_makes_trains_as_documents_alone(family: str, collated: str) -> None:
    made, docs = model(family), documents()
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=collated != "positions", return_position_ids=collated != "cu_seq_lens",
        return_tensors="pt",
    )  # fmt: skip
    batch = collator([{"input_ids": d.tolist(), "labels": d.tolist()} for d in docs])
    labels = batch.pop("labels")
    if collated == "cu_seq_lens":
        batch["position_ids"] = torch.arange(sum(LENGTHS))[None]  # RoPE sees distances alone
    found = made(**batch).logits
    expected = alone(made, docs)[None]
    torch.testing.assert_close(found, expected, **NEAR)
    losses = [
        torch.nn.functional.cross_entropy(x[0, :-1], labels[0, 1:], ignore_index=-100)
        for x in (found, expected)
    ]
    torch.testing.assert_close(gradients(made, losses[0]), gradients(made, losses[1]), **NEAR)
