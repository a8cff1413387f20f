"""Key intervals against the mask itself, element by element."""

from __future__ import annotations

import pytest
import torch
from mask_zoo import KV, KV_LEN, Q_LEN, B, H, Q, both, clamp, dense, either, near, op, zoo
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.analyze.intervals import (
    MOST_INTERVALS,
    Intervals,
    KeyIntervals,
    allowed_keys,
    describe,
    key_intervals,
    query_intervals,
)
from fa4flex.codegen.analyze.seen import keys_seen
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.analyze.tiles import Shape, unmet
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import Expr, load, scalar, search

NOTHING = Captured()
SHAPES = [Shape(2, 3, 60, 60), Shape(2, 3, 41, 60), Shape(2, 3, 60, 23)]


def covered(intervals: Intervals, shape: Shape, captured: Captured, of: Expr = KV) -> Tensor:
    """Elements in the union of the spans, of keys or queries, bool [batch, heads, q_len, kv_len]."""
    wide = Captured(tuple(_long(t) for t in captured.operands), captured.scalars)
    inside = torch.zeros(shape.batch, shape.heads, shape.q_len, shape.kv_len, dtype=torch.bool)
    for lo, hi in intervals.spans:
        assert of.value not in lo.free | hi.free
        inside |= dense(both(op("le", lo, of), op("lt", of, hi)), shape, wide)
    return inside


def _long(table: Tensor) -> Tensor:
    return table if table.is_floating_point() or table.dtype == torch.bool else table.long()


def check(mask: Expr, captured: Captured = NOTHING) -> KeyIntervals:
    keys = key_intervals(mask)
    assert keys is not None, str(mask)
    assert all(Tables(captured).is_sorted(slot) for slot in keys.sorted_operands)
    for shape in SHAPES:
        same = covered(keys, shape, captured) == dense(mask, shape, captured)
        assert same.all(), (str(mask), describe(keys), (~same).nonzero()[:5].tolist())
    return keys


@pytest.mark.parametrize("i", range(len(zoo())))
def test_zoo(i: int) -> None:
    case = zoo()[i]
    keys = key_intervals(case.mask)
    assert (keys is not None) == case.has_keys, case.name
    if keys is not None and all(Tables(case.captured).is_sorted(slot) for slot in keys.sorted_operands):
        shape = Shape(2, 3, 180, 256)
        assert torch.equal(covered(keys, shape, case.captured), dense(case.mask, shape, case.captured))


@pytest.mark.parametrize("i", range(len(zoo())))
def test_queries_of_the_zoo(i: int) -> None:
    """The same mask, asked the other way round."""
    case, shape = zoo()[i], Shape(2, 3, 180, 256)
    queries = query_intervals(case.mask)
    if queries is not None and not unmet(queries, shape, Tables(case.captured)):
        assert torch.equal(covered(queries, shape, case.captured, Q), dense(case.mask, shape, case.captured))


def test_which_masks_have_query_intervals() -> None:
    found = {case.name for case in zoo() if query_intervals(case.mask) is not None}
    assert {"causal", "sliding window"} <= found, found


@pytest.mark.parametrize("comparison", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("factor", [1, -1, 3, -4])
def test_linear(comparison: str, factor: int) -> None:
    for moved in (
        KV,
        op("floordiv", KV, 5),
        op("floordiv", op("sub", op("mul", KV, 2), 7), 3),
        op("bitnot", KV),
    ):
        scaled = op("add", op("mul", moved, factor), op("neg", Q))
        check(op(comparison, scaled, op("sub", 9, op("mod", Q, 11))))
        check(op(comparison, op("sub", 9, op("mul", Q, 2)), scaled))


@pytest.mark.parametrize("comparison", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_monotone_functions_of_kv(comparison: str) -> None:
    distance = op("sub", KV, Q)
    table = torch.tensor([-3, -3, 0, 0, 1, 5, 5, 9]).repeat_interleave(8)
    chosen = op("where", op("lt", KV, 20), op("add", KV, 3), op("sub", Q, KV))
    for x in (
        op("abs", distance),
        op("abs", op("sub", op("abs", distance), 6)),
        clamp(distance, -5, 7),
        op("minimum", KV, op("sub", 30, KV)),
        op("maximum", KV, Q),
        chosen,
        op("to_int", op("lt", KV, Q)),
        op("shr", op("add", KV, Q), 2),
        op("shl", KV, 1),
        op("mul", KV, scalar(0, "int")),
        op("floordiv", distance, scalar(0, "int")),
        load(0, (KV,), "int"),
        load(0, (op("floordiv", KV, 2),), "int"),
        load(0, (op("maximum", op("sub", KV, 7), 0),), "int"),
    ):
        check(op(comparison, x, op("sub", op("mod", Q, 13), 3)), Captured((table,), (6,)))
        check(op(comparison, op("neg", x), -4), Captured((table,), (6,)))


def test_logic() -> None:
    atoms = [op("ge", Q, KV), near(Q, KV, 9), op("lt", KV, 12), op("ne", H, 1), op("eq", op("mod", Q, 3), 0)]
    for a in atoms:
        for b in atoms:
            for name in ("and_", "or_", "xor", "eq", "ne"):
                check(op(name, a, b))
                check(op("not_", op(name, a, op("not_", b))))
            check(op("where", a, b, op("not_", b)))
    check(op("to_bool", op("sub", Q, KV)))
    check(op("not_", op("to_bool", op("sub", Q, KV))))


OF_PAIRS = op("eq", op("mod", op("add", op("mul", Q, 5), KV), 7), 2)
"""No key interval."""


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (either(op("lt", KV, 20), OF_PAIRS), op("lt", KV, 20)),
        (
            either(OF_PAIRS, both(op("ge", Q, KV), op("ge", KV, 3)), OF_PAIRS),
            both(op("ge", Q, KV), op("ge", KV, 3)),
        ),
        (
            either(op("lt", KV, 4), either(OF_PAIRS, op("ge", KV, 30))),
            either(op("lt", KV, 4), op("ge", KV, 30)),
        ),
        (op("ge", Q, KV), op("ge", Q, KV)),
    ],
)
def test_keys_that_are_allowed_for_certain(mask: Expr, known: Expr) -> None:
    found = allowed_keys(mask)
    assert found is not None and found.certain
    for shape in SHAPES:
        inside = covered(found, shape, NOTHING)
        assert torch.equal(inside, dense(known, shape, NOTHING))
        assert not (inside & ~dense(mask, shape, NOTHING)).any()


