"""Public names and parameters: they equal a committed list, and guides import nothing else.

docs/stability.md says what is public. `pytest tests/packaging --update-golden` rewrites the list: a line that
goes is a removal, which needs a deprecation first.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "fa4flex", "fa4flex.variants", "fa4flex.nn", "fa4flex.parallel", "fa4flex.reference", "fa4flex.select",
    "fa4flex.trees",
    "ptxsim",
    "ptxsim.model", "fa4flex.integrations.transformers", "fa4flex.integrations.torch",
    "fa4flex.integrations.diffusers", "fa4flex.integrations.layers",
    "fa4flex.integrations.paged_cache", "fa4flex.integrations.latent_cache",
)  # fmt: skip
"""Modules whose `__all__` is public."""

SINGLE = {"fa4flex.primitives.mask": ["mask_family"], "fa4flex.primitives.score": ["score_family"]}
MADE_HERE = {
    "fa4flex.Attention", "fa4flex.Choice", "fa4flex.Mask", "fa4flex.Planes", "fa4flex.Quantized",
    "fa4flex.Reads", "fa4flex.ScoreMod", "fa4flex.trees.Folded",
    *(f"fa4flex.parallel.{name}" for name in ("ContextParallel", "Exchange", "Placement", "Plan")),
    *(f"ptxsim.{name}" for name in ("Fault", "Finding", "Gpu", "Result")),
    *(f"ptxsim.model.{name}" for name in ("Chip", "Prediction", "Trace")),
}  # fmt: skip
"""Classes whose objects functions return: how they are constructed is internal."""

OWN_USE = {
    "bind", "bounds", "brought", "check", "check_contents", "check_padded", "check_tokens", "check_used",
    "checked", "combined_with", "compute_dtype", "context", "cu_k", "differentiable", "digest", "fits",
    "incoming", "looks", "norms", "now", "outgoing", "output_dtype", "pages", "parts", "prepared", "role",
    "rotation", "spread", "src_data_rank", "stale", "together", "trace", "turned", "variant",
}  # fmt: skip
"""Attributes without an underscore that the package's other parts use, and users do not."""

INTERNAL = {"analysis", "layout", "primitives", "tracing"}
"""Pages about how things work inside, which import internal modules."""

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def inherited() -> set[str]:
    """Names of classes that public ones derive from, now: transformers adds one to torch.nn.Module when it
    makes a model, perhaps after this file was imported."""
    return set[str]().union(*(dir(kind) for kind in (torch.nn.Module, tuple, Exception)))


def names_of(module: str) -> list[str]:
    return SINGLE.get(module) or sorted(importlib.import_module(module).__all__)


def public_names() -> Iterator[str]:
    """One line for each public name, class attribute, and signature without annotations."""
    for module in (*MODULES, *SINGLE):
        for name in names_of(module):
            value = getattr(importlib.import_module(module), name)
            if isinstance(value, ModuleType):
                yield f"{module}.{name}"
            else:
                yield from described(f"{module}.{name}", value)


def described(path: str, value: Any) -> Iterator[str]:
    yield path if path in MADE_HERE else f"{path}{parameters(value)}"
    if inspect.isclass(value):
        called = {"__call__", "forward"} & vars(value).keys()
        for name in sorted(set(dir(value)) - inherited() - OWN_USE | called):
            if name in called or not name.startswith("_"):
                attribute = inspect.getattr_static(value, name)
                function = (
                    attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute
                )
                yield f"{path}.{name}{parameters(function) if inspect.isfunction(function) else ''}"


def parameters(value: Any) -> str:
    """`(a, b, *, c=...)`; "" for what is no callable."""
    if not callable(value):
        return ""
    given = inspect.signature(value).parameters.values()
    shown = [p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...) for p in given]
    return str(inspect.Signature(shown)).replace("Ellipsis", "...")


def test_public_names(golden: Callable[[str], None]) -> None:
    golden("\n".join(public_names()))


def test_every_public_module_is_named_in_the_guide() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    assert not [module for module in (*MODULES, *SINGLE) if f"`{module}`" not in page]


def test_every_variable_is_named_in_the_guide() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "fa4flex").rglob("*.py"))
    page = (ROOT / "docs" / "stability.md").read_text()
    assert not [name for name in set(re.findall(r"FA4FLEX_[A-Z_]*[A-Z]", sources)) if f"`{name}`" not in page]


@pytest.mark.parametrize("name", [*MODULES, *SINGLE])
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    bare = [each for each in names_of(name) if not inspect.getdoc(getattr(module, each))]
    assert bare in ([], ["B200"])  # an instance, which help() describes by its class


def test_guides_import_public_names() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [
        (page, block)
        for page in pages
        if page.stem not in INTERNAL
        for block in BLOCK.findall(page.read_text())
    ]
    internal = [
        f"{page.name}: {path}" for page, block in blocks for path in imported(block) if not is_public(path)
    ]
    assert not internal


def imported(source: str) -> Iterator[str]:
    """Dotted paths in fa4flex that `source` imports."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "fa4flex":
                yield from (f"{module}.{each.name}" for each in names)
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] == "fa4flex")


def is_public(path: str) -> bool:
    module, _, name = path.rpartition(".")
    return path in MODULES or (module in (*MODULES, *SINGLE) and name in names_of(module))
