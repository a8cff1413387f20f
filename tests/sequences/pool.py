"""Attentions of every door, what they mean, and what calls of them bring."""

from __future__ import annotations

import itertools
import random
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

import fa4flex
from fa4flex import variants

from .brought import Map, Ragged, make_map
from .oracle import NAMES
from .values import (
    MASKS,
    SCORES,
    Function,
    Kind,
    Mod,
    Sizes,
    Value,
    arguments,
    attribute,
    first_value,
    floats,
    ids,
    near,
    number,
    set_on_module,
    substituted,
    window,
    write_function,
)  # fmt: skip


class Skip(Exception):
    """A step that does not apply to what there is."""


# --- the world of a sequence ------------------------------------------------------------------------------


@dataclass(eq=False)
class Subject:
    """One attention: how it is called, and what it was composed of."""

    door: str
    attend: Callable[..., Any]
    score: Function | None = None
    mask: Function | None = None
    blocks: Map | None = None
    sinks: Value | None = None
    scale: float | None = None
    heads_first: bool = True
    holder: Any = None
    heads: int = 0
    """Query heads that it is for; 0: any."""
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> list[Value]:
        found = [] if self.sinks is None else [self.sinks]
        for function in (self.score, self.mask, None if self.blocks is None else self.blocks.own):
            found += [] if function is None else list(function.values.values())
        return found

    @property
    def compiled(self) -> bool:
        return self.door.startswith("torch.compile")

    @property
    def threads(self) -> bool:
        """True if threads may call it at once, which torch.compile does not let them."""
        return not self.compiled


class World:
    """State of one sequence, and the random numbers of the step at hand."""

    def __init__(self, device: torch.device, sizes: Sizes, choices: Choices) -> None:
        self.device, self.sizes, self.choices = device, sizes, choices
        self.rng = random.Random(choices.seed)
        self.subjects: list[Subject] = []
        self.maps: list[Map] = []
        self.ragged: list[Ragged] = []
        self.pending: list[Any] = []
        self.tensors: dict[Any, tuple[Tensor, ...]] = {}
        self.known_lengths = [self.draw_lengths() for _ in range(4)]
        self.numbers = itertools.count()
        self.graphs: dict[Any, Any] = {}
        self.calls = 0
        self.last: Subject | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda" or self.choices.as_gpu

    def seed(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)

    def lengths(self) -> tuple[int, int]:
        """Lengths of queries and keys: one of a few pairs, mostly."""
        known, own = self.rng.choice(self.known_lengths), self.draw_lengths()
        return known if self.rng.random() < 0.85 else own

    def draw_lengths(self) -> tuple[int, int]:
        least, most = (64, self.sizes.length) if self.on_gpu else (1, self.sizes.length)
        q_len, kv_len = (self.rng.randint(least, most) for _ in range(2))
        share = self.rng.random()
        return 1 if share < 0.15 else q_len, q_len if 0.15 < share < 0.55 else kv_len

    def pick(self) -> Subject:
        if not self.subjects:
            raise Skip
        share, chosen = self.rng.random(), self.rng.choice(self.subjects)
        self.last = self.last if self.last is not None and share < 0.5 else chosen
        return self.last

    def values(self) -> list[Value]:
        found = [x for subject in self.subjects for x in subject.values]
        return found + [x for one in self.maps if one.own is not None for x in one.own.values.values()]


