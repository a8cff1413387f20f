"""Rows that come from several ranks are found by their places, and are one view where places meet."""

from __future__ import annotations

import random
from itertools import pairwise

import torch

from fa4flex.parallel.pieces import Pieces, in_a_row, in_order, order_of, tensors_of


def test_rows_of_several_senders(seed: int) -> None:
    """Ranges by sender, each sender's in order, as an exchange brings them."""
    rng = random.Random(seed)
    for _ in range(200):
        cuts = sorted(rng.sample(range(60), rng.randrange(2, 12)))
        ranges = [x for x in pairwise(cuts) if rng.random() < 0.8]
        senders = [rng.randrange(3) for _ in ranges]
        places = [x for rank in range(3) for x, sender in zip(ranges, senders, strict=True) if sender == rank]
        rows = torch.tensor([[float(at), -at] for lo, hi in places for at in range(lo, hi)]).reshape(-1, 2)
        kept, order = in_order(rows, places), order_of(places)
        assert sorted(order) == sorted(places) and kept.shape == rows.shape
        (like,) = tensors_of(kept, [torch.empty(1, 1, 0, 2)])
        pieces = Pieces(like, order)
        for lo, hi in in_a_row(sorted(places)):
            assert pieces.take((lo, hi))[0, 0, :, 0].tolist() == list(range(lo, hi))
            assert len(pieces.slices((lo, hi))) == 1, "one view"


def test_rows_stay_where_no_order_is_better() -> None:
    rows = torch.randn(9, 4)
    for places in ([(0, 4), (6, 11)], [(6, 11), (0, 4)], [(3, 7), (7, 12)]):
        assert in_order(rows, places) is rows and order_of(places) == tuple(places)
    assert order_of([(4, 8), (0, 4)]) == ((0, 4), (4, 8))
