"""Plans: problems, tiles, memory, registers, costs and bounds, against hand counts and brute force."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest
import torch
from checked_plans import plan_forward, sizes_of

import fa4flex
from fa4flex.codegen.analyze.facts import SCORE, Facts
from fa4flex.codegen.expr import (
    FALSE,
    TRUE,
    Expr,
    apply,
    const,
    load,
    reduce,
    scalar,
    sym,
    to_float,
)
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.fwd_sm90 import plan as plan_module
from fa4flex.kernels.fwd_sm90 import registers
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.kernels.fwd_sm90.registers import SPLITS, Split, consumer_need
from fa4flex.kernels.fwd_sm90.tiles import TABLE, WIDTHS, Tiles, candidates, may_share, pad
from fa4flex.kernels.plan import problem as problem_module
from fa4flex.kernels.plan import target as target_module
from fa4flex.kernels.plan import work
from fa4flex.kernels.plan.bound import Size
from fa4flex.kernels.plan.counts import check_counts
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.memory import Memory, Region
from fa4flex.kernels.plan.pipeline import Plan
from fa4flex.kernels.plan.problem import Lengths, MaskForm, Problem, itemsize
from fa4flex.kernels.plan.target import SM90A
from fa4flex.kernels.plan.work import Bias, Work, count_work, score_cost
from fa4flex.primitives.schedule import Schedule

Q, KV, H, B = sym("q"), sym("kv"), sym("h"), sym("b")
CAUSAL = apply("ge", Q, KV)
SOFTCAP = apply("mul", const(30.0), apply("tanh", apply("div", SCORE, const(30.0))))
ALIBI = apply("add", SCORE, apply("mul", load(0, (H,), "float"), to_float(apply("sub", KV, Q))))
BIAS = apply("add", SCORE, load(0, (B, H, Q, KV), "float"))
VARIANTS: dict[str, tuple[Facts, dict[str, Any]]] = {
    "dense": (Facts(), {}),
    "causal": (Facts(SCORE, CAUSAL), {"mask_form": "spans"}),
    "softcap": (Facts(SOFTCAP, CAUSAL), {"mask_form": "spans"}),
    "alibi": (Facts(ALIBI, CAUSAL), {"mask_form": "spans", "operands": (("float32", 1),)}),
    "bias": (Facts(BIAS, CAUSAL), {"mask_form": "tables", "operands": (("bfloat16", 4),)}),
}


@cache
def planned(name: str, head_dim: int, head_dim_v: int, **more: Any) -> Plan:
    facts, options = VARIANTS[name]
    return plan_forward(facts, Problem(head_dim, head_dim_v, **options, **more))


def refused(make: Callable[[], object], kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    text = str(caught.value)
    for word in (*words, "expected:", "to fix:"):
        assert word in text, text


# --- problem -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    (
        ({"dtype": "float32"}, UnsupportedError, ("dtype='float32'", "bfloat16")),
        ({"out_dtype": "float64"}, UnsupportedError, ("out_dtype",)),
        ({"head_dim": 100}, UnsupportedError, ("head_dim=100", "multiple of 8", "104")),
        ({"head_dim_v": 20}, UnsupportedError, ("head_dim_v=20", "24")),
        ({"head_dim": 584}, UnsupportedError, ("584", "at most 576")),
        ({"head_dim_v": 640}, UnsupportedError, ("640", "at most 576")),
        ({"head_dim": 0}, InputError, ("head_dim=0",)),
        ({"head_dim": True}, InputError, ("positive int",)),
        ({"lengths": "jagged"}, InputError, ("jagged", "packed")),
        ({"mask_form": "dense"}, InputError, ("spans",)),
        ({"statistics": ("lse", "lse")}, InputError, ("max_scores",)),
        ({"statistics": ("kurtosis",)}, InputError, ("kurtosis",)),
        ({"sinks": 3}, InputError, ("sinks=3",)),
        ({"operands": (("float32",),)}, InputError, ("rank",)),
    ),
)
def test_problems_are_validated_in_words(
    options: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    refused(lambda: Problem(**{"head_dim": 64, "head_dim_v": 64, **options}), kind, *words)


def test_problem_and_facts_must_agree() -> None:
    refused(lambda: plan_forward(Facts(SCORE, CAUSAL), Problem(64, 64)), InputError, "mask_form")
    scattered = apply("eq", apply("mod", apply("add", Q, KV), const(2)), const(0))
    assert Facts(SCORE, scattered).keys is None
    refused(
        lambda: plan_forward(Facts(SCORE, scattered), Problem(64, 64, mask_form="spans")),
        InputError,
        "tables",
    )
    three = FALSE
    for i in range(3):
        inside = apply(
            "and_",
            apply("ge", KV, apply("add", Q, const(10 * i))),
            apply("lt", KV, apply("add", Q, const(10 * i + 5))),
        )
        three = apply("or_", three, inside)
    refused(
        lambda: plan_forward(Facts(SCORE, three), Problem(64, 64, mask_form="spans")),
        UnsupportedError,
        "3 key",
    )
    refused(lambda: plan_forward(Facts(ALIBI), Problem(64, 64)), InputError, "captured tensor 0")
    wrong_rank = Problem(64, 64, operands=(("float32", 2),))
    refused(lambda: plan_forward(Facts(ALIBI), wrong_rank), InputError, "rank 2")


def test_itemsize_of_dtypes_by_name() -> None:
    names = {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "int32": 4,
        "int64": 8,
        "bool": 1,
        "uint8": 1,
    }
    assert {name: itemsize(name) for name in names} == names


# --- plans of everything -------------------------------------------------------------------------------


NAMES = {
    name: value
    for module in (plan_module, registers, work, target_module, problem_module)
    for name, value in vars(module).items()
}
"""Names that the repr of a plan has."""


@pytest.mark.parametrize("count", (15, pytest.param(600, marks=pytest.mark.slow)))
def test_every_supported_problem_has_a_checked_plan(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        d, dv = (8 * rng.randint(1, 32) for _ in range(2))
        name, lengths = rng.choice(sorted(VARIANTS)), rng.choice(get_args(Lengths))
        plan = planned(name, d, dv, lengths=lengths, dtype=rng.choice(("bfloat16", "float16")))
        tiles = plan.tiles
        assert (
            tiles.head_dim >= d
            and tiles.head_dim_v >= dv
            and {tiles.head_dim, tiles.head_dim_v} <= set(WIDTHS)
        )
        assert tiles.head_dim == min(w for w in WIDTHS if w >= d)
        assert plan.kv_stages == 2 and plan.need.total <= plan.registers.consumer
        assert plan.memory.total <= 232448
        assert eval(repr(plan), NAMES) == plan
        assert hash(plan) == hash(eval(repr(plan), NAMES))


@pytest.mark.parametrize(
    ("d", "dv", "plain", "hooked"),
    (
        (64, 64, (192, 128), (192, 128)),
        (96, 96, (128, 128), (128, 128)),
        (128, 128, (128, 128), (128, 128)),
        (160, 160, (128, 128), (128, 128)),
        (192, 192, (128, 112), (128, 112)),
        (256, 256, (128, 80), (128, 64)),
    ),
)
def test_tiles_of_the_usual_heads(d: int, dv: int, plain: tuple[int, int], hooked: tuple[int, int]) -> None:
    for name, pair in (("dense", plain), ("causal", plain), ("softcap", hooked), ("alibi", hooked)):
        tiles = planned(name, d, dv).tiles
        assert (tiles.tile_m, tiles.tile_n) == pair, name


def test_blocks_take_tiles_from_a_counter_where_tiles_differ_in_work() -> None:
    for name, lengths in product(VARIANTS, get_args(Lengths)):
        plan = planned(name, 64, 64, lengths=lengths)
        expected = lengths != "dense" or plan.problem.mask_form != "none"
        assert plan.persistent and plan.dynamic == plan.config().dynamic == expected, (name, lengths)
        assert expected == any(ring.name == "next" for ring in plan.topology.rings)
        assert expected == any(region.name == "next" for region in plan.memory.regions)
        assert ("publish the next tile's number" in plan.explain()) == expected


def test_heavy_hooks_take_fewer_consumers_with_more_registers() -> None:
    score = SCORE
    for slot in range(8):  # each table leaves a value per row
        score = apply("add", score, load(slot, (Q,), "float"))
    operands = (("float32", 1),) * 8
    light = plan_forward(Facts(), Problem(64, 64))
    heavy = plan_forward(Facts(score), Problem(64, 64, operands=operands))
    assert (light.tiles.tile_m, light.registers) == (192, Split(32, 160))
    assert (heavy.tiles.tile_m, heavy.registers) == (128, Split(24, 240))
    assert any("not 192 x 128" in reason for reason in heavy.reasons)


@pytest.mark.parametrize("width", [64, 128, 160, 192])
def test_scores_that_read_much_for_each_pair_have_little_code(width: int) -> None:
    table = torch.zeros(4, 1, 1).expand(4, 4096, 4096)
    for reads, much in ((3, False), (4, True)):

        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any, reads: int = reads) -> Any:
            return score + sum(table[n, q, kv] for n in range(reads))

        attn = fa4flex.compile(score_mod=mod)
        sizes = {"head_dim": width, "q_len": 4096, "kv_len": 4096}
        assert ("128 x 64 as scores read much" in attn.source("plan", **sizes)) == much
        for part in ("forward", "backward"):
            assert ("one_body=True" in attn.source(part, **sizes)) == much


def test_the_table_is_legal_and_covers_every_width() -> None:
    for row in TABLE:
        problem = Problem(row.head_dim, row.head_dim_v)
        for pair in {*row.plain, *row.hooked}:
            try:
                plan = plan_forward(Facts(), problem, schedule=Schedule(tile=pair))
            except UnsupportedError as error:
                raise AssertionError(f"{pair} for {problem}: {error}") from error
            assert (plan.tiles.tile_m, plan.tiles.tile_n) == pair
    for d, dv, plain in product(range(8, 257, 8), range(8, 257, 8), (True, False)):
        assert candidates(Problem(d, dv), plain)
        assert d <= pad(d) <= 256 and pad(d) % 16 == 0


def test_config_says_what_the_plan_says() -> None:
    problem = Problem(128, 96, "float16", "float16", "packed", "tables", True, ("max_scores", "lse"))
    config = plan_forward(Facts(SCORE, CAUSAL), problem).config()
    assert config == Config(
        head_dim=128, head_dim_v=96, depth=8, tile_m=128, tile_n=128, kv_stages=2, producer_registers=40,
        consumer_registers=232, pingpong=True, rescale_threshold=0.0, alias_output=True,
        persistent=True, dynamic=True, workers=132, short_tiles=198, longest_first=True, lengths="packed",
        tables=True, sinks=True, statistics=("max_scores", "lse"),
    )  # fmt: skip
    plain = Problem(96, 96, statistics=())
    assert plan_forward(Facts(), plain).config() == Config(
        head_dim=96, head_dim_v=96, depth=6, tile_m=128, tile_n=128, kv_stages=2, producer_registers=24,
        consumer_registers=240, pingpong=True, rescale_threshold=8.0, alias_output=False, persistent=True,
        workers=132, short_tiles=198, longest_first=False, lengths="dense", tables=False,
        sinks=False, statistics=(),
    )  # fmt: skip
    assert planned("dense", 64, 64).config().consumers == planned("dense", 64, 64).tiles.consumers == 3


@pytest.mark.parametrize(
    ("width", "depth"), ((8, 1), (40, 3), (64, 4), (72, 5), (80, 5), (96, 6), (112, 7), (200, 13), (256, 16))
)
def test_what_heads_are_padded_with_is_not_multiplied(width: int, depth: int) -> None:
    """Along queries and keys, 16 columns an instruction; tiles in shared memory may be wider."""
    plan = planned("dense", width, 64)
    assert plan.config().depth == depth and plan.tiles.head_dim >= width
    size = Size(1, 1, 1024, 1024)
    flops = 2 * (16 * depth + 64) * size.scores
    assert dict(plan.bound(size).times)["tensor cores"] == flops / plan.target.peak_flops


# --- the user's schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "d", "dv", "words"),
    (
        ((100, 128), 128, 128, ("64 queries", "(128, 128)")),
        ((256, 128), 64, 64, ("[64, 128, 192]",)),
        ((128, 100), 128, 128, ("100 keys", "multiple of 16", "(128, 96)")),
        ((128, 272), 64, 64, ("up to 256",)),
        ((192, 176), 128, 128, ("registers", "at most 160")),
        ((128, 256), 256, 256, ("registers", "at most 240")),
        ((128, 144), 192, 256, ("shared memory", "barriers", "q ", "k ", "v ", "out", "232448")),
    ),
)
def test_tiles_that_the_chip_does_not_have_are_refused(
    tile: tuple[int, int], d: int, dv: int, words: tuple[str, ...]
) -> None:
    refused(
        lambda: plan_forward(Facts(), Problem(d, dv), schedule=Schedule(tile=tile)), UnsupportedError, *words
    )


def test_a_legal_tile_is_honoured() -> None:
    for tile in ((64, 16), (64, 128), (128, 176), (192, 96)):
        plan = plan_forward(Facts(), Problem(64, 64), schedule=Schedule(tile=tile))
        assert (plan.tiles.tile_m, plan.tiles.tile_n) == tile
        assert plan.registers == SPLITS[tile[0] // 64][0]
    single = plan_forward(Facts(), Problem(256, 256), schedule=Schedule(tile=(128, 96)))
    assert single.kv_stages == 1 and any("do not fit" in reason for reason in single.reasons)


def test_order() -> None:
    assert planned("dense", 64, 64).order == "linear"
    assert planned("causal", 64, 64).order == planned("bias", 64, 64).order == "longest_first"
    ahead = Facts(SCORE, apply("le", Q, KV))  # rows end at kv_len: the first is the longest
    spans = Problem(64, 64, mask_form="spans")
    assert plan_forward(ahead, spans).order == "linear"
    assert plan_forward(ahead, spans, schedule=Schedule(order="longest_first")).order == "longest_first"
    causal, _ = VARIANTS["causal"]
    assert plan_forward(causal, spans, schedule=Schedule(order="row_major")).order == "linear"


def test_rescale_threshold_is_safe_for_the_dtype_of_probabilities() -> None:
    for dtype, largest in (("bfloat16", 3.3e38), ("float16", 65504.0)):
        problem = Problem(128, 128, dtype=dtype)  # type: ignore[arg-type]
        default = plan_forward(Facts(), problem).rescale_threshold
        assert default == 8.0 and 2.0**default < largest
        assert plan_forward(Facts(), problem, rescale_threshold=0).rescale_threshold == 0.0
        assert plan_forward(Facts(), problem, rescale_threshold=2).rescale_threshold == 2.0
    for name, d in product(VARIANTS, (64, 128, 256)):
        assert planned(name, d, d).rescale_threshold == 8.0
    half = Problem(64, 64, dtype="float16")
    refused(
        lambda: plan_forward(Facts(), half, rescale_threshold=16), UnsupportedError, "float16", "overflow"
    )
    refused(lambda: plan_forward(Facts(), half, rescale_threshold=-1), UnsupportedError, "-1")
    maxima = Problem(128, 128, statistics=("lse", "max_scores"))
    assert plan_forward(Facts(), maxima).rescale_threshold == 0.0
    refused(lambda: plan_forward(Facts(), maxima, rescale_threshold=8), UnsupportedError, "max_scores")


# --- memory and registers ------------------------------------------------------------------------------


def painted(memory: Memory) -> bool:
    """True if no byte has two owners: brute force in units of 8 bytes."""
    owner: dict[int, str] = {}
    for region in memory.regions:
        for unit in range(region.offset // 8, -(-region.end // 8)):
            other = owner.setdefault(unit, region.alias or region.name)
            if other != (region.alias or region.name):
                return False
    return True


def test_memory_maps_are_disjoint_aligned_and_of_the_right_size() -> None:
    widths = (64, 64), (96, 80), (96, 128), (192, 128), (256, 64), (192, 256)
    for name, (d, dv) in product(("dense", "bias"), widths):
        plan = planned(name, d, dv)
        tiles, memory = plan.tiles, plan.memory
        assert painted(memory)
        sizes = {r.name: r.size for r in memory.regions}
        ahead = 2 if max(d, dv) <= (96 if name == "bias" else 64) else 1  # tiles of queries in flight
        assert sizes == {
            "barriers": 8 * (2 * ahead * tiles.tile_m // 64 + 2 * 2 + 2 * 2 + (2 if name == "bias" else 0)),
            **({"next": 8 * 4} if name == "bias" else {}),  # 8 numbers, where a mask makes tiles differ
            "q": ahead * tiles.tile_m * pad(d) * 2,
            "k": 2 * tiles.tile_n * pad(d) * 2,
            "v": 2 * tiles.tile_n * pad(dv) * 2,
            "out": tiles.tile_m * pad(dv) * 2,
        }
        assert all(r.offset % 1024 == 0 for r in memory.regions if r.name not in ("barriers", "next"))
        assert memory.total == 1024 + sum(sizes[n] for n in ("q", "k", "v")) + (
            0 if memory["out"].alias else sizes["out"]
        )
        assert (memory["out"].alias == "q") == plan.config().alias_output
        assert plan.config().alias_output == tiles.shares(plan.problem, plan.kv_stages, SM90A)
    assert "out" not in {r.name for r in planned("dense", 192, 128, lengths="packed").memory.regions}


# 16-bit tiles of q, two of k, two of v and out, in KiB of 227, and where out then goes
@pytest.mark.parametrize(
    ("tile", "d", "dv", "staging"),
    (
        ((192, 128), 64, 64, "own"),  # 24 + 32 + 32 + 24
        ((128, 128), 128, 128, "own"),  # 32 + 64 + 64 + 32 = 192
        ((128, 176), 128, 128, "queries"),  # 32 + 88 + 88 = 208, and 32 more would not fit
        ((128, 128), 192, 128, "queries"),  # 48 + 96 + 64 = 208; out is narrower than q
        ((128, 112), 192, 128, "own"),  # 48 + 84 + 56 + 32 = 220
        ((128, 112), 192, 192, "queries"),  # 48 + 84 + 84 = 216
        ((128, 80), 256, 256, "queries"),  # 64 + 80 + 80 = 224
        ((128, 96), 128, 192, "own"),  # 32 + 48 + 72 + 48 = 200; out is wider than q
    ),
)
def test_output_has_room_of_its_own_where_it_fits(
    tile: tuple[int, int], d: int, dv: int, staging: str
) -> None:
    for lengths in get_args(Lengths):
        problem = Problem(d, dv, lengths=lengths)
        plan = plan_forward(Facts(), problem, schedule=Schedule(tile=tile))
        assert plan.kv_stages == 2
        expected = staging if lengths == "dense" else "none"  # rows go straight to global memory
        assert plan.topology.staging == expected
        assert plan.config().alias_output == (expected != "own") == plan.tiles.shares(problem, 2, SM90A)
        outs = [(r.alias, r.size) for r in plan.memory.regions if r.name == "out"]
        alias = "q" if expected == "queries" else None
        assert outs == ([(alias, tile[0] * dv * 2)] if lengths == "dense" else [])


def test_output_may_lie_in_queries_only_where_no_other_warpgroup_reads() -> None:
    """Each warpgroup's slice of the output starts where its slice of the queries does."""

    def slice_bytes(group: int, width: int, stride: int) -> range:
        start = group * 64 * stride * 2
        return range(start, start + 64 * width * 2, 512)

    for d, dv in product(WIDTHS, WIDTHS):
        reader = {byte: g for g in range(3) for byte in slice_bytes(g, d, d)}
        safe = all(reader.get(byte) == g for g in range(3) for byte in slice_bytes(g, dv, d))
        assert may_share(d, dv) == safe, (d, dv)


