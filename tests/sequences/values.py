"""Values that mods and calls read: what they may hold, where they lie, and how they are replaced."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from .oracle import NAMES, Formula


@dataclass(frozen=True)
class Sizes:
    """Largest extents of a run: tables are made for these. `unit` is the smallest block of a map."""

    length: int = 70
    heads: int = 4
    batch: int = 3
    unit: int = 4


@dataclass(frozen=True)
class Kind:
    """Kind of contents of a value: `draw(rng, sizes)` is another content, a tensor or a number."""

    name: str
    draw: Callable[[random.Random, Sizes], Any]

    @property
    def learns(self) -> bool:
        return self.name == "floats"


def floats(*shape: str, scale: float = 1.0) -> Kind:
    return Kind("floats", lambda rng, sizes: torch.randn(extents(shape, sizes)) * scale)


def ids(*shape: str, most: int = 4) -> Kind:
    def draw(rng: random.Random, sizes: Sizes) -> Tensor:
        found = torch.randint(0, rng.randint(1, most), extents(shape, sizes), dtype=torch.int32)
        return found.sort(-1).values if rng.random() < 0.6 else found

    return Kind("integers", draw)


def integers(least: int, most: str, *shape: str) -> Kind:
    return Kind(
        "integers", lambda rng, sizes: torch.randint(least, extents((most,), sizes)[0], extents(shape, sizes))
    )


def bools(*shape: str, share: float = 0.6) -> Kind:
    return Kind("bools", lambda rng, sizes: torch.rand(extents(shape, sizes)) < share)


def number(*choices: float) -> Kind:
    return Kind("number", lambda rng, sizes: rng.choice(choices))


def near(least: float, most: float) -> Kind:
    return Kind("number", lambda rng, sizes: rng.uniform(least, most))


def window() -> Kind:
    return Kind("number", lambda rng, sizes: rng.randint(1, sizes.length))


def switch() -> Kind:
    return Kind("switch", lambda rng, sizes: True)


def extents(shape: tuple[str, ...], sizes: Sizes) -> tuple[int, ...]:
    known = {"L": sizes.length, "2L": 2 * sizes.length, "H": sizes.heads, "B": sizes.batch}
    return tuple(known[x] if x in known else int(x) for x in shape)


@dataclass(eq=False)
class Value:
    """A value that something reads: `read()` is what it holds now, `write(x)` puts another in its place (None
    where that cannot be). `owner` is the module that has it as its attribute `key`."""

    kind: Kind
    sizes: Sizes
    read: Callable[[], Any]
    write: Callable[[Any], None] | None
    owner: nn.Module | None = None
    key: str = ""
    fixed: bool = False
    """True if no other extents fit."""

    def drawn(self, rng: random.Random) -> Any:
        """Another content, of the extents and dtype of now and on its device."""
        new, now = self.kind.draw(rng, self.sizes), self.read()
        if not isinstance(now, Tensor):
            return new
        new = torch.as_tensor(new)
        for axis, extent in enumerate(now.shape):
            new = new.index_select(axis, torch.arange(extent) % new.shape[axis])
        return new.to(device=now.device, dtype=now.dtype)


# --- mods -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mod:
    """A mod by its text, in which the names of `values` stand for what it captures."""

    text: str
    values: dict[str, Kind]

    @property
    def context(self) -> list[str]:
        return [x for x in ("q_len", "kv_len", "num_heads") if re.search(rf"\b{x}\b", self.text)]


PINNED = Kind("pinned", lambda rng, sizes: sizes.length - 1)

SCORES = [
    Mod("score + t[kv_idx]", {"t": floats("L")}),
    Mod("score + t[h, q_idx - kv_idx + N]", {"t": floats("H", "2L"), "N": PINNED}),
    Mod("score + F.softplus(t)[kv_idx]", {"t": floats("L")}),
    Mod("score + 0.2 * torch.cumsum(t, 0)[kv_idx]", {"t": floats("L")}),
    Mod("score + (t * 2).tanh()[h, kv_idx]", {"t": floats("H", "L")}),
    Mod("score * t", {"t": floats()}),
    Mod("score * n", {"n": near(-1.5, 1.5)}),
    Mod("score - n * (q_idx - kv_idx).abs()", {"n": number(0.0, 0.03, 0.1, -0.02)}),
    Mod("n * torch.tanh(score / n)", {"n": near(0.5, 4.0)}),
    Mod("score + t[b, h]  * (kv_idx % 3)", {"t": floats("B", "H")}),
    Mod("score + t[kv_idx] * u[q_idx]", {"t": floats("L"), "u": floats("L")}),
    Mod("score + t[i[kv_idx]]", {"t": floats("4"), "i": ids("L")}),
    Mod("score + t[kv_idx] - t.mean()", {"t": floats("L")}),
    Mod("torch.where(i[q_idx] == i[kv_idx], score, score - n)", {"i": ids("L"), "n": near(0.5, 2.0)}),
    Mod("score + t[h] * (kv_idx + q_len - kv_len - q_idx) / 16", {"t": floats("H")}),
    Mod("(score + t[kv_idx]) if go else score.no_such_thing()", {"t": floats("L"), "go": switch()}),
    Mod("score + (t if go else u)[kv_idx]", {"t": floats("L"), "u": floats("L"), "go": number(True, False)}),
    Mod("score + t[kv_idx] * n", {"t": floats("L"), "n": number(0.0, -0.0, 1.0, -1.0, 0.5)}),
]  # fmt: skip

MASKS = [
    Mod("q_idx >= kv_idx", {}),
    Mod("(q_idx - kv_idx < n) & (kv_idx - q_idx < n)", {"n": window()}),
    Mod("(q_idx + kv_len - q_len >= kv_idx) & (q_idx + kv_len - q_len - kv_idx < n)", {"n": window()}),
    Mod("i[q_idx] == i[kv_idx]", {"i": ids("L")}),
    Mod("(i[b, q_idx] == i[b, kv_idx]) & (q_idx >= kv_idx)", {"i": ids("B", "L")}),
    Mod("kv_idx < i", {"i": integers(0, "L")}),
    Mod("kv_idx < i[b]", {"i": integers(0, "L", "B")}),
    Mod("t[kv_idx] > 0", {"t": floats("L")}),
    Mod("(q_idx - kv_idx + 0.5) / n > 0", {"n": number(0.0, -0.0, 1.0, -1.0)}),
    Mod("o[q_idx // 8, kv_idx // 8]", {"o": bools("L", "L")}),
    Mod("i.cumsum(0)[q_idx] == i.cumsum(0)[kv_idx]", {"i": ids("L", most=2)}),
    Mod("(i[q_idx] <= i[kv_idx]) | (kv_idx % n == 0)", {"i": ids("L"), "n": number(2, 3, 7)}),
    Mod("o[h, kv_idx] | (q_idx == kv_idx)", {"o": bools("H", "L")}),
]  # fmt: skip

PLACES = ("cell", "global", "attribute", "module", "item", "keyword", "partial")
"""Places of a function's values. `item` is one of a dict in a cell, `keyword` a default argument."""


