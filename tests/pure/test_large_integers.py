"""Integers beyond 64 bits: the right answer or a clear error, never what int64 makes of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_zoo import KV, KV_LEN, Q, op

import fa4flex
from fa4flex.codegen.analyze.bounds import Bounds, bounds
from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.analyze.overflow import TooLarge, computed_with, fits, fitted
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.analyze.tiles import Shape, tile_map
from fa4flex.codegen.blame import dress
from fa4flex.codegen.evaluate import Captured, DividedByZero, PastTheEnd, evaluate
from fa4flex.codegen.expr import FALSE, TRUE, Expr, const, load, reduce, scalar, sym, to_float, to_int
from fa4flex.errors import Fa4flexError, InputError, Origin, TraceError, UnsupportedError
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import cpu

SHAPE = Shape(2, 1, 70, 70)
W = scalar(0, "int")
LIMIT = load(0, (sym("b"),), "int")
MAX, MIN = sys.maxsize, -sys.maxsize - 1


def attend(facts: Facts, captured: Captured, shape: Shape = SHAPE) -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(shape.batch, shape.heads, n, 8, dtype=torch.float64)
        for n in (shape.q_len, shape.kv_len, shape.kv_len)
    )
    return cpu.forward(facts, cpu.Inputs(q, k, v, captured)).out


def number(value: int, captured: bool) -> tuple[Expr, Captured]:
    return (W, Captured((), (value,))) if captured else (const(value), Captured())


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("value", [MAX, MAX - 70, 2**62, 2**70, 10**400])
def test_no_limit_at_all(value: int, captured: bool) -> None:
    """Windows as large as can be: every spelling means every key."""
    w, given = number(value, captured)
    every = attend(Facts(SCORE, TRUE), Captured())
    none = torch.zeros_like(every)
    for mask in (
        op("le", op("sub", Q, KV), w),
        op("le", KV, op("add", Q, w)),
        op("lt", op("sub", Q, w), KV),
        op("le", op("abs", op("sub", Q, KV)), w),
        op("lt", KV, op("minimum", op("add", Q, w), 70)),
        op("le", op("mul", op("sub", Q, KV), 3), op("mul", w, 5)),
        op("ne", op("neg", w), op("sub", Q, KV)),
    ):
        assert torch.equal(attend(Facts(SCORE, mask), given), every), str(mask)
        assert torch.equal(attend(Facts(SCORE, op("not_", mask)), given), none), str(mask)
        tiles = tile_map(mask, None, SHAPE, given, (16, 16))
        assert tiles.counts() == (0, 0, 25), str(mask)


@pytest.mark.parametrize("captured", [True, False])
def test_neighbours_are_told_apart(captured: bool) -> None:
    w, given = number(2**53 + 1, captured)
    shifted = op("add", op("mod", Q, 2), 2**53)
    mask = op("eq", shifted, w)
    dense = (torch.arange(70) % 2 == 1)[:, None].expand(70, 70)
    out = attend(Facts(SCORE, mask), given)
    assert torch.equal((out != 0).any(-1)[0, 0], dense[:, 0])


@pytest.mark.parametrize("captured", [True, False])
def test_sixty_bits(captured: bool) -> None:
    """Shifts by more than there are bits leave none, for keys beyond 64 too."""
    bits = 0b101100111000111100001111100000111111000000111111100000001111
    w, given = number(bits, captured)
    mask = op("to_bool", op("bitand", op("shr", w, KV), 1))
    (found,) = evaluate([mask], {"kv": torch.arange(70)}, given)
    assert found.tolist() == [bool(bits >> i & 1) for i in range(70)]  # type: ignore[union-attr]
    assert fitted([mask], SHAPE, given) == (mask,)
    attend(Facts(SCORE, mask), given)


@pytest.mark.parametrize("value", [2**63 - 1, 2**62, -(2**63)])
def test_contents_near_the_end(value: int) -> None:
    """Sums with them are refused, comparisons with them are right."""
    tables = Captured((torch.tensor([5, value]),))
    limits = torch.tensor([5, value])
    q, kv = torch.arange(70)[:, None], torch.arange(70)
    dense = torch.stack([(q - kv).abs() <= limit for limit in limits])
    out = attend(Facts(SCORE, op("le", op("abs", op("sub", Q, KV)), LIMIT)), tables)
    scores_hidden = attend(
        Facts(op("where", op("le", op("abs", op("sub", Q, KV)), LIMIT), SCORE, -torch.inf)), tables
    )
    assert torch.equal((out != 0).any(-1)[:, 0], dense.any(-1))
    torch.testing.assert_close(out, scores_hidden)
    grown = op("mul", op("add", Q, LIMIT), 3)
    for facts in (Facts(SCORE, op("lt", KV, grown)), Facts(op("add", SCORE, to_float(grown)))):
        with pytest.raises(TooLarge, match="64-bit"):
            attend(facts, tables)


def test_sums_with_contents() -> None:
    mask = op("lt", KV, op("add", Q, LIMIT))
    with pytest.raises(UnsupportedError, match="lies between 5 and 92233720368547758"):
        attend(Facts(SCORE, mask), Captured((torch.tensor([5, MAX]),)))
    assert torch.equal(
        attend(Facts(SCORE, mask), Captured((torch.tensor([70, MAX]),)), Shape(2, 1, 70, 70)),
        attend(Facts(), Captured()),
    )


@pytest.mark.parametrize(
    "grown",
    [
        op("neg", W),
        op("abs", W),
        op("sub", Q, W),
        op("floordiv", W, -1),
        op("truncdiv", W, -1),
        op("truncdiv", W, op("sub", op("mul", op("mod", Q, 2), 2), 1)),
        op("mul", W, 3),
        op("shl", W, 1),
        op("shl", 1, op("add", Q, 1)),
        op("bitnot", op("sub", op("neg", W), 1)),
        reduce("sum", "k0", 3, op("sub", W, sym("k0"))),
        reduce("prod", "k0", 3, op("sub", W, sym("k0"))),
        to_int(op("mul", to_float(W), 2.0)),
        to_int(op("mul", SCORE, 2.0)),
    ],
    ids=str,
)
def test_what_leaves_the_word_is_refused(grown: Expr) -> None:
    facts = Facts(op("add", SCORE, to_float(op("where", op("lt", Q, 3), grown, KV))))
    with pytest.raises(TooLarge):
        attend(facts, Captured((), (MIN,)))


def test_remainders_of_the_least_number() -> None:
    for divisor in (-1, 3, -5):
        root = op("mod", W, divisor)
        mask = op("eq", op("add", root, KV), 2)
        out = attend(Facts(SCORE, mask), Captured((), (MIN,)))
        assert bool((out != 0).any()) == (0 <= 2 - MIN % divisor < 70)


def test_ordinary_contents_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents that are compared only may be anything; what is added to is looked at, without exact
    ranges."""
    monkeypatch.setattr("fa4flex.codegen.analyze.overflow.index_ranges", None)
    ids = torch.tensor([MAX, MIN]).repeat(35)
    same = op("eq", load(0, (Q,), "int"), load(0, (KV,), "int"))
    assert fits([same], SHAPE, Captured((ids,)))
    near = op("le", KV, op("add", load(0, (Q,), "int"), op("mul", Q, W)))
    assert fits([near], SHAPE, Captured((torch.arange(70),), (4096,)))
    assert fits([near], SHAPE, Captured((torch.full((70,), 2**31 - 1, dtype=torch.int32),), (4096,)))
    assert fits([near], SHAPE, Captured((torch.zeros(0, dtype=torch.int64),), (4096,)))


