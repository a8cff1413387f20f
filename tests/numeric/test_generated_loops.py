"""Folds over long axes: loops of the device, right on a CPU, and no longer a text for being longer loops."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runner import Grid
from test_generated_hooks import check, plan

from fa4flex.codegen.build import Program, build
from fa4flex.codegen.emit import emit_backward, emit_forward
from fa4flex.codegen.emit.nodes import LONGEST
from fa4flex.kernels.bwd_sm90.config import Config as BackwardConfig
from fa4flex.variant import compose

GRID = Grid(2, 2, 5, 6)
Mod = Callable[..., Any]


def tables(length: int, *, integer: bool = False) -> list[torch.Tensor]:
    found = [torch.randn(2, 2, 6, length) / length**0.5 for _ in range(2)]
    return [(9 * x).int() for x in found] if integer else found


def folds(length: int) -> dict[str, Mod]:
    """Mods by what they fold; each reads a vector of a query and one of a key."""
    t, u = tables(length)
    n, m = tables(length, integer=True)

    def under_a_cap(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.tanh(s + torch.dot(t[b, h, q], u[b, h, kv]))

    def in_a_row(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + t[b, h, q].sum() * u[b, h, kv].abs().sum() + t[0, 0, 0].sum()

    def nested(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + (t[b, h, q, :, None] * u[b, h, kv, None, :7]).tanh().sum((-1, -2))

    return {
        "sum": lambda s, b, h, q, kv: s + 0.3 * torch.dot(t[b, h, q], u[b, h, kv]),
        "under a cap": under_a_cap,
        "in a row": in_a_row,
        "product": lambda s, b, h, q, kv: s + (1 + 0.1 * t[b, h, q] * u[b, h, kv]).prod(-1),
        "largest": lambda s, b, h, q, kv: s + (t[b, h, q] * u[b, h, kv]).amax(-1),
        "smallest": lambda s, b, h, q, kv: s * (t[b, h, q] - u[b, h, kv]).amin(-1),
        "nested": nested,
        "integers": lambda s, b, h, q, kv: s + (n[b, h, q] * m[b, h, kv]).sum(-1),
        "largest integer": lambda s, b, h, q, kv: s + (n[b, h, q] - 99 * m[b, h, kv].abs()).amax(-1),
        "smallest integer": lambda s, b, h, q, kv: s + (n[b, h, q] + 99 * m[b, h, kv].abs()).amin(-1),
        "any": lambda s, b, h, q, kv: torch.where((t[b, h, q] > 8 * u[b, h, kv].abs()).any(-1), s, -s),
        "all": lambda s, b, h, q, kv: torch.where((t[b, h, q] < 1 + u[b, h, kv]).all(-1), s, -s),
    }


def program(mod: Mod) -> Program:
    return build(compose(score_mod=mod))


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("name", folds(1))
def test_loops(name: str, wide: bool) -> None:
    """Folds by loops are those of all terms, of which there are a few more than are ever written out."""
    found = program(folds(LONGEST + 7)[name])
    check(found.facts, GRID, found.captured(), "none", wide_index=wide)


def test_masks() -> None:
    t, u = tables(LONGEST + 1)
    found = build(compose(mask=lambda b, h, q, kv: torch.dot(t[b, h, q], u[b, h, kv]) > 0))
    check(found.facts, GRID, found.captured(), "tables")


@pytest.mark.parametrize("name", folds(1))
def test_text_does_not_grow(name: str) -> None:
    texts = [emit_forward(program(folds(n)[name]).facts, plan("none")).text for n in (64, 1024)]
    assert texts[0].replace("64", "1024") == texts[1].replace("64", "1024")
    assert texts[0].count("\n") < 60
    assert "in range(" not in texts[0] or name == "nested"


@pytest.mark.parametrize("length", [5, 64])
@pytest.mark.parametrize("name", ["dot", "product", "largest"])
def test_text_of_gradients(name: str, length: int) -> None:
    """Analysis makes axes of its own, and each has a name in Python; gradients along long ones are loops."""
    t, u = (x.requires_grad_() for x in tables(length))
    mods: dict[str, Mod] = {
        "dot": lambda s, b, h, q, kv: s + torch.dot(t[b, h, q], u[b, h, kv]),
        "product": lambda s, b, h, q, kv: s + (t[b, h, q] * u[b, h, kv]).prod(-1),
        "largest": lambda s, b, h, q, kv: s + (t[b, h, q] * u[b, h, kv]).amax(-1),
    }
    facts = program(mods[name]).facts
    slots = sorted({term.slot for term in facts.gradient.captured})
    given = plan("none", gradients=tuple((slot, "sum") for slot in slots), dtype="bfloat16")
    given.copies, given.config = False, lambda: BackwardConfig(128, 128)
    source = emit_backward(facts, given)
    ast.parse(source.text)
    assert ("loop=(64,)" in source.text) == (length == 64)
    assert length == 5 or source.text.count("\n") < 200