@pytest.mark.parametrize(
    ("regions", "kind", "words"),
    (
        ((Region("a", 0, 2048, 1024), Region("b", 1024, 8, 8)), PlanError, ("a and b overlap",)),
        ((Region("a", 8, 8, 1024),), PlanError, ("multiple of 1024",)),
        ((Region("a", 0, 8, 8), Region("b", 0, 16, 8, "a")), PlanError, ("lie in a",)),
        ((Region("a", 0, 8, 8), Region("b", 0, 8, 8, "c")), PlanError, ("lie in c",)),
        ((Region("a", 0, 1 << 18, 8),), UnsupportedError, ("262144", "at most 232448")),
    ),
)
def test_bad_memory_maps_are_found(
    regions: tuple[Region, ...], kind: type[Exception], words: tuple[str, ...]
) -> None:
    refused(lambda: Memory(regions, SM90A.shared_memory).check(), kind, *words)


def test_splits_fit_the_register_file() -> None:
    for consumers, splits in SPLITS.items():
        for split in splits:
            split.check(consumers, SM90A)
            assert 128 * (split.producer + consumers * split.consumer) <= 65536
    refused(lambda: Split(32, 240).check(2, SM90A), PlanError, "512", "504")
    refused(lambda: Split(24, 244).check(1, SM90A), PlanError, "244 registers per consumer")
    refused(lambda: Split(16, 160).check(3, SM90A), PlanError, "16 registers per producer")