def test_no_keys_are_allowed_for_certain() -> None:
    sorted_ids = op("eq", load(0, (Q,), "int"), load(0, (KV,), "int"))
    many = either(*(near(KV, 10 * n, 2) for n in range(4)))
    for mask in (
        OF_PAIRS,
        both(OF_PAIRS, op("ge", Q, KV)),
        either(OF_PAIRS, sorted_ids),
        either(OF_PAIRS, many),
    ):
        assert allowed_keys(mask) is None


def test_empty_spans_have_full_complements() -> None:
    """Empty spans have lo > hi; their complement is every key, not the keys outside [hi, lo)."""
    never = both(op("ge", KV, op("add", Q, 5)), op("lt", KV, Q))
    check(never)
    check(op("not_", never))


def test_bottom_right_by_lengths() -> None:
    offset = op("sub", KV_LEN, Q_LEN)
    check(op("ge", op("add", Q, offset), KV))
    check(near(op("add", Q, offset), KV, 6))


def test_tables_by_batch_are_searched_in_their_row() -> None:
    ids = torch.randint(0, 5, (2, 60)).sort(1).values
    keys = check(op("eq", load(0, (B, Q), "int"), load(0, (B, KV), "int")), Captured((ids,)))
    assert keys.sorted_operands == {0}
    assert keys.spans == (
        (search(0, "left", load(0, (B, Q), "int"), (B,)), search(0, "right", load(0, (B, Q), "int"), (B,))),
    )


def test_conditions_are_stated() -> None:
    size = scalar(0, "int")
    keys = key_intervals(op("eq", op("floordiv", Q, size), op("floordiv", KV, size)))
    assert keys is not None
    assert keys.nonnegative == (op("sub", size, 1),)
    shifted = key_intervals(op("lt", load(0, (op("add", KV, size),), "int"), 3))
    assert shifted is not None
    assert op("add", KV, size) in shifted.nonnegative, "a negative index would wrap to the end of the table"


@pytest.mark.parametrize(
    "mask",
    [
        op("eq", op("mod", KV, 2), 0),
        op("lt", op("mul", KV, KV), 9),
        op("lt", op("to_float", KV), 3.5),
        load(0, (Q, KV), "bool"),
        op("lt", load(0, (KV, Q), "int"), 3),
        op("lt", load(0, (KV,), "float"), 3.0),
        op("lt", op("floordiv", KV, -3), -2),
        op("ge", op("add", KV, op("floordiv", KV, 2)), Q),
        either(*(op("eq", KV, op("mul", Q, i)) for i in range(2, MOST_INTERVALS + 4))),
    ],
    ids=str,
)
def test_not_a_few_intervals(mask: Expr) -> None:
    assert key_intervals(mask) is None


def test_in_words() -> None:
    keys = key_intervals(both(op("ge", Q, KV), op("lt", op("sub", Q, KV), scalar(0, "int"))))
    assert keys is not None
    assert describe(keys) == "row (b, h, q) attends keys from (q - s0) + 1 up to, not including, q + 1"
    nothing = key_intervals(op("lt", KV, KV))
    assert nothing is not None
    assert describe(nothing) == "no row attends any key"


# --- keys that a row sees, at most ------------------------------------------------------------------------


@pytest.mark.parametrize("i", range(len(zoo())))
def test_no_row_sees_more_keys_than_is_said(i: int) -> None:
    case, shape = zoo()[i], Shape(2, 3, 180, 256)
    facts = Facts(mask=case.mask)
    most = keys_seen(facts, shape, case.captured)
    assert (most is None) == (facts.keys is None)
    if facts.keys is not None and all(Tables(case.captured).is_sorted(x) for x in facts.keys.sorted_operands):
        assert most is not None and most >= dense(case.mask, shape, case.captured).sum(-1).max()


def test_a_window_has_its_own_keys() -> None:
    shape, offset = Shape(1, 1, 4, 4096), op("sub", op("add", Q, KV_LEN), Q_LEN)
    causal, narrow = op("ge", offset, KV), op("lt", op("sub", offset, KV), 64)
    wide = op("lt", op("sub", offset, KV), scalar(0, "int"))
    sink, captured = op("lt", KV, 4), Captured((), (100,))
    for mask, most in (
        (both(causal, narrow), 64),
        (both(causal, wide), 100),
        (both(both(causal, wide), narrow), 64),
        (either(both(causal, narrow), sink), 68),
        (near(offset, KV, 10), 21),
        (causal, 4096),
    ):
        assert keys_seen(Facts(mask=mask), shape, captured) == most, str(mask)
