"""Random mods that read extents, ask helpers for "number or tensor", and cast: equal to the float64
formula by every door and at every length.

FA4FLEX_RANDOM_MODS: how many mods are drawn. FA4FLEX_RANDOM_DOORS: which doors they go through, by name.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex

MODS = int(os.environ.get("FA4FLEX_RANDOM_MODS", "4"))
LENGTHS = (24, 40, 17)

HELPERS = """
import torch

def even(x):
    return x // 2 * 2 if isinstance(x, torch.Tensor) else x

def halved(x):
    return x // 2 if torch.is_tensor(x) else x + 1

def exact(x):
    return x if type(x) is int else x + 3

def either(x):
    return x - 5 if isinstance(x, (int, float)) else x * 3

def whole(x):
    return x.long() if hasattr(x, "dtype") and not torch.is_floating_point(x) else x

def sized(x):
    return x.numel() if isinstance(x, torch.Tensor) and x.ndim == 1 else 7
"""


class Draw:
    """Text of a score mod and of a mask, of q [B, H, N, D], a table [N] and one of integers [N]."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.constant = False
        """True if the mod needs an extent as a constant: no export serves all lengths then."""
        self.score = f"s + ({self.whole(3)} % 97 - 48) * 0.0625{self.per_extent()} + {self.element()}"
        self.mask = f"({self.integer(4)} % {self.random.choice((3, 5, 7))} < 2) | (i == j)"

    def per_extent(self) -> str:
        return f" / {self.extent()}" if self.random.random() < 0.7 else ""

    def element(self) -> str:
        extent = self.random.choice(("t.shape[0]", "len(t)", "t.size(0)", "q.shape[2]"))
        return f"t[{self.whole(3)} % {extent}]"

    def whole(self, depth: int) -> str:
        return f"({self.integer(depth)}).long()"

    def extent(self) -> str:
        """A positive int."""
        plain = (
            "t.shape[0]", "len(t)", "t.numel()", "q.shape[2]", "q.size(-2)", "n.size()[0]",
            "q[b, h].shape[0]", "sized(t)", "q.shape[-1]",
        )  # fmt: skip
        made = self.random.choice(plain)
        match self.random.randrange(8):
            case 0:
                return f"({made} // 2)"
            case 1:
                return f"({made} * 2 + 1)"
            case 2:
                return f"halved({made})"
            case 3:
                return f"exact({made})"
            case 4 if self.random.random() < 0.3:
                self.constant = True
                return f"max({made}, 20)"
        return made

    def integer(self, depth: int) -> str:
        if depth == 0 or self.random.random() < 0.1:
            return self.random.choice(("i", "j", "(i - j)", "(i + j)", "n[i]", "n[j]"))
        x = self.integer(depth - 1)
        match self.random.randrange(12):
            case 0 | 1 | 2:
                how = (
                    ".to(torch.int8)", ".to(torch.int16)", ".to(torch.int32)", ".byte()", ".int()",
                    ".short()", ".char()", ".to(dtype=torch.uint8)", ".type(torch.int32)",
                )  # fmt: skip
                return f"({x} * {self.random.choice((1, 37, 991, 2654435761))}){self.random.choice(how)}"
            case 3:
                return f"({x}).to(n.dtype)"
            case 4:
                return f"even({x})"
            case 5:
                return f"halved({x})"
            case 6:
                return f"either({x})"
            case 7:
                return f"(whole({x}) + {self.extent()})"
            case 8:
                return f"(whole({x}) % {self.extent()})"
            case 9:
                return f"({x} {self.random.choice('+-*^&|')} {self.integer(depth - 1)})"
            case 10:
                return f"torch.where({x} > {self.integer(depth - 1)}, {x}, {self.random.randrange(100)})"
        return f"({x} % 1000)"

    def functions(self, q: Tensor, t: Tensor, n: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The score mod and the mask; their closures hold the tensors."""
        space: dict[str, Any] = {}
        exec(compile(self.text(), "<a random mod>", "exec"), space)
        made: tuple[Callable[..., Any], Callable[..., Any]] = space["make"](q, t, n)
        return made

    def text(self) -> str:
        return (
            f"{HELPERS}\ndef make(q, t, n):\n"
            f"    def score(s, b, h, i, j):\n        return {self.score}\n"
            f"    def mask(b, h, i, j):\n        return {self.mask}\n"
            "    return score, mask\n"
        )


class Model(torch.nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        space: dict[str, Any] = {}
        exec(compile(draw.text(), "<a random mod>", "exec"), space)
        self.make = space["make"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, t: Tensor, n: Tensor) -> Tensor:
        score, mask = self.make(q, t, n)
        found: Tensor = fa4flex.attention(q, k, v, score_mod=score, mask=mask)
        return found


def inputs(length: int) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
    return q, k, v, torch.randn(length), torch.randint(-1000, 1000, (length,), dtype=torch.int32).long()


def formula(draw: Draw, given: tuple[Tensor, ...]) -> Tensor:
    """The mod itself, on all pairs at once."""
    q, k, v = (x.double() for x in given[:3])
    length = q.shape[2]
    score, mask = draw.functions(given[0], given[3].double(), given[4])
    i, j = torch.arange(length)[:, None].expand(length, length), torch.arange(length).expand(length, length)
    heads = []
    for h in range(2):
        s = score(q[0, h] @ k[0, h].T / 8**0.5, 0, h, i, j).masked_fill(~mask(0, h, i, j), -torch.inf)
        heads.append(s.softmax(-1) @ v[0, h])
    return torch.stack(heads)[None]


def _compiled(dynamic: bool | None) -> Callable[[Draw], Callable[..., Tensor]]:
    def door(draw: Draw) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return torch.compile(Model(draw), backend="eager", fullgraph=True, dynamic=dynamic)

    return door


def _exported(strict: bool) -> Callable[[Draw], Callable[..., Tensor]]:
    return lambda draw: _program(draw, strict).module()


def _program(draw: Draw, strict: bool) -> torch.export.ExportedProgram:
    n = torch.export.Dim("n", min=8, max=512)
    shapes = {x: {2: n} for x in "qkv"} | {x: {0: n} for x in "tn"}
    return torch.export.export(Model(draw), inputs(32), dynamic_shapes=shapes, strict=strict)


def _aoti(draw: Draw) -> Callable[..., Tensor]:
    path = torch._inductor.aoti_compile_and_package(_program(draw, strict=True))
    try:
        loaded: Callable[..., Tensor] = torch._inductor.aoti_load_package(path)
    finally:
        Path(path).unlink()
    return loaded


DOORS: dict[str, Callable[[Draw], Callable[..., Tensor]]] = {
    "eager": Model,
    "static": _compiled(False),
    "automatic": _compiled(None),
    "dynamic": _compiled(True),
    "strict export": _exported(True),
    "export": _exported(False),
    "aoti": _aoti,
}
OF_FILES = ("strict export", "export", "aoti")
ASKED = os.environ.get("FA4FLEX_RANDOM_DOORS", ",".join(set(DOORS) - {"aoti"})).split(",")


def _error(draw: Draw, door: str) -> str | None:
    """Faults of that door, if there are any."""
    call = DOORS[door](draw)
    for length in LENGTHS:
        given = inputs(length)
        error = (call(*given).double() - formula(draw, given)).abs().max().item()
        if not error < 2e-5:
            return f"{error:.1e} off at length {length}"
    return None


@pytest.mark.slow
@pytest.mark.timeout_s(0)
def test_random_mods_equal_the_formula(seed: int) -> None:
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    wrong = []
    for at in range(MODS):
        draw = Draw(seed + at)
        for door in ASKED:
            if draw.constant and door in OF_FILES:
                continue
            asked[door] += 1
            try:
                found = _error(draw, door)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            right[door] += found is None
            if found is not None:
                wrong.append(f"{door}, mod {seed + at}: {found}\n{draw.score}\n{draw.mask}")
    print({door: f"{right[door]} of {asked[door]}" for door in ASKED})
    assert not wrong, "\n\n".join(wrong)