def test_need_counts_fragments_of_a_warpgroup() -> None:
    need = dict(consumer_need(128, 64, Work(row=2, uniform=1, row_ends=1, element=100)).parts)
    # 64 x 128 float32 over 128 threads; the same in 16 bits; 64 x 64 float32
    assert (need["scores"], need["probabilities"], need["output"]) == (64, 32, 32)
    assert need["hooks"] == 1 + 2 * (2 + 1) + 8
    assert need["loads"] == 0
    # of a key's bias, a thread's two rows share the load
    few, many = (dict(consumer_need(128, 64, Work(loads=loads)).parts) for loads in (0.5, 2))
    assert (few["loads"], many["loads"]) == (0, 8)


def test_a_changed_plan_is_checked_anew() -> None:
    plan = planned("dense", 128, 128)
    replace(plan, pingpong=False).check()
    replace(plan, kv_stages=3).check()
    handed = replace(plan, dynamic=True)
    handed.__dict__["memory"] = plan.memory  # without room for what is handed over
    refused(handed.check, PlanError, "region next", "0 bytes")
    replace(plan, dynamic=True).check()
    for changes, kind in (
        ({"kv_stages": 0}, PlanError),
        ({"kv_stages": 9}, UnsupportedError),
        ({"registers": Split(40, 240)}, PlanError),
        ({"tiles": Tiles(192, 176, 128, 128)}, (PlanError, UnsupportedError)),
        ({"rescale_threshold": 100.0}, UnsupportedError),
        ({"target": replace(SM90A, shared_memory=100_000)}, UnsupportedError),
        ({"target": replace(SM90A, named_barriers=4)}, PlanError),
    ):
        with pytest.raises(kind):
            replace(plan, **changes).check()