@pytest.mark.parametrize("name", ["floordiv", "mod", "truncdiv"])
def test_division_by_zero(name: str) -> None:
    for divisor, captured in (
        (const(0), Captured()),
        (W, Captured((), (0,))),
        (KV, Captured()),
        (LIMIT, Captured((torch.tensor([3, 0]),))),
    ):
        node = op(name, Q, divisor)
        for facts in (
            Facts(SCORE, op("eq", op("mod", node, 3), op("mod", KV, 2))),
            Facts(op("add", SCORE, to_float(node))),
        ):
            with pytest.raises(DividedByZero, match="by 0") as caught:
                attend(facts, captured)
            assert isinstance(caught.value, InputError)
            assert caught.value.node is node or divisor is not KV


def test_hidden_pairs_may_divide_by_zero() -> None:
    ratio = op("floordiv", Q, op("sub", Q, KV))
    facts = Facts(op("add", SCORE, to_float(ratio)), op("lt", KV, Q))
    assert attend(facts, Captured()).isfinite().all()


def test_errors_name_line_and_operand() -> None:
    line = Origin("mods.py", 7)
    read = load(0, (op("add", Q, KV_LEN),), "int")
    facts = Facts(SCORE, op("eq", op("mul", read, 1), KV))
    with pytest.raises(PastTheEnd) as caught:
        attend(facts, Captured((torch.arange(10),)))
    dress(caught.value, ["table"], [], {}, {read: line})
    assert str(caught.value).startswith("a mod read past the captured tensor table of shape [10]")
    assert caught.value.where is line
    grown = op("mul", W, LIMIT)
    with pytest.raises(TooLarge) as found:
        attend(Facts(SCORE, op("lt", KV, grown)), Captured((torch.tensor([-1, 2]),), (MAX,)))
    dress(found.value, ["limits"], ["window"], {grown: line})
    assert "`window * limits[b]` lies between" in str(found.value)
    assert found.value.where is line
    other = InputError("t0", "s0", "t0")
    dress(other, ["limits"], ["window"])
    assert str(other).startswith("t0\n")


