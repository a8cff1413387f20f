"""Regret of the choice of kernels: random problems, every candidate timed, the chosen one over the best.

    python benchmarks/choice_regret.py --record regret.json [--problems 200] [--seconds 480] [--seed N]
    python benchmarks/choice_regret.py --fit regret.json
    python benchmarks/choice_regret.py --record regret.json --dry      # invented times, without a GPU

Problems are drawn at random: both passes, dense and packed, full, causal and windows, 1 to 16 query heads per
head of keys, heads of 64 to 192, 128 to 16,384 queries. Of each, a candidate is a tile, the query heads of a
group together or in parts, tiles from a counter or in turn; all are timed in turns (bench/measure.py), the
least of them beside the one that the library chooses. Processes compile all kernels before the first is
timed.

--fit finds the constants of the model (kernels/plan/constants.py) for which logarithms of predicted times,
and above all of their ratios between candidates of a problem, come nearest to the measured ones, on every
other problem, and prints the regret of the others before and after, and the row to put there.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fa4flex
from fa4flex.kernels.bwd_sm90 import plan as backward_plans
from fa4flex.kernels.fwd_sm90 import plan as forward_plans
from fa4flex.kernels.plan import constants
from fa4flex.kernels.plan.candidates import least
from fa4flex.kernels.plan.constants import Constants, Rates
from fa4flex.kernels.plan.groups import Groups
from fa4flex.kernels.plan.kernel_time import Heads
from fa4flex.kernels.plan.target import SM90A

os.environ.setdefault("FA4FLEX_BACKGROUND", "0")  # times are those of the best kernels

ROUNDS, SAMPLE = 5, 0.004
WIDTHS, GROUPS = (64, 64, 96, 128, 128, 192), (1, 1, 2, 4, 7, 8, 16)
MASKS = ("full", "causal", "causal", "window")
WINDOW = 512
MOST_WORK = 3e12
"""Operations of a problem: some 6 ms."""
MOST_PARTS = 4
ASKED = (128, 96), (64, 128)
"""Tiles of forward passes that schedules ask for, beside those that plans choose among."""
FITTED = ("clock", "memory", "l2", "adding", "launch")
ERRORS = (0.0, 0.01, 0.02, 0.04, 0.08)
NEARER = 4.0
"""Weight of ratios between candidates of one problem, beside that of times themselves."""


@dataclass(frozen=True)
class Problem:
    """A call: `q_len` queries and as many keys of each of `batch` sequences; `packed` ones have random
    lengths of that average."""

    direction: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    width: int
    mask: str
    packed: bool = False

    @property
    def name(self) -> str:
        lengths = "packed " if self.packed else ""
        heads = f"h{self.heads}:{self.kv_heads}"
        return f"{self.direction} {self.mask} {lengths}b{self.batch} {heads} s{self.q_len} d{self.width}"


@dataclass(frozen=True)
class Way:
    """A candidate: its tile, heads of a group that share tiles or None (forward), parts of a group or 0
    (backward), and how blocks find their next tile."""

    tile: tuple[int, int]
    packed: int | None = None
    parts: int = 0
    next_tile: str = "auto"

    @property
    def name(self) -> str:
        parts = [f"{self.tile[0]} x {self.tile[1]}"]
        parts += [f"{self.packed} heads share tiles"] * ((self.packed or 1) > 1)
        parts += [f"{self.parts} parts"] * (self.parts > 1) + [self.next_tile] * (self.next_tile != "auto")
        return ", ".join(parts)


def drawn(draw: random.Random) -> Problem:
    """A problem whose work is at most MOST_WORK."""
    while True:
        group, kv_heads = draw.choice(GROUPS), draw.choice((1, 2, 4, 8, 16))
        q_len, batch = (
            round(math.exp(draw.uniform(math.log(128), math.log(16384)))),
            draw.choice((1, 2, 4, 8, 16, 64)),
        )
        width, mask, direction = draw.choice(WIDTHS), draw.choice(MASKS), draw.choice(("forward", "backward"))
        one = Problem(direction, batch, group * kv_heads, kv_heads, q_len, width, mask)
        work = 10 * batch * one.heads * q_len**2 * width
        if work <= MOST_WORK and batch * one.heads * q_len * width < 2**30:
            return replace(one, packed=batch > 1 and draw.random() < 0.25)


# --- plans and predictions ----------------------------------------------------------------------------------


def mask_of(problem: Problem) -> Any:
    from fa4flex.variants import causal, sliding_window

    return {"full": None, "causal": causal, "window": causal & sliding_window(WINDOW)}[problem.mask]


def plan_of(problem: Problem) -> Any:
    """The plan that the library would take, on an H200 without a GPU at hand."""
    from fa4flex.view.gpu import KernelView

    tokens = problem.q_len * (problem.batch if problem.packed else 1)
    sizes = {"batch": problem.batch, "heads": problem.heads, "q_len": tokens, "kv_len": tokens}
    lengths = {"lengths": "packed"} if problem.packed else {}
    asked = {
        "kv_heads": problem.kv_heads,
        "head_dim": problem.width,
        "direction": problem.direction,
        **lengths,
    }
    return KernelView(fa4flex.compile(mask=mask_of(problem)).program, {**sizes, **asked}).lowered.plan


def ways_of(problem: Problem, plan: Any) -> list[Way]:
    """Candidates, the one that the library takes first."""
    if problem.direction == "backward":
        tiles = dict.fromkeys((plan.tile, *plan.others)) if plan.ctas == 1 else (plan.tile,)
        groups = groups_of(problem, plan)
        parts = [0] if groups is None else parts_tried(problem, groups)
        return [Way(tile, parts=n) for tile in tiles for n in parts]
    tiles = dict.fromkeys((plan.tile, *plan.others))
    ways = [Way(tile, plan.packed_heads) for tile in tiles]
    if plan.packed_heads > 1:
        ways += [Way(tile, 1) for tile in tiles]
    ways += [Way(tile, plan.packed_heads) for tile in ASKED if tile not in tiles]
    other = "in_turn" if plan.dynamic else "counter"
    return [*ways, replace(ways[0], next_tile=other)]


def parts_tried(problem: Problem, groups: Groups) -> list[int]:
    """The number that is chosen, and others, MOST_PARTS at most."""
    chosen = groups.parts(*extents_of(problem))
    others = [n for n in groups.divisors if n != chosen]
    return [chosen, *others[-MOST_PARTS + 1 :]]


def extents_of(problem: Problem) -> tuple[int, int, int]:
    tokens = problem.q_len * (problem.batch if problem.packed else 1)
    return problem.batch, tokens, tokens


def groups_of(problem: Problem, plan: Any) -> Groups | None:
    if not plan.problem.grouped:
        return None
    counted = plan.time.form != "other" and not plan.problem.deterministic
    return Groups(problem.heads // problem.kv_heads, problem.kv_heads, plan.time, counted)


def predicted(problem: Problem, plan: Any, way: Way) -> float | None:
    """Seconds by the model; None for what it has no word on."""
    if way.next_tile != "auto":
        return None
    size = Heads(problem.batch, problem.heads, problem.kv_heads, problem.q_len, problem.q_len)
    if problem.direction == "backward":
        of_tile = plan if way.tile == plan.tile else replace(plan, tile=way.tile)
        model = replace(of_tile.time)  # a new one: each keeps the constants that it begins with
        return float(model.predict(size, max(way.parts, 1)).seconds)
    tiles = replace(plan.tiles, tile_m=way.tile[0], tile_n=way.tile[1])
    made = forward_plans.time_of(
        tiles, plan.problem, plan.work, plan.target, plan.form, max(way.packed or 1, 1)
    )
    return float(made.predict(size).seconds)


# --- forcing a candidate ------------------------------------------------------------------------------------


class Forcing:
    """The candidate that plans and launches are made for; None leaves the choice to the library."""

    way: Way | None = None


@contextmanager
def forcing() -> Iterator[None]:
    """Plans and launches are those of Forcing.way, and kept apart by it."""
    from fa4flex.runtime.cuda import backward
    from fa4flex.runtime.cuda.engine import Engine

    choose, packed, tiles = forward_plans.choose, forward_plans.packed_heads, backward_plans._tiles
    parts, key = Groups.parts, Engine.key

    def chosen(request: Any) -> Any:
        found = choose(request)
        mine = [c for c in found if Forcing.way and (c.tiles.tile_m, c.tiles.tile_n) == Forcing.way.tile]
        return tuple(mine) or found

    def heads(request: Any) -> int:
        return packed(request) if Forcing.way is None or Forcing.way.packed is None else Forcing.way.packed

    def of_way(request: Any, *widths: int) -> Any:
        found = tiles(request, *widths)
        pair = Forcing.way is not None and Forcing.way.tile == backward_plans.PAIR_TILE and len(found) == 1
        return found if Forcing.way is None or pair else (Forcing.way.tile,)

    def in_parts(self: Groups, *extents: int) -> int:
        return parts(self, *extents) if Forcing.way is None or not Forcing.way.parts else Forcing.way.parts

    def apart(self: Engine, call: Any, *bits: Any) -> Any:
        found = key(self, call, *bits)
        return None if found is None else ((Forcing.way, *found[0]), found[1])

    with (
        patch.object(forward_plans, "choose", chosen),
        patch.object(forward_plans, "packed_heads", heads),
        patch.object(backward_plans, "_tiles", of_way),
        patch.object(Groups, "parts", in_parts),
        patch.object(Engine, "key", apart),
        patch.object(backward, "_known", lambda *_: None),
        patch.object(backward, "_remember", lambda *_: None),
    ):
        yield


# --- timing -------------------------------------------------------------------------------------------------


def call_of(problem: Problem, way: Way, tensors: tuple[Any, ...]) -> Callable[[], Any]:
    """A pass of this candidate."""
    import torch

    q, k, v, dout, options = tensors
    asked = way.tile if problem.direction == "forward" and way.tile in ASKED else None
    schedule = fa4flex.Schedule(tile=asked, next_tile=way.next_tile)  # type: ignore[arg-type]
    attend = fa4flex.compile(mask=mask_of(problem), schedule=schedule)
    if problem.direction == "forward":

        def forward() -> Any:
            Forcing.way = way
            return attend(q, k, v, **options)

        return forward
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        Forcing.way = None
        out = attend(*inputs, **options)

    def backward() -> Any:
        Forcing.way = way
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return backward


def tensors_of(problem: Problem, seed: int) -> tuple[Any, ...]:
    """q, k, v, the gradient of the output, and options of the call."""
    import torch

    draw, tokens, options = random.Random(seed), problem.q_len * problem.batch, {}
    before, after = (problem.batch,), (problem.q_len, problem.width)
    if problem.packed:
        ends = sorted(draw.randint(0, tokens) for _ in range(problem.batch - 1))
        lengths = torch.tensor([0, *ends, tokens], dtype=torch.int32, device="cuda")
        options = {"varlen": fa4flex.Varlen(lengths)}
    made = []
    for heads in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads):
        shape = (tokens, heads, problem.width) if problem.packed else (*before, heads, *after)
        made.append(torch.randn(shape, device="cuda").bfloat16())
    return *made, options


def measured(problem: Problem, ways: Sequence[Way], seed: int) -> dict[Way, float]:
    """Seconds of each candidate, medians of samples in turns; a candidate that no kernel does is left out."""
    from fa4flex.bench.measure import DeviceClock, interleave

    tensors, calls = tensors_of(problem, seed), {}
    for way in ways:
        try:
            call = call_of(problem, way, tensors)
            call()
            calls[way] = call
        except fa4flex.Fa4flexError as error:
            print(f"  {problem.name}: {way.name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return {way: one.median for way, one in interleave(calls, DeviceClock(), ROUNDS, SAMPLE).items()}


def compile_all(problems: Sequence[Problem]) -> None:
    """Calls each candidate once, so that all kernels are on disk."""
    with forcing():
        for problem in problems:
            tensors = tensors_of(problem, 0)
            for way in ways_of(problem, plan_of(problem)):
                try:
                    call_of(problem, way, tensors)()
                except fa4flex.Fa4flexError:
                    continue


def invented(problem: Problem, plan: Any, ways: Sequence[Way], seed: int) -> dict[Way, float]:
    """Times for a dry run: what the model says, by another chip's constants, and noise."""
    draw = random.Random(f"{seed} {problem.name}")
    times = {}
    for way in ways:
        seconds = predicted(problem, plan, way) or predicted(problem, plan, replace(way, next_tile="auto"))
        assert seconds is not None
        times[way] = 1.1 * seconds * math.exp(draw.gauss(0, 0.02)) * (1.05 if way.next_tile != "auto" else 1)
    return times