def test_a_plan_is_checked_in_order_too() -> None:
    """Scores multiplied before their keys are there: no count is wrong, so only the simulation tells."""
    plan = replace(planned("dense", 128, 128))
    producer, *consumers = plan.topology.roles
    hasty = []
    for role in consumers:
        wait, take, issue, *rest = role.body
        hasty.append(replace(role, body=(take, issue, wait, *rest)))
    broken = replace(plan.topology, roles=(producer, *hasty))
    check_counts(broken)
    plan.__dict__["topology"] = broken
    with pytest.raises(PlanError, match="before it is there"):
        plan.check()


# --- costs and bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "special", "fp32", "loads"),
    (
        (SCORE, 0, 0, 0),
        (SOFTCAP, 1, 2, 0),  # tanh; a product and a product with 1 / 30
        (apply("sigmoid", SCORE), 2, 3, 0),  # exp2, a reciprocal; two products, a sum
        (ALIBI, 0, 0.5 * (2 + 2 + 1) + 1, 0),  # offset, conversion and slope per offset; the sum per score
        (apply("add", SCORE, load(0, (KV,), "float")), 0, 0.5 * 2 + 1, 0.5),  # once per column
        (apply("add", SCORE, load(0, (Q,), "float")), 0, 1, 0),  # once per row
        (apply("add", SCORE, load(0, (Q, KV), "float")), 0, 4 + 1, 1),
        (apply("with_grad", SCORE, SCORE, apply("tanh", SCORE)), 0, 0, 0),  # the slope is for the backward
        (
            reduce("sum", "i", 4, apply("exp2", apply("mul", SCORE, to_float(sym("i"))))),
            4, 4 * 1 + 4, 0,
        ),
        (apply("mul", SCORE, apply("exp2", scalar(0, "float"))), 0, 1, 0),  # once per head
        (apply("add", SCORE, to_float(apply("floordiv", apply("mul", Q, KV), const(8)))), 0, 2 + 2 + 3, 0),
    ),
)  # fmt: skip
def test_costs_per_score_by_hand(score: Expr, special: float, fp32: float, loads: float) -> None:
    assert score_cost(score) == (special, fp32, loads)