def test_what_is_decided_becomes_a_constant() -> None:
    far = op("le", op("sub", Q, KV), W)
    assert fitted([far], SHAPE, Captured((), (MAX,))) == (TRUE,)
    assert fitted([op("lt", W, KV)], SHAPE, Captured((), (MAX,))) == (FALSE,)
    near = op("and_", op("le", KV, Q), far)
    assert fitted([near], SHAPE, Captured((), (MAX,))) == (op("le", KV, Q),)
    assert fitted([near], SHAPE, Captured((), (16,))) == (near,)


def test_nothing_is_decided_by_a_number_without_a_bound() -> None:
    """Ranges of wide shifts and of floats as integers end somewhere; the numbers themselves do not."""
    limit = const(2**200)
    for far in (op("shl", 1, op("add", KV, 300)), to_int(op("mul", SCORE, 1e300))):
        with pytest.raises(TooLarge):
            fitted([op("le", far, limit)], SHAPE, Captured())
        with pytest.raises(TooLarge):
            fitted([op("le", op("minimum", far, limit), KV)], SHAPE, Captured())
    lost = op("shr", op("mul", limit, op("add", KV, 1)), W)
    assert fitted([op("lt", lost, 1)], SHAPE, Captured((), (10**6,))) == (TRUE,)


@pytest.mark.parametrize("captured", [True, False])
def test_floats_of_large_numbers(captured: bool) -> None:
    """A number as a float needs no 64 bits; one beyond all floats is refused in a line."""
    factor, given = number(2**70, captured)
    root = op("mul", to_float(factor), SCORE)
    (found,) = evaluate(fitted([root], SHAPE, given), {"score": torch.tensor(3.0)}, given)
    assert float(found) == 3 * 2.0**70
    factor, given = number(10**400, captured)
    with pytest.raises(TooLarge) as caught:
        fitted([op("mul", to_float(factor), SCORE)], SHAPE, given)
    assert "2^1328" in caught.value.given and len(caught.value.given) < 100


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_tensors(dtype: torch.dtype) -> None:
    table = torch.tensor([5, 200]).to(dtype)
    wanted = Captured((torch.tensor([5, 200]),))
    for facts in (Facts(SCORE, op("lt", KV, LIMIT)), Facts(op("add", SCORE, to_float(op("mul", LIMIT, KV))))):
        assert torch.equal(attend(facts, Captured((table,))), attend(facts, wanted))
    by_row = Facts(op("add", SCORE, to_float(load(0, (op("mul", Q, KV),), "int"))))
    large = (torch.arange(70 * 70) % 256).to(dtype)
    assert torch.equal(attend(by_row, Captured((large,))), attend(by_row, Captured((large.long(),))))
    if dtype == torch.uint64:
        far = Captured((torch.tensor([5, -1]).view(dtype),))
        with pytest.raises(UnsupportedError, match="uint64"):
            attend(Facts(SCORE, op("lt", KV, LIMIT)), far)


