"""Calls of new lengths: what is proved, compiled and made for one of them serves the others, and is what each
would have been given alone. Kernels are left out; CPU tensors stand for those of a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_changes import afresh, by_name, recording, same
from test_gpu_calls import Recorder, call_of
from torch import Tensor

import fa4flex
from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.extents import ANY, Reach
from fa4flex.codegen.analyze.reach import LEAST_BOUND, generous
from fa4flex.codegen.evaluate import PastTheEnd
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.bwd_sm90.plan import LONG_TILE, SHORT_TILE, TILE
from fa4flex.kernels.plan.arguments import BACKWARD, FORWARD, Schema
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
from fa4flex.lower import Lowered
from fa4flex.runtime.call import Call
from fa4flex.runtime.cuda import engine as engine_module
from fa4flex.runtime.cuda.backward import run_backward
from fa4flex.runtime.cuda.calls.launch_cache import MISSING
from fa4flex.runtime.cuda.engine import Engine
from fa4flex.runtime.cuda.launches import ready_backward
from fa4flex.runtime.cuda.launches.captured_sums import memory_of
from fa4flex.runtime.cuda.launches.ready_backward import Saved
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.layouts import empty_output, output_layout
from fa4flex.variants import alibi, causal, document, learned_bias, sliding_window, softcap

HEADS = 4
RESULTS = (3, 4, 5)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The problems that are proved."""
    found: list[Shape] = []
    prove = engine_module.prove

    def recorded(facts: Any, shape: Shape, captured: Any) -> Any:
        found.append(shape)
        return prove(facts, shape, captured)

    monkeypatch.setattr(engine_module, "prove", recorded)
    return found


def tensors(batch: int, q_len: int, kv_len: int, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.zeros(batch, heads, n, width, dtype=torch.bfloat16)
        for heads, n in ((HEADS, q_len), (2, kv_len), (2, kv_len))
    )
    return q, k, v


def resized(call: Call, batch: int, q_len: int, kv_len: int) -> Call:
    q, k, v = tensors(batch, q_len, kv_len, call.q.shape[-1])
    return call._replace(q=q, kv=Contiguous(k, v))


def launched(recorder: Recorder) -> dict[str, Any]:
    return by_name(recorder.launches[-1])


# --- what is shared -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask", (None, causal, causal & sliding_window(70)), ids=("none", "causal", "window")
)
def test_new_lengths_share_proof_kernel_and_launch(
    recorder: Recorder, proofs: list[Shape], mask: Any
) -> None:
    """Few queries, whose groups of two heads share tiles of 64 rows, have one launch, up to 128 of narrow
    heads another, prompts alone whose tiles run at the same time a third, and many queries a fourth. One
    proof serves all."""
    many = (
        (2, 700, 300),
        (2, 700, 301),
        (2, 700, 4096),
        (2, 777, 300),
        (9, 4096, 5),
        (400, 700, 9),
    )
    alone = (1, 300, 300), (1, 33, 1), (1, 4000, 301), (1, 128, 4096)
    short = (2, 40, 300), (2, 40, 301), (2, 40, 4096), (2, 128, 300), (4096, 40, 9)
    few = (2, 1, 300), (2, 1, 301), (2, 1, 4096), (2, 32, 300), (1, 1, 1), (4096, 1, 9)
    # Slopes and the ends of rows leave registers for tiles of 128 queries alone, and heads that share
    # tiles no choice.
    engine, call = call_of(fa4flex.compile(alibi if mask is None else None, mask), tensors(*many[0]))
    for sets, sizes in enumerate((many, short, alone, few), 1):
        share(recorder, engine, call, sizes)
        assert len(recorder.problems) == sets and len(proofs) == 1


def share(recorder: Recorder, engine: Engine, call: Call, sizes: tuple[tuple[int, int, int], ...]) -> None:
    """Calls of these sizes have one launch."""
    engine.run(resized(call, *sizes[0]))
    first = engine.find(resized(call, *sizes[0]))
    for extents in sizes:
        other = resized(call, *extents)
        assert engine.find(other) is first, extents
        out, lse, _ = engine.run(other)
        assert out.shape == other.q.shape and lse is not None and lse.shape == other.q.shape[:3]
        given = launched(recorder)
        assert given["max_q_len"] == extents[1] and given["q"] is other.q and given["k"] is other.kv.k