def test_work_counts_softmax_and_streams() -> None:
    dense = count_work(Facts(), Problem(64, 64))
    assert (dense.special, dense.bias, dense.row_ends) == (1, (), 0)
    facts, options = VARIANTS["bias"]
    assert count_work(facts, Problem(64, 64, **options)).bias == (Bias(2, True, True),)
    facts, options = VARIANTS["causal"]
    assert count_work(facts, Problem(64, 64, **options)).row_ends == 1
    relative = apply("add", SCORE, load(0, (H, apply("sub", KV, Q)), "float"))
    assert count_work(Facts(relative), Problem(64, 64, operands=(("float32", 2),))).bias == ()


def test_bounds_name_the_unit_that_limits() -> None:
    size = Size(2, 16, 8192, 8192)
    dense = planned("dense", 128, 128).bound(size)
    assert dense.limit == "tensor cores" and dense.flops == 4 * 2 * 16 * 8192**2 * 128
    assert dense.seconds == pytest.approx(dense.flops / (4096 * 132 * 1.83e9))
    assert dense.tflops == pytest.approx(989, rel=1e-3)  # NVIDIA's figure for the chip
    special = dict(dense.times)["special functions"]
    assert special == pytest.approx(2 * 16 * 8192**2 / 3.9e12, rel=0.02)  # FlashAttention-3's figure
    assert planned("softcap", 64, 64).bound(size).limit == "special functions"
    # A row of queries per head reads all keys once: memory.
    decode = planned("dense", 128, 128).bound(Size(64, 8, 1, 8192))
    assert decode.limit == "HBM"
    assert decode.seconds == pytest.approx((64 * 8 * (8193 * 2 * 256 + 4)) / 4.8e12)
    grouped = planned("dense", 128, 128).bound(Size(64, 8, 1, 8192, kv_heads=1))
    assert grouped.seconds < decode.seconds / 4
    half = planned("dense", 128, 128).bound(replace(size, density=0.5))
    assert half.seconds == pytest.approx(dense.seconds / 2)
    refused(lambda: replace(size, density=0.0), InputError, "density")
    refused(lambda: replace(size, q_len=0), InputError, "at least 1")