def test_ragged_batches() -> None:
    """Lengths differ: what is decided holds for all sequences, and what is refused could happen in one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 7, 30], dtype=torch.int32)
    sequences = cpu.Sequences.of(Varlen(cu, cu), q, k)

    def run(mask: Expr, captured: Captured) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, facts = cpu.Inputs(q.detach(), k.detach(), v.detach(), captured), Facts(SCORE, mask)
        saved = cpu.forward_sequences(facts, inputs, sequences)
        found = cpu.backward_sequences(facts, inputs, sequences, saved, (saved.out, None, None))
        return saved.out, found.dq

    window = op("le", KV, op("add", Q, W))
    for found, wanted in zip(run(window, Captured((), (MAX,))), run(TRUE, Captured()), strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(TooLarge):  # by the shorter sequence alone
        run(op("lt", op("sub", op("add", KV, W), KV_LEN), MAX), Captured((), (MAX - 5,)))


@pytest.mark.parametrize("value", [2**60 + 2**36 + 1, -(2**60) - 2**36 - 1, 2**63 - 1, 2**53 + 1])
def test_ranges_of_floats_hold_for_both_ways_of_rounding(value: int) -> None:
    """int64 to float32 rounds once; by way of float64 it rounds twice, and may end elsewhere."""
    table = torch.tensor([value, value])
    tables = Tables(Captured((table,), (value,)))
    for point in (Bounds(0, 0), Bounds(torch.tensor([0]), torch.tensor([1]))):
        for node in (load(0, (Q,), "int"), W):
            (found,) = bounds([to_float(node)], {"q": point}, tables)
            for rounded in (table.float().double(), table.double().float().double(), table.double()):
                assert bool(((found.lo <= rounded) & (rounded <= found.hi)).all())


def test_gradients_of_what_was_decided() -> None:
    bias = torch.randn(1, 139, dtype=torch.float64)
    read = load(0, (sym("h"), op("add", op("sub", Q, KV), 69)), "float")
    plain = Facts(op("add", SCORE, read), op("le", KV, Q))
    inside = op("le", KV, op("add", Q, W))
    chosen = op("where", inside, op("add", SCORE, read), op("mul", SCORE, op("to_float", op("mul", W, KV))))
    large = Facts(chosen, op("and_", inside, op("le", KV, Q)))
    q, k, v = (torch.randn(1, 1, 70, 8, dtype=torch.float64) for _ in range(3))
    found = []
    for facts in (plain, large):
        inputs = cpu.Inputs(q, k, v, Captured((bias,), (MAX,)))
        saved = cpu.forward(facts, inputs)
        gradients = cpu.backward(facts, inputs, saved, v, None, [0])
        found.append((saved.out, gradients.dq, gradients.dk, gradients.operands[0]))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


ENDS, EDGE, HUGE, ZERO = torch.tensor([5, MAX]), MAX, 2**70, 0
EVERY_KEY: list[Callable[..., Any]] = [
    lambda b, h, q, kv: q - kv <= EDGE,
    lambda b, h, q, kv: kv <= q + sys.maxsize,
    lambda b, h, q, kv: abs(q - kv) <= sys.maxsize,
    lambda b, h, q, kv: (q - kv).abs() <= EDGE,
    lambda b, h, q, kv: kv < (q + EDGE).clamp(max=70),
    lambda b, h, q, kv: q - kv <= HUGE,
    lambda b, h, q, kv: kv < 2**70,
    lambda b, h, q, kv: kv < q + abs(MIN),
    lambda b, h, q, kv: kv < -(kv * 0 + MIN),
    lambda b, h, q, kv: kv < (ENDS + q).sum(),
]
REFUSED: list[tuple[Callable[..., Any], type[Exception]]] = [
    (lambda b, h, q, kv: kv < q + ENDS[b], UnsupportedError),
    (lambda b, h, q, kv: kv < (q * 1e30).long(), UnsupportedError),
    (lambda b, h, q, kv: kv <= 2**q, UnsupportedError),
    (lambda b, h, q, kv: kv % ZERO <= q, InputError),
]


@pytest.mark.parametrize("mask", [lambda b, h, q, kv: kv // 0 <= q, lambda b, h, q, kv: kv % 0 <= q])
def test_a_divisor_that_is_zero_is_refused_at_its_line(mask: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match=r"(?s)divided by 0.*test_large_integers.py.*kv [/%]"):
        fa4flex.compile(mask=mask)


@pytest.mark.parametrize("mask", EVERY_KEY)
def test_every_key_as_users_write_it(mask: Callable[..., Any]) -> None:
    program = fa4flex.compile(mask=mask).program
    assert torch.equal(attend(program.facts, program.captured()), attend(Facts(), Captured()))


@pytest.mark.parametrize(("mask", "error"), REFUSED)
def test_refused_as_users_write_it(mask: Callable[..., Any], error: type[Exception]) -> None:
    program = fa4flex.compile(mask=mask).program
    assert program.mask is not None
    with pytest.raises(error) as caught:
        attend(program.facts, program.captured())
    assert isinstance(caught.value, Fa4flexError)
    dress(caught.value, [x.name for x in program.operands], program.scalar_names, program.mask.origins)
    assert caught.value.where is not None and caught.value.where.line == mask.__code__.co_firstlineno
    assert not re.search(r"\b[ts]\d\b", caught.value.given)


def test_comparisons_take_integers_of_any_size() -> None:
    """Integers only compared need not be looked after; those added, or that read other tensors, must be."""
    mine, other = (load(0, (x,), "int") for x in (Q, KV))
    bias = load(1, (mine,), "float")
    assert computed_with(op("eq", mine, other)) == ()
    assert computed_with(op("le", op("sub", mine, other), 5)) == (0,)
    assert computed_with(op("add", SCORE, bias)) == (0,)
    assert computed_with(op("add", SCORE, load(1, (Q,), "float"))) == ()