def test_bounds_grow_with_lengths(recorder: Recorder, proofs: list[Shape]) -> None:
    engine, call = call_of(fa4flex.compile(mask=causal), tensors(1, 1, LEAST_BOUND))
    edges = (LEAST_BOUND, 2 * LEAST_BOUND, 4 * LEAST_BOUND)
    assert [generous(n) for n in (0, 1, *edges)] == [LEAST_BOUND] * 3 + list(edges[1:])
    for n in (edges[0], edges[0] + 1, edges[1], edges[1] + 1, 7, edges[0], edges[2]):
        engine.run(resized(call, 1, 1, n))
    assert [shape.kv_len for shape in proofs] == list(edges)
    assert all(isinstance(shape, Ragged) for shape in proofs)


def test_a_launch_makes_tables_for_any_lengths(recorder: Recorder) -> None:
    """One launch for all, up to where what was captured ends; tables are made for the lengths of a call, and
    kept for these where they are made of no contents."""
    ids = torch.arange(500) // 50
    for mask, most in ((document(ids), 500), (lambda b, h, q, kv: (q - kv) % 3 == 0, LEAST_BOUND)):
        engine, call = call_of(fa4flex.compile(mask=mask), tensors(1, 300, 300))
        engine.run(call)
        first, made = engine.find(call), len(recorder.tables)
        assert first is not None and first.reach.most[1:] == (most, most)
        for n, new in ((300, 0), (290, 1), (300, 0), (301, 1), (most, 1)):
            engine.run(resized(call, 1, n, n))
            assert engine.find(resized(call, 1, n, n)) is first
            made += new or most == 500
            assert len(recorder.tables) == made
            tables = launched(recorder)["tables"]
            assert tables.partial_ptr.shape[2] * 192 >= n
        if most == 500:
            with pytest.raises(fa4flex.Fa4flexError):
                engine.run(resized(call, 1, 501, 501))


# --- captured tensors end somewhere -----------------------------------------------------------------------


@pytest.mark.parametrize("dimension", ("batch", "queries", "keys"))
def test_the_end_of_a_captured_table_is_noticed_at_the_call_that_passes_it(
    recorder: Recorder, proofs: list[Shape], dimension: str
) -> None:
    at = ("batch", "queries", "keys").index(dimension)
    table = torch.ones(400, dtype=torch.bool)
    masks: tuple[Callable[..., Any], ...] = (
        lambda b, h, q, kv: (q >= kv) & (table[b].int() > 0),
        lambda b, h, q, kv: kv < q + table[q].int(),
        lambda b, h, q, kv: q >= kv + table[kv].int(),
    )
    engine, call = call_of(fa4flex.compile(mask=masks[at]), tensors(1, 1, 1))
    for n in (3, 300, 399, 400, 401, 402, 17, 400, 500, 399):
        extents = [2, 3, 4]
        extents[at] = n
        other = resized(call, *extents)
        if n <= len(table):
            engine.run(other)
        else:
            assert engine.find(other) is MISSING
            with pytest.raises(PastTheEnd, match=f"goes up to {n - 1} in a dimension of 400"):
                engine.run(other)


def test_a_score_may_pass_the_end_of_what_it_does_not_read(recorder: Recorder) -> None:
    """Its mask hides such pairs. Kernels are told whether all indices are in range."""
    bias = torch.zeros(HEADS, 400, 400)
    engine, call = call_of(
        fa4flex.compile(lambda s, b, h, q, kv: s + bias[h, q, kv], causal), tensors(1, 300, 300)
    )
    for n, in_range in ((300, True), (400, True), (401, False), (390, True), (450, False), (400, True)):
        engine.run(resized(call, 1, n, n))
        ready = engine.find(resized(call, 1, n, n))
        assert ready is not None and (ready.reach.most[1] == 400) == in_range
    assert [problem.in_range for problem in recorder.problems] == [True, False]


