"""Tiny random models of Hugging Face families, with inputs: see model_families.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY, HIDDEN, HEADS, WINDOW = 97, 32, 4, 8
BATCH, PROMPT = 2, 23
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "max_position_embeddings": 128, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "image_size": 24, "patch_size": 6,
}  # fmt: skip
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}


@dataclass(frozen=True)
class Family:
    """A model class with its config; `kind` says what it can be asked for."""

    name: str
    config: str
    model: str
    settings: dict[str, Any]
    kind: str = "decoder"
    read: tuple[str, ...] = ("logits",)
    window: bool = False
    without: tuple[str, ...] = ()
    padded: str = "input_ids"
    extra: dict[str, Any] = field(default_factory=dict)

    def build(self, implementation: str, dtype: torch.dtype, seed: int = 0) -> Any:
        """The same weights at each call. They are larger than usual: initial weights give nearly uniform
        attention, which hides errors."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{k: _config(v) for k, v in self.settings.items()})
        cls = getattr(transformers, self.model)
        model = cls._from_config(config, attn_implementation=implementation).eval()
        for parameter in model.parameters():
            parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # the grouped product has no float64 form
        return model.to(dtype)

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed + 100)
        ids = torch.randint(3, VOCABULARY - 1, (BATCH, PROMPT), generator=generator)
        images = torch.randn(BATCH, 3, 24, 24, generator=generator).to(dtype)
        if self.kind == "vision":
            return {"pixel_values": images, **({"input_ids": ids} if "input_ids" in self.extra else {})}
        if self.kind == "prefix":
            ids[:, :16] = VOCABULARY - 1
            kinds = torch.ones_like(ids)
            kinds[:, :18] = 0
            return {"input_ids": ids, "pixel_values": images, "token_type_ids": kinds}
        if self.kind == "seq2seq" and "mels" in self.extra:
            features = torch.randn(BATCH, self.extra["mels"], 40, generator=generator).to(dtype)
            return {"input_features": features, "decoder_input_ids": ids}
        if self.kind == "seq2seq":
            source = torch.randint(3, VOCABULARY, (BATCH, 17), generator=generator)
            return {"input_ids": source, "decoder_input_ids": ids}
        return {"input_ids": ids}


