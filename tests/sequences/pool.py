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

from .oracle import NAMES, Blocks, Formula, Problem, Scales, Sequences
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

E4M3 = torch.float8_e4m3fn


class Skip(Exception):
    """A step that does not apply to what there is."""


# --- block maps and lengths -------------------------------------------------------------------------------


@dataclass(eq=False)
class Map:
    """A BlockMap, or torch's BlockMask, that calls bring: `tensors` are what its blocks are read from."""

    given: Any
    size: tuple[int, int]
    lengths: tuple[int, int]
    shape: tuple[int, int, int, int]
    own: Function | None = None
    copied: bool = False
    """True if compile() was given a BlockMask, whose map it makes once."""

    @property
    def tensors(self) -> list[Tensor]:
        if isinstance(self.given, BlockMask):
            return [x for x in (getattr(self.given, name) for name in LISTS) if x is not None]
        return [self.given.classes]

    def blocks(self) -> Blocks:
        """The classes that its tensors hold now."""
        if not isinstance(self.given, BlockMask):
            return Blocks(self.given.classes, self.size)
        partial = _listed(self.given.kv_num_blocks, self.given.kv_indices, self.shape)
        full = _listed(self.given.full_kv_num_blocks, self.given.full_kv_indices, self.shape)
        return Blocks(torch.where(full, 2, partial.to(torch.uint8)).to(torch.uint8), self.size)

    def contents(self, classes: Tensor) -> list[Tensor]:
        """What `tensors` hold for these classes."""
        if not isinstance(self.given, BlockMask):
            return [classes]
        lists = lists_of(classes)
        found = [lists[name] for name in LISTS if getattr(self.given, name) is not None]
        return [x.to(y.dtype) for x, y in zip(found, self.tensors)]


LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def _listed(counts: Tensor | None, indices: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if counts is None or indices is None:
        return torch.zeros(shape, dtype=torch.bool)
    taken = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    found = torch.zeros(*indices.shape[:-1], shape[-1], dtype=torch.int32, device=indices.device)
    return found.scatter_add(-1, indices.long(), taken.int()) > 0


def lists_of(classes: Tensor) -> dict[str, Tensor]:
    """torch's lists of blocks of classes [B, H, R, C], as wide as the map."""
    found = {}
    for prefix, wanted in (("", 1), ("full_", 2)):
        for side, hits in (("kv", classes == wanted), ("q", (classes == wanted).mT)):
            found[f"{prefix}{side}_num_blocks"] = hits.sum(-1).to(torch.int32)
            order = torch.argsort(hits.to(torch.int8), dim=-1, descending=True, stable=True)
            found[f"{prefix}{side}_indices"] = order.to(torch.int32).contiguous()
    return found


def draw_classes(rng: random.Random, shape: tuple[int, ...], device: torch.device) -> Tensor:
    classes = torch.randint(0, 3, shape, dtype=torch.uint8, device=device)
    if rng.random() < 0.3:
        classes = torch.where(torch.rand(shape, device=device) < 0.6, 0, classes).to(torch.uint8)
    return classes


@dataclass(eq=False)
class Ragged:
    """Lengths that calls bring, with pages where `table` is there."""

    kind: str
    given: dict[str, Any]
    sequences: Sequences
    batch: int
    q_len: int
    kv_len: int
    pages: int = 0
    page_size: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in vars(self.sequences).values() if x is not None]


def draw_lengths(ragged: Ragged, rng: random.Random) -> list[Tensor]:
    """Other contents of its tensors, in their order."""
    found: dict[str, Tensor] = {}
    s = ragged.sequences
    for side, length in (("q", ragged.q_len), ("k", ragged.kv_len)):
        cu, used = getattr(s, f"cu_{side}"), getattr(s, f"used_{side}")
        each = torch.full((ragged.batch,), length)
        if ragged.kind == "packed" or (ragged.kind == "paged" and side == "q"):
            if side == "k" and cu is None and "cu_q" in found:
                cu_now = found["cu_q"]
            else:
                cuts = sorted(rng.randint(0, length) for _ in range(ragged.batch - 1))
                cu_now = torch.tensor([0, *cuts, length])
            found[f"cu_{side}"] = cu_now
            each = cu_now[1:] - cu_now[:-1]
        if used is not None:
            found[f"used_{side}"] = torch.tensor([rng.randint(0, int(n)) for n in each])
    if s.table is not None:
        found["table"] = torch.stack(
            [torch.randperm(ragged.pages)[: s.table.shape[1]] for _ in range(ragged.batch)]
        )
    return [found[name] for name, x in vars(s).items() if x is not None]


