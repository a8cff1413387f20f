"""Changes of what a mod runs and looks up, rather than reads: code of classes and modules, attributes that
were not there, names that were those of builtins. Each gives the results of the mod as it is now."""

from __future__ import annotations

import enum
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_captures import CLOSE, distance, formula, qkv
from torch import nn

import fa4flex
from fa4flex.codegen import build

Steps = Iterator[tuple[Callable[..., Any], float]]
"""The same mod before and after a change, with what it multiplies the distance of query and key by."""

GLOBAL = 0.5


class Sloped:
    """Mod whose slope comes from methods of all kinds."""

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.tilted(q - k) + self.fixed(q - k) + self.named(q - k) + self.rate * (q - k)

    def tilted(self, d: Any) -> Any:
        return 0.1 * d

    @staticmethod
    def fixed(d: Any) -> Any:
        return 0.1 * d

    @classmethod
    def named(cls, d: Any) -> Any:
        return 0.1 * d

    @property
    def rate(self) -> float:
        return 0.1


def method(name: str, other: Any) -> Steps:
    cls = type("Changing", (Sloped,), dict(vars(Sloped)))
    mod = cls()
    yield mod, 0.4
    setattr(cls, name, other)
    yield mod, 0.8


def inherited(other: Any) -> Steps:
    cls = type("Inheriting", (Sloped,), {})
    mod = cls()
    yield mod, 0.4
    cls.tilted = other
    yield mod, 0.8


def code_of_a_method() -> Steps:
    def tilted(self: Any, d: Any) -> Any:
        return 0.1 * d

    mod = type("Reloaded", (Sloped,), {"tilted": tilted})()
    yield mod, 0.4
    tilted.__code__ = (lambda self, d: 0.5 * d).__code__  # as IPython's autoreload does
    yield mod, 0.8


def default_of_a_method() -> Steps:
    rates = {"near": 0.1}

    def tilted(self: Any, d: Any, table: Any = rates) -> Any:
        return table["near"] * d

    mod = type("Defaulting", (Sloped,), {"tilted": tilted})()
    yield mod, 0.4
    rates["near"] = 0.5
    yield mod, 0.8


def hidden_method() -> Steps:
    mod = Sloped()
    yield mod, 0.4
    mod.tilted = lambda d: 0.5 * d  # type: ignore[method-assign]
    yield mod, 0.8


def wrapped_method() -> Steps:
    global GLOBAL
    GLOBAL = 0.1

    @torch.no_grad()
    def tilted(self: Any, d: Any) -> Any:
        return GLOBAL * d

    mod = type("Wrapped", (Sloped,), {"tilted": tilted})()
    yield mod, 0.4
    GLOBAL = 0.5
    yield mod, 0.8


def descriptor() -> Steps:
    class Stored:
        def __get__(self, owner: Any, cls: Any) -> Any:
            return owner.values["rate"]

    class Owner:
        rate = Stored()

        def __init__(self) -> None:
            self.values = {"rate": 0.5}

    owner = Owner()
    mod = lambda s, b, h, q, k: s + owner.rate * (q - k)  # noqa: E731
    yield mod, 0.5
    owner.values["rate"] = 0.25
    yield mod, 0.25


def other_names() -> Steps:
    class Renamed:
        def __init__(self) -> None:
            self.n_rate = 0.5

        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__("n_rate" if name == "rate" else name)

    owner = Renamed()
    mod = lambda s, b, h, q, k: s + owner.rate * (q - k)  # noqa: E731
    yield mod, 0.5
    owner.n_rate = 0.25
    yield mod, 0.25


def enumeration() -> Steps:
    class Mode(enum.Enum):
        FAR = types.SimpleNamespace(rate=0.5)

        def slope(self) -> float:
            return float(self.value.rate * self.factor)

    Mode.FAR.factor = 1  # type: ignore[attr-defined]
    mode = Mode.FAR
    mod = lambda s, b, h, q, k: s + mode.slope() * (q - k)  # noqa: E731
    yield mod, 0.5
    mode.value.rate = 0.25
    yield mod, 0.25
    mode.factor = 2  # type: ignore[attr-defined]
    yield mod, 0.5


def function_attribute() -> Steps:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + mod.slope * (q - k)  # type: ignore[attr-defined]

    for slope in (0.5, 0.25):
        mod.slope = slope  # type: ignore[attr-defined]
        yield mod, slope


def added_to(thing: Any, mod: Callable[..., Any]) -> Steps:
    """The mod asks whether `thing` has a slope."""
    yield mod, 0.5
    thing.slope = 0.25
    yield mod, 0.25


class Asking:
    __slots__ = ("__dict__", "slope")

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + getattr(self, "slope", 0.5) * (q - k)


class Trying:
    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        try:
            return s + self.slope * (q - k)  # type: ignore[attr-defined]
        except AttributeError:
            return s + 0.5 * (q - k)


def asking(thing: Any) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + getattr(thing, "slope", 0.5) * (q - k)


def of_instance() -> Steps:
    mod = type("Asking", (), {"__call__": Asking.__call__})()
    return added_to(mod, mod)


def of_slot() -> Steps:
    return added_to(mod := Asking(), mod)


def of_class() -> Steps:
    cls = type("Asked", (), {"__call__": Asking.__call__})
    return added_to(cls, cls())