def test_tables_of_distances_are_proved_for_as_long_as_they_are(
    recorder: Recorder, proofs: list[Shape]
) -> None:
    bias = torch.zeros(HEADS, 2 * 1000 - 1)
    engine, call = call_of(
        fa4flex.compile(lambda s, b, h, q, kv: s + bias[h, q - kv + 999]), tensors(1, 1, 500)
    )
    for n in (500, 501, 77, 1000):
        engine.run(resized(call, 1, 1, n))
    assert len(recorder.problems) == 1 and recorder.problems[0].in_range
    assert len(proofs) == 4, "for a generous bound, the call alone, its few queries, and that of the table"
    engine.run(resized(call, 1, 1, 1001))
    assert not recorder.problems[-1].in_range


def test_indices_that_nothing_proves_in_range_are_asked_about_once(
    recorder: Recorder, proofs: list[Shape]
) -> None:
    where, bias = torch.arange(64), torch.zeros(64)
    engine, call = call_of(
        fa4flex.compile(lambda s, b, h, q, kv: s + bias[where[kv % 64] - 1]), tensors(1, 1, 500)
    )
    for n in (500, 501, 999, 1000):
        engine.run(resized(call, 1, 1, n))
    assert not recorder.problems[0].in_range and len(recorder.problems) == 1 and len(proofs) == 6


# --- the same as for each alone -----------------------------------------------------------------------------

table = torch.linspace(-1, 1, 300 * 300).view(300, 300)
ends = torch.arange(1100).clamp(max=500)
far = torch.zeros(HEADS, 2 * 256 - 1)

