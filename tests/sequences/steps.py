"""Steps of a sequence: calls that are judged, changes, threads, errors in between, backward passes later."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import fa4flex

from . import calls, changes, pool
from .brought import Ragged
from .calls import Given
from .oracle import Exact, Failure, Problem, Wrong, judge, settings, solve, units, words_of
from .pool import Skip, Subject, World

Step = tuple[str, int]
"""Name of a step, and the seed of what it draws."""

STEPS: dict[str, tuple[float, Callable[[World], str]]] = {}


def step(weight: float) -> Callable[[Callable[[World], str]], Callable[[World], str]]:
    def register(function: Callable[[World], str]) -> Callable[[World], str]:
        STEPS[function.__name__] = weight, function
        return function

    return register


# --- calls ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Asked:
    """A call, and what it must give, computed before it ran."""

    given: Given
    exact: Exact
    unit: float
    found: tuple[Tensor, Tensor | None] | None = None
    error: BaseException | None = None
    with_lse: bool = False

    def run(self) -> None:
        try:
            self.found = self.given()
        except Exception as error:
            self.error = error

    def again(self) -> Asked:
        """The same call, which has not run."""
        return Asked(self.given, self.exact, self.unit, with_lse=self.with_lse)

    def plain(self) -> Exact:
        """The same maths in the dtypes of the call."""
        return solve(
            self.given.problem, False, self.exact.cotangents, bool(self.exact.gradients), self.with_lse
        )

    @property
    def where(self) -> str:
        return f"{self.given.subject.door}: {self.given.words}"

    def check(self) -> None:
        """Judge the results. Raises Failure."""
        if self.error is not None:
            if is_of_torch(self.error):
                return
            raise Failure("raw error", self.where, words_of(self.error)) from self.error
        assert self.found is not None
        out, lse = self.found
        try:
            if out.dtype != self.given.problem.q.dtype:
                raise Wrong(f"out: {out.dtype} for q {self.given.problem.q.dtype}")
            judge("out", out, self.exact.out, lambda: self.plain().out, self.unit)
            if lse is not None:
                judge("lse", lse, self.exact.lse, lambda: self.plain().lse, self.unit)
        except Wrong as wrong:
            raise Failure("wrong", self.where, str(wrong)) from wrong

    def differentiable(self) -> bool:
        return self.given.mode == "grad" and bool(self.exact.gradients) and self.error is None

    def check_gradients(self, keep: bool = False, when: str = "") -> None:
        """The backward pass, judged. Raises Failure."""
        assert self.found is not None
        problem, (out, lse) = self.given.problem, self.found
        wanted = [x for x in problem.learns() if id(x) in self.exact.gradients]
        outs = [(out, self.exact.cotangents[0].to(out.dtype))]
        if lse is not None:
            unseen = self.exact.lse == -torch.inf
            outs.append((lse, self.exact.cotangents[1].masked_fill(unseen, 0).to(lse.dtype)))
        outs = [(x, g) for x, g in outs if x.requires_grad]
        where = self.where + when
        if not outs:
            if any(bool((g != 0).any()) for g in self.exact.gradients.values()):
                raise Failure("wrong", where, "results do not require gradients")
            return
        try:
            found = torch.autograd.grad(
                [x for x, _ in outs], wanted, [g for _, g in outs], allow_unused=True, retain_graph=keep
            )
        except Exception as error:
            raise Failure("raw error", where + ", backward", words_of(error)) from error
        try:
            for n, (x, g) in enumerate(zip(wanted, found)):
                name = self._name(x) or str(n)
                if g is not None and g.dtype != x.dtype:
                    raise Wrong(f"gradient of {name}: {g.dtype} for {x.dtype}")
                summed = x is not problem.q and x is not problem.k and x is not problem.v
                unit = max(self.unit, units(x.dtype)) * (8 if summed else 1)
                judge(
                    f"gradient of {name}", g, self.exact.gradients[id(x)],
                    lambda x=x: self.plain().gradients[id(x)], unit,
                )  # fmt: skip
        except Wrong as wrong:
            raise Failure("wrong", where, str(wrong)) from wrong

    def _name(self, x: Tensor) -> str:
        p = self.given.problem
        for name in ("q", "k", "v", "sinks"):
            if getattr(p, name) is x:
                return name
        for kind, formula in (("score", p.score), ("mask", p.mask)):
            for name, value in () if formula is None else formula.values.items():
                if value is x:
                    return f"{name} of the {kind} {formula.text}"
        return ""


def is_of_torch(error: BaseException) -> bool:
    """True for what torch itself refuses: too many recompilations."""
    return "recompile_limit" in str(error) or "RecompileLimit" in type(error).__name__


def ask(world: World, given: Given) -> Asked:
    """Freeze what the call is given, and compute what it must give."""
    problem = given.problem.freeze()
    with_lse = bool(given.brought.get("return_lse")) or given.subject.compiled
    wanted = given.mode == "grad"
    world.calls += 1
    exact = solve(problem, True, None, wanted, with_lse)
    return Asked(given, exact, units(problem.q.dtype, *summed_in(problem)), with_lse=with_lse)


def summed_in(problem: Problem) -> list[torch.dtype]:
    """Dtypes in which torch adds up captured tensors for a mod, in an order that strides decide."""
    formulas = [x for x in (problem.score, problem.mask) if x is not None and SUMS.search(x.text)]
    values = [x for formula in formulas for x in formula.values.values()]
    return [x.dtype for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]


SUMS = re.compile(r"\b(mean|cumsum)\(")


@step(30)
def call(world: World) -> str:
    subject = world.pick()
    asked = ask(world, calls.draw_call(world, subject))
    asked.run()
    asked.check()
    words = asked.where
    if asked.differentiable():
        how = world.rng.choice(("now", "now", "later", "twice", "not"))
        if how == "now":
            asked.check_gradients()
        elif how == "later":
            world.pending.append(asked)
        elif how == "twice":
            asked.check_gradients(True)
            asked.check_gradients(when=", the second time")
        words += f", backward {how}"
    return words


@step(5)
def call_again(world: World) -> str:
    """Like `call`, five times over with nothing changed; what is kept for repeats serves the fourth."""
    subject, seed = world.pick(), world.rng.random()
    for _ in range(5):
        world.rng.seed(seed)
        asked = ask(world, calls.draw_call(world, subject))
        asked.run()
        asked.check()
    return asked.where


@step(12)
def around_a_change(world: World) -> str:
    """Calls alike, once to five times, a change of something that they read, and the same call again."""
    subject, seed = world.pick(), world.rng.random()
    repeats, how = world.rng.choice((1, 2, 3, 5)), world.rng.random()
    words: list[str] = []
    last: Asked | None = None
    for n in range(repeats + 1):
        if n == repeats and last is not None:
            world.rng.seed(how)
            try:
                words.append(_change_of(world, subject, last.given))
            except Skip:
                return " ".join(words)
        world.rng.seed(seed)
        last = asked = ask(world, calls.draw_call(world, subject))
        asked.run()
        try:
            asked.check()
            if asked.differentiable() and how < 0.5:
                asked.check_gradients()
        except Failure as failure:
            raise Failure(
                failure.kind, f"{failure.where}; call {n + 1}, {' '.join(words)}", failure.words
            ) from failure
        words.append(asked.where if n == 0 else "again")
    return " ".join(words)


def lengths_of(world: World, given: Given) -> list[Ragged]:
    return [x for x in world.ragged if x.sequences is given.problem.sequences]


def _change_of(world: World, subject: Subject, given: Given) -> str:
    """A change of one thing that the call read: a value, a map, or lengths."""
    things: list[Callable[[], str]] = []
    brought = given.brought
    maps = [x for x in world.maps if x.given is brought.get("blocks") or x is subject.blocks]
    values = [x for x in subject.values if x.kind.name not in ("switch", "pinned")]
    values += [v for x in maps if x.own is not None for v in x.own.values.values()]
    things += [partial(changes.change_value, world, x) for x in values]
    things += [partial(changes.change_map, world, x) for x in maps]
    things += [partial(changes.change_lengths, world, x) for x in lengths_of(world, given)]
    if not things:
        raise Skip
    return changes.in_torchs_words(world.rng.choice(things))


@step(2.5)
def backward(world: World) -> str:
    """The backward pass of an earlier call, unless what it read holds something else now."""
    if not world.pending:
        raise Skip
    asked = world.pending.pop(world.rng.randrange(len(world.pending)))
    if asked.given.problem.changed() or asked.given.problem.counted():
        raise Skip
    if any(not x.requires_grad for x in asked.given.problem.learns()):
        raise Skip
    wanted = {id(x) for x in asked.given.problem.learns()}
    if wanted != set(asked.exact.gradients):
        raise Skip
    asked.check_gradients(when=", later")
    return asked.where


# --- threads ----------------------------------------------------------------------------------------------


@step(1.5)
def threads(world: World) -> str:
    """Two to four threads call the same attention, in two ways or more, at once."""
    subject = world.pick()
    if not subject.threads:
        raise Skip
    asked = [ask(world, calls.draw_call(world, subject)) for _ in range(world.rng.choice((2, 3)))]
    asked = _for_threads(asked)
    count = 4 if world.on_gpu else world.rng.choice((2, 3, 4))
    _at_once(world, asked, count, rounds=4)
    return f"{count} of " + " | ".join(x.where for x in asked)


def _for_threads(asked: list[Asked]) -> list[Asked]:
    """Calls that threads may make: those whose tensors were not written to as later ones were drawn."""
    problems = [x.given.problem for x in asked]
    asked = [x for x, p in zip(asked, problems) if not p.q.is_inference() and not p.changed()]
    if not asked:
        raise Skip
    return asked


def _at_once(world: World, asked: list[Asked], count: int, rounds: int) -> None:
    gate, found = threading.Barrier(count), []

    def work(n: int) -> None:
        gate.wait()
        for i in range(rounds):
            one = asked[(n + i) % len(asked)]
            mine = one.again()
            mine.run()
            found.append(mine)

    if world.device.type == "cuda":
        torch.cuda.synchronize()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=_in_settings(work, world), args=(n,)) for n in range(count)]
        for x in workers:
            x.start()
        for x in workers:
            x.join()
    finally:
        sys.setswitchinterval(interval)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.calls += len(found)
    for one in found:
        one.check()
    for one in asked:  # what threads left behind
        alone = one.again()
        alone.run()
        alone.check()


def _in_settings(work: Callable[[int], None], world: World) -> Callable[[int], None]:
    def run(n: int) -> None:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device.index or 0)
            stream = torch.cuda.Stream() if n % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                work(n)
            stream.synchronize()
        else:
            work(n)

    return run


@step(0.6)
def threads_on_a_new_attention(world: World) -> str:
    """The same with an attention of code that no call has seen."""
    subject = pool.new_attention(world)
    asked = [ask(world, calls.draw_call(world, subject)) for _ in range(3)]
    asked = _for_threads(asked)
    _at_once(world, asked, 4, rounds=6)
    return " | ".join(x.where for x in asked)


# --- errors in between ------------------------------------------------------------------------------------


@step(2)
def error(world: World) -> str:
    """A call that must raise an error in words, after which everything goes on."""
    name = world.rng.choice(("shapes", "shapes", "mod", "lengths"))
    return {"shapes": _bad_shapes, "mod": _bad_mod, "lengths": _bad_lengths}[name](world)


def _must_raise(given: Given, expected: tuple[type[BaseException], ...], what: str) -> str:
    where = f"{given.subject.door}: {given.words}, {what}"
    try:
        given()
    except expected as error:
        return f"{what}: {type(error).__name__}"
    except Exception as error:
        raise Failure("raw error", where, words_of(error)) from error
    raise Failure("accepted", where, "no error")


def _bad_shapes(world: World) -> str:
    subject = world.pick()
    if subject.compiled:
        raise Skip
    given = calls.draw_call(world, subject)
    p, what = given.problem, world.rng.choice(("width of k", "dtype of v", "length of v", "rank of q"))
    with settings():
        if what == "width of k":
            p.k = torch.randn(*p.k.shape[:-1], p.q.shape[-1] + 8, device=world.device).to(p.k.dtype)
        elif what == "dtype of v":
            if subject.door == "flex_attention":
                raise Skip
            p.v = torch.randn(p.v.shape, device=world.device).to(
                torch.float16 if p.v.dtype != torch.float16 else torch.bfloat16
            )
        elif what == "length of v":
            axis = (
                0 if p.v.ndim == 3 or (given.brought.get("paging") is not None) else 2 if p.heads_first else 1
            )
            p.v = torch.cat([p.v.detach(), p.v.detach()], axis) if p.v.shape[axis] else p.v
            if p.v.shape == p.k.shape:
                raise Skip
        else:
            p.q = p.q.detach()[None]
    return _must_raise(given, (fa4flex.Fa4flexError,), what)


def _bad_mod(world: World) -> str:
    """A mod that raises while a switch is off."""
    found = [
        (s, v) for s in world.subjects if s.score is not None
        for v in s.score.values.values() if v.kind.name == "switch"
    ]  # fmt: skip
    if not found:
        raise Skip
    subject, value = world.rng.choice(found)
    if subject.compiled or value.write is None:
        raise Skip
    given = calls.draw_call(world, subject)
    value.write(False)
    try:
        return _must_raise(given, (AttributeError, fa4flex.Fa4flexError), "a mod that raises")
    finally:
        value.write(True)


def _bad_lengths(world: World) -> str:
    """Lengths changed in place to what no sequence has, by a counted way or not, and back."""
    if world.on_gpu:  # there the next call tells
        raise Skip
    subject = world.pick()
    given = calls.draw_call(world, subject)
    s = given.problem.sequences
    if s is None:
        raise Skip
    names = [x for x in ("cu_q", "used_k", "used_q") if getattr(s, x) is not None]
    name = world.rng.choice(names)
    x = getattr(s, name)
    before, wrong = x.clone(), x.clone()
    wrong[-1] = -1 if world.rng.random() < 0.5 else 10_000
    how = changes.write_some_way(world, x, wrong)
    try:
        return _must_raise(given, (fa4flex.Fa4flexError,), f"{name} ends in {int(wrong[-1])}, {how}")
    finally:
        changes.write_some_way(world, x, before)
        x.data.copy_(before)


# --- changes ----------------------------------------------------------------------------------------------


def any_change(world: World) -> str:
    names = list(changes.OTHERS)
    name = world.rng.choices(names, [changes.OTHERS[x][0] for x in names])[0]
    return f"{name}: {changes.in_torchs_words(lambda: changes.OTHERS[name][1](world))}"


@step(22)
def change(world: World) -> str:
    return any_change(world)


@step(0)
def make(world: World) -> str:
    subject = pool.make_subject(world)
    return f"{subject.door} {'' if subject.score is None else subject.score.mod.text} | " + (
        "" if subject.mask is None else subject.mask.mod.text
    )


ON_A_GPU: dict[str, float] = {"streams": 4, "unordered_streams": 4, "captured": 5, "sharded": 0.7}
"""Steps that are drawn on a GPU alone, and how often."""


@step(0)
def lengths(world: World) -> str:
    """Pairs of lengths that most calls of a sequence have."""
    world.known_lengths = [world.draw_lengths() for _ in range(4)]
    return str(world.known_lengths)


def draw_steps(rng: random.Random, on_gpu: bool, mean: int) -> list[Step]:
    """Steps of one sequence, names with seeds of their own: any of them can be left out."""
    names = [x for x in STEPS if STEPS[x][0]]
    weights = [STEPS[x][0] for x in names]
    if on_gpu:
        names, weights = [*names, *ON_A_GPU], [*weights, *ON_A_GPU.values()]
    first = [("lengths", rng.randrange(2**31))]
    first += [("make", rng.randrange(2**31)) for _ in range(rng.choice((1, 1, 2, 3)))]
    rest = [
        (x, rng.randrange(2**31))
        for x in rng.choices(names, weights, k=rng.randint(mean // 2, mean * 3 // 2))
    ]
    return first + rest


def run_step(world: World, one: Step) -> str | None:
    """Words on what the step did; None where it does not apply. Raises Failure."""
    world.seed(one[1])
    try:
        return STEPS[one[0]][1](world)
    except Skip:
        return None
    except Failure:
        raise
    except fa4flex.Fa4flexError as error:
        raise Failure("raw error", one[0], words_of(error)) from error
