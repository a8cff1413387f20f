"""Keys of programs, analysis, graphs and of what is made of captured tensors, each part changed alone."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fa4flex
from fa4flex.codegen.analyze import tables as tables_module
from fa4flex.codegen.analyze import tiles
from fa4flex.codegen.analyze.domain import Ragged, Shape, bind
from fa4flex.codegen.analyze.facts import SCORE, Facts, analyze
from fa4flex.codegen.analyze.tables import Tables
from fa4flex.codegen.analyze.tiles import tile_map
from fa4flex.codegen.evaluate import Captured
from fa4flex.codegen.expr import TRUE, Expr, apply, const, scalar, sym
from fa4flex.errors import InputError
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime import graphs
from fa4flex.runtime import programs as programs_module
from fa4flex.runtime.programs import publish, read

B, H, Q, KV = (sym(name) for name in ("b", "h", "q", "kv"))
CPU = torch.device("cpu")
CAUSAL, LATER = apply("le", KV, Q), apply("lt", KV, Q)

# --- programs -------------------------------------------------------------------------------------------

PUBLISHED: dict[str, tuple[Facts, Schedule, Precision]] = {
    "base": (analyze(SCORE, CAUSAL), Schedule(), Precision()),
    "score": (analyze(apply("mul", SCORE, const(2.0)), CAUSAL), Schedule(), Precision()),
    "zero": (analyze(apply("mul", SCORE, const(0.0)), CAUSAL), Schedule(), Precision()),
    "minus zero": (analyze(apply("mul", SCORE, const(-0.0)), CAUSAL), Schedule(), Precision()),
    "mask": (analyze(SCORE, LATER), Schedule(), Precision()),
    "no mask": (analyze(SCORE, TRUE), Schedule(), Precision()),
    "tile": (analyze(SCORE, CAUSAL), Schedule(tile=(64, 64)), Precision()),
    "another tile": (analyze(SCORE, CAUSAL), Schedule(tile=(64, 128)), Precision()),
    "deterministic": (analyze(SCORE, CAUSAL), Schedule(deterministic=True), Precision()),
    "order": (analyze(SCORE, CAUSAL), Schedule(order="row_major"), Precision()),
    "split": (analyze(SCORE, CAUSAL), Schedule(split=512), Precision()),
    "sm margin": (analyze(SCORE, CAUSAL), Schedule(sm_margin=8), Precision()),
    "next tile": (analyze(SCORE, CAUSAL), Schedule(next_tile="counter"), Precision()),
    "contents": (analyze(SCORE, CAUSAL), Schedule(contents="counted"), Precision()),
    "compute": (analyze(SCORE, CAUSAL), Schedule(), Precision(compute="float64")),
    "output": (analyze(SCORE, CAUSAL), Schedule(), Precision(output=torch.float32)),
    "skip": (analyze(SCORE, CAUSAL), Schedule(), Precision(skip=0.1)),
    "qk": (analyze(SCORE, CAUSAL), Schedule(), Precision(qk="int8")),
    "pv": (analyze(SCORE, CAUSAL), Schedule(), Precision(qk="int8", pv="float8_e4m3")),
    "promote": (
        analyze(SCORE, CAUSAL),
        Schedule(),
        Precision("auto", None, 0.0, "int8", "float8_e4m3", False),
    ),
    "tolerance": (analyze(SCORE, CAUSAL), Schedule(), Precision(tolerance=0.1)),
}


def test_programs_are_told_apart_in_memory_and_as_text() -> None:
    made = {name: publish(*parts) for name, parts in PUBLISHED.items()}
    assert len({id(program) for program in made.values()}) == len(made)
    assert len({id(program.engine) for program in made.values()}) == len(made)
    assert len({program.text for program in made.values()}) == len(made)
    for name, program in made.items():
        assert publish(*PUBLISHED[name]) is program and read(program.text) is program
        engine = program.engine
        assert (engine.facts, engine.schedule, engine.precision) == PUBLISHED[name]


def test_every_field_of_a_precision_is_in_the_text() -> None:
    text = json.loads(publish(*PUBLISHED["base"]).text)
    written = {field.name for field in fields(Precision)}
    assert written <= text.keys()
    made = [precision for _, _, precision in PUBLISHED.values()]
    changed = {name for x in made for name in written if getattr(x, name) != getattr(Precision(), name)}
    assert changed == written - {"backward"}, "each that has another value is changed above"


def test_every_field_of_a_schedule_is_in_the_text() -> None:
    written = json.loads(publish(*PUBLISHED["base"]).text)["schedule"]
    assert written.keys() == {field.name for field in fields(Schedule)}
    changed = {
        name
        for _, schedule, _ in PUBLISHED.values()
        for name in written
        if getattr(schedule, name) != getattr(Schedule(), name)
    }
    assert changed == written.keys(), "each is changed above"


@pytest.mark.parametrize("part", ("format", "program", "schedule", "compute", "output"))
def test_a_text_without_a_part_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = publish(*PUBLISHED["base"]).text
    written = json.loads(text)
    del written[part]
    with pytest.raises(InputError, match="cannot be read"):
        read(json.dumps(written))


def test_a_text_of_other_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    written = json.loads(publish(*PUBLISHED["base"]).text)
    with pytest.raises(InputError, match="another version"):
        read(json.dumps({**written, "format": programs_module.FORMAT + 1}))
    monkeypatch.setattr(programs_module, "FORMAT", programs_module.FORMAT + 1)
    other = programs_module.Published(*PUBLISHED["base"])
    assert json.loads(other.text)["format"] == programs_module.FORMAT


def test_facts_with_other_intervals_are_other_facts() -> None:
    facts = analyze(SCORE, CAUSAL)
    assert analyze(SCORE, CAUSAL) is facts and analyze(SCORE, LATER) is not facts
    assert replace(facts, intervals=analyze(SCORE, LATER).keys) != facts
    assert len({facts.key, analyze(SCORE, LATER).key, PUBLISHED["score"][0].key}) == 3


# --- tiles ----------------------------------------------------------------------------------------------

WINDOW = apply("lt", apply("sub", Q, KV), scalar(0, "int"))
BY_BATCH = apply("lt", apply("sub", Q, KV), apply("add", B, const(20)))
BY_HEAD = apply("lt", apply("sub", Q, KV), apply("add", H, const(20)))

TILES: dict[str, tuple[Expr, Shape, tuple[Any, ...], tuple[int, int]]] = {
    "base": (WINDOW, Shape(2, 2, 40, 50), (7,), (8, 8)),
    "mask": (LATER, Shape(2, 2, 40, 50), (7,), (8, 8)),
    "queries": (WINDOW, Shape(2, 2, 41, 50), (7,), (8, 8)),
    "keys": (WINDOW, Shape(2, 2, 40, 58), (7,), (8, 8)),
    "number": (WINDOW, Shape(2, 2, 40, 50), (17,), (8, 8)),
    "rows of a tile": (WINDOW, Shape(2, 2, 40, 50), (7,), (16, 8)),
    "columns of a tile": (WINDOW, Shape(2, 2, 40, 50), (7,), (8, 16)),
    "batch": (BY_BATCH, Shape(1, 2, 40, 50), (7,), (8, 8)),
    "larger batch": (BY_BATCH, Shape(2, 2, 40, 50), (7,), (8, 8)),
    "heads": (BY_HEAD, Shape(2, 1, 40, 50), (7,), (8, 8)),
    "more heads": (BY_HEAD, Shape(2, 2, 40, 50), (7,), (8, 8)),
    "a sequence": (BY_BATCH, Shape(1, 2, 40, 50, 9), (7,), (8, 8)),
}


def classes(name: str) -> Tensor:
    mask, shape, numbers, tile = TILES[name]
    found = tile_map(mask, analyze(SCORE, mask).keys, shape, Captured((), numbers), tile)
    parts = [found.row_ptr, found.start, found.stop, found.full.int()]
    return torch.cat([torch.tensor([found.map_batch, found.map_heads]), *(x.flatten() for x in parts)])


@pytest.mark.parametrize("name", TILES)
def test_each_part_leads_to_other_tiles(name: str) -> None:
    """Remembered tiles are those found without memory."""
    tiles.remembered.cache_clear()
    for other in TILES:
        classes(other)
    kept = classes(name)
    tiles.remembered.cache_clear()
    assert torch.equal(kept, classes(name))
    assert name == "base" or not torch.equal(kept, classes("base"))


def test_the_shape_of_tiles_is_that_of_the_call() -> None:
    """Batches of one length share what was found."""
    keys = analyze(SCORE, WINDOW).keys
    maps = [tile_map(WINDOW, keys, Shape(n, 2, 40, 50), Captured((), (7,)), (8, 8)) for n in (1, 5)]
    assert [one.shape.batch for one in maps] == [1, 5] and maps[0].start is maps[1].start


def test_zeros_of_either_sign_are_told_apart() -> None:
    """They compare equal; what is made of them does not."""
    mask = apply("lt", apply("div", const(1.0), scalar(0, "float")), const(0.0))
    shape = Shape(1, 1, 16, 16)
    bound = [bind(mask, shape, Captured((), (x,))) for x in (0.0, -0.0, 0.0)]
    assert bound[0] is bound[2] and bound[0] is not bound[1]
    tiles.remembered.cache_clear()
    maps = [tile_map(mask, None, shape, Captured((), (x,)), (8, 8)) for x in (0.0, -0.0, 0.0)]
    assert [bool(len(one.start)) for one in maps] == [False, True, False]


def test_ragged_extents_are_others() -> None:
    assert Shape(1, 2, 3, 4) != Ragged(1, 2, 3, 4) and Ragged(1, 2, 3, 4) == Ragged(1, 2, 3, 4)


# --- large tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ((1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 20) + 37))
def test_ranges_of_large_tables_hold_every_element(size: int) -> None:
    """Up to LARGE_TABLE elements exactly; beyond, widened to whole granules at most."""
    table = torch.randint(-99, 99, (size,), dtype=torch.int32)
    found = Tables(Captured((table,)))
    lo = torch.cat([torch.randint(0, size - 200, (200,)), torch.tensor([0, size - 200, size - 1])])
    hi = torch.cat([lo[:-3] + torch.randint(1, 200, (200,)), torch.tensor([size - 1, size - 1, size - 1])])
    least, greatest, _ = found.range(0, [(lo, hi)])
    granule = tables_module.GRANULE if size > tables_module.LARGE_TABLE else 1
    for i, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        inside = table[first : last + 1]
        wider = table[first // granule * granule : (last // granule + 1) * granule]
        assert wider.min() <= least[i] <= inside.min() and inside.max() <= greatest[i] <= wider.max()


@pytest.mark.parametrize("axis", (0, 1))
def test_ranges_along_either_axis(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "LARGE_TABLE", 100)
    shape = (130, 7) if axis == 0 else (7, 130)
    table = torch.randint(-99, 99, shape)
    lo = torch.randint(0, 100, (50,))
    hi, other = lo + torch.randint(1, 30, (50,)), torch.randint(0, 7, (50,))
    ends = [(lo, hi), (other, other)]
    least, greatest, _ = Tables(Captured((table,))).range(0, ends if axis == 0 else ends[::-1])
    lines = table if axis == 0 else table.T
    for i in range(50):
        inside = lines[lo[i] : hi[i] + 1, other[i]]
        assert least[i] <= inside.min() and inside.max() <= greatest[i]


# --- graphs ---------------------------------------------------------------------------------------------


def graph(function: Any) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def pair() -> tuple[fx.GraphModule, fx.GraphModule]:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, other: Any, number: Any) -> Any:
        return s + table[q] * other[k] * number

    def mask(b: Any, h: Any, q: Any, k: Any, window: Any) -> Any:
        return q - k < window

    return graph(score), graph(mask)


LIFTED: dict[str, Any] = {
    "dtype": lambda a, c: (a.double(), c, 0.5, 3),
    "the other's dtype": lambda a, c: (a, c.double(), 0.5, 3),
    "device": lambda a, c: (a.to("meta"), c, 0.5, 3),
    "shape": lambda a, c: (a[:8], c, 0.5, 3),
    "one tensor twice": lambda a, c: (a, a, 0.5, 3),
    "type of a number": lambda a, c: (a, c, 2, 3),
    "type of the mask's number": lambda a, c: (a, c, 0.5, 3.5),
}


@pytest.mark.parametrize("name", LIFTED)
def test_each_look_of_a_lifted_input_leads_to_another_program(name: str) -> None:
    (score, mask), context = pair(), [torch.zeros((), dtype=torch.int64) for _ in range(3)]
    a, c = torch.rand(12), torch.rand(12)

    def kept(score: fx.GraphModule, mask: fx.GraphModule, given: tuple[Any, ...]) -> graphs.GraphTrace:
        return graphs._kept(((score, given[:3]), (mask, given[3:])), context, "score")

    base = a, c, 0.5, 3
    first, other = kept(score, mask, base), kept(score, mask, LIFTED[name](a, c))
    assert other is not first and kept(score, mask, base) is first
    assert kept(score, mask, (torch.rand(12), torch.rand(12), 0.25, 5)) is first, "contents are no part of it"
    alone = kept(*pair(), LIFTED[name](a, c))
    assert (other.facts, other.bases, other.scalars) == (alone.facts, alone.bases, alone.scalars)
    assert len(graphs._traces[score]) == 2


def test_another_mask_is_another_program() -> None:
    (score, mask), context = pair(), [torch.zeros((), dtype=torch.int64) for _ in range(3)]
    given = (torch.rand(12), torch.rand(12), 0.5)
    later = graph(lambda b, h, q, k, window: q - k > window)
    first, other = (graphs._kept(((score, given), (x, (3,))), context, "score") for x in (mask, later))
    assert first.facts.mask != other.facts.mask and first.facts.score == other.facts.score
    assert graphs._kept(((score, given), (mask, (3,))), context, "score") is first


def test_a_tensor_that_stands_for_a_length_is_another_program() -> None:
    score = graph(lambda s, b, h, q, k, n: s + n * (q - k))
    mask = graph(lambda b, h, q, k: q >= k)
    context = [torch.zeros((), dtype=torch.int64) for _ in range(3)]
    given = (torch.zeros((), dtype=torch.int64), context[0], context[1], context[0])
    found = [graphs._kept(((score, (x,)), (mask, ())), context, "score") for x in given]
    assert len({id(one) for one in found}) == 3 and found[1] is found[3]
    assert [len(one.operands) for one in found] == [1, 0, 0, 0]
    assert {"q_len"} <= found[1].facts.score.free and {"kv_len"} <= found[2].facts.score.free


def test_a_number_that_is_part_of_the_program_is_compared() -> None:
    score, body = graph(lambda s, b, h, q, k: s), fx.Graph()
    _, _, q, k, far = (body.placeholder(name) for name in ("b", "h", "q", "k", "far"))
    body.output(body.call_function(lambda q, k, far: q - k < 3 if far else q >= k, (q, k, far)))
    mask = fx.GraphModule(torch.nn.Module(), body)
    context = [torch.zeros((), dtype=torch.int64) for _ in range(3)]

    def kept(far: int) -> graphs.GraphTrace:
        return graphs._kept(((score, ()), (mask, (far,))), context, "score")

    assert kept(1).facts.mask is not kept(0).facts.mask
    assert kept(1).pinned and kept(2) is kept(2)


def test_masks_of_zeros_of_either_sign() -> None:
    """The whole way: equal numbers, and masks of which one allows all and the other nothing."""
    q = torch.randn(1, 1, 16, 8)
    for zero in (0.0, -0.0, 0.0):
        out = fa4flex.compile(mask=lambda b, h, q, k, zero=zero: 1 / (zero * (q + 1)) > 0)(q, q, q)
        assert bool(out.abs().sum()) == (str(zero) == "0.0")