class Box:
    """Plain object with attributes."""


@functools.cache
def _compiled(text: str, name: str) -> Any:
    return compile(text, name, "exec")


class Function:
    """A user's function of a mod's text, and its values. Functions of one text and places share their code,
    unless a name makes it their own. `places` are those of its values, None where `values` are given."""

    def __init__(
        self, mod: Mod, role: str, made: Callable[..., Any], places: dict[str, str], sizes: Sizes,
        values: dict[str, Value] | None = None,
    ) -> None:  # fmt: skip
        self.mod, self.role, self.made, self.places, self.sizes = mod, role, made, places, sizes
        self.values = self._found() if values is None else values

    def formula(self) -> Formula:
        return Formula(self.mod.text, {name: value.read() for name, value in self.values.items()})

    def copied(self, made: Callable[..., Any]) -> Function:
        """The same of a copy of the function."""
        return Function(self.mod, self.role, made, self.places, self.sizes)

    def _found(self) -> dict[str, Value]:
        partial = self.made.keywords if isinstance(self.made, functools.partial) else {}
        function: Any = self.made.func if isinstance(self.made, functools.partial) else self.made
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        return {
            name: _value(self.mod.values[name], self.sizes, name, place, (function, cells, partial))
            for name, place in self.places.items()
        }


def arguments(mod: Mod, role: str) -> str:
    first = "score, " if role == "score" else ""
    return first + ", ".join(["b, h, q_idx, kv_idx", *mod.context])


def substituted(text: str, names: dict[str, str]) -> str:
    for name, read in names.items():
        text = re.sub(rf"(?<![\w.]){name}\b", read, text)
    return text


