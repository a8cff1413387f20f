"""Generated hooks, executed on a CPU for every (q, kv) pair, mean what `evaluate` says in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import random_exprs
import torch
from gym import Instance, mask_instances, score_instances
from hook_runner import Grid, run
from torch import Tensor
from variant_table import TABLE, Draw, Sizes

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.build import build
from fa4flex.codegen.emit import emit_forward
from fa4flex.codegen.evaluate import Captured, evaluate
from fa4flex.codegen.expr import TRUE
from fa4flex.kernels.fwd_sm90.config import Config
from fa4flex.variant import compose

SCALE = 0.31
EXPRESSIONS = 12
DRAWS = [
    pytest.param(draw, number, id=f"{name} {number}")
    for name, draws in TABLE.items()
    for number, draw in enumerate(draws)
]
GYM = {x.name: ("mask", x) for x in mask_instances(seq=96)} | {
    x.name: ("score_mod", x) for x in score_instances(seq=40)
}


def plan(mask_form: str, **problem: Any) -> Any:
    """Plan with only what hooks depend on; by default nothing is proved about indices."""
    given = {
        "in_range": False,
        "wide_index": False,
        "positive_scale": True,
        "mask_form": mask_form,
        "dtype": "bfloat16",
        **problem,
    }
    return SimpleNamespace(
        problem=SimpleNamespace(**given),
        target=SimpleNamespace(name="sm_90a"),
        module="fa4flex.kernels.fwd_sm90",
        config=lambda: Config(128, 128, 128, 128),
        by_groups=True,
    )


def truth(facts: Facts, grid: Grid, score: Tensor, captured: Captured) -> tuple[Tensor, Tensor]:
    symbols = {**grid.symbols(), "score": score}
    values = evaluate([facts.score, facts.mask], symbols, captured, score.dtype)
    scores, allowed = (torch.as_tensor(x).expand(grid.shape) for x in values)
    return scores.to(score.dtype), allowed


def form_of(facts: Facts, captured: Captured, prefer_spans: bool) -> str:
    if facts.mask is TRUE:
        return "none"
    keys = facts.keys
    if keys is None or not prefer_spans or keys.nonnegative:
        return "tables"
    vectors = (captured.operands[slot] for slot in keys.sorted_operands)
    return "spans" if all((x.diff() >= 0).all() for x in vectors) else "tables"


def check(facts: Facts, grid: Grid, captured: Captured, form: str, **problem: Any) -> None:
    """Exact masks; scores within float32 rounding, estimated by what float32 does to `evaluate` itself."""
    given = plan(form, **problem)
    wide = given.problem.wide_index
    scale = SCALE if given.problem.positive_scale else -SCALE
    hooks = emit_forward(facts, given).namespace()["HOOKS"]
    raw = 3 * torch.randn(grid.shape)
    scores, taken = run(hooks, raw, captured, scale, wide=wide)
    wanted, allowed = truth(facts, grid, raw * scale, captured)
    exact, _ = truth(facts, grid, raw.double() * scale, captured)
    rounding = (wanted.double() - exact).abs().nan_to_num(0, 0, 0)
    close = (scores - wanted).abs() <= 3e-5 * (1 + wanted.abs()) + 20 * rounding
    close |= (scores == wanted) | (scores.isnan() & wanted.isnan())
    # A comparison or a floor of floats may fall on either side.
    assert close.float().mean() > 0.998, f"{facts.score}: {scores[~close][:5]}, not {wanted[~close][:5]}"
    differ = taken != allowed
    assert not differ.any(), f"{facts.mask}: {differ.sum()} pairs of {differ.numel()} differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
@pytest.mark.parametrize("even_rows", [False, True])
def test_loads_by_steps(dtype: torch.dtype, even_rows: bool) -> None:
    """Neighbours that are loaded at once, elements a constant step away, both also within the score."""
    grid = Grid(2, 3, 5, 8)
    dense, table = (9 * torch.randn(2, 3, 5, 8)).to(dtype), (9 * torch.randn(3, 14)).to(dtype)
    keys, skewed = (9 * torch.randn(3, 8)).to(dtype), (9 * torch.randn(8, 18)).to(dtype)

    def added(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + dense[b, h, q, kv] + table[h, q - kv + 7] + keys[h, kv] + skewed[kv, 2 * kv + 1]

    def capped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.tanh((score + dense[b, h, q, kv] + table[h, kv - q + 4]) / 9)

    for mod in (added, capped):
        program = build(compose(score_mod=mod))
        captured = program.captured()
        hooks = emit_forward(program.facts, plan("none", in_range=True)).namespace()["HOOKS"]
        assert (hooks.score is not None and hooks.score.pair is not None) == (mod is capped)
        raw = 3 * torch.randn(grid.shape)
        wanted, _ = truth(program.facts, grid, raw * SCALE, captured)
        for guard in (False, True):
            scores, _ = run(hooks, raw, captured, SCALE, guard, even_rows=even_rows)
            torch.testing.assert_close(scores, wanted, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_differences_of_late_positions(dtype: torch.dtype) -> None:
    """float32 holds a multiple of 4 million to a half or so: what multiplies positions must come last."""
    grid = Grid(1, 2, 6, 8)
    positions = ((1 << 22) + torch.randperm(64)[:8]).to(dtype)
    slopes, pages = torch.tensor([0.3, 0.7]), ((1 << 15) + torch.randperm(8)).int()

    def plain(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + (positions[q] - positions[kv]) / 7

    def inside(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.tanh(score - slopes[h] * (positions[kv] - positions[q]))

    def paged(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score - slopes[h] * ((1 << 22) + q - (pages[kv // 2] * 128 + kv % 2))

    for mod in (plain, inside, paged):
        program = build(compose(score_mod=mod))
        captured = program.captured()
        hooks = emit_forward(program.facts, plan("none", in_range=True)).namespace()["HOOKS"]
        raw = 3 * torch.randn(grid.shape)
        wanted, _ = truth(program.facts, grid, raw * SCALE, captured)
        scores, _ = run(hooks, raw, captured, SCALE)
        torch.testing.assert_close(scores, wanted, rtol=1e-6, atol=1e-4, msg=lambda m, mod=mod: f"{mod}: {m}")


ONE_AWAY: dict[str, Any] = {
    "constant": lambda q, kv, w, t: torch.floor(q / 41) == torch.floor(kv / 41),
    "number": lambda q, kv, w, t: (q / w).int() == (kv / w).int(),
    "table": lambda q, kv, w, t: (q / t[kv % 2]).trunc() == (kv / t[q % 2]).round(),
    "difference": lambda q, kv, w, t: torch.ceil((kv - q) / w) < 1,
    "product": lambda q, kv, w, t: torch.floor((q + 3) * 0.1) == torch.floor((kv + 3) * 0.1),
    "quotient": lambda q, kv, w, t: (q * 0.1) // 0.1 == kv // t[q % 2].float(),
    "remainder": lambda q, kv, w, t: (q * 0.1) % 0.1 < (kv * 0.3) % -0.1 + 0.05,
    "truncated": lambda q, kv, w, t: torch.div(kv - q, 0.7, rounding_mode="trunc") == torch.fmod(q - kv, 3.5),
}


@pytest.mark.parametrize("name", ONE_AWAY)
def test_jumps_are_where_torch_has_them(name: str) -> None:
    """41 / 41 is 1, but 41 * (1 / 41) is less: masks and roundings of indices compute with torch's values."""
    window, steps, fn = 41, torch.tensor([41, 47]), ONE_AWAY[name]

    def allowed(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return fn(q, kv, window, steps)

    def moved(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + torch.where(fn(q, kv, window, steps), 2.0, 0.0)

    program = build(compose(score_mod=moved, mask=allowed))
    check(program.facts, Grid(1, 1, 100, 100), program.captured(), "tables")


def test_remainders_of_infinities_and_by_zero() -> None:
    x = torch.tensor([-torch.inf, -7.5, -1.0, -0.0, 0.3, 5.0, torch.inf, torch.nan])

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        quotient, rest = x[q] // x[kv], x[q] % x[kv]
        return torch.where(h == 0, quotient, torch.where(h == 1, rest, torch.fmod(x[q], x[kv])))

    program = build(compose(score_mod=mod))
    grid = Grid(1, 3, len(x), len(x))
    hooks = emit_forward(program.facts, plan("none")).namespace()["HOOKS"]
    scores, _ = run(hooks, torch.randn(grid.shape), program.captured(), SCALE)
    row, column = x[:, None], x[None, :]
    wanted = torch.stack([row // column, row % column, torch.fmod(row, column)])
    torch.testing.assert_close(scores[0], wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("fn", [torch.log2, torch.exp2, torch.sqrt, torch.tanh, torch.exp, torch.log])
def test_functions_of_infinities(fn: Any) -> None:
    """Also where a compiler can see that an operand is infinite."""

    def known(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 2 * torch.tanh(fn(torch.abs(torch.where(kv < 0, -1.5, -torch.inf)) + 0.1) / 3)

    def hidden(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 2 * torch.tanh(fn(torch.where(kv <= q, torch.abs(score), torch.inf)) / 3)

    for mod in (known, hidden):
        program = build(compose(score_mod=mod))
        check(program.facts, Grid(2, 2, 5, 8), program.captured(), "none")


@pytest.mark.parametrize(("draw", "number"), DRAWS)
def test_every_variant(draw: Draw, number: int) -> None:
    """The first composition of a variant by spans where it has them, the others by tables."""
    case = draw(Sizes())
    program, s = build(compose(**case.compose(*case.learned))), case.sizes
    captured = program.captured()
    form = form_of(program.facts, captured, prefer_spans=number == 0)
    check(program.facts, Grid(s.batch, s.heads, s.q_len, s.kv_len), captured, form)


@pytest.mark.parametrize("name", GYM)
def test_every_mod_of_attention_gym(name: str) -> None:
    kind, x = GYM[name]
    assert isinstance(x, Instance)
    program = build(compose(**{kind: x.fn}))
    captured = program.captured()
    form = form_of(program.facts, captured, prefer_spans=True)
    check(program.facts, Grid(x.B, x.H, x.q_len, x.kv_len), captured, form)


@pytest.mark.parametrize("number", range(EXPRESSIONS))
def test_random_expressions(number: int, seed: int) -> None:
    draw = random_exprs.Draw(seed + number)
    facts = Facts(draw.score(), draw.boolean(3))
    grid = Grid(random_exprs.BATCH, random_exprs.HEADS, random_exprs.QUERIES, random_exprs.KEYS)
    wide, positive = number % 4 == 3, number % 3 != 2
    check(facts, grid, random_exprs.captured(), "tables", wide_index=wide, positive_scale=positive)
