"""Ranges of integers over the whole problem: exact, and sound against evaluation."""

from __future__ import annotations

import random

import pytest
import torch
from mask_zoo import KV, Q_LEN, H, Q, op, zoo

from fa4flex.codegen.analyze.overflow import index_ranges, overflowing
from fa4flex.codegen.analyze.tiles import Shape
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import load, reduce, scalar, sym, walk

LONG = Shape(2, 8, 100_000, 131_072)


def test_exact_ranges_by_hand() -> None:
    difference = op("sub", Q, KV)
    flat = op("add", op("mul", op("add", op("mul", H, Q_LEN), Q), 131_072), KV)
    table = load(0, (difference,), "int")
    ranges = index_ranges(
        [difference, flat, op("add", table, 1)], LONG, Captured((torch.tensor([7, -9, 4]),))
    )
    assert ranges[difference] == (-131_071, 99_999)
    assert ranges[flat] == (0, (7 * 100_000 + 99_999) * 131_072 + 131_071)
    assert ranges[table] == (-9, 7)


def test_what_cancels_is_not_reported() -> None:
    """(q - kv) + kv is q, however large kv is."""
    far = op("mul", KV, 1 << 40)
    cancelled = op("sub", op("add", Q, far), far)
    assert index_ranges([cancelled], LONG, Captured())[cancelled] == (0, 99_999)


def test_the_limit_is_that_of_the_word() -> None:
    for bits in (8, 32, 63, 64):
        for value, fits in ((2 ** (bits - 1) - 1, True), (2 ** (bits - 1), False)):
            grown = op("add", op("mod", Q, 2), value - 1)
            wide = [node for node, _ in overflowing([grown], LONG, Captured(), bits) if node is grown]
            assert (wide == []) == fits, (bits, value)
    shrunk = op("sub", op("neg", op("mod", Q, 2)), 2**31)
    assert [ends for node, ends in overflowing([shrunk], LONG, Captured()) if node is shrunk] == [
        (-(2**31) - 1, -(2**31))
    ]


def test_no_limit_to_the_ranges() -> None:
    """Ranges are Python ints: they say how large a number is, where int64 would say something else."""
    grown = op("mul", op("mul", op("mul", Q, Q), KV), op("mul", KV, KV))
    assert index_ranges([grown], LONG, Captured())[grown] == (0, 99_999**2 * 131_071**3)


def test_inside_reductions() -> None:
    axis = sym("k0")
    inside = op("mul", axis, op("add", Q, 1))
    total = reduce("sum", "k0", 10, inside)
    ranges = index_ranges([total], Shape(1, 1, 100, 1), Captured())
    assert ranges[inside] == (0, 9 * 100)
    assert ranges[total] == (45, 4500)


@pytest.mark.parametrize("i", range(len(zoo())))
def test_zoo_stays_in_its_ranges(i: int) -> None:
    case = zoo()[i]
    shape = Shape(2, 3, 180, 256)
    nodes = [
        n for n in walk(case.mask) if n.kind == "int" and n.free <= {"b", "h", "q", "kv", "q_len", "kv_len"}
    ]
    ranges = index_ranges([case.mask], shape, case.captured)
    for _ in range(50):
        point = {
            "b": random.randrange(2),
            "h": random.randrange(3),
            "q": random.randrange(180),
            "kv": random.randrange(256),
        }
        symbols = {name: torch.tensor(x) for name, x in point.items()} | {"q_len": 180, "kv_len": 256}
        for node, value in zip(nodes, evaluate(nodes, symbols, case.captured), strict=True):
            lo, hi = ranges[node]
            assert lo <= int(value) <= hi, (case.name, str(node), point)


def test_scalars_count_with_their_value() -> None:
    window = op("mul", Q, scalar(0, "int"))
    assert overflowing([window], LONG, Captured((), (1000,))) == []
    assert [n for n, _ in overflowing([window], LONG, Captured((), (100_000,)))] == [window]
