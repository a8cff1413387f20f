"""Variants against the implementations that others published: torch, attention-gym and transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_gym import masks as gym
from attn_gym import mods as gym_mods
from helpers import added, cumulative
from torch.nn.attention.flex_attention import create_mask
from variant_files import CASES, at_random

from fa4flex import variants as v
from fa4flex.primitives.mask import Mask, as_mask
from fa4flex.variants._cases import Case, allowed, scored


def flex_mod(mask: Mask, q_len: int, kv_len: int) -> Callable[..., Any]:
    bound = mask.bind(q_len=q_len, kv_len=kv_len)
    return lambda b, h, q_idx, kv_idx: bound(b, h, q_idx, kv_idx)


@pytest.mark.parametrize("case", CASES)
def test_mask_runs_under_torch_create_mask(case: Case, seed: int) -> None:
    sizes = at_random(seed)
    drawn = case.draw(sizes)
    mask = drawn.compose(*drawn.learned).get("mask")
    if mask is not None:
        mask = as_mask(mask)
        mod = flex_mod(mask, drawn.q_len, drawn.kv_len)
        dense = create_mask(mod, sizes.batch, 1, drawn.q_len, drawn.kv_len, device="cpu")
        assert torch.equal(dense[:, 0], allowed(mask, drawn.q_len, drawn.kv_len, sizes.batch)), mask


def test_a_mask_object_is_a_flexattention_mod_as_it_is() -> None:
    mask = (v.causal & v.sliding_window(3)).bind(q_len=6, kv_len=6)
    assert torch.equal(create_mask(mask, 1, 1, 6, 6, device="cpu")[0, 0], allowed(mask, 6, 6)[0])


def test_masks_agree_with_attention_gym(seed: int) -> None:
    rng = random.Random(seed)
    n, w, d, p = 24, rng.randint(1, 8), rng.randint(1, 4), rng.randint(1, 9)
    sizes = [rng.randint(1, 6) for _ in range(4)]
    of, total = cumulative(sizes), sum(sizes)
    marked = torch.rand(n) < 0.2
    parents = [-1] + [rng.randint(0, node - 1) for node in range(1, 7)]
    pairs = [
        (v.causal(), gym.causal_mask, n, n),
        (v.sliding_window(w + 1), gym.generate_sliding_window(w), n, n),
        (v.dilated_window(w, d), gym.generate_dilated_sliding_window(w, d), n, n),
        (v.global_window(w, marked), gym.generate_global_sliding_window(w, marked), n, n),
        (v.prefix_lm(p), gym.generate_prefix_lm_mask(p), n, n),
        (v.causal & v.document(offsets=of), gym.generate_doc_mask_mod(gym.causal_mask, of), total, total),
        (v.natten((6, 6), (3, 5)), gym.generate_natten(6, 6, 3, 5), 36, 36),
        (v.block_diffusion(12, d), gym.generate_block_diffusion_mask(12, d), n, n),
        (
            v.sliding_tile((4, 6), (2, 4), (2, 2), 3),
            gym.generate_sta_mask_mod_2d((4, 6), (2, 4), (2, 2), 3),
            27,
            27,
        ),
        (
            v.sliding_tile((2, 4, 4), (1, 2, 4), (1, 2, 2), 2),
            gym.generate_sta_mask_mod_3d((2, 4, 4), (1, 2, 4), (1, 2, 2), 2),
            34,
            34,
        ),
        (
            v.shared_prefix(of, torch.tensor([0, 0, 2, 2])),
            gym.generate_shared_prefix_mask_mod(of, torch.tensor([0, 0, 2, 2])),
            total,
            total,
        ),
        (
            v.tree(parents, p),
            gym.generate_jetspec_tree_causal_mask_mod(p, gym.build_tree_ancestor_matrix(parents, "cpu")),
            7,
            7 + p,
        ),
        (
            v.vision_cross(torch.tensor([[0, 3], [2, 7]]), 4),
            gym.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 3], [2, 7]]), 4),
            8,
            8,
        ),
    ]
    for mask, theirs, q_len, kv_len in pairs:
        expected = create_mask(theirs, 1, 1, q_len, kv_len, device="cpu")[0, 0]
        assert torch.equal(allowed(mask, q_len, kv_len)[0], expected), mask


def test_alibi_agrees_with_attention_gym() -> None:
    theirs = gym_mods.generate_alibi_bias(16)
    own = added(v.alibi(), (1, 16, 6, 6))
    h, q, kv = torch.meshgrid(torch.arange(16), torch.arange(6), torch.arange(6), indexing="ij")
    torch.testing.assert_close(
        own[0], theirs(torch.zeros(16, 6, 6).double(), 0, h, q, kv), rtol=1e-6, atol=1e-6
    )


def test_softcap_agrees_with_attention_gym() -> None:
    scores = 40 * torch.randn(1, 2, 5, 5, dtype=torch.float64)
    theirs = gym_mods.generate_tanh_softcap(5)(scores, 0, 0, 0, 0)
    torch.testing.assert_close(scored(v.softcap(5.0), scores), theirs)


def test_sandwich_agrees_with_attention_gym() -> None:
    heads, d_bar, n = 4, 16, 9
    bias = added(v.sandwich(n, d_bar), (1, heads, n, n))
    h, q, kv = torch.meshgrid(torch.arange(heads), torch.arange(n), torch.arange(n), indexing="ij")
    theirs = gym_mods.generate_sandwich_bias(heads, n, d_bar)(torch.zeros(heads, n, n), 0, h, q, kv)
    torch.testing.assert_close(bias[0].float(), theirs, rtol=1e-5, atol=1e-5)


def test_graphormer_reads_attention_gyms_distances() -> None:
    adjacency = torch.rand(2, 7, 7) < 0.3
    distances = gym_mods.shortest_path_distances(adjacency | adjacency.transpose(1, 2), 4)
    table = torch.randn(3, 6, dtype=torch.float64)
    theirs = gym_mods.generate_graphormer_spatial_bias(table, distances.to(torch.int32))
    b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (2, 3, 7, 7)), indexing="ij")
    expected = theirs(torch.zeros(2, 3, 7, 7, dtype=torch.float64), b, h, q, kv)
    torch.testing.assert_close(added(v.graphormer(table, distances), (2, 3, 7, 7)), expected)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets_are_those_of_published_checkpoints(bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    relative = torch.arange(-400, 401)
    theirs = t5.T5Attention._relative_position_bucket(relative, bidirectional, 32, 128)
    table = torch.arange(32.0, dtype=torch.float64)[:, None]
    ours = added(v.t5_bias(table, bidirectional), (1, 1, 401, 401))[0, 0]
    first_query, last_query = ours[0], ours[-1]
    assert torch.equal(first_query.long(), theirs[400:])
    assert torch.equal(last_query.long(), theirs[:401])
