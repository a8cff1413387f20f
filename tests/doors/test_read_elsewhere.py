"""Mods that read numbers and functions which are not captured: of modules, classes, tensors, the environment
and torch's modes. After each change the next call gives what the dense formula gives."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_captures import CLOSE, S, distance, formula, qkv

import fa4flex
from fa4flex.codegen.build import bind
from fa4flex.primitives.score import as_score
from fa4flex.variant import Variant

Step = tuple[Callable[..., Any], float]
"""A score mod that adds a multiple of the distance, and the factor."""

PACKAGE = "SCALE = 2.0\ndef scaled(x):\n    return x * SCALE\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an installed package that nobody has imported yet."""
    name = f"package_of_{abs(hash(tmp_path))}"
    folder = tmp_path / "site-packages" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "inner.py").write_text("DEPTH = 3.0\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return name


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a package without __init__.py."""
    name = f"namespace_of_{abs(hash(tmp_path))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "inner.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def agreeing(steps: Callable[..., Iterator[Step]]) -> Callable[..., None]:
    """The test of steps, each of which is compared with the dense formula as it comes."""

    @functools.wraps(steps)
    def test(**fixtures: Any) -> None:
        given, kept = qkv(), {}
        for mod, factor in steps(**fixtures):
            attend = kept.setdefault(mod, fa4flex.compile(mod))
            for out in (fa4flex.attention(*given, score_mod=mod), attend(*given)):
                torch.testing.assert_close(out, formula(given, factor * distance(), True), **CLOSE)

    return test


@agreeing
def test_numbers_and_functions_of_an_installed_package(package: str) -> Iterator[Step]:
    module = __import__(package)
    number = lambda s, b, h, q, k: s + module.SCALE * (q - k)  # noqa: E731
    function = lambda s, b, h, q, k: s + module.scaled(q - k)  # noqa: E731
    for scale in (2.0, 5.0):
        module.SCALE = scale
        yield number, scale
        yield function, scale
    module.scaled = lambda x: x * 7
    yield function, 7


@agreeing
def test_a_package_without_a_file(namespace: str) -> Iterator[Step]:
    inner = __import__(f"{namespace}.inner").inner
    outer: Any = sys.modules[namespace]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + outer.inner.scaled(q - k) * outer.FACTOR

    for factor, scale in ((1.0, 2.0), (3.0, 2.0), (3.0, 4.0)):
        outer.FACTOR, inner.SCALE = factor, scale
        yield mod, factor * scale


@agreeing
def test_a_module_made_at_run_time() -> Iterator[Step]:
    module: Any = types.ModuleType("made_here")
    mod = lambda s, b, h, q, k: s + module.scale * (q - k)  # noqa: E731
    for module.scale in (2, 3.5, 4.5):
        yield mod, module.scale


@agreeing
def test_a_module_that_computes_its_attributes() -> Iterator[Step]:
    module: Any = types.ModuleType("computing")
    answers = [2.0]
    module.__getattr__ = lambda name: answers[0]
    mod = lambda s, b, h, q, k: s + module.scale * (q - k)  # noqa: E731
    for answers[0] in (2.0, 3.0):
        yield mod, answers[0]


@agreeing
def test_imports_inside_a_mod(package: str) -> Iterator[Step]:
    def whole(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        import importlib

        return s + importlib.import_module(package).SCALE * (q - k)

    space: dict[str, Any] = {"__name__": "user", "__package__": package}
    exec(
        f"def plain(s, b, h, q, k):\n    import {package}\n    return s + {package}.SCALE * (q - k)\n"
        f"def one(s, b, h, q, k):\n    from {package} import SCALE\n    return s + SCALE * (q - k)\n"
        f"def deep(s, b, h, q, k):\n    import {package}.inner as c\n    return s + c.DEPTH * (q - k)\n"
        f"def relative(s, b, h, q, k):\n    from . import inner\n    return s + inner.DEPTH * (q - k)\n",
        space,
    )

    for mod, name in ((space["plain"], "SCALE"), (space["one"], "SCALE"), (whole, "SCALE")):
        yield mod, getattr(sys.modules.get(package), name, 2.0)
        for scale in (6.0, 7.0, 2.0):
            setattr(sys.modules[package], name, scale)
            yield mod, scale
    for mod in (space["relative"], space["deep"]):  # the first of them is the first to import it
        yield mod, 3.0
        for depth in (4.0, 3.0):
            sys.modules[f"{package}.inner"].DEPTH = depth  # type: ignore[attr-defined]
            yield mod, depth


@agreeing
def test_a_method_that_is_not_copied_reads_a_module(package: str) -> Iterator[Step]:
    module = __import__(package)

    class Distance:
        def times(self, d: Any) -> Any:
            return module.scaled(d) + module.SCALE * d

    made = Distance()
    mod = lambda s, b, h, q, k: s + made.times(q - k)  # noqa: E731
    for module.SCALE in (2.0, 3.0):
        yield mod, 2 * module.SCALE


@pytest.mark.parametrize(
    "read", [lambda name: os.environ[name], os.getenv, lambda name: os.environ.get(name)]
)
@agreeing
def test_the_environment(read: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    mod = lambda s, b, h, q, k: s + float(read("FACTOR_OF_A_TEST")) * (q - k)  # noqa: E731
    for factor in ("2", "3", "5"):
        monkeypatch.setenv("FACTOR_OF_A_TEST", factor)
        yield mod, float(factor)


@agreeing
def test_whether_gradients_are_recorded() -> Iterator[Step]:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (2 if torch.is_grad_enabled() else 3) * (q - k)

    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            yield mod, 2 if grad else 3


@agreeing
def test_modes_and_flags_of_torch() -> Iterator[Step]:
    def threads(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.get_num_threads() * (q - k)

    def flag(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (2 if torch.backends.cudnn.benchmark else 3) * (q - k)

    def inference(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (2 if torch.is_inference_mode_enabled() else 3) * (q - k)

    before = torch.get_num_threads(), torch.backends.cudnn.benchmark
    try:
        for n, on in ((1, True), (2, False)):
            torch.set_num_threads(n)
            torch.backends.cudnn.benchmark = on
            yield threads, n
            yield flag, 2 if on else 3
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.benchmark = before[1]
    for on in (False, True, False):
        with torch.inference_mode(on):
            yield inference, 2 if on else 3


@agreeing
def test_attributes_of_tensors() -> Iterator[Step]:
    table: Any = torch.zeros(S)
    mod = lambda s, b, h, q, k: s + table[q] + table.factor * (q - k)  # noqa: E731
    for table.factor in (2.0, 3.0):
        yield mod, table.factor
    asked = lambda s, b, h, q, k, t=table: s + getattr(t, "more", 5) * (q - k)  # noqa: E731
    yield asked, 5
    table.more = 6
    yield asked, 6


@pytest.mark.parametrize("ask", [
    lambda t: 2 if isinstance(t, torch.nn.Parameter) else 3,
    lambda t: 2 if type(t) is torch.nn.Parameter else 3,
])  # fmt: skip
@agreeing
def test_the_class_of_a_tensor(ask: Callable[[Any], Any]) -> Iterator[Step]:
    for table in (torch.zeros(S), torch.nn.Parameter(torch.zeros(S)), torch.zeros(S)):
        mod = lambda s, b, h, q, k, t=table: s + t[q] + ask(t) * (q - k)  # noqa: E731
        yield mod, 2 if isinstance(table, torch.nn.Parameter) else 3


@pytest.mark.parametrize("ask", [
    lambda t: t.stride(0), lambda t: t.storage_offset(), lambda t: 2 if t.is_contiguous() else 3,
])  # fmt: skip
@agreeing
def test_how_a_tensor_lies_in_memory(ask: Callable[[Any], Any]) -> Iterator[Step]:
    for table in (torch.zeros(S), torch.zeros(2 * S)[::2], torch.zeros(S + 1)[1:]):
        mod = lambda s, b, h, q, k, t=table: s + t[q] + ask(t) * (q - k)  # noqa: E731
        yield mod, ask(table)


class Meta(type):
    factor = 2.0


class WithMeta(metaclass=Meta):
    own = 2.0

    def times(self, d: Any) -> Any:
        return d * type(self).own

    @classmethod
    def of_class(cls, d: Any) -> Any:
        return d * cls.own


@agreeing
def test_attributes_of_a_metaclass() -> Iterator[Step]:
    mod = lambda s, b, h, q, k: s + WithMeta.factor * (q - k)  # noqa: E731
    for factor in (2.0, 3.0, 2.0):
        Meta.factor = factor
        yield mod, factor


@agreeing
def test_attributes_of_a_class_by_its_instance() -> Iterator[Step]:
    made = WithMeta()
    mods = (
        lambda s, b, h, q, k: s + made.times(q - k),
        lambda s, b, h, q, k: s + type(made).own * (q - k),
        lambda s, b, h, q, k: s + made.__class__.own * (q - k),
        lambda s, b, h, q, k: s + made.of_class(q - k),
    )
    for mod in mods:
        for own in (2.0, 3.0, 2.0):
            WithMeta.own = own
            yield mod, own


def test_numbers_of_modules_make_no_new_trace() -> None:
    module: Any = types.ModuleType("made_here_too")
    mod = lambda s, b, h, q, k: s + module.scale * (q - k)  # noqa: E731
    programs = set()
    for module.scale in (2.0, 3.0):
        programs.add(id(bind(Variant(score_mod=as_score(mod))).trace))
    assert len(programs) == 1