def make_ragged(world: World, kind: str) -> Ragged:
    rng, sizes = world.rng, world.sizes
    batch, dtype = rng.randint(1, sizes.batch), rng.choice((torch.int32, torch.int32, torch.int64))
    q_len, kv_len = world.lengths()
    names = {"padded": ["used_k"], "packed": ["cu_q"], "paged": ["used_k", "table"]}[kind]
    pages = size = 0
    if kind == "padded" and rng.random() < 0.4:
        names = ["used_q", "used_k"]
    elif kind == "packed":
        names += ["cu_k"] if rng.random() < 0.5 else []
        names += ["used_k"] if rng.random() < 0.3 else []
        names += ["used_q"] if rng.random() < 0.3 else []
        kv_len = kv_len if "cu_k" in names else q_len
    elif kind == "paged":
        size = rng.choice((1, 4, 16)) if not world.on_gpu else rng.choice((16, 64))
        kv_len = max(kv_len // size, 1) * size
        pages = kv_len // size + rng.randint(0, 3)
        names += ["cu_q"] if rng.random() < 0.4 else []
    shapes = {"cu_q": (batch + 1,), "cu_k": (batch + 1,), "used_q": (batch,), "used_k": (batch,)}
    shapes["table"] = (batch, -(-kv_len // size) if size else 0)
    order = [name for name in ("cu_q", "cu_k", "used_q", "used_k", "table") if name in names]
    tensors = {name: torch.zeros(shapes[name], dtype=dtype, device=world.device) for name in order}
    ragged = Ragged(kind, {}, Sequences(**tensors), batch, q_len, kv_len, pages, size)
    for x, new in zip(ragged.tensors, draw_lengths(ragged, rng)):
        x.copy_(new)
    s = ragged.sequences
    if kind == "paged":
        ragged.given["paging"] = fa4flex.Paging(s.table, s.used_k)
        if s.cu_q is not None:
            ragged.given["varlen"] = fa4flex.Varlen(s.cu_q)
    else:
        ragged.given["varlen"] = fa4flex.Varlen(s.cu_q, s.cu_k, s.used_q, s.used_k)
    return ragged


def make_map(world: World, lengths: tuple[int, int], heads: int, batch: int, own: Function | None) -> Map:
    """A new map. `own` is the mask_mod of a BlockMask, which a map is half of the time."""
    rng, unit = world.rng, world.sizes.unit
    size = (unit * rng.choice((1, 2, 4)), unit * rng.choice((1, 2, 4))) if not world.on_gpu else (128, 128)
    shape = (
        rng.choice((1, batch)), rng.choice((1, heads)), -(-lengths[0] // size[0]), -(-lengths[1] // size[1])
    )  # fmt: skip
    classes = draw_classes(rng, shape, world.device)
    if own is None and rng.random() < 0.6:
        return Map(fa4flex.BlockMap.from_dense(classes, size, *lengths), size, lengths, shape)
    mask_mod = None if own is None else own.made
    if own is not None and rng.random() < 0.25:
        given = torch.nn.attention.flex_attention.create_block_mask(
            own.made, shape[0], shape[1], *lengths, device=str(world.device), BLOCK_SIZE=size
        )
        return Map(given, size, lengths, shape, own)
    lists = lists_of(classes)
    full = (lists["full_kv_num_blocks"], lists["full_kv_indices"]) if rng.random() < 0.7 else (None, None)
    given = BlockMask.from_kv_blocks(
        lists["kv_num_blocks"], lists["kv_indices"], *full, BLOCK_SIZE=size, mask_mod=mask_mod,
        seq_lengths=lengths,
    )  # fmt: skip
    return Map(given, size, lengths, shape, own)


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
        """True if threads may call it at once: neither torch.compile nor torch's dense reference of
        flex_attention, which traces the mods, lets them."""
        return not self.compiled and "flex" not in self.door.replace("flex_attention", "")


class World:
    """What there is in one sequence, and the random numbers of the step at hand."""

    def __init__(self, device: torch.device, sizes: Sizes, choices: Choices) -> None:
        self.device, self.sizes, self.choices = device, sizes, choices
        self.rng = random.Random(choices.seed)
        self.subjects: list[Subject] = []
        self.maps: list[Map] = []
        self.ragged: list[Ragged] = []
        self.pending: list[Any] = []
        self.tensors: dict[Any, tuple[Tensor, ...]] = {}
        self.known_lengths = [self._draw_lengths() for _ in range(4)]
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
        known, own = self.rng.choice(self.known_lengths), self._draw_lengths()
        return known if self.rng.random() < 0.85 else own

    def _draw_lengths(self) -> tuple[int, int]:
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
    """What a run draws from. `programs` bounds how many compositions of mods there are (0: any): a GPU compiles
    kernels for each."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 6 + (torch.bfloat16, torch.float16, torch.float64)
    doors: tuple[str, ...] = ()
    programs: int = 0
    as_gpu: bool = False
    seed: int = 0
    left_out: tuple[str, ...] = ()
    """What calls never bring: blocks, sinks, scale, return_lse, padded, packed, paged."""

    def mods(self, rng: random.Random) -> tuple[Mod | None, Mod | None]:
        """Texts of a score mod and of a mask."""
        source = random.Random(self.seed * 1000 + rng.randrange(self.programs)) if self.programs else rng
        score = source.choice(SCORES) if source.random() < 0.7 else None
        return score, source.choice(MASKS) if source.random() < 0.6 else None


# --- doors ------------------------------------------------------------------------------------------------

DOORS: dict[str, tuple[float, Callable[[World], Subject]]] = {}
"""How often a door is drawn, and what makes an attention of it."""


def door(weight: float) -> Callable[[Callable[[World], Subject]], Callable[[World], Subject]]:
    def register(make: Callable[[World], Subject]) -> Callable[[World], Subject]:
        DOORS[make.__name__] = (weight, make)
        return make

    return register


def make_subject(world: World) -> Subject:
    names = [x for x in DOORS if not world.choices.doors or x in world.choices.doors]
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
    return _of_module(world, made, functions, heads, not layout)


def _tensor(kind: Kind) -> bool:
    return kind.name not in ("number", "switch", "pinned")


def _of_module(world: World, made: nn.Module, functions: list[Any], heads: int, heads_first: bool) -> Subject:
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
    backend = {"backend": "flex"} if rng.random() < 0.25 else {}
    net.attention = fa4flex.compile(
        *(None if x is None else getattr(net, x[1]) for x in mods), **layout, **backend
    )
    return _of_net(world, net, mods, not layout)


def _of_net(world: World, net: Any, mods: list[Any], heads_first: bool) -> Subject:
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

    return Subject(f"torch.compile({how}, {backend}, dynamic={dynamic})", attend, score, mask)


# --- calls ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Given:
    """One call: what it means, what is passed, and how. `words` describe it."""

    subject: Subject
    problem: Problem
    brought: dict[str, Any]
    mode: str
    words: str

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        with modes[self.mode]():
            q = self.problem.q
            for _ in range(self.problem.times):
                found = self.subject.attend(q, self.problem.k, self.problem.v, **self.brought)
                q, lse = found if isinstance(found, tuple) else (found, None)
            return q, lse


def draw_call(world: World, subject: Subject) -> Given:
    """A call of an attention, with what it brings, and its tensors, which may be those of an earlier one."""
    rng, brought = world.rng, {}
    ragged = _bring_lengths(world, subject, brought)
    heads = subject.heads or (rng.choice((1, 2, 4)) if not world.on_gpu else 4)
    groups = rng.choice([n for n in ((1, 2, 4) if not world.on_gpu else (1, 2)) if heads % n == 0])
    batch, (q_len, kv_len) = rng.randint(1, world.sizes.batch), world.lengths()
    if ragged is not None:
        batch, q_len, kv_len = ragged.batch, ragged.q_len, ragged.kv_len
    if subject.blocks is not None:
        q_len, kv_len = subject.blocks.lengths
        batch = batch if subject.blocks.shape[0] == 1 else subject.blocks.shape[0]
    dim = rng.choice((8, 16, 32)) if not world.on_gpu else 64
    dtype = rng.choice(world.choices.dtypes)
    times = 2 if ragged is None and rng.random() < 0.1 and q_len == kv_len else 1
    mode = rng.choice(("grad", "grad", "grad", "no_grad", "inference"))
    eight = not world.on_gpu and ragged is None and not subject.compiled and "flex" not in subject.door
    eight = (
        eight and subject.door != "module" and dtype != torch.float64 and rng.random() < 0.06 and times == 1
    )
    q, k, v = _tensors(
        world, ragged, subject.heads_first, (batch, heads, heads // groups, q_len, kv_len, dim), dtype, mode
    )
    blocks, mask = _bring_blocks(world, subject, ragged, (batch, heads, q_len, kv_len), brought)
    problem = Problem(
        q, k, v, None if subject.score is None else subject.score.formula(), mask, blocks,
        None if subject.sinks is None else subject.sinks.read(), subject.scale, subject.heads_first,
        None if ragged is None else ragged.sequences, None, times,
    )  # fmt: skip
    if eight:
        _bring_scales(world, problem, brought)
    if not subject.compiled:
        _bring_rest(world, subject, problem, heads, brought)
    words = f"{list(q.shape)} {list(k.shape)} {str(dtype)[6:]} {mode}"
    words += "".join(f" {x}" for x in brought) + (f" ({ragged.kind})" if ragged else "")
    words += " twice" if times > 1 else ""
    return Given(subject, problem, brought, mode, words)


def _bring_lengths(world: World, subject: Subject, brought: dict[str, Any]) -> Ragged | None:
    if subject.compiled or subject.door == "flex_attention" or subject.blocks is not None:
        return None
    if world.rng.random() < 0.7:
        return None
    kind = world.rng.choice(("padded", "packed", "paged"))
    if kind in world.choices.left_out:
        return None
    known = [x for x in world.ragged if x.kind == kind]
    if not known or world.rng.random() < 0.15:
        known = [make_ragged(world, kind)]
        world.ragged += known
    ragged = world.rng.choice(known)
    brought.update(ragged.given)
    return ragged


def _bring_blocks(
    world: World, subject: Subject, ragged: Ragged | None, extents: tuple[int, int, int, int], brought: Any
) -> tuple[Blocks | None, Formula | None]:
    """Blocks and mask of a call; a map is among what it brings, or not."""
    batch, heads, *lengths = extents
    own = subject.own.get("mask") if subject.door == "flex_attention" else None
    mask = None if subject.mask is None else subject.mask.formula()
    composed = None if subject.blocks is None else subject.blocks.blocks()
    may = ragged is None and not subject.compiled and "blocks" not in world.choices.left_out
    if not may or world.rng.random() < (0.15 if own is not None else 0.65):
        return composed, mask
    fits = [
        x for x in world.maps
        if x.lengths == tuple(lengths) and x.shape[0] in (1, batch) and x.shape[1] in (1, heads)
        and (x.own is None or x.own is own or (subject.mask is None and subject.door != "flex_attention"))
        and (subject.door != "flex_attention" or isinstance(x.given, BlockMask))
    ]  # fmt: skip
    if not fits or world.rng.random() < 0.25:
        inner = own
        if inner is None and subject.mask is None and world.rng.random() < 0.3:
            mod = world.rng.choice(MASKS)
            mod = mod if not mod.context else MASKS[0]
            inner = write_function(mod, "mask", world.sizes, world.rng, world.device)
        if inner is not None and inner.mod.context:
            return composed, mask  # torch's mask_mods know no lengths
        made = make_map(world, (lengths[0], lengths[1]), heads, batch, inner)
        world.maps.append(made)
        if subject.door == "flex_attention" and not isinstance(made.given, BlockMask):
            return composed, mask
        fits = [made]
    chosen = world.rng.choice(fits)
    brought["blocks"] = chosen.given
    return chosen.blocks(), mask if chosen.own is None else chosen.own.formula()


def _bring_rest(
    world: World, subject: Subject, problem: Problem, heads: int, brought: dict[str, Any]
) -> None:
    rng, left_out = world.rng, world.choices.left_out
    if rng.random() < 0.2 and "scale" not in left_out:
        problem.scale = brought["scale"] = rng.choice((0.2, 0.7, 1.0))
    if rng.random() < 0.5 and "return_lse" not in left_out:
        brought["return_lse"] = True
    takes_sinks = subject.door in ("compile", "attention", "flex", "methods", "methods by flex", "named")
    if takes_sinks and rng.random() < 0.15 and "sinks" not in left_out:
        problem.sinks = brought["sinks"] = torch.randn(heads, device=world.device).requires_grad_(
            rng.random() < 0.5
        )


def _bring_scales(world: World, problem: Problem, brought: dict[str, Any]) -> None:
    heads = problem.k.shape[1 if problem.heads_first else 2]
    scales = [torch.rand(heads, device=world.device, dtype=torch.float32) + 0.5 for _ in range(2)]
    problem.k, problem.v = (x.detach().to(E4M3) for x in (problem.k, problem.v))
    problem.scales = Scales(*scales)
    brought["kv_scales"] = fa4flex.KVScales(*scales)


def _tensors(
    world: World,
    ragged: Ragged | None,
    heads_first: bool,
    extents: tuple[int, ...],
    dtype: torch.dtype,
    mode: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a call: new ones in some layout, or those of an earlier call with other contents."""
    batch, heads, kv_heads, q_len, kv_len, dim = extents
    packed = ragged is not None and ragged.sequences.packed
    if packed:
        q_shape: tuple[int, ...] = (q_len, heads, dim)
    else:
        q_shape = (batch, heads, q_len, dim) if heads_first else (batch, q_len, heads, dim)
    if ragged is not None and ragged.kind == "paged":
        k_shape: tuple[int, ...] = (ragged.pages, ragged.page_size, kv_heads, dim)
    elif packed:
        k_shape = (kv_len, kv_heads, dim)
    else:
        k_shape = (batch, kv_heads, kv_len, dim) if heads_first else (batch, kv_len, kv_heads, dim)
    key = (q_shape, k_shape, dtype)
    known = world.tensors.get(key)
    if known is not None and world.rng.random() < 0.5:
        if world.rng.random() < 0.5:
            for x in known:
                x.data.copy_(torch.randn_like(x))
        return known
    in_mode = (
        torch.inference_mode() if mode == "inference" and world.rng.random() < 0.3 else torch.enable_grad()
    )
    with in_mode:
        found = tuple(laid_out(world, shape, dtype) for shape in (q_shape, k_shape, k_shape))
    if not found[0].is_inference():
        if mode == "grad":
            for x in found:
                x.requires_grad_(world.rng.random() < 0.6)
        world.tensors[key] = found  # type: ignore[assignment]
    return found  # type: ignore[return-value]


def laid_out(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers of some strides, the last of which is 1."""
    how = world.rng.choice(("dense", "dense", "transposed", "wide", "stepped"))
    kind = {"dtype": dtype, "device": world.device}
    if how == "transposed" and len(shape) == 4:
        return torch.randn(shape[0], shape[2], shape[1], shape[3], **kind).transpose(1, 2)
    if how == "wide":
        return torch.randn(*shape[:-1], shape[-1] * 2, **kind)[..., : shape[-1]]
    if how == "stepped":
        return torch.randn(shape[0] * 2, *shape[1:], **kind)[::2]
    return torch.randn(shape, **kind)
