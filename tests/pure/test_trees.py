"""Folded sequences: which tokens are one, where they lie, and how values go there and back."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex.errors import InputError
from fa4flex.trees import Folded, fold

Sequences = list[list[int]]


def drawn(seed: int, letters: int = 2, most: int = 8, longest: int = 7) -> Sequences:
    rng = random.Random(seed)
    sequences = [
        [rng.randrange(letters) for _ in range(rng.randint(0, longest))] for _ in range(rng.randint(0, most))
    ]
    for _ in range(len(sequences) and rng.randint(0, 2)):  # equal to, and a prefix of, another
        other = rng.choice(sequences)
        sequences.insert(rng.randint(0, len(sequences)), other[: rng.randint(0, len(other))])
    return sequences


def allowed(folded: Folded) -> Tensor:
    """bool [T, T]: pairs of the mask."""
    places = torch.arange(len(folded.tokens))
    if not len(places):
        return torch.zeros(0, 0, dtype=torch.bool)
    found: Tensor = folded.mask(0, 0, places[:, None], places)
    return found


def causal_pairs(folded: Folded) -> Tensor:
    """The union of the causal pairs of all sequences, by where their tokens are."""
    pairs = torch.zeros(len(folded.tokens), len(folded.tokens), dtype=torch.bool)
    for places in folded.index.split(list(folded.lengths)):
        for i, place in enumerate(places):
            pairs[place, places[: i + 1]] = True
    return pairs


@pytest.mark.parametrize("case", range(200))
def test_tokens_are_shared_where_all_before_them_are(case: int, seed: int) -> None:
    sequences = drawn(seed + case)
    folded = fold(sequences)
    prefixes = {tuple(x[: i + 1]) for x in sequences for i in range(len(x))}
    assert len(folded.tokens) == len(prefixes) and folded.saved == sum(map(len, sequences)) - len(prefixes)
    assert [x.tolist() for x in folded.unfold(folded.tokens)] == sequences
    assert [x.tolist() for x in folded.unfold(folded.positions)] == [list(range(len(x))) for x in sequences]
    assert torch.equal(allowed(folded), causal_pairs(folded))
    assert torch.equal(folded.counts, torch.bincount(folded.index, minlength=len(prefixes)))
    for token, (parent, depth) in enumerate(
        zip(folded.parents.tolist(), folded.positions.tolist(), strict=True)
    ):
        assert (parent == -1) == (depth == 0) and parent < token
        assert parent == -1 or (folded.positions[parent] == depth - 1 and allowed(folded)[token, parent])
    assert torch.equal(folded.enter, torch.arange(len(prefixes), dtype=torch.int32))


@pytest.mark.parametrize("case", range(20))
def test_trees_and_branches_lie_in_the_order_of_sequences(case: int, seed: int) -> None:
    """The first time that each token is met, sequence by sequence, rises among the children of one."""
    folded = fold(drawn(seed + case, 3, 10))
    first = folded._holders().tolist()
    for parent in {-1, *folded.parents.tolist()}:
        met = [first[token] for token, above in enumerate(folded.parents.tolist()) if above == parent]
        assert met == sorted(met)


def test_nothing_shared_is_the_packed_batch() -> None:
    sequences = [[5, 1], [4, 1, 2], [], [3]]
    folded = fold(sequences)
    assert folded.tokens.tolist() == [5, 1, 4, 1, 2, 3] and folded.saved == 0
    assert folded.positions.tolist() == [0, 1, 0, 1, 2, 0] and folded.leave.tolist() == [2, 2, 5, 5, 5, 6]


@pytest.mark.parametrize(
    ("sequences", "tokens", "leave"),
    [
        ([], [], []),
        ([[]], [], []),
        ([[7]], [7], [1]),
        ([[7], [7], [7]], [7], [1]),
        ([[1, 2, 3], [1, 2]], [1, 2, 3], [3, 3, 3]),
        ([[1, 2], [1, 2, 3], [1]], [1, 2, 3], [3, 3, 3]),
        ([[1, 2], [3], [1, 4]], [1, 2, 4, 3], [3, 2, 3, 4]),
    ],
)
def test_small_batches(sequences: Sequences, tokens: list[int], leave: list[int]) -> None:
    folded = fold(sequences)
    assert folded.tokens.tolist() == tokens and folded.leave.tolist() == leave
    assert folded.leave.dtype == torch.int32 and folded.tokens.dtype == torch.int64


def test_a_padded_batch_and_its_lengths() -> None:
    batch = torch.tensor([[1, 2, 3, 0], [1, 2, 0, 0], [1, 5, 6, 7]], dtype=torch.int32)
    folded = fold(batch, torch.tensor([3, 2, 4]))
    assert folded.tokens.tolist() == [1, 2, 3, 5, 6, 7] and folded.tokens.dtype == torch.int32
    padded = folded.padded(folded.tokens, -1)
    assert padded.tolist() == [[1, 2, 3, -1], [1, 2, -1, -1], [1, 5, 6, 7]]
    weights = torch.arange(12.0).view(3, 4)  # what lies behind the ends counts for nothing
    assert folded.fold_weights(weights).tolist() == [12.0, 6.0, 2.0, 9.0, 10.0, 11.0]


def test_what_has_to_agree_beside_the_tokens() -> None:
    sequences = [[1, 2, 3], [1, 2, 4], [1, 2, 4]]
    chances = [torch.tensor(x) for x in ([0.5, 0.25, 1.0], [0.5, 0.125, 1.0], [0.5, 0.125, -0.0])]
    folded = fold(sequences, also=[chances])
    assert folded.tokens.tolist() == [1, 2, 3, 2, 4, 4]
    assert [x.tolist() for x in folded.unfold(folded.also[0])] == [x.tolist() for x in chances]
    images = torch.zeros(3, 3, 2, 2)
    assert len(fold(sequences, also=[images]).tokens) == 4
    images[1, 0, 1, 1] = 1
    split = fold(sequences, also=[images])
    assert len(split.tokens) == 3 + 3 + 1 and split.also[0].shape == (7, 2, 2)
    assert len(fold(sequences, also=[torch.tensor([[True, True, False]] * 3)]).tokens) == 4


def test_weights_fold_as_values_unfold(seed: int) -> None:
    """<unfold(x), w> = <x, fold_weights(w)>, and the same by autograd."""
    sequences = [x for x in drawn(seed) if x] or [[1]]
    folded = fold(sequences)
    x = torch.randn(len(folded.tokens), 3, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(len(s), 3, dtype=torch.float64) for s in sequences]
    total = sum((a * w).sum() for a, w in zip(folded.unfold(x), weights, strict=True))
    assert isinstance(total, Tensor)
    (gradient,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(gradient, folded.fold_weights(weights))
    torch.testing.assert_close(total, (x * folded.fold_weights(weights)).sum())
    turned = folded.unfold(x.T, dim=1)
    assert all(torch.equal(a.T, b) for a, b in zip(turned, folded.unfold(x), strict=True))


def test_log_probs_know_all_targets_of_a_branching_point() -> None:
    sequences = [[1, 2, 3], [1, 2, 0, 3], [2]]
    folded = fold(sequences)
    logits = torch.randn(len(folded.tokens), 4)
    found = folded.unfold(folded.log_probs(logits))
    for tokens, own, got in zip(sequences, folded.unfold(logits), found, strict=True):
        wanted = [0.0, *(float(own[i].log_softmax(0)[token]) for i, token in enumerate(tokens[1:]))]
        torch.testing.assert_close(got, torch.tensor(wanted))
    assert found[0][2] != found[1][2]
    assert folded.log_probs(logits.bfloat16()).dtype == torch.float32


def test_first_is_of_the_first_sequence_that_holds_a_token() -> None:
    folded = fold([[1, 2], [1, 3]])
    assert folded.first([torch.tensor([10, 20]), torch.tensor([99, 30])]).tolist() == [10, 20, 30]


def test_long_batches_take_no_time() -> None:
    """64 sequences of 1,000 tokens, of which one half is shared: 100 ms on an idle core; the least of ten."""
    batch = torch.randint(0, 50_000, (64, 1000))
    batch[:, :500] = batch[0, :500]
    batch[:, 500] = torch.arange(64)  # no two go on alike by chance
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        folded = fold(batch)
        times.append(time.perf_counter() - begin)
    assert len(folded.tokens) == 500 + 64 * 500 and min(times) < 0.1


def test_deep_trees() -> None:
    """Every sequence continues the one before: as many nodes above the last as there are sequences."""
    tokens = torch.randint(0, 9, (3000,))
    folded = fold([tokens[:n] for n in range(1, 3001)])
    assert torch.equal(folded.tokens, tokens) and folded.leave.unique().tolist() == [3000]
    branches = fold([[*[1] * n, 2] for n in range(3000)])
    assert len(branches.tokens) == 2999 + 3000 and int(branches.positions.max()) == 2999
    depth_first = [x.tolist() for x in branches.unfold(branches.tokens)]
    assert all(x == [*[1] * n, 2] for n, x in enumerate(depth_first))


def tiles(folded: Folded, tile: tuple[int, int]) -> Any:
    return fa4flex.compile(mask=folded.mask).mask.tile_map(len(folded.tokens), tile=tile)


@pytest.mark.parametrize("tile", [(8, 8), (16, 8), (4, 16)])
def test_classes_of_tiles(tile: tuple[int, int], seed: int) -> None:
    """A group with boundaries off the tiles, and random trees: tiles are those that brute force counts.
    Bounds alone find all that are full, and all that are empty."""
    rng = random.Random(seed)
    group = [[0] * 53 + [n + 1] * rng.randint(1, 40) for n in range(5)]
    for sequences in (group, [x + y for x in drawn(seed, 2, 12, 6) for y in ([7] * 9, [8] * 5)] or [[1]]):
        folded = fold(sequences)
        size = len(folded.tokens)
        grid = [-(-size // n) for n in tile]
        pairs = torch.zeros(grid[0] * tile[0], grid[1] * tile[1], dtype=torch.int64)
        pairs[:size, :size] = causal_pairs(folded)
        there = torch.zeros_like(pairs)
        there[:size, :size] = 1
        each = [x.view(grid[0], tile[0], grid[1], tile[1]).sum((1, 3)) for x in (pairs, there)]
        wanted = (each[0] > 0).int() + (each[0] == each[1]).int()
        found = tiles(folded, tile)
        assert torch.equal(found.classes()[0, 0].int(), wanted)
        empty, partial, full = found.counts()
        if found.proof.by_intervals:  # the tree is one sequence, or so small that its intervals say all
            assert found.proof.by_intervals == empty + partial + full
        else:
            assert found.proof.by_bounds == empty + full


def test_errors() -> None:
    folded = fold([[1, 2], [1, 3]])
    wrong: list[tuple[Any, str]] = [
        (lambda: fold([[1.5]]), "integers"),
        (lambda: fold([torch.zeros(2, 2, dtype=torch.int64)]), "1-D"),
        (lambda: fold(torch.zeros(3, dtype=torch.int64)), "1-D"),
        (lambda: fold(torch.zeros(2, 3, dtype=torch.int64), [3, 4]), "from 0 to 3"),
        (lambda: fold([[1]], [1]), "padded batch"),
        (lambda: fold([[1, 2]], also=[[[1.0]]]), r"also\[0\]"),
        (lambda: fold([torch.tensor([1]), torch.tensor([1], dtype=torch.int32)]), "one dtype"),
        (lambda: folded.unfold(torch.zeros(4)), "3 folded tokens"),
        (lambda: folded.log_probs(torch.zeros(1, 3, 5)), r"logits\[0\]"),
        (lambda: folded.fold_weights([[1.0, 2.0]]), "weights"),
        (lambda: folded.at_positions(3), "a mask or a score mod"),
    ]
    for call, said in wrong:
        with pytest.raises(InputError, match=said):
            call()