def first_value(kind: Kind, sizes: Sizes, rng: random.Random, device: torch.device, learns: bool) -> Any:
    """First content of a value."""
    x = kind.draw(rng, sizes)
    if not isinstance(x, Tensor):
        return x
    if kind.learns:
        share = rng.random()
        x = x.to(torch.bfloat16 if share < 0.07 else torch.float64 if share < 0.1 else x.dtype)
    x = x.to(device)
    return x.requires_grad_(learns and kind.learns)


def write_function(
    mod: Mod, role: str, sizes: Sizes, rng: random.Random, device: torch.device, own: str = ""
) -> Function:
    """A function of a mod whose values lie in places drawn by `rng`. `own` names code that no other has."""
    reads, cells, globals_, defaults = {}, {}, dict(NAMES), {}
    places: dict[str, str] = {}
    box, module, bag = Box(), nn.Module(), {}
    partial: dict[str, Any] = {}
    for name, kind in mod.values.items():
        place = rng.choice(PLACES)
        if kind.name in ("switch", "pinned"):
            place = rng.choice(("cell", "global", "attribute"))
        if kind.name == "number" and place == "item":
            place = "attribute"
        x = first_value(kind, sizes, rng, device, rng.random() < 0.6)
        places[name] = place
        if place == "cell":
            reads[name], cells[name] = name, x
        elif place == "global":
            reads[name], globals_[f"G_{name}"] = f"G_{name}", x
        elif place == "attribute":
            reads[name], cells["box"] = f"box.{name}", box
            setattr(box, name, x)
        elif place == "module":
            reads[name], cells["module"] = f"module.{name}", module
            set_on_module(module, name, x)
        elif place == "item":
            reads[name], cells["bag"] = f"bag[{name!r}]", bag
            bag[name] = x
        elif place == "keyword":
            reads[name], defaults[name] = name, x
        else:
            reads[name], partial[name] = name, x
    keywords = "".join(f", {x}" for x in defaults) + "".join(f", {x}" for x in partial)
    header = arguments(mod, role) + (", *" + keywords if keywords else "")
    text = (
        f"def make({', '.join(sorted(cells))}):\n"
        f"    def {role}({header}):\n"
        f"        return {substituted(mod.text, reads)}\n"
        f"    return {role}\n"
    )
    exec(_compiled(text, f"<sequences{own}>"), globals_)
    function = globals_["make"](**cells)
    function.__kwdefaults__ = dict(defaults) or None
    made = functools.partial(function, **partial) if partial else function
    return Function(mod, role, made, places, sizes)


def set_on_module(module: nn.Module, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        setattr(module, name, x)
    elif x.requires_grad:
        setattr(module, name, nn.Parameter(x.detach()))
    else:
        module.register_buffer(name, x)


def _value(kind: Kind, sizes: Sizes, name: str, place: str, where: tuple[Any, Any, Any]) -> Value:
    """The value of a function at a place; `where` are the function, its cells by name, and what its partial
    gives."""
    function, cells, partial = where
    if place == "cell":
        cell = cells[name]
        return Value(kind, sizes, lambda: cell.cell_contents, lambda x: _fill(cell, x))
    if place == "global":
        space = function.__globals__
        return Value(kind, sizes, lambda: space[f"G_{name}"], lambda x: space.update({f"G_{name}": x}))
    if place == "item":
        bag = cells["bag"].cell_contents
        return Value(kind, sizes, lambda: bag[name], lambda x: bag.update({name: x}))
    if place == "keyword":
        given = function.__kwdefaults__
        return Value(kind, sizes, lambda: given[name], lambda x: given.update({name: x}))
    if place == "partial":
        return Value(kind, sizes, lambda: partial[name], None)
    return attribute(kind, sizes, cells["module" if place == "module" else "box"].cell_contents, name)


def attribute(kind: Kind, sizes: Sizes, owner: Any, name: str) -> Value:
    """A value that is an attribute of a plain object or of a module."""

    def write(x: Any) -> None:
        if isinstance(owner, nn.Module) and name in owner._parameters:
            x = nn.Parameter(x.detach(), x.requires_grad)
        setattr(owner, name, x)

    module = owner if isinstance(owner, nn.Module) else None
    return Value(kind, sizes, lambda: getattr(owner, name), write, module, name if module else "")


def _fill(cell: CellType, x: Any) -> None:
    cell.cell_contents = x