def record(given: argparse.Namespace) -> dict[str, Any]:
    """Draws, times and writes. Returns what is written."""
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    draw, end = random.Random(seed), time.monotonic() + given.seconds
    problems = [drawn(draw) for _ in range(given.problems)]
    print(f"seed {seed}, {len(problems)} problems", flush=True)
    if not given.dry and given.jobs > 1:
        shares = [problems[i :: given.jobs] for i in range(given.jobs)]
        workers = [
            multiprocessing.get_context("spawn").Process(target=compile_all, args=(x,)) for x in shares
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.6 * given.seconds - (time.monotonic() - end + given.seconds), 1.0))
            worker.kill()
    rows = []
    with forcing():
        for problem in problems:
            if time.monotonic() > end:
                break
            Forcing.way = None
            plan = plan_of(problem)
            ways = ways_of(problem, plan)
            times = invented(problem, plan, ways, seed) if given.dry else measured(problem, ways, seed)
            Forcing.way = None
            rows.append(row_of(problem, plan, ways, times))
    found = {"seed": seed, "chip": chip(given.dry), "dry": given.dry, "rows": rows}
    Path(given.record).write_text(json.dumps(found, indent=1))
    return found


def row_of(problem: Problem, plan: Any, ways: Sequence[Way], times: dict[Way, float]) -> dict[str, Any]:
    timed = [way for way in ways if way in times]
    entries = [
        {
            "name": way.name,
            "way": asdict(way),
            "seconds": times[way],
            "predicted": predicted(problem, plan, way),
        }
        for way in timed
    ]
    return {"problem": asdict(problem), "name": problem.name, "candidates": entries}