@dataclass
class Choices:
    """Choices of a run. `programs` is how many compositions of mods there are (0: any): a GPU compiles
    kernels for each."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 6 + (torch.bfloat16, torch.float16, torch.float64)
    doors: tuple[str, ...] = ()
    programs: int = 0
    as_gpu: bool = False
    seed: int = 0
    mods_seed: int = 0
    """Seed of those compositions: runs beside each other that share it compile fewer kernels in all."""
    left_out: tuple[str, ...] = ()
    """Arguments that calls never bring: blocks, sinks, scale, return_lse, padded, packed, paged."""

    def mods(self, rng: random.Random) -> tuple[Mod | None, Mod | None]:
        """Texts of a score mod and of a mask."""
        source = random.Random(self.mods_seed * 1000 + rng.randrange(self.programs)) if self.programs else rng
        score = source.choice(SCORES) if source.random() < 0.7 else None
        return score, source.choice(MASKS) if source.random() < 0.6 else None


# --- doors ------------------------------------------------------------------------------------------------

DOORS: dict[str, tuple[float, Callable[[World], Subject]]] = {}
"""Door: how often it is drawn, and what makes an attention of it."""


def door(weight: float) -> Callable[[Callable[[World], Subject]], Callable[[World], Subject]]:
    def register(make: Callable[[World], Subject]) -> Callable[[World], Subject]:
        DOORS[make.__name__] = (weight, make)
        return make

    return register


def make_subject(world: World) -> Subject:
    doors = world.choices.doors or [x for x in DOORS if x != "flex" or not world.on_gpu]
    names = [x for x in DOORS if x in doors]  # on a GPU, Inductor compiles for minutes: where it is asked for
    name = world.rng.choices(names, [DOORS[x][0] for x in names])[0]
    subject = DOORS[name][1](world)
    world.subjects.append(subject)
    return subject


def _functions(world: World, own: str = "") -> tuple[Function | None, Function | None]:
    mods = world.choices.mods(world.rng)
    score, mask = (
        None if mod is None else write_function(mod, role, world.sizes, world.rng, world.device, own)
        for mod, role in zip(mods, ("score", "mask"))
    )
    return score, mask


def _composed(world: World, score: Function | None, mask: Function | None, **more: Any) -> Subject:
    """A subject of these functions with parts drawn, and what to compose it of in `own`."""
    rng = world.rng
    subject = Subject("", lambda: None, score, mask, **more)
    parts: dict[str, Any] = {}
    if score is not None:
        parts["score_mod"] = score.made
    if mask is not None:
        parts["mask"] = mask.made
    if rng.random() < 0.25:
        subject.heads = rng.choice((1, 2, 4)) if not world.on_gpu else 4
        subject.sinks = sinks_of(world, subject.heads)
        parts["sinks"] = subject.sinks.read if rng.random() < 0.5 else subject.sinks.read()
        if parts["sinks"] is not subject.sinks.read:
            subject.sinks.write = None
    if rng.random() < 0.2:
        subject.scale = parts["scale"] = rng.choice((0.1, 0.5, 1.0))
    if rng.random() < 0.25:
        subject.heads_first, parts["layout"] = False, "bshd"
    if rng.random() < 0.2:
        subject.heads = subject.heads or (2 if not world.on_gpu else 4)
        subject.blocks = make_map(world, world.lengths(), subject.heads, 1, None)
        world.maps.append(subject.blocks)
        parts["blocks"] = subject.blocks.given
    subject.own = parts
    return subject


def sinks_of(world: World, heads: int) -> Value:
    box = types.SimpleNamespace(sinks=torch.randn(heads, device=world.device))
    box.sinks.requires_grad_(world.rng.random() < 0.5)
    return fixed(attribute(floats(str(heads)), world.sizes, box, "sinks"))


def fixed(value: Value) -> Value:
    """The value, whose extents are to stay."""
    value.fixed = True
    return value


@door(4)
def compile(world: World) -> Subject:
    return _compile(world, "compile", _composed(world, *_functions(world)))


def _compile(world: World, name: str, subject: Subject) -> Subject:
    subject.holder = fa4flex.compile(**subject.own)
    subject.door, subject.attend = name, subject.holder
    if subject.blocks is not None:
        subject.blocks.copied = isinstance(subject.blocks.given, BlockMask)
    return subject


@door(2)
def attention(world: World) -> Subject:
    subject = _composed(world, *_functions(world))

    def attend(*qkv: Tensor, **brought: Any) -> Any:
        return fa4flex.attention(*qkv, **{**subject.own, **brought})

    subject.door, subject.attend = "attention", attend
    return subject


@door(2.5)
def flex_attention(world: World) -> Subject:
    score, mask = _functions(world)
    subject = Subject("flex_attention", _drop_in(score, None), score, None)
    subject.own["mask"] = mask
    return subject


def _drop_in(score: Function | None, block_mask: Any) -> Callable[..., Any]:
    def attend(*qkv: Tensor, blocks: Any = None, **brought: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fa4flex.flex_attention(
                *qkv, None if score is None else score.made, blocks, enable_gqa=True, **brought
            )

    return attend


@door(2)
def module(world: World) -> Subject:
    """fa4flex.nn.Attention with parameters and buffers that its functions take."""
    from fa4flex import nn as fa4flex_nn

    rng, functions, tables, buffers = world.rng, [], {}, {}
    for mod, role in zip(world.choices.mods(rng), ("score", "mask")):
        if mod is None or any(not _tensor(kind) for kind in mod.values.values()):
            functions.append(None)
            continue
        renamed = {name: f"{role}_{name}" for name in mod.values}
        for name, kind in mod.values.items():
            x = kind.draw(rng, world.sizes).to(world.device)
            (tables if kind.learns else buffers)[renamed[name]] = x
        given = ", ".join([arguments(mod, role), *renamed.values()])
        text = f"def {role}({given}):\n    return {substituted(mod.text, renamed)}\n"
        space = dict(NAMES)
        exec(text, space)
        functions.append((mod, role, space[role], renamed))
    heads = rng.choice((0, 0, 2)) if not world.on_gpu else 0
    layout = {"layout": "bshd"} if rng.random() < 0.3 else {}
    made = fa4flex_nn.Attention(
        *(None if x is None else x[2] for x in functions), parameters=tables, buffers=buffers,
        sinks=torch.randn(heads) if heads else None, **layout,
    ).to(world.device)  # fmt: skip
    return of_module(world, made, functions, heads, not layout)


def _tensor(kind: Kind) -> bool:
    return kind.name not in ("number", "switch", "pinned")


def of_module(world: World, made: nn.Module, functions: list[Any], heads: int, heads_first: bool) -> Subject:
    found: list[Function | None] = []
    for one in functions:
        if one is None:
            found.append(None)
            continue
        mod, role, function, renamed = one
        values = {x: attribute(mod.values[x], world.sizes, made, y) for x, y in renamed.items()}
        found.append(Function(mod, role, function, {}, world.sizes, values))
    sinks = fixed(attribute(floats(str(heads)), world.sizes, made, "sinks")) if heads else None
    return Subject(
        "module", made, found[0], found[1], sinks=sinks, heads=heads, heads_first=heads_first, holder=made,
        own={"functions": functions},
    )  # fmt: skip


@door(2)
def methods(world: World) -> Subject:
    """A module whose methods are the mods, and which reads its own parameters, buffers and numbers."""
    rng, space, body, mods = world.rng, dict(NAMES), [], []
    net = nn.Module()
    for mod, role in zip(world.choices.mods(rng), ("score", "mask")):
        if mod is None:
            mods.append(None)
            continue
        renamed = {name: f"{role}_{name}" for name in mod.values}
        for name, kind in mod.values.items():
            set_on_module(
                net, renamed[name], first_value(kind, world.sizes, rng, world.device, rng.random() < 0.6)
            )
        text = substituted(mod.text, {x: f"self.{y}" for x, y in renamed.items()})
        body.append(f"    def {role}(self, {arguments(mod, role)}):\n        return {text}\n")
        mods.append((mod, role, renamed))
    exec("class Net(torch.nn.Module):\n    pass\n" + "\n".join(body), space)
    net.__class__ = space["Net"]
    layout = {"layout": "bshd"} if rng.random() < 0.3 else {}
    backend = {"backend": "flex"} if rng.random() < 0.25 and not world.on_gpu else {}
    net.attention = fa4flex.compile(
        *(None if x is None else getattr(net, x[1]) for x in mods), **layout, **backend
    )
    return of_net(world, net, mods, not layout)


def of_net(world: World, net: Any, mods: list[Any], heads_first: bool) -> Subject:
    functions = [
        None
        if x is None
        else Function(
            x[0], x[1], getattr(net, x[1]), {}, world.sizes,
            {a: attribute(x[0].values[a], world.sizes, net, b) for a, b in x[2].items()},
        )
        for x in mods
    ]  # fmt: skip
    by_flex = net.attention.variant.backend == "flex"
    return Subject(
        "methods" + " by flex" * by_flex, net.attention, functions[0], functions[1], heads_first=heads_first,
        holder=net, own={"mods": mods},
    )  # fmt: skip


@door(1.5)
def flex(world: World) -> Subject:
    subject = _composed(world, *_functions(world))
    subject.own["backend"] = "flex"
    return _compile(world, "flex", subject)


def new_attention(world: World) -> Subject:
    """An attention of code that no call has seen; it does not join the pool."""
    subject = _composed(world, *_functions(world, own=f" {world.rng.random()}"))
    return _compile(world, "compile, new", subject)


NAMED: dict[str, tuple[Mod, Callable[..., Any]]] = {
    "causal": (Mod("kv_idx <= q_idx + kv_len - q_len", {}), lambda: variants.causal),
    "sliding_window": (
        Mod("(kv_idx <= q_idx + kv_len - q_len) & (q_idx + kv_len - q_len - kv_idx < n)", {"n": window()}),
        lambda n: variants.sliding_window(n),
    ),
    "document": (Mod("i[q_idx] == i[kv_idx]", {"i": ids("L")}), lambda i: variants.document(i)),
    "prefix_lm": (
        Mod("(kv_idx < i[b]) | (kv_idx <= q_idx + kv_len - q_len)",
            {"i": Kind("integers", lambda r, s: torch.randint(0, s.length, (s.batch,)))}),
        lambda i: variants.prefix_lm(i),
    ),
}  # fmt: skip
NAMED_SCORES: dict[str, tuple[Mod, Callable[..., Any]]] = {
    "alibi": (
        Mod("score - t[h] * (q_idx + kv_len - q_len - kv_idx)", {"t": floats("H", scale=0.1)}),
        lambda t: variants.alibi(t),
    ),
    "softcap": (Mod("n * torch.tanh(score / n)", {"n": near(1.0, 5.0)}), lambda n: variants.softcap(n)),
    "relative_position": (
        Mod("score + n * (q_idx + kv_len - q_len - kv_idx)", {"n": number(-0.02, 0.01)}),
        lambda n: variants.relative_position(n),
    ),
}  # fmt: skip


@door(1.5)
def named(world: World) -> Subject:
    """Published variants, whose tensors are the objects that were given."""
    rng, parts, functions = world.rng, {}, {}
    for role, family in (("score_mod", NAMED_SCORES), ("mask", NAMED)):
        if rng.random() < 0.2:
            continue
        mod, make = family[rng.choice(list(family))]
        held = {
            name: first_value(kind, world.sizes, rng, world.device, False)
            for name, kind in mod.values.items()
        }
        parts[role] = make(**held)
        values = {
            name: Value(mod.values[name], world.sizes, (lambda x=x: x), None) for name, x in held.items()
        }
        functions[role] = Function(mod, role, parts[role], {}, world.sizes, values)
    subject = Subject("named", lambda: None, functions.get("score_mod"), functions.get("mask"))
    subject.heads = world.sizes.heads  # of the slopes
    subject.holder = fa4flex.compile(**parts)
    subject.attend = subject.holder
    return subject


@door(0.1)
def compiled(world: World) -> Subject:
    """A function under torch.compile that calls attention with mods of its own code."""
    rng = world.rng
    score, mask = _functions(world, own=f" {rng.random()}")
    how = rng.choice(("attention", "compile", "flex_attention"))
    dynamic, backend = rng.choice((None, None, True)), rng.choice(("eager", "aot_eager"))
    mods = [None if x is None else x.made for x in (score, mask)]
    if how == "compile":
        attn = fa4flex.compile(*mods)
        body = "attn(q, k, v, return_lse=True)"
    elif how == "attention":
        attn = fa4flex.attention
        body = "attn(q, k, v, score_mod=mods[0], mask=mods[1], return_lse=True)"
    else:
        attn, mask = fa4flex.flex_attention, None
        body = "attn(q, k, v, score_mod=mods[0], return_lse=True, enable_gqa=True)"
    space = {"attn": attn, "mods": mods}
    exec(f"def f(q, k, v):\n    out, lse = {body}\n    return out * 1.0, lse * 1.0\n", space)
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 100_000
    function: Any = torch.compile(space["f"], backend=backend, dynamic=dynamic, fullgraph=True)

    def attend(*qkv: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*qkv)

    subject = Subject(f"torch.compile({how}, {backend}, dynamic={dynamic})", attend, score, mask)
    for value in subject.values:
        if value.kind.name == "number":
            _without_minus_zero(value)
    return subject


def _without_minus_zero(value: Value) -> None:
    """torch's compiler takes -0.0 for 0.0, wherever it reads a number: its guards compare with `==`."""
    drawn = value.kind.draw

    def draw(rng: random.Random, sizes: Sizes) -> Any:
        return drawn(rng, sizes) or 0

    value.kind = Kind(value.kind.name, draw)
    if value.write is not None:
        value.write(value.read() or 0)
