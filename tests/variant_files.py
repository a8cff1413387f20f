"""Files of variants: what each declares, and in words what it lacks."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from types import ModuleType

import pytest

from fa4flex import variants
from fa4flex.variants._cases import Case, Picture, Sizes


def at_random(seed: int) -> Sizes:
    """Sizes of a small call, of random lengths."""
    rng = random.Random(seed)
    batch, heads, q_len, kv_len = (rng.randint(1, most) for most in (3, 4, 20, 20))
    return Sizes(batch, heads, 1, q_len, kv_len, rng=rng)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"fa4flex.variants.{name}")


def cases_of(name: str) -> tuple[Case, ...]:
    """Cases of a variant. Raises AssertionError where its file declares none."""
    module = module_of(name)
    assert not list(lacking(module)), "\n".join(lacking(module))
    cases: tuple[Case, ...] = module.CASES
    return cases


def lacking(module: ModuleType) -> Iterator[str]:
    """Words for what the file of a variant must declare and does not."""
    file = f"fa4flex/variants/{module.__name__.rpartition('.')[2]}.py"
    if not getattr(module, "CASES", ()):
        yield f"{file} declares no CASES: compositions with their definitions, as sliding_window.py has"
    elif not any(case.compiled or not case.kernels for case in module.CASES):
        yield f"{file} has no case for GPUs: all of its CASES are compiled=False"
    if not isinstance(getattr(module, "PICTURE", "absent"), Picture | None):
        yield f"{file} declares no PICTURE: Picture(code) for the gallery, or None"
    if "\nSource: " not in (module.__doc__ or ""):
        yield f"{file} names no source: a paragraph 'Source: ...' at the end of its docstring"
    if "\n    " not in (module.__doc__ or ""):
        yield f"{file} states no formula: indented lines in its docstring"


CASES = [
    pytest.param(case, id=f"{name} {number}")
    for name in variants.__all__
    for number, case in enumerate(cases_of(name))
]
"""Every case of every variant, as a parameter of a test."""
