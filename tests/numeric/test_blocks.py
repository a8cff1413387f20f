"""Block-sparse maps: what each constructor means, pair by pair, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import evaluate
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import fa4flex
from fa4flex.errors import InputError
from fa4flex.primitives.blocks import BlockMap
from fa4flex.variants import causal, sliding_window

GARBAGE = 10_000


def meaning(classes: Tensor, size: tuple[int, int], lengths: tuple[int, int], inner: Any) -> Tensor:
    """allowed[b, h, q, kv], pair by pair."""
    batch, heads = classes.shape[:2]
    allowed = torch.zeros(batch, heads, *lengths, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for q in range(lengths[0]):
                for kv in range(lengths[1]):
                    found = int(classes[b, h, q // size[0], kv // size[1]])
                    allowed[b, h, q, kv] = found == 2 or (found == 1 and inner(q, kv))
    return allowed


def drawn(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape, dtype=torch.uint8)


def as_lists(classes: Tensor, which: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """counts and indices of the blocks of class `which`, with garbage behind the live entries."""
    counts = (classes == which).sum(-1).to(dtype)
    indices = torch.full((*classes.shape[:3], width), GARBAGE, dtype=dtype)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in classes.shape[:3])).tolist():
        live = (classes[tuple(place)] == which).nonzero().flatten()
        indices[tuple(place)][: live.numel()] = live[torch.randperm(live.numel())].to(dtype)
    return counts, indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_counts_is_the_map_whatever_stands_behind_the_counts(dtype: torch.dtype) -> None:
    classes = drawn(2, 3, 4, 5)
    for width in (5, 7):
        partial, full = as_lists(classes, 1, width, dtype), as_lists(classes, 2, width, dtype)
        blocks = BlockMap.from_counts(*partial, (8, 4), 30, 17, *full)
        assert torch.equal(blocks.classes, classes)
    assert torch.equal(BlockMap.from_counts(*partial, (8, 4), 30, 17).classes, (classes == 1).to(torch.uint8))


def test_narrow_lists_are_enough() -> None:
    counts = torch.tensor([[[1, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[2], [GARBAGE], [0]]]], dtype=torch.int32)
    blocks = BlockMap.from_counts(counts, indices, 4, 12, 12)
    assert blocks.classes[0, 0].tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_mask_means_full_or_partial_and_inner(shape: tuple[int, int]) -> None:
    size, lengths = (4, 3), (14, 11)
    blocks = BlockMap(drawn(*shape, 4, 4), size, *lengths)
    classes = blocks.classes.expand(2, 3, -1, -1)
    cases: list[tuple[Any, Any]] = [
        (None, lambda q, kv: True),
        (causal, lambda q, kv: kv <= q + 11 - 14),
        (lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0, lambda q, kv: (q + kv) % 2 == 0),
    ]
    for inner, oracle in cases:
        got = evaluate(blocks.mask(inner), 2, 3, *lengths)
        assert torch.equal(got, meaning(classes, size, lengths, oracle))


def test_block_masks_compose_and_run_under_torch() -> None:
    blocks = BlockMap(drawn(1, 1, 3, 3), (4, 4), 12, 12)
    mask = (blocks.mask(causal) & sliding_window(3)).bind(q_len=12, kv_len=12)
    expected = evaluate(blocks.mask(causal), 1, 1, 12, 12) & evaluate(sliding_window(3), 1, 1, 12, 12)
    got = create_mask(lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx), 1, 1, 12, 12, device="cpu")
    assert torch.equal(got, expected)
    assert blocks.mask().context == () and blocks.mask(causal).context == ("q_len", "kv_len")


def test_from_dense() -> None:
    listed = torch.rand(3, 4) < 0.5
    assert BlockMap.from_dense(listed, 8).classes.tolist() == [[listed.int().tolist()]]
    assert (BlockMap.from_dense(listed, 8).q_len, BlockMap.from_dense(listed, 8).kv_len) == (24, 32)
    assert BlockMap.from_dense(drawn(2, 3, 4), (8, 4), 20, 14).classes.shape == (1, 2, 3, 4)
    assert BlockMap.from_dense(drawn(5, 2, 3, 4), (8, 4), 20, 14).classes.shape == (5, 2, 3, 4)


@pytest.mark.parametrize("separate_full", [True, False])
def test_from_torch(separate_full: bool) -> None:
    kind: dict[str, Any] = {} if separate_full else {"separate_full_blocks": False}
    if kind.keys() - inspect.signature(create_block_mask).parameters.keys():
        pytest.skip("this torch always separates full blocks")

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx + h) & (q_idx - kv_idx < 35 + b)

    block_mask = create_block_mask(mask_mod, 2, 3, 50, 70, device="cpu", BLOCK_SIZE=(8, 16), **kind)
    blocks, own = BlockMap.from_torch(block_mask)
    assert own is mask_mod and (blocks.q_len, blocks.kv_len, blocks.block_size) == (50, 70, (8, 16))
    assert (blocks.counts["full"] > 0) == separate_full
    dense = create_mask(mask_mod, 2, 3, 50, 70, device="cpu")
    assert torch.equal(evaluate(blocks.mask(own), 2, 3, 50, 70), dense)


def test_from_torch_without_mask_mod_is_a_mask_by_itself() -> None:
    counts = torch.ones(1, 1, 3, dtype=torch.int32)
    indices = torch.arange(3, dtype=torch.int32).view(1, 1, 3, 1).expand(1, 1, 3, 3).contiguous()
    blocks, own = BlockMap.from_torch(BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4))
    assert own is None
    allowed = evaluate(blocks.mask(own), 1, 1, 12, 12)[0, 0]
    assert torch.equal(allowed, torch.block_diag(*[torch.ones(4, 4)] * 3).bool())


def test_a_map_made_in_inference_mode_serves_training() -> None:
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 12, 12, device="cpu", BLOCK_SIZE=4)
    q, k, v = (torch.randn(1, 1, 12, 8, requires_grad=True) for _ in range(3))
    with torch.inference_mode():
        expected = fa4flex.flex_attention(q, k, v, block_mask=block_mask)
    out = fa4flex.flex_attention(q, k, v, block_mask=block_mask)
    out.sum().backward()
    assert torch.equal(out, expected) and v.grad is not None


def test_a_map_made_within_a_transform_serves_no_other_call() -> None:
    """Its tensors have no memory after that."""
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 12, 12, device="cpu", BLOCK_SIZE=4)
    q, k, v = (torch.randn(1, 1, 12, 8) for _ in range(3))
    torch.func.grad(lambda x: fa4flex.flex_attention(x, k, v, block_mask=block_mask).sum())(q)
    blocks, _ = BlockMap.from_torch(block_mask)
    assert blocks.classes.data_ptr()


def test_sliced_block_mask_is_refused() -> None:
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 256, 256, device="cpu")
    with pytest.raises(InputError, match=r"a sliced BlockMask.*\n.*\n.*reassign it: sliced.mask_mod = "):
        BlockMap.from_torch(block_mask[:, :, 0])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_from_csr_and_sparse_tensors() -> None:
    listed = torch.rand(4, 6) < 0.4
    listed[0, 0] = True
    csr = listed.float().to_sparse_csr()
    arrays = BlockMap.from_csr(csr.crow_indices().int(), csr.col_indices().int(), (4, 6), (8, 4), 30, 21)
    tensor = BlockMap.from_sparse(csr, (8, 4), 30, 21)
    assert torch.equal(arrays.classes[0, 0].bool(), listed) and torch.equal(tensor.classes, arrays.classes)
    tokens = listed.repeat_interleave(2, 0).repeat_interleave(3, 1).float()
    bsr = BlockMap.from_sparse(tokens.to_sparse_bsr((2, 3)))
    assert (bsr.block_size, bsr.q_len, bsr.kv_len) == ((2, 3), 8, 18)
    assert torch.equal(evaluate(bsr.mask(), 1, 1, 8, 18)[0, 0], tokens.bool())


def test_statistics_repr_and_fits() -> None:
    classes = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]], dtype=torch.uint8)
    blocks = BlockMap.from_dense(classes, (8, 4), 9, 16)
    assert blocks.counts == {"empty": 4, "partial": 2, "full": 2} and blocks.sparsity == 0.5
    again = eval(repr(blocks), {"BlockMap": BlockMap, "torch": torch})
    assert torch.equal(again.classes, blocks.classes) and again.block_size == (8, 4) and again.kv_len == 16
    blocks.fits(9, 16, 5, 7)
    with pytest.raises(InputError, match="q_len=9, kv_len=16, but got q_len=9, kv_len=17"):
        blocks.fits(9, 17, 1, 1)
    wide = BlockMap(drawn(2, 3, 2, 4), (8, 4), 9, 16)
    wide.fits(9, 16, 2, 3)
    with pytest.raises(InputError, match="a block map with 2 batch entries for inputs with 1"):
        wide.fits(9, 16, 1, 3)
    with pytest.raises(
        InputError, match=r"a block map with 3 heads for inputs with 6\n  expected: 1 .shared. or 6"
    ):
        wide.fits(9, 16, 2, 6)


def lists(counts: Any, indices: Any, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    return torch.tensor([[counts]], dtype=dtype), torch.tensor([[indices]], dtype=dtype)


ONE = lists([1, 1], [[0, 9], [1, 9]])
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: BlockMap(drawn(1, 1, 2, 2).int(), (4, 4), 8, 8), "classes of torch.int32\n  expected: a uint8"),
    (lambda: BlockMap(drawn(2, 2), (4, 4), 8, 8), "classes of rank 2"),
    (
        lambda: BlockMap(drawn(1, 1, 2, 3), (4, 4), 8, 8),
        r"\[2, 3\] blocks.*\n  expected: \[2, 2\] blocks: ceil",
    ),
    (lambda: BlockMap(drawn(1, 1, 2, 2) * 0 + 3, (4, 4), 8, 8), "class 3 in the map"),
    (
        lambda: BlockMap(drawn(1, 1, 2, 2), (0, 4), 8, 8),
        r"block_size=\(0, 4\)\n  expected: one or two positive",
    ),
    (lambda: BlockMap.from_dense(drawn(2, 2), -1), "block_size=-1"),
    (lambda: BlockMap(drawn(1, 1, 2, 2), (4, 4), 0, 8), "q_len=0, kv_len=8"),
    (lambda: BlockMap.from_dense(torch.ones(2, 2), 4), "a block map of torch.float32"),
    (lambda: BlockMap.from_dense(drawn(2), 4), "a block map of rank 1"),
    (
        lambda: BlockMap.from_counts(*ONE, 4, 8, 12, *lists([0, 1], [[0], [1]])),
        r"block \(0, 0, 1, 1\).*partial and full",
    ),
    (lambda: BlockMap.from_counts(*ONE, 4, 8, 12, ONE[0]), "full_counts without full_indices"),
    (lambda: BlockMap.from_counts(*ONE, 4, 8, 12, None, ONE[1]), "full_indices without full_counts"),
    (
        lambda: BlockMap.from_counts(*lists([1], [[3]]), 4, 4, 12),
        "key block 3 in indices\n  expected: 0 to 2",
    ),
    (lambda: BlockMap.from_counts(*lists([1], [[-1]]), 4, 4, 12), "key block -1 in indices"),
    (lambda: BlockMap.from_counts(*lists([2], [[0]]), 4, 4, 12), "counts from 2 to 2\n  expected: 0 to 1"),
    (lambda: BlockMap.from_counts(*lists([-1], [[0]]), 4, 4, 12), "counts from -1 to -1"),
    (
        lambda: BlockMap.from_counts(*lists([2], [[1, 1]]), 4, 4, 12),
        r"block \(0, 0, 0, 1\).*listed more than once",
    ),
    (lambda: BlockMap.from_counts(ONE[0].float(), ONE[1], 4, 8, 12), "counts of torch.float32"),
    (lambda: BlockMap.from_counts(ONE[0], ONE[1].to(torch.int16), 4, 8, 12), "indices of torch.int16"),
    (lambda: BlockMap.from_counts(ONE[0][0], ONE[1], 4, 8, 12), "counts of rank 2"),
    (
        lambda: BlockMap.from_counts(ONE[0][:, :, :1], ONE[1], 4, 8, 12),
        r"counts \[1, 1, 1\] on cpu, indices \[1, 1, 2, 2\]",
    ),
    (lambda: BlockMap.from_counts(ONE[0].to("meta"), ONE[1], 4, 8, 12), "on meta, indices"),
    (lambda: BlockMap.from_counts(*ONE, 4, 12, 12), r"\[2, 3\] blocks for q_len=12.*\n  expected: \[3, 3\]"),
    (
        lambda: BlockMap.from_csr(torch.tensor([0, 1]), torch.tensor([0]), (2, 2), 4),
        r"row_starts torch.tensor\(\[0, 1\].*for 2 rows.*\n  expected: 3 entries",
    ),
    (
        lambda: BlockMap.from_csr(torch.tensor([0, 1, 3]), torch.tensor([0, 1]), (2, 2), 4),
        "row_starts end at 3, columns has 2",
    ),
    (lambda: BlockMap.from_csr(torch.tensor([0, 1]), torch.tensor([2]), (1, 2), 4), "key block 2 in columns"),
    (
        lambda: BlockMap.from_csr(torch.tensor([0, 2]), torch.tensor([1, 1]), (1, 2), 4),
        "more than once in columns",
    ),
    (
        lambda: BlockMap.from_csr(torch.tensor([0, 1], device="meta"), torch.tensor([0]), (1, 2), 4),
        "row_starts on meta",
    ),
    (lambda: BlockMap.from_sparse(torch.eye(2), 4), "sparse_csr or sparse_bsr"),
    (lambda: BlockMap.from_sparse(torch.eye(2).to_sparse_csr()), "CSR tensor of blocks without block_size"),
    (lambda: BlockMap.from_sparse(torch.eye(4).to_sparse_bsr((2, 2)), 2), "stores zeros"),
    (
        lambda: BlockMap.from_sparse(torch.ones(4, 4).to_sparse_bsr((2, 2)), 4),
        r"block_size=4 for a BSR tensor of \(2, 2\)",
    ),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_says_what_was_given_and_what_to_do(number: int) -> None:
    make, text = ERRORS[number]
    with pytest.raises(InputError, match=text) as raised:
        make()
    assert "to fix:" in str(raised.value)
