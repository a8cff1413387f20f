"""Random compositions of masks: every truly empty or full tile is found, and no other is called so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_zoo import tile_classes
from torch import Tensor

from fa4flex.codegen.analyze.tiles import Shape, tile_map
from fa4flex.codegen.build import build
from fa4flex.primitives.mask import Mask
from fa4flex.variant import Variant
from fa4flex.variants import (
    block_diffusion,
    causal,
    checkerboard,
    chunked_local,
    dilated_window,
    document,
    global_window,
    prefix_lm,
    sliding_window,
    streaming_llm,
    symmetric_window,
)

EMPTY, FULL = 0, 2
LONGEST = 160
BATCH, HEADS = 2, 2


def _ids(lengths: list[int]) -> Tensor:
    """Document ids [LONGEST] of documents of these lengths, the last one filling up."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.nn.functional.pad(ids, (0, LONGEST), value=len(lengths))[:LONGEST].to(torch.int32)


def _per_head_window(widths: Tensor) -> Mask:
    from fa4flex.primitives.mask import as_mask

    def per_head_window(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (q_idx - kv_idx).abs() < widths[h]

    return as_mask(per_head_window)


def _table(seed: int, density: float) -> Mask:
    from fa4flex.primitives.mask import as_mask

    table = torch.rand(LONGEST, LONGEST, generator=torch.Generator().manual_seed(seed)) < density

    def lookup(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return table[q_idx, kv_idx]

    return as_mask(lookup)


small = st.integers(1, 48)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=6)
ATOMS = st.one_of(
    st.just(None).map(lambda _: causal()),
    small.map(sliding_window),
    small.map(symmetric_window),
    st.integers(1, 100).map(prefix_lm),
    lengths.map(lambda each: document(ids=_ids(each))),
    st.permutations(list(range(8))).map(
        lambda order: document(ids=torch.tensor(order).repeat_interleave(LONGEST // 8).to(torch.int32))
    ),
    st.tuples(lengths, lengths).map(lambda pair: document(ids=torch.stack([_ids(pair[0]), _ids(pair[1])]))),
    st.tuples(st.integers(1, 60), st.integers(1, 5)).map(lambda p: dilated_window(*p)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda p: streaming_llm(sinks=p[0], window=p[1])),
    st.integers(1, 70).map(chunked_local),
    st.tuples(small, st.integers(1, 20)).map(lambda p: global_window(p[0], p[1])),
    st.integers(1, 8).map(lambda size: checkerboard(size)),
    st.integers(1, 20).map(lambda block: block_diffusion(80, block)),
    st.lists(st.integers(1, 100), min_size=HEADS, max_size=HEADS).map(
        lambda w: _per_head_window(torch.tensor(w))
    ),
    st.tuples(st.integers(0, 999), st.sampled_from([0.01, 0.5, 0.999])).map(lambda p: _table(*p)),
)
MASKS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
        inner.map(lambda m: ~m),
    ),
    max_leaves=4,
)
SIZES = st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST))
TILES = st.sampled_from([(16, 16), (32, 32), (64, 64), (32, 24), (17, 40), (128, 128)])


def brute_force(mask: Mask, shape: Shape, tile: tuple[int, int]) -> Tensor:
    """Classes uint8 [B, H, R, C], from the mask itself on every pair of indices."""
    b = torch.arange(shape.batch).view(-1, 1, 1, 1) if shape.b is None else torch.full((1, 1, 1, 1), shape.b)
    h, q, kv = (
        torch.arange(shape.heads).view(-1, 1, 1),
        torch.arange(shape.q_len).view(-1, 1),
        torch.arange(shape.kv_len),
    )
    context = {"q_len": shape.q_len, "kv_len": shape.kv_len, "num_heads": shape.heads}
    allowed = mask(b, h, q, kv, **{name: context[name] for name in mask.context})
    allowed = torch.as_tensor(allowed).expand(b.shape[0], shape.heads, shape.q_len, shape.kv_len)
    return tile_classes(allowed, tile)


@pytest.mark.slow
@settings(
    max_examples=2000,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(mask=MASKS, sequences=st.lists(SIZES, min_size=1, max_size=2), tile=TILES)
def test_classes_are_sound_and_complete(
    mask: Mask, sequences: list[tuple[int, int]], tile: tuple[int, int]
) -> None:
    """One mask object, dense or as the sequences of a ragged batch, at any tile size and length."""
    program = build(Variant(mask=mask))
    for index, (q_len, kv_len) in enumerate(sequences):
        ragged = len(sequences) > 1
        shape = Shape(1 if ragged else BATCH, HEADS, q_len, kv_len, index if ragged else None)
        found = tile_map(program.facts.mask, program.facts.keys, shape, program.captured(), tile).classes()
        truth = brute_force(mask, shape, tile)
        found = found.expand_as(truth)
        assert not ((found == EMPTY) & (truth != EMPTY)).any(), "a tile with allowed pairs was called empty"
        assert not ((found == FULL) & (truth != FULL)).any(), "a tile with masked pairs was called full"
        assert torch.equal(found, truth), "a truly empty or full tile was left partial"
