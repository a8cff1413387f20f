"""Block masks for torch's flex_attention: right at every tile, as torch lists them, in O(blocks) memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import cumulative
from largest import largest_tensor
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fa4flex
from fa4flex import variants as v
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.tiles import tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.primitives.blocks import EMPTY, FULL, PARTIAL
from fa4flex.runtime.call import SequenceLengths
from fa4flex.runtime.flex import ragged
from fa4flex.runtime.flex.block_mask import (
    BLOCK,
    TILES_AT_ONCE,
    blocks_of,
    classes_of,
)

LENGTH = 1500


def found_and_proved(mask: Any, shape: Shape) -> tuple[Tensor, Tensor]:
    """Classes by bounds on tensors of the device, and exact ones."""
    program = fa4flex.compile(mask=mask).program
    found = classes_of(program.facts.mask, shape, program.captured())
    exact = tile_map(program.facts.mask, program.facts.keys, shape, program.captured(), BLOCK).classes()
    return found, exact.expand_as(found)


def documents(length: int) -> Tensor:
    return torch.randint(0, 9, (length,), dtype=torch.int32).sort().values


EXACT = {
    "causal": lambda: v.causal,
    "window": lambda: v.sliding_window(300),
    "documents": lambda: v.document(documents(LENGTH)) & v.causal,
    "chunked": lambda: v.chunked_local(200),
    "prefix": lambda: v.prefix_lm(200),
    "streaming": lambda: v.streaming_llm(7, 300),
    "by head": lambda: lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 100 * (h + 1),
    "nothing": lambda: lambda b, h, q_idx, kv_idx: q_idx < 0,
    "a map": lambda: fa4flex.BlockMap.from_dense(torch.rand(24, 24) < 0.3, 64, LENGTH, LENGTH),
}
BOUNDED = {
    "random pairs": lambda: lambda b, h, q, kv, t=torch.rand(LENGTH, LENGTH): t[q, kv] < 1e-4,
    "shuffled documents": lambda: v.document(documents(LENGTH)[torch.randperm(LENGTH)]),
    "dilated": lambda: v.dilated_window(20, 3),
    "natten": lambda: v.natten((30, 50), (7, 7)),
    "global tokens": lambda: v.global_window(100, torch.rand(LENGTH) < 0.001),
}


@pytest.mark.parametrize("name", [*EXACT, *BOUNDED])
def test_no_tile_is_skipped_or_taken_whole_in_error(name: str) -> None:
    """Nearly all tiles of the first kind are told exactly: all but those at the ends of the sequences."""
    found, exact = found_and_proved((EXACT | BOUNDED)[name](), Shape(2, 3, LENGTH, LENGTH))
    assert not ((found == EMPTY) & (exact != EMPTY)).any()
    assert not ((found == FULL) & (exact != FULL)).any()
    assert (found[:, :, -1] != FULL).all() and (found[..., -1] != FULL).all()
    if name in EXACT:
        assert torch.equal(found[:, :, :-1, :-1], exact[:, :, :-1, :-1])


def test_lists_are_those_of_torch() -> None:
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 300 * (h + 1))  # noqa: E731
    theirs = create_block_mask(mask_mod, None, 2, LENGTH, LENGTH, device="cpu")
    program = fa4flex.compile(mask=mask_mod).program
    ours = blocks_of(classes_of(program.facts.mask, Shape(1, 2, LENGTH, LENGTH), program.captured()))
    for name, given in zip(ours._fields, ours, strict=True):
        wanted = getattr(theirs, name)
        if not name.endswith("indices"):
            assert torch.equal(given, wanted), name
            continue
        count = getattr(ours, name.replace("indices", "num_blocks"))
        live = torch.arange(given.shape[-1]) < count[..., None]
        assert torch.equal(given[live], wanted[live]), name
        assert torch.equal(given.sort(-1).values, wanted.sort(-1).values), name


def test_lists_of_any_classes() -> None:
    classes = torch.randint(0, 3, (2, 3, 5, 7), dtype=torch.uint8)
    ours = blocks_of(classes)
    for kind, counts, indices in ((PARTIAL, *ours[:2]), (FULL, *ours[2:4])):
        made = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK)
        assert torch.equal(made.to_dense() != 0, classes == kind)
        assert made.q_num_blocks is not None and made.q_indices is not None
        transposed = ours[4:6] if kind == PARTIAL else ours[6:8]
        assert torch.equal(made.q_num_blocks, transposed[0])


def test_nothing_is_as_large_as_the_mask() -> None:
    """131,072 tokens: 1,048,576 blocks. No tensor has more than 8 bytes for each."""
    length = 1 << 17
    ids = (torch.arange(length) // 5000).to(torch.int32)
    program = fa4flex.compile(mask=v.causal & v.document(ids)).program
    captured = program.captured()
    with largest_tensor() as largest:
        classes = classes_of(program.facts.mask, Shape(1, 8, length, length), captured)
    assert largest.nbytes <= 8 * TILES_AT_ONCE == 1 << 20, "classes take a byte each, and tokens 8"
    with largest_tensor() as largest:
        made = blocks_of(classes)
    assert largest.nbytes <= 8 * (length // BLOCK[0]) ** 2
    per_document = 5000 // 128
    assert int(made.kv_num_blocks.sum()) < 3 * length // 128
    assert int(made.full_kv_num_blocks.sum()) > 0.8 * (length // 5000) * per_document**2 / 2


def test_packed_sequences_see_their_own_blocks() -> None:
    """Blocks that hold tokens of two sequences aside, none that is empty is partial."""
    cu = cumulative([300, 0, 700, 500])
    program = fa4flex.compile(mask=v.causal).program
    facts = ragged.packed_facts(program.facts, 0)
    tokens = ragged.tokens_of(SequenceLengths(cu, cu), LENGTH, LENGTH)
    captured = Captured(tuple(tokens), program.scalars)
    found = classes_of(facts.mask, Shape(1, 1, LENGTH, LENGTH), captured)[0, 0]
    place = torch.arange(LENGTH)
    of = torch.searchsorted(cu[1:].long(), place, right=True)
    allowed = (of[:, None] == of) & (place[:, None] >= place)
    padded = torch.nn.functional.pad(allowed, (0, 1536 - LENGTH, 0, 1536 - LENGTH))
    some = padded.view(12, 128, 12, 128).any(3).any(1)
    assert not (some & (found == EMPTY)).any()
    of_blocks = torch.nn.functional.pad(of, (0, 1536 - LENGTH), value=3).view(12, 128)
    mixed = of_blocks.amin(1) != of_blocks.amax(1)
    assert not ((found != EMPTY) & ~some)[~mixed][:, ~mixed].any()