def caught() -> Steps:
    return added_to(mod := Trying(), mod)


def of_namespace() -> Steps:
    return added_to(thing := types.SimpleNamespace(), asking(thing))


def of_python_module() -> Steps:
    thing = types.ModuleType("settings")
    thing.__file__ = "/a/users/settings.py"
    return added_to(thing, asking(thing))


def new_global() -> Steps:
    space: dict[str, Any] = {"__builtins__": __builtins__}
    exec("def mod(s, b, h, q, k): return s + 0.5 * round(1.0) * (q - k)", space)
    yield space["mod"], 0.5
    space["round"] = lambda x: x / 2
    yield space["mod"], 0.25


def computed_global() -> Steps:
    global GLOBAL
    mod = lambda s, b, h, q, k: s + globals()["GLO" + "BAL"] * (q - k)  # noqa: E731
    for GLOBAL in (0.5, 0.25):
        yield mod, GLOBAL


def empty_cell() -> Steps:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        try:
            return s + slope * (q - k)
        except NameError:
            return s + 0.5 * (q - k)

    yield mod, 0.5
    slope = 0.25
    yield mod, 0.25


class Inner(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, d: Any) -> Any:
        return self.slope * d


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.several = Inner(0.25), nn.ModuleList([Inner(0.25)])
        self.bent = nn.LeakyReLU(1.0)

    def mod(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.bent(self.inner(q - k)) + sum(inner(q - k) for inner in self.several)


def submodule(change: Callable[[Outer], Any]) -> Steps:
    outer = Outer()
    yield outer.mod, 0.5
    change(outer)
    yield outer.mod, 0.75


def bound_builtin() -> Steps:
    items = [0.5]
    item = items.__getitem__
    mod = lambda s, b, h, q, k: s + item(0) * (q - k)  # noqa: E731
    yield mod, 0.5
    items[0] = 0.25
    yield mod, 0.25


STEPS: dict[str, Callable[[], Steps]] = {
    "method": lambda: method("tilted", lambda self, d: 0.5 * d),
    "static method": lambda: method("fixed", staticmethod(lambda d: 0.5 * d)),
    "class method": lambda: method("named", classmethod(lambda cls, d: 0.5 * d)),
    "property": lambda: method("rate", property(lambda self: 0.5)),
    "call": lambda: method("__call__", lambda self, s, b, h, q, k: s + 0.8 * (q - k)),
    "inherited method": lambda: inherited(lambda self, d: 0.5 * d),
    "code of a method": code_of_a_method,
    "default of a method": default_of_a_method,
    "method that an attribute hides": hidden_method,
    "global of a wrapped method": wrapped_method,
    "descriptor": descriptor,
    "attributes by other names": other_names,
    "enumeration": enumeration,
    "attribute of a function": function_attribute,
    "new attribute": of_instance,
    "new slot": of_slot,
    "new attribute of a class": of_class,
    "attribute that was missed": caught,
    "new attribute of a namespace": of_namespace,
    "new name in a python module": of_python_module,
    "global that hides a builtin": new_global,
    "global by a computed name": computed_global,
    "closure variable without a value": empty_cell,
    "number of a submodule": lambda: submodule(lambda outer: setattr(outer.inner, "slope", 0.5)),
    "number of one of several": lambda: submodule(lambda outer: setattr(outer.several[0], "slope", 0.5)),
    "another submodule": lambda: submodule(lambda outer: outer.several.append(Inner(0.25))),
    "hook": lambda: submodule(lambda outer: outer.inner.register_forward_hook(lambda *given: 2 * given[2])),
    "method of a builtin": bound_builtin,
}


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store of traces, so that no test finds those of another."""
    monkeypatch.setattr(build, "_kept", type(build._kept)())


@pytest.mark.parametrize("name", STEPS)
def test_a_change_is_noticed(name: str) -> None:
    given, attn = qkv(), None
    for mod, factor in STEPS[name]():
        attn = attn or fa4flex.compile(mod)
        torch.testing.assert_close(attn(*given), formula(given, factor * distance()), **CLOSE)


def test_numbers_of_torchs_modules_are_noticed() -> None:
    given, outer = qkv(), Outer()
    attn = fa4flex.compile(outer.mod)
    for slope in (1.0, 0.5):
        outer.bent.negative_slope = slope
        bias = nn.functional.leaky_relu(0.25 * distance(), slope) + 0.25 * distance()
        torch.testing.assert_close(attn(*given), formula(given, bias), **CLOSE)


def test_what_does_not_change_is_traced_once() -> None:
    for name in ("method", "enumeration", "number of a submodule", "new attribute", "descriptor"):
        mod, _ = next(STEPS[name]())
        attn = fa4flex.compile(mod)
        assert attn.trace.reader is not None
        assert fa4flex.compile(mod).trace is attn.trace, name


def test_a_module_is_gone_with_its_last_user() -> None:
    """No cycle of what a trace made holds its parameters until Python collects garbage."""
    gc.disable()
    try:
        outer = Outer()
        attn = fa4flex.compile(outer.mod)
        attn(*qkv())
        gone = weakref.ref(outer.inner)
        del outer, attn
        assert gone() is None
    finally:
        gc.enable()
