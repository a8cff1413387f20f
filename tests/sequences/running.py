"""Runs random sequences of calls, and says in as few steps as it can what went wrong."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

import fa4flex

from . import gpu_steps  # noqa: F401  # registers its steps
from .pool import Choices, World
from .processes import run_many
from .steps import Failure, Step, draw_steps, run_step
from .values import Sizes


@dataclass(frozen=True)
class Setting:
    """Setting of a run. Equal settings and steps make equal sequences, threads aside."""

    device: str = "cpu"
    seed: int = 0
    programs: int = 0
    mods_seed: int | None = None
    as_gpu: bool = False
    doors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu" or self.as_gpu

    def world(self) -> World:
        choices = Choices(doors=self.doors, programs=self.programs, as_gpu=self.as_gpu, seed=self.seed)
        choices.mods_seed = self.seed if self.mods_seed is None else self.mods_seed
        choices.left_out = self.left_out
        sizes = Sizes()
        if self.on_gpu:
            choices.dtypes = (torch.bfloat16,) * 5 + (torch.float16,)
            sizes = Sizes(length=500, heads=4, batch=3, unit=128)
        return World(torch.device(self.device), sizes, choices)


@dataclass
class Outcome:
    """Outcome of a sequence: its failure, if any, and words of the steps that ran."""

    kind: str = ""
    where: str = ""
    words: str = ""
    trace: str = ""
    calls: int = 0
    ran: list[tuple[Step, str]] = field(default_factory=list)

    @property
    def signature(self) -> str:
        """Text that failures of one kind have in common, as far as can be told before they are shrunk."""
        last = self.ran[-1][0][0] if self.ran else ""
        door = self.where.split(":")[0].split("(")[0]
        words = "".join(x for x in self.words.split(":")[0] if not x.isdigit())
        if self.kind == "raw error":
            words = "".join(x for x in self.words[:60] if not x.isdigit())
        return f"{self.kind} | {last} | {door} | {words}"


def run_sequence(setting: Setting, steps: list[Step]) -> Outcome:
    """Run the steps in a new world."""
    world, outcome = setting.world(), Outcome()
    try:
        for one in steps:
            try:
                outcome.ran.append((one, ""))
                words = run_step(world, one)
                outcome.ran.pop()
                if words is not None:
                    outcome.ran.append((one, words))
            except Failure as failure:
                outcome.kind, outcome.where, outcome.words = failure.kind, failure.where, failure.words
                cause = failure.__cause__ or failure
                outcome.trace = "".join(traceback.format_exception(cause)[-6:])
                break
            except Exception as error:
                outcome.kind, outcome.where, outcome.words = (
                    "raw error",
                    one[0],
                    f"{type(error).__name__}: {error}",
                )
                outcome.trace = "".join(traceback.format_exception(error)[-12:])
                break
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        if setting.device == "cuda":
            torch.cuda.synchronize()
    outcome.calls = world.calls
    return outcome


# --- shrinking, in processes that have made no call yet ---------------------------------------------------


class Clean:
    """A process that was forked before any call, and runs sequences in children of its own."""

    def __init__(self, setting: Setting, seconds: float = 120.0) -> None:
        self.seconds = seconds
        asks, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        child = os.fork()
        if child == 0:
            try:  # whatever happens, the child never goes on with what called this
                os.close(self._ask)
                os.close(self._answer)
                self._serve(setting, asks, answers)
            finally:
                os._exit(0)
        os.close(asks)
        os.close(answers)

    def _serve(self, setting: Setting, asks: int, answers: int) -> None:
        with os.fdopen(asks, "rb") as stream, os.fdopen(answers, "wb") as back:
            while True:
                try:
                    steps, times = pickle.load(stream)
                except EOFError:
                    return
                pickle.dump(_in_a_child(setting, steps, times, self.seconds), back)
                back.flush()

    def run(self, steps: list[Step], times: int) -> Outcome:
        """The first failure in so many runs of the steps."""
        os.write(self._ask, pickle.dumps((steps, times)))
        if not hasattr(self, "_stream"):
            self._stream = os.fdopen(self._answer, "rb")
        return pickle.load(self._stream)  # type: ignore[no-any-return]


def _in_a_child(setting: Setting, steps: list[Step], times: int, seconds: float) -> Outcome:
    back, answer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(back)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler would raise
            signal.alarm(int(seconds))
            outcome = Outcome()
            for _ in range(times):
                outcome = run_sequence(setting, steps)
                if outcome.kind:
                    break
            with os.fdopen(answer, "wb") as stream:
                pickle.dump(outcome, stream)
        finally:
            os._exit(0)
    os.close(answer)
    with os.fdopen(back, "rb") as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    if said:
        return pickle.loads(said)  # type: ignore[no-any-return]
    return Outcome("raw error", "process", f"ended with status {status}", ran=[(x, "") for x in steps])


def shrink(clean: Clean, steps: list[Step], seconds: float) -> tuple[list[Step], Outcome | None]:
    """The fewest steps found that still fail in a clean process; None where they do not fail there."""
    until = time.monotonic() + seconds
    times = 8 if any(name.startswith("threads") for name, _ in steps) else 1
    first = clean.run(steps, times)
    if not first.kind or "fork" in first.words:
        return steps, None
    best, steps = first, [x for x, _ in first.ran]
    size = max(1, len(steps) // 2)
    while time.monotonic() < until:
        at, smaller = 0, False
        while at < len(steps) and time.monotonic() < until:
            fewer = steps[:at] + steps[at + size :]
            found = clean.run(fewer, times) if fewer else Outcome()
            if found.kind == first.kind:
                steps, best, smaller = [x for x, _ in found.ran], found, True
            else:
                at += size
        if size == 1 and not smaller:
            break
        size = max(1, size // 2)
    return steps, best


# --- the run ----------------------------------------------------------------------------------------------


def prepare(setting: Setting) -> None:
    """Settings of this process. On a CPU nothing is compiled: graphs run as Dynamo captures them."""
    warnings.simplefilter("ignore")
    # Compiled backward passes may run twice.
    torch._functorch.config.donated_buffer = False
    if setting.device == "cpu":
        torch.set_num_threads(1)
        from fa4flex.runtime.flex import attend

        attend.Module.compiled = lambda self, fallback=None: _Uncompiled(self.uncompiled())


class _Uncompiled:
    """In the place of a function that torch compiles: what a CPU without a compiler runs."""

    def __init__(self, attend: Any) -> None:
        self.attend = attend

    def __call__(self, *arguments: Any) -> Any:
        return self.attend(*arguments)

    def watched(self, *arguments: Any) -> Any:
        return self.attend(*arguments), None


def preload() -> None:
    """Import what calls import, lest each process that is forked does it anew: a few calls of no subject."""

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[j]

    table = torch.zeros(3, requires_grad=True)
    maps = fa4flex.BlockMap.from_dense(torch.ones(1, 1, dtype=torch.bool), 4, 3, 3)
    for backend in ("auto", "flex"):
        for more in ({}, {"blocks": maps}, {"varlen": fa4flex.Varlen(seqused_k=torch.tensor([2]))}):
            q = torch.randn(1, 1, 3, 8, requires_grad=True)
            attn = fa4flex.compile(score, lambda b, h, i, j: i >= j, backend=backend)
            attn(q, q, q, **more).sum().backward()


@dataclass
class Report:
    """Counts of a run, and its failures by signature: how often, first where, and the fewest steps."""

    calls: int = 0
    sequences: int = 0
    seconds: float = 0.0
    failures: dict[str, list[Any]] = field(default_factory=dict)
    steps: collections.Counter[str] = field(default_factory=collections.Counter)

    def table(self) -> str:
        lines = [
            f"{self.calls} calls in {self.sequences} sequences, {self.seconds:.0f} s: "
            f"{sum(x[0] for x in self.failures.values())} failures of {len(self.failures)} kinds",
            " ".join(f"{name} {n}" for name, n in sorted(self.steps.items())),
        ]
        for signature, (count, first, _, _) in sorted(self.failures.items(), key=lambda x: -x[1][0]):
            lines.append(f"{count:5d}  {signature}   (first: {first})")
        return "\n".join(lines)


def describe(setting: Setting, steps: list[Step], outcome: Outcome) -> str:
    lines = [f"  {outcome.kind}: {outcome.where}", f"    {outcome.words}"]
    lines += [f"    {name} {seed}: {words[:230]}" for (name, seed), words in outcome.ran]
    given = " ".join(f"{name}:{seed}" for name, seed in steps)
    options = f"--device {setting.device} --seed {setting.seed} --programs {setting.programs}"
    options += f" --mods-seed {setting.mods_seed}" * (setting.mods_seed is not None)
    options += " --as-gpu" * setting.as_gpu
    options += f" --doors {','.join(setting.doors)}" * bool(setting.doors)
    options += f" --leave-out {','.join(setting.left_out)}" * bool(setting.left_out)
    return "\n".join([*lines, f'    python tests/sequences {options} --replay "{given}"'])


def run(
    setting: Setting,
    calls: int | None = None,
    sequences: int | None = None,
    seconds: float | None = None,
    stop_at_first: bool = False,
    shrink_seconds: float = 60.0,
    say: Any = print,
) -> Report:
    """Run sequences until so many calls, sequences or seconds are over."""
    prepare(setting)
    if setting.device == "cpu":
        preload()
    clean = Clean(setting) if shrink_seconds > 0 else None
    rng, report, start = random.Random(setting.seed), Report(), time.monotonic()
    told = start
    mean = 24 if not setting.on_gpu else 8
    while True:
        report.seconds = time.monotonic() - start
        if calls is not None and report.calls >= calls:
            break
        if sequences is not None and report.sequences >= sequences:
            break
        if seconds is not None and report.seconds >= seconds:
            break
        if time.monotonic() > told + 60:
            told = time.monotonic()
            say(f"{report.calls} calls, {report.sequences} sequences, {report.seconds:.0f} s", flush=True)
        steps = draw_steps(random.Random(rng.randrange(2**62)), setting.on_gpu, mean)
        outcome = run_sequence(setting, steps)
        report.calls += outcome.calls
        report.sequences += 1
        report.steps.update(name for (name, _), _ in outcome.ran)
        if "torch._dynamo" in sys.modules and report.sequences % 50 == 0:
            torch._dynamo.reset()
        if not outcome.kind:
            continue
        signature = outcome.signature
        if signature in report.failures:
            report.failures[signature][0] += 1
            continue
        at = f"call {report.calls}, sequence {report.sequences}, {time.monotonic() - start:.0f} s"
        say(f"{signature}\n  after {at}", flush=True)
        fewest, found = [x for x, _ in outcome.ran], None
        if clean is not None:
            fewest, found = shrink(clean, fewest, shrink_seconds)
            if found is None:
                say("  (not in a process without the sequences before)", flush=True)
        report.failures[signature] = [1, at, fewest, found or outcome]
        say(describe(setting, fewest, found or outcome), flush=True)
        if stop_at_first:
            break
    report.seconds = time.monotonic() - start
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tests/sequences", description=__doc__)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--time", type=float, help="seconds")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--as-gpu", action="store_true", help="what a GPU would be given, on a CPU")
    parser.add_argument("--programs", type=int, default=None, help="compositions of mods, 0 for any")
    parser.add_argument("--mods-seed", type=int, help="seed of the compositions (default: --seed)")
    parser.add_argument("--doors", default="", help="names of doors, separated by commas")
    parser.add_argument("--leave-out", default="", help="what calls never bring: blocks, sinks, paged, ...")
    parser.add_argument("--stop-at-first", action="store_true")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds for each kind of failure; 0: none"
    )
    parser.add_argument("--replay", default="", help="name:seed ... of steps")
    parser.add_argument("--smaller", action="store_true", help="shrink what is replayed")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of a seed of its own")
    parser.add_argument("--logs", type=Path, help="folder of their logs")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    on_gpu = given.device == "cuda" or given.as_gpu
    programs = given.programs if given.programs is not None else 12 if on_gpu else 0
    doors, left_out = (tuple(x for x in y.split(",") if x) for y in (given.doors, given.leave_out))
    setting = Setting(given.device, seed, programs, given.mods_seed, given.as_gpu, doors, left_out)
    if given.replay:
        steps = [(name, int(n)) for name, n in (x.split(":") for x in given.replay.split())]
        if given.smaller:
            prepare(setting)
            if given.device == "cpu":
                preload()
            steps, _ = shrink(Clean(setting), steps, given.shrink)
        prepare(setting)
        outcome = Outcome()
        for _ in range(20 if any("threads" in name for name, _ in steps) else 1):
            outcome = run_sequence(setting, steps)
            if outcome.kind:
                break
        print(describe(setting, steps, outcome))
        print(outcome.trace)
        return 1 if outcome.kind else 0
    print(f"--seed {seed}", flush=True)
    if given.jobs > 1:
        if given.time is None or given.logs is None:
            parser.error("--jobs needs --time and --logs")
        options = ["--device", given.device, "--programs", str(programs), "--shrink", "0"]
        options += ["--as-gpu"] * given.as_gpu
        return run_many(options, seed, given.jobs, given.time, given.logs)
    calls = given.calls
    if calls is None and given.sequences is None and given.time is None:
        calls = 2_000
    report = run(setting, calls, given.sequences, given.time, given.stop_at_first, given.shrink)
    print(report.table())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