def test_explain_says_what_will_run() -> None:
    plan = planned("alibi", 128, 128)
    text = plan.explain(Size(2, 16, 8192, 8192, 0.5))
    assert "in q" not in text and "would pass 2^8" in text
    shared = planned("dense", 192, 192, statistics=("max_scores",)).explain()
    assert "in q" in shared and "at every tile" in shared and "one block per multiprocessor" in shared
    for words in (
        "sm_90a", "128 queries x 128 keys", "2 consumers", "longest_first", "232448", "consumer 0",
        "start S_j", "limited by tensor cores", "HBM", "rescaled",
    ):  # fmt: skip
        assert words in text, words
    assert "limited by" in plan.explain() and "HBM" not in plan.explain().splitlines()[-1]


def test_planning_loads_neither_torch_nor_cutlass() -> None:
    program = (
        "import sys\n"
        "from fa4flex.codegen.analyze.facts import Facts\n"
        "from fa4flex.kernels.plan.problem import Problem\n"
        "from fa4flex.kernels.dispatch import plan_forward\n"
        "assert 'networkx' not in sys.modules\n"
        "plan_forward(Facts(), Problem(128, 128)).explain()\n"
        "print(sorted({'torch', 'cutlass', 'sympy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mask_forms_are_all_planned() -> None:
    """Forward passes plan every mask form but "queries", which backward passes have; "pairs" those of few
    rows."""
    given = {options.get("mask_form", "none") for _, options in VARIANTS.values()}
    assert set(get_args(MaskForm)) == given | {"queries", "pairs"}
    with pytest.raises(InputError, match="in a forward pass"):
        plan_forward(Facts(SCORE, TRUE), Problem(64, 64, mask_form="queries"))
    with pytest.raises(UnsupportedError, match="asked of every pair"):
        plan_forward(Facts(SCORE, CAUSAL), Problem(64, 64, mask_form="pairs"))
    pairs = Problem(64, 64, mask_form="pairs")
    plan = plan_forward(Facts(SCORE, CAUSAL), pairs, sizes=sizes_of(64))
    assert plan.module == "fa4flex.kernels.decode_sm90"
    assert plan_forward(Facts(SCORE, TRUE), Problem(64, 64, mask_form="spans")).order == "linear"