def _config(value: Any) -> Any:
    """Configs of parts are given as (class name, settings)."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        return getattr(transformers, value[0])(**value[1])
    return value


def _decoder(name: str, cls: str, **settings: Any) -> Family:
    window = settings.pop("windowed", False)
    without = settings.pop("without", ())
    sizes = {} if settings.pop("own_names", False) else DECODER
    return Family(
        name, f"{cls}Config", settings.pop("model", f"{cls}ForCausalLM"), {**sizes, **settings},
        window=window, without=without,
    )  # fmt: skip


def _encoder(name: str, cls: str, model: str, **settings: Any) -> Family:
    return Family(
        name, f"{cls}Config", model, {**ENCODER, **settings}, "encoder", read=("logits", "last_hidden_state")
    )


_LAYERS = ["sliding_attention", "full_attention"]
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {**_TOKENS, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 128}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_BART = {
    **_TOKENS, **_NO_DROPOUT, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_start_token_id": 1, "max_position_embeddings": 128,
}  # fmt: skip
_T5 = {
    **_TOKENS, "d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS,
    "dropout_rate": 0.0, "decoder_start_token_id": 1,
}  # fmt: skip
_WHISPER = {
    **_BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 128,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
_TOWER_TEXT = {k: v for k, v in ENCODER.items() if "dropout" not in k}
_TWO_TOWERS = {"text_config": {**_TOWER_TEXT, "bos_token_id": 1, "eos_token_id": 2}, "vision_config": VISION}
_PALIGEMMA = {
    "text_config": {**DECODER, "head_dim": 8, "model_type": "gemma"},
    "vision_config": {**VISION, "projection_dim": HIDDEN, "model_type": "siglip_vision_model"},
    "image_token_index": VOCABULARY - 1, "image_token_id": VOCABULARY - 1, "projection_dim": HIDDEN,
    "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_ALL = [
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral", sliding_window=WINDOW, windowed=True),
    _decoder("mixtral", "Mixtral", sliding_window=WINDOW, windowed=True, **MOE),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=8),
    _decoder("gemma", "Gemma", head_dim=8),
    _decoder("gemma2", "Gemma2", head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=5.0,
             layer_types=_LAYERS, windowed=True),
    _decoder("gemma3", "Gemma3Text", model="Gemma3ForCausalLM", head_dim=8, sliding_window=WINDOW,
             layer_types=_LAYERS, windowed=True),
    _decoder("gpt_oss", "GptOss", head_dim=8, sliding_window=WINDOW, layer_types=_LAYERS, windowed=True,
             **MOE),
    _decoder("llama4", "Llama4Text", model="Llama4ForCausalLM", head_dim=8, attention_chunk_size=WINDOW,
             layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
             intermediate_size_mlp=48, windowed=True, **MOE),
    _decoder("phi", "Phi"),
    _decoder("phi3", "Phi3", sliding_window=WINDOW, windowed=True),
    _decoder("cohere", "Cohere"),
    _decoder("cohere2", "Cohere2", sliding_window=WINDOW, layer_types=_LAYERS, windowed=True),
    _decoder("olmo2", "Olmo2"),
    _decoder("olmo3", "Olmo3", sliding_window=WINDOW, layer_types=_LAYERS, windowed=True),
    _decoder("stablelm", "StableLm"),
    _decoder("starcoder2", "Starcoder2", sliding_window=WINDOW, windowed=True, residual_dropout=0.0,
             embedding_dropout=0.0),
    _decoder("glm", "Glm", head_dim=8, attention_dropout=0.0),
    _decoder("glm4", "Glm4", head_dim=8),
    _decoder("deepseek_v3", "DeepseekV3", **_MLA),
    _decoder("granite", "Granite", attention_multiplier=0.3),
    _decoder("nemotron", "Nemotron"),
    _decoder("exaone4", "Exaone4", sliding_window=WINDOW, layer_types=_LAYERS, windowed=True),
    _decoder("smollm3", "SmolLM3"),
    _decoder("gpt_neox", "GPTNeoX"),
    _decoder("gpt2", "GPT2", model="GPT2LMHeadModel", own_names=True, attn_pdrop=0.0, resid_pdrop=0.0,
             embd_pdrop=0.0, **_GPT2),
    _decoder("opt", "OPT", ffn_dim=48, word_embed_proj_dim=HIDDEN, **_NO_DROPOUT),
    _decoder("biogpt", "BioGpt", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
             activation_dropout=0.0),
    _decoder("modernbert_decoder", "ModernBertDecoder", local_attention=WINDOW, global_attn_every_n_layers=2),
    _decoder("qwen3_moe", "Qwen3Moe", head_dim=8, moe_intermediate_size=16, num_experts=4,
             num_experts_per_tok=2),
    _decoder("deepseek_v2", "DeepseekV2", topk_method="greedy", **_MLA),
    _decoder("gemma3n", "Gemma3nText", model="Gemma3nForCausalLM", head_dim=8, sliding_window=WINDOW,
             layer_types=_LAYERS, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8,
             num_kv_shared_layers=0, laurel_rank=4, altup_num_inputs=2,
             activation_sparsity_pattern=[0.0, 0.0], windowed=True),
    _decoder("jamba", "Jamba", num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False,
             attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4),
    _decoder("qwen3_next", "Qwen3Next", head_dim=8, layer_types=["linear_attention", "full_attention"],
             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
             num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
             shared_expert_intermediate_size=16),
    _decoder("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
    _decoder("doge", "Doge", keep_window_size=12, without=("padding", "generate")),
    _decoder("bloom", "Bloom", own_names=True, hidden_size=HIDDEN, n_layer=2, n_head=HEADS, **_TOKENS),
    _decoder("falcon", "Falcon", alibi=True),
    _decoder("mpt", "Mpt", own_names=True, d_model=HIDDEN, n_layers=2, n_heads=HEADS, max_seq_len=128,
             **_TOKENS),
    _decoder("gptj", "GPTJ", own_names=True, rotary_dim=4, **_GPT2),
    Family("t5", "T5Config", "T5ForConditionalGeneration", _T5, "seq2seq"),
    Family("bart", "BartConfig", "BartForConditionalGeneration", _BART, "seq2seq"),
    Family("marian", "MarianConfig", "MarianMTModel", _BART, "seq2seq"),
    Family("longt5", "LongT5Config", "LongT5ForConditionalGeneration", {**_T5, "local_radius": 5}, "seq2seq"),
    Family("whisper", "WhisperConfig", "WhisperForConditionalGeneration", _WHISPER, "seq2seq",
           extra={"mels": 8}, without=("padding",)),
    Family("paligemma", "PaliGemmaConfig", "PaliGemmaForConditionalGeneration", _PALIGEMMA, "prefix"),
    _encoder("bert", "Bert", "BertForMaskedLM"),
    _encoder("roberta", "Roberta", "RobertaForMaskedLM"),
    _encoder("albert", "Albert", "AlbertForMaskedLM", embedding_size=16),
    _encoder("distilbert", "DistilBert", "DistilBertForMaskedLM", dim=HIDDEN, n_layers=2, n_heads=HEADS,
             hidden_dim=48, dropout=0.0, attention_dropout=0.0),
    _encoder("modernbert", "ModernBert", "ModernBertForMaskedLM", local_attention=WINDOW,
             global_attn_every_n_layers=2),
    _encoder("deberta_v2", "DebertaV2", "DebertaV2ForMaskedLM"),
    Family("vit", "ViTConfig", "ViTForImageClassification", VISION, "vision"),
    Family("dinov2", "Dinov2Config", "Dinov2Model", VISION, "vision", read=("last_hidden_state",)),
    Family("beit", "BeitConfig", "BeitModel", VISION, "vision", read=("last_hidden_state",)),
    Family("clip", "CLIPConfig", "CLIPModel", _TWO_TOWERS, "vision", read=("logits_per_image", "text_embeds"),
           extra={"input_ids": True}),
    Family("siglip", "SiglipConfig", "SiglipModel", _TWO_TOWERS, "vision",
           read=("logits_per_image", "text_embeds"), extra={"input_ids": True}),
]  # fmt: skip
FAMILIES = {family.name: family for family in _ALL}
