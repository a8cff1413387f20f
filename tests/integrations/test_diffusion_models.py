"""Tiny random models of diffusers under the backend "fa4flex" beside its default one."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.errors import UnsupportedError

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

B, TEXT = 2, 6
MODELS = ("flux", "sd3", "wan", "hunyuan", "unet")


@pytest.fixture
def finite_masks() -> None:
    """No model of transformers is under test."""


@pytest.fixture(scope="module")
def door() -> ModuleType:
    from fa4flex.integrations import diffusers

    return diffusers


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry.set_active_backend(before)
    torch._dynamo.reset()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def flux() -> tuple[Any, dict[str, Any]]:
    made = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return made, {
        "hidden_states": randn(B, 16, 4), "encoder_hidden_states": randn(B, TEXT, 32),
        "pooled_projections": randn(B, 32), "timestep": torch.tensor([0.3, 0.7], dtype=torch.float64),
        "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(TEXT, 3),
    }  # fmt: skip


def sd3(dual_attention_layers: tuple[int, ...] = (0,)) -> tuple[Any, dict[str, Any]]:
    made = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
        qk_norm="rms_norm", dual_attention_layers=dual_attention_layers,
    )  # fmt: skip
    return made, {
        "hidden_states": randn(B, 4, 8, 8), "encoder_hidden_states": randn(B, TEXT, 32),
        "pooled_projections": randn(B, 64), "timestep": torch.tensor([3.0, 700.0]),
    }  # fmt: skip


def wan() -> tuple[Any, dict[str, Any]]:
    made = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return made, {
        "hidden_states": randn(B, 4, 2, 8, 8), "encoder_hidden_states": randn(B, TEXT, 16),
        "timestep": torch.tensor([3, 700]),
    }  # fmt: skip


def hunyuan() -> tuple[Any, dict[str, Any]]:
    made = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return made, {
        "hidden_states": randn(B, 4, 2, 4, 4), "encoder_hidden_states": randn(B, TEXT, 16),
        "encoder_attention_mask": torch.arange(TEXT) < torch.tensor([[TEXT], [2]]),
        "pooled_projections": randn(B, 8), "timestep": torch.tensor([3, 700]),
        "guidance": torch.full((B,), 3.0),
    }  # fmt: skip


def unet() -> tuple[Any, dict[str, Any]]:
    made = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(4, 8), layers_per_block=1, cross_attention_dim=8,
        attention_head_dim=2, norm_num_groups=2, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return made, {
        "sample": randn(B, 4, 8, 8), "encoder_hidden_states": randn(B, TEXT, 8), "timestep": 3,
        "encoder_attention_mask": torch.arange(TEXT) < torch.tensor([[TEXT], [2]]),
    }  # fmt: skip


def tiny(name: str) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs. Parameters that begin close to zero would hide its attention."""
    made, given = globals()[name]()
    made = made.double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made, given


def close(got: Tensor, expected: Tensor, largest: float | None = None) -> None:
    """Equal within rounding of float64, in all layers of a model."""
    largest = float(expected.detach().abs().max()) if largest is None else largest
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11 * largest)


def run(made: Any, given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Output, and the gradients of all that has one."""
    leaves = [*made.parameters(), *(x for x in given.values() if isinstance(x, Tensor) and x.requires_grad)]
    out = made(**given, return_dict=False)[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    got = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return out.detach(), [x for x in got if x is not None]


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_they_did(door: ModuleType, name: str) -> None:
    made, given = tiny(name)
    out, gradients = run(made, given)
    made.set_attention_backend("fa4flex")
    with door.fa4flex_attention() as inside:
        got, of_got = run(made, given)
    assert inside.calls
    close(got, out)
    largest = max(float(x.abs().max()) for x in gradients)  # those of keys' biases are 0, but for rounding
    for mine, theirs in zip(of_got, gradients, strict=True):
        close(mine, theirs, largest)
    with door.fa4flex_attention(mask=lambda b, h, q_idx, kv_idx: kv_idx == 0):  # attention matters here
        assert (run(made, given)[0] - out).abs().max() > 1e-3 * out.abs().max()


def test_a_block_map_for_self_attention_alone(door: ModuleType) -> None:
    """A map that allows everything changes nothing; one that leaves out blocks is the mask that does."""
    made, given = tiny("wan")
    tokens = 2 * 4 * 4
    out, _ = run(made, given)
    made.set_attention_backend("fa4flex")
    layers = [block.attn1 for block in made.blocks]
    whole = fa4flex.BlockMap.from_dense(torch.full((4, 4), 2, dtype=torch.uint8), 8, tokens, tokens)
    with door.fa4flex_attention(blocks=whole, modules=layers) as inside:
        close(run(made, given)[0], out)
    assert inside.calls == len(layers)
    kept = torch.eye(4, dtype=torch.uint8) * 2
    with door.fa4flex_attention(blocks=fa4flex.BlockMap.from_dense(kept, 8), modules=layers):
        sparse = run(made, given)
    with door.fa4flex_attention(mask=lambda b, h, q_idx, kv_idx: q_idx // 8 == kv_idx // 8, modules=layers):
        torch.testing.assert_close(run(made, given), sparse)
    assert (sparse[0] - out).abs().max() > 1e-3 * out.abs().max()


def test_a_mask_by_the_arguments_of_a_model(door: ModuleType) -> None:
    """Flux hands `attention_mask` of joint_attention_kwargs on to its layers: a mask of any kind."""
    made, given = tiny("flux")
    made.set_attention_backend("fa4flex")

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() < 5

    i = torch.arange(16 + TEXT)
    table = (i[:, None] - i).abs() < 5
    by_table = run(made, given | {"joint_attention_kwargs": {"attention_mask": table}})
    by_function = run(made, given | {"joint_attention_kwargs": {"attention_mask": near}})
    torch.testing.assert_close(by_function, by_table)


def test_fused_projections_need_the_name_again(door: ModuleType) -> None:
    made, given = sd3(dual_attention_layers=())
    made = made.double()
    made.set_attention_backend("fa4flex")
    made.fuse_qkv_projections()
    with pytest.raises(UnsupportedError, match="no call"), door.fa4flex_attention():
        out = made(**given).sample
    made.set_attention_backend("fa4flex")
    with door.fa4flex_attention() as inside:
        close(made(**given).sample, out)
    assert inside.calls == 2


@pytest.mark.parametrize("name", MODELS[:4])
def test_names_go_back(door: ModuleType, name: str) -> None:
    made, given = tiny(name)
    out = made(**given, return_dict=False)[0]
    made.set_attention_backend("fa4flex")
    made.set_attention_backend("native")
    with pytest.raises(UnsupportedError, match="no call"), door.fa4flex_attention():
        close(made(**given, return_dict=False)[0], out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_compiled(door: ModuleType, name: str) -> None:
    made, given = tiny(name)
    made.set_attention_backend("fa4flex")
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    with door.fa4flex_attention(mask=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 5):
        torch.testing.assert_close(compiled(**given).sample, made(**given).sample)