def chip(dry: bool) -> dict[str, Any]:
    if dry:
        return {"name": "none", "multiprocessors": SM90A.multiprocessors}
    import torch

    found = torch.cuda.get_device_properties(0)
    return {"name": found.name, "multiprocessors": found.multi_processor_count}


# --- what it says -------------------------------------------------------------------------------------------


def quantile(numbers: Sequence[float], share: float) -> float:
    ordered = sorted(numbers)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def regrets(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Chosen over best, less 1; the first candidate is the one that was chosen."""
    chosen = [row["candidates"] for row in rows if len(row["candidates"]) > 1]
    return [one[0]["seconds"] / min(c["seconds"] for c in one) - 1 for one in chosen]


def report(rows: Sequence[dict[str, Any]]) -> None:
    found = regrets(rows)
    if not found:
        print("no problem has two candidates")
        return
    ratios = [
        c["predicted"] / c["seconds"] for row in rows for c in row["candidates"] if c["predicted"] is not None
    ]
    number = statistics.median(len(row["candidates"]) for row in rows)
    print(f"{len(found)} problems, {number:g} candidates in the median")
    median, most = statistics.median(found), quantile(found, 0.95)
    print(f"chosen over best: median {median:.1%}, 95th percentile {most:.1%}")
    print(
        f"predicted over measured: median {statistics.median(ratios):.3f},"
        f" {quantile(ratios, 0.05):.3f} to {quantile(ratios, 0.95):.3f} of 90 %"
    )
    worst = sorted(
        zip(found, (row for row in rows if len(row["candidates"]) > 1), strict=True), key=lambda x: -x[0]
    )
    for regret, row in worst[:10]:
        best = min(row["candidates"], key=lambda c: c["seconds"])
        print(f"  {regret:6.1%} {row['name']}: {row['candidates'][0]['name']}; best {best['name']}")


# --- the fit ------------------------------------------------------------------------------------------------


@contextmanager
def using(row: Constants) -> Iterator[None]:
    """The model goes by these constants."""
    with patch.object(constants, "ROWS", (row,)):
        constants.constants_of.cache_clear()
        yield
    constants.constants_of.cache_clear()


class Fitted:
    """Rows, their plans made once, and what a row of constants says of them."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows: list[tuple[Problem, Any, list[Way], list[float]]] = []
        for row in rows:
            problem = Problem(**row["problem"])
            known = [c for c in row["candidates"] if c["predicted"] is not None]
            ways = [Way(**{**c["way"], "tile": tuple(c["way"]["tile"])}) for c in known]
            if ways:
                self.rows.append((problem, plan_of(problem), ways, [c["seconds"] for c in known]))

    def predictions(self, row: Constants) -> list[list[float]]:
        with using(row):
            return [
                [predicted(problem, plan, way) or math.inf for way in ways]
                for problem, plan, ways, _ in self.rows
            ]

    def loss(self, row: Constants) -> float:
        total = 0.0
        for made, (*_, seconds) in zip(self.predictions(row), self.rows, strict=True):
            logs = [math.log(a / b) for a, b in zip(made, seconds, strict=True)]
            mean = statistics.fmean(logs)
            total += mean**2 + NEARER * statistics.fmean((x - mean) ** 2 for x in logs)
        return total / max(len(self.rows), 1)

    def regret(self, row: Constants, only: str = "") -> list[float]:
        """Chosen over best, less 1, were the choice made by these predictions, of one pass or of both."""
        found = []
        for made, (problem, *_, seconds) in zip(self.predictions(row), self.rows, strict=True):
            error = row.of(problem.direction).error
            if len(made) > 1 and only in ("", problem.direction):
                found.append(seconds[least(made, error)] / min(seconds) - 1)
        return found


def knobs(row: Constants) -> list[tuple[str, str]]:
    return [("", name) for name in FITTED] + [
        (of, name) for of in ("forward", "backward") for name in ("exposed", "masked", "once")
    ]


def scaled(row: Constants, knob: tuple[str, str], factor: float) -> Constants:
    of, name = knob
    if not of:
        return replace(row, **{name: getattr(row, name) * factor})
    rates: Rates = getattr(row, of)
    return replace(row, **{of: replace(rates, **{name: getattr(rates, name) * factor})})


def fit(rows: Fitted, start: Constants, rounds: int = 4) -> Constants:
    """Coordinate descent on logarithms: each constant is scaled while that helps, by ever smaller steps."""
    best, lowest, step = start, rows.loss(start), 1.25
    for _ in range(rounds):
        for knob in knobs(best):
            for factor in (step, 1 / step):
                while (loss := rows.loss(trial := scaled(best, knob, factor))) < lowest * (1 - 1e-4):
                    best, lowest = trial, loss
        step = math.sqrt(step)
    return best


def fitted(found: dict[str, Any]) -> Constants:
    """Fits to every other problem, and prints the regret of the others."""
    train, held = (Fitted(found["rows"][i::2]) for i in (0, 1))
    start = constants.ROWS[0]
    row = fit(train, start)
    for pass_name in ("forward", "backward"):
        tried = [replace(row, **{pass_name: replace(row.of(pass_name), error=error)}) for error in ERRORS]
        row = min(tried, key=lambda one: statistics.fmean(train.regret(one, pass_name) or [0.0]))
    for name, one in (("before", start), ("after", row)):
        for which, rows in (("fitted", train), ("held out", held)):
            regret = rows.regret(one) or [0.0]
            print(
                f"{name}, {which}: error of logarithms {math.sqrt(rows.loss(one)):.3f}, regret median"
                f" {statistics.median(regret):.1%}, 95th percentile {quantile(regret, 0.95):.1%}"
            )
    row = replace(row, origin=f"fitted to {len(found['rows'])} problems, seed {found['seed']}")
    print("for kernels/plan/constants.py:", row, sep="\n")
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", metavar="FILE", help="draw, time, and write this file")
    what.add_argument("--fit", metavar="FILE", help="fit the model's constants to what was recorded")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=480, help="no problem is begun after this time")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--jobs", type=int, default=12, help="processes that compile before anything is timed"
    )
    parser.add_argument("--dry", action="store_true", help="invent times, without a GPU")
    given = parser.parse_args(arguments)
    if given.fit:
        fitted(json.loads(Path(given.fit).read_text()))
    else:
        report(record(given)["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