PROGRAMS: dict[str, Callable[[], fa4flex.Attention]] = {
    "plain": lambda: fa4flex.compile(),
    "causal": lambda: fa4flex.compile(mask=causal),
    "window": lambda: fa4flex.compile(alibi, causal & sliding_window(100)),
    "bias by pairs": lambda: fa4flex.compile(lambda s, b, h, q, kv: s + table[q, kv]),
    "bias by distance": lambda: fa4flex.compile(lambda s, b, h, q, kv: s + far[h, q - kv + 255], causal),
    "clipped distances": lambda: fa4flex.compile(learned_bias(far)),
    "end by row": lambda: fa4flex.compile(mask=lambda b, h, q, kv: kv < ends[q]),
    "documents": lambda: fa4flex.compile(mask=document(ends // 50)),
    "every third": lambda: fa4flex.compile(mask=lambda b, h, q, kv: (q - kv) % 3 == 0),
}


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
@pytest.mark.parametrize("target", (SM90A, SM100A), ids=lambda target: target.name)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_serves_a_call_is_what_it_would_get_alone(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, name: str, target: Target, layout: str, seed: int
) -> None:
    """In any order of lengths: problem, signature, and all arguments, those of the backward pass as well."""
    monkeypatch.setattr(engine_module, "target_of", lambda device: target)
    draw, knowing = random.Random(seed), Knowing()
    monkeypatch.setattr("fa4flex.lower.compile_kernel", knowing.compile)
    engine, call = call_of(PROGRAMS[name](), tensors(1, 1, 1))
    sides = (1, 100, 128, 129, 256, 257, 300, 301), (1, 100, 257, 300, 301, 1024, 1025)
    for _ in range(12):
        extents = draw.choice((1, 2, 3)), *(draw.choice(side) for side in sides)
        other = resized(call, *extents)
        if layout == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (other.q, *other.kv))
            other = other._replace(q=q, kv=Contiguous(k, v), heads_first=False)
        if draw.random() < 0.3:
            other = other._replace(
                q=other.q.contiguous(), kv=Contiguous(torch.cat([other.kv.k] * 2, -1)[..., :64], other.kv.v)
            )
        saved = Saved(torch.empty_like(other.q), torch.empty(extents[0], HEADS, extents[1]), other.q, None)
        for one in (engine, afresh(engine)):
            one.run(other)
            run_backward(one, other, saved)
        forward, backward, *alone = knowing.kernels[-4:]
        for schema, (kernel, given), (its_own, expected) in zip(
            (FORWARD, BACKWARD), (forward, backward), alone, strict=True
        ):
            assert kernel == its_own, extents
            pairs = zip(schema.names, alike(schema, given), alike(schema, expected), strict=True)
            assert [name for name, a, b in pairs if not same(a, b)] == [], extents


class Knowing(Recorder):
    """Recorder whose launches come with what was compiled for them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, tuple[Any, ...]]] = []

    def compile(self, source: Any, problem: Problem, signature: Signature, arch: str = "sm_90a") -> Any:
        kernel = source.text, problem, signature, arch
        if source.name == "block tables":  # these stay as empty memory is
            return SimpleNamespace(launch=lambda *given: None)
        return SimpleNamespace(launch=lambda *given: self.kernels.append((kernel, given)))


def alike(schema: Schema, given: tuple[Any, ...]) -> list[Any]:
    """Arguments, of tensors made for the launch what they look like."""
    made = (
        *("out", "lse", "max_scores", "workspace", "lse2", "delta", "dq_sum", "dq", "dk", "dv"),
        *("dk_parts", "dv_parts", "cleared"),
    )

    def shown(name: str, x: Any) -> Any:
        if name == "tables" and x is not None:
            return tuple(None if part is None else part.shape for part in x)
        return (x.shape, x.stride(), x.dtype) if name in made and isinstance(x, Tensor) else x

    return [shown(name, x) for name, x in zip(schema.names, given, strict=True)]


# --- backward passes ---------------------------------------------------------------------------------------


def backward_of(engine: Engine, call: Call, needs: tuple[int, ...] = ()) -> Any:
    lse = torch.empty(call.q.shape[0], HEADS, call.q.shape[2])
    return run_backward(engine, call, Saved(call.q, lse, call.q, None), needs)


def test_new_lengths_share_a_backward_pass(recorder: Recorder) -> None:
    engine, call = call_of(fa4flex.compile(alibi, causal), tensors(6, 300, 300))
    for extents in ((6, 300, 300), (6, 301, 300), (7, 5, 4096), (17, 300, 270)):
        other = resized(call, *extents)
        found = backward_of(engine, other)
        assert [x.shape for x in found[:3]] == [x.shape for x in (other.q, other.kv.k, other.kv.v)]
        given = dict(zip(BACKWARD.names, recorder.launches[-1], strict=True))
        rows = -(-extents[1] // 128) * 128
        assert given["lse2"].shape == given["delta"].shape == (extents[0], HEADS, rows)
        assert given["dq_sum"].shape == (extents[0], HEADS, rows * 64)
    assert len(recorder.problems) == 1


def test_keys_that_fit_one_tile_share_a_backward_pass_of_their_own(recorder: Recorder) -> None:
    """Up to 128 of them: there are no sums of dQ then. Others before, between and after have them."""
    engine, call = call_of(fa4flex.compile(alibi, causal), tensors(6, 300, 300))
    for extents, few in (
        ((6, 300, 300), False),
        ((2, 300, 128), True),
        ((1, 5, 1), True),
        ((17, 300, 270), False),
        ((3, 4096, 77), True),
    ):
        found = backward_of(engine, resized(call, *extents))
        given = dict(zip(BACKWARD.names, recorder.launches[-1], strict=True))
        assert (given["dq_sum"] is None) == few and given["dq"] is found.dq
    assert len(recorder.problems) == 2


@pytest.mark.parametrize(
    ("mask", "few", "most"), ((None, (512, 449, 576), 577), (causal, (300, 17, 1024), 1537))
)
def test_few_steps_are_those_of_plain_scores(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, mask: Any, few: tuple[int, ...], most: int
) -> None:
    """Steps of wide heads are long where queries are so many that few rows of them are past an end, and
    scores take no registers, as capped ones do."""
    tiles: list[tuple[int, int]] = []
    compiled = Lowered.compile

    def noted(lowered: Lowered, signature: Signature) -> Any:
        tiles.append(lowered.plan.tile)
        return compiled(lowered, signature)

    monkeypatch.setattr(Lowered, "compile", noted)
    wide = tensors(6, 300, 300, width=128)
    engine, call = call_of(fa4flex.compile(mask=mask), wide)
    for q_len in (*few, most, 4096, few[0], 2049):
        backward_of(engine, resized(call, 6, q_len, 600))
    assert tiles == [SHORT_TILE, LONG_TILE]
    engine, call = call_of(fa4flex.compile(softcap(20.0), mask=mask), wide)
    for q_len in (300, 2000):
        backward_of(engine, resized(call, 6, q_len, 600))
    assert tiles[2:] == [TILE]


def test_few_tiles_share_a_backward_pass_of_their_own(recorder: Recorder) -> None:
    """At most 66 of 128 keys, of 4 heads each: others are for as many multiprocessors as there are."""
    engine, call = call_of(fa4flex.compile(alibi, causal), tensors(1, 300, 300))
    few, many = ((5, 300, 300), (5, 301, 384), (1, 7, 200)), ((5, 300, 385), (5, 7, 4096), (6, 300, 400))
    for extents in (*few, *many, *few, *many):
        backward_of(engine, resized(call, *extents))
    assert len(recorder.problems) == 2


def test_gradients_of_captured_tensors_are_added_up_as_for_each_call_alone(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element that belongs to a pair is written once in a batch of one, and added to by every entry of a
    larger one; memory holds zeros where not every element is written."""
    knowing, made = Knowing(), []
    monkeypatch.setattr("fa4flex.lower.compile_kernel", knowing.compile)
    monkeypatch.setattr(ready_backward, "memory_of", lambda one, q: made.append(one) or memory_of(one, q))
    bias = torch.zeros(HEADS, 300, 300)
    engine, call = call_of(fa4flex.compile(lambda s, b, h, q, kv: s + bias[h, q, kv]), tensors(1, 300, 300))
    sizes = (300, 300), (200, 300), (300, 301)
    for extents in [(batch, *size) for batch in (1, 2, 3, 1) for size in sizes]:
        other = resized(call, *extents)
        for one in (engine, afresh(engine)):
            assert backward_of(one, other, (0,)).captured[0].shape == bias.shape
        assert made[-2] == made[-1] and knowing.kernels[-2][0] == knowing.kernels[-1][0], extents
    assert {one.adding for one in made} == {"once", "sum"} and {one.whole for one in made} == {True, False}
    assert {kernel[1].in_range for kernel, _ in knowing.kernels} == {True, False}


def test_ordered_gradients_have_memory_for_the_lengths_of_each_call(recorder: Recorder) -> None:
    """There is a copy for every warp that adds, and more warps where there are more keys."""
    slope = torch.ones(HEADS)
    schedule = fa4flex.Schedule(deterministic=True)
    attn = fa4flex.compile(lambda s, b, h, q, kv: s + slope[h] * (q - kv), schedule=schedule)
    engine, call = call_of(attn, tensors(1, 300, 300))
    for kv_len in (300, 3000, 300, 100):
        copies = []
        for one in (engine, afresh(engine)):
            backward_of(one, resized(call, 1, 300, kv_len), (0,))
            given = dict(zip(BACKWARD.names, recorder.launches[-1], strict=True))
            copies.append(given["gradients"][0].shape)
        assert copies[0] == copies[1], kv_len


@pytest.mark.parametrize("order", [*permutations(range(4)), (0, 1, 2), (1, 0, 2)], ids=str)
def test_layouts_of_outputs_are_those_that_torch_would_give(order: tuple[int, ...]) -> None:
    for shape in ((2, 3, 5, 8), (1, 4, 1, 8), (1, 1, 1, 1), (3, 1, 7, 8)):
        q = torch.zeros(shape[: len(order)]).permute(order)
        for x in (q, q[:1].expand_as(q), q[..., :1]):
            for width in (1, 16):
                expected = empty_output(x, width, torch.float32)
                assert output_layout(x, width) == (tuple(expected.shape), expected.stride())


# --- reach ---------------------------------------------------------------------------------------------


def test_both_ends_of_a_reach_are_in_it() -> None:
    reach = Reach((1, 2, 3), (4, 5, 6))
    assert reach.holds((1, 2, 3)) and reach.holds((4, 5, 6)) and not reach.exact
    for at in range(3):
        for end, step in ((reach.least, -1), (reach.most, 1)):
            outside = [*end]
            outside[at] += step
            assert not reach.holds((outside[0], outside[1], outside[2]))
    assert reach.within(Reach((2, 0, 0), (ANY, 4, ANY))) == Reach((2, 2, 3), (4, 4, 6))
    assert Reach.exactly((1, 2, 3)).exact
