"""Every mask_mod and score_mod of attention-gym, instantiated at sizes small enough to check densely.

Lengths are 256..640 where the mod permits; ragged ones (not a multiple of 64 or 128) where nothing in the mod
ties the length to a grid. `differentiable` are the captured tensors that gradients must reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from attn_gym import masks, mods
from attn_gym.masks import document_mask, vsa
from torch import Tensor


@dataclass(frozen=True)
class Instance:
    """One mod: `fn` is defined for b < B, h < H, q_idx < q_len, kv_idx < kv_len."""

    name: str
    fn: Callable[..., Any]
    B: int
    H: int
    q_len: int
    kv_len: int
    differentiable: tuple[Tensor, ...] = ()

    @property
    def approximate(self) -> bool:
        """True if it has functions that a GPU approximates, such as tanh."""
        return self.name in APPROXIMATE


APPROXIMATE = (
    "softcap",
    "softcap_approx",
    "softcap_wide",
    "sandwich",
    "gelu",
    "gelu_tanh",
    "sigmoid",
    "silu",
)
Key = tuple[str, str]
"""The argument that takes a mod, and its name."""


def instances(masks: int = 333, scores: int = 270) -> dict[Key, Instance]:
    """All mods; of those that work at any length, mask_mods at `masks` and score_mods at `scores`. They are
    made on the CPU, with whose generator attention-gym draws."""
    with torch.device("cpu"):
        kinds = (("mask", mask_instances(masks)), ("score_mod", score_instances(scores)))
    return {(kind, x.name): x for kind, found in kinds for x in found}


def _offsets(total: int, documents: int, generator: torch.Generator) -> Tensor:
    cuts = torch.randperm(total - 1, generator=generator)[: documents - 1].sort().values + 1
    return torch.tensor([0, *cuts.tolist(), total])


def _simple_masks(seq: int, generator: torch.Generator) -> list[Instance]:
    is_global = torch.rand(seq, generator=generator) < 0.02
    offsets = _offsets(seq, 6, generator)
    prefix_of = torch.tensor([0, 0, 0, 3, 3, 5])
    square = {
        "causal": masks.causal_mask,
        "sliding_window": masks.generate_sliding_window(70),
        "dilated_sliding_window": masks.generate_dilated_sliding_window(48, 3),
        "global_sliding_window": masks.generate_global_sliding_window(40, is_global),
        "prefix_lm": masks.generate_prefix_lm_mask(90),
        "document_causal": masks.generate_doc_mask_mod(masks.causal_mask, offsets),
        "document_window": masks.generate_doc_mask_mod(masks.generate_sliding_window(20), offsets),
        "packed_causal_document": masks.generate_packed_causal_doc_mask_mod(offsets),
        "shared_prefix": masks.generate_shared_prefix_mask_mod(offsets, prefix_of),
        "batchify_causal": masks.batchify_mask_mod(masks.causal_mask, 75),
        "batchify_noop": masks.batchify_mask_mod(document_mask.noop_mask, 75),
    }
    return [Instance(name, fn, 1, 1, seq, seq) for name, fn in square.items()]


def _block_masks(generator: torch.Generator) -> list[Instance]:
    parents = [-1, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, 256))]
    tree = masks.build_tree_ancestor_matrix(parents, device="cpu")
    intervals = torch.tensor([[0, 80], [60, 200], [200, 330], [330, 330], [100, 330]])
    return [
        Instance("block_diffusion", masks.generate_block_diffusion_mask(160, 24), 1, 1, 320, 320),
        Instance("jetspec_tree", masks.generate_jetspec_tree_causal_mask_mod(100, tree), 1, 1, 256, 356),
        Instance("jetspec_training", masks.generate_jetspec_training_mask_mod(90, 12), 1, 1, 264, 354),
        Instance("flamingo", masks.generate_vision_cross_attention_mask_mod(intervals, 60), 1, 1, 330, 300),
        Instance(
            "svg_spatial", masks.generate_spatial_head_mask_mod(26, 9, 36, 2, False, 16), 1, 1, 350, 350
        ),
        Instance(
            "svg_spatial_sink", masks.generate_spatial_head_mask_mod(26, 9, 36, 2, True, 16), 1, 1, 350, 350
        ),
        Instance("svg_temporal", masks.generate_temporal_head_mask_mod(26, 9, 36, 2), 1, 1, 350, 350),
    ]


def _canvas_masks() -> list[Instance]:
    text = 14
    return [
        Instance("natten", masks.generate_natten(18, 18, 5, 7), 1, 1, 324, 324),
        Instance("tiled_natten", masks.generate_tiled_natten(16, 24, 5, 5, 4, 8), 1, 1, 384, 384),
        Instance("morton_natten", masks.generate_morton_natten(16, 16, 5, 7), 1, 1, 256, 256),
        Instance(
            "sta_2d",
            masks.generate_sta_mask_mod_2d((16, 16), (12, 8), (4, 4), text),
            1, 1, 256 + text, 256 + text,
        ),
        Instance(
            "sta_3d",
            masks.generate_sta_mask_mod_3d((4, 8, 12), (2, 4, 12), (2, 4, 4), text),
            1, 1, 384 + text, 384 + text,
        ),
    ]  # fmt: skip


def _vsa_masks(generator: torch.Generator) -> list[Instance]:
    B, H, tiles, top, tile = 2, 3, 6, 3, 64
    topk = torch.rand(B, H, tiles, tiles, generator=generator).topk(top, dim=-1).indices.to(torch.int32)
    sizes = torch.randint(1, tile + 1, (tiles,), generator=generator)
    length = tiles * tile
    return [
        Instance("vsa", masks.generate_vsa_mask_mod(topk, tile), B, H, length, length),
        Instance("vsa_sizes", masks.generate_vsa_mask_mod(topk, tile, sizes), B, H, length, length),
        Instance("vsa_padding", vsa.generate_vsa_padding_mask_mod(sizes, tile), 1, 1, length, length),
        Instance(
            "vsa_block_mask",
            vsa.create_vsa_block_mask(topk, tile, tiles, sizes).mask_mod,
            1,
            1,
            length,
            length,
        ),
    ]


def mask_instances(seq: int = 333, seed: int = 0) -> list[Instance]:
    """All 27 mask_mods; `seq` is the length of those that work at any."""
    generator = torch.Generator().manual_seed(seed)
    return [
        *_simple_masks(seq, generator),
        *_block_masks(generator),
        *_canvas_masks(),
        *_vsa_masks(generator),
    ]


def _graphormer(B: int, H: int, nodes: int, generator: torch.Generator) -> list[Instance]:
    distances, hops, kinds = 6, 4, 5
    spatial = torch.randn(H, distances, generator=generator, requires_grad=True)
    edge = torch.randn(H, hops, kinds, generator=generator, requires_grad=True)
    dist = torch.randint(0, distances, (B, nodes, nodes), generator=generator, dtype=torch.int32)
    types = torch.randint(0, kinds, (B, nodes, nodes, hops), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, hops + 1, (B, nodes, nodes), generator=generator, dtype=torch.int32)
    spatial_mod = mods.generate_graphormer_spatial_bias(spatial, dist)
    edge_mod = mods.generate_graphormer_edge_bias(edge, types, lengths)
    return [
        Instance("graphormer_spatial", spatial_mod, B, H, nodes, nodes, (spatial,)),
        Instance("graphormer_edge", edge_mod, B, H, nodes, nodes, (edge,)),
    ]


def score_instances(seq: int = 270, seed: int = 0) -> list[Instance]:
    """All 14 score_mods at B=2, H=4; `seq` is their length (any)."""
    generator = torch.Generator().manual_seed(seed)
    B, H = 2, 4
    q_rope = torch.randn(B, H, seq, 16, generator=generator, requires_grad=True)
    k_rope = torch.randn(B, 1, seq, 16, generator=generator, requires_grad=True)
    activation = mods.generate_activation_score_mod
    plain = {
        "alibi": mods.generate_alibi_bias(H),
        "softcap": mods.generate_tanh_softcap(20),
        "softcap_approx": mods.generate_tanh_softcap(20, approx=True),
        "sandwich": mods.generate_sandwich_bias(H, seq, d_bar=32),
        "gelu": activation(F.gelu, 1.0),
        "gelu_tanh": activation(lambda x: F.gelu(x, approximate="tanh"), 1.0),
        "relu": activation(F.relu, 0.5),
        "sigmoid": activation(torch.sigmoid, 0.25),
        "silu": activation(F.silu, 1.0),
    }
    return [
        *(Instance(name, fn, B, H, seq, seq) for name, fn in plain.items()),
        *_graphormer(B, H, seq, generator),
        Instance(
            "mla_rope",
            mods.generate_mla_rope_score_mod(q_rope, k_rope, H),
            B, H, seq, seq, (q_rope, k_rope),
        ),
        Instance(
            "mla_rope_scaled",
            mods.generate_mla_rope_score_mod(q_rope, k_rope, H, 0.3),
            B, H, seq, seq, (q_rope, k_rope),
        ),
        Instance("softcap_wide", mods.generate_tanh_softcap(50), B, H, seq, seq),
    ]  # fmt: skip
