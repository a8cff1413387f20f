"""Demonstration of a variant run alone: it draws itself and checks itself against its definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.base import call_mod
from fa4flex.primitives.mask import Mask
from fa4flex.primitives.score import ScoreMod

MaskDefinition = Callable[[int, int], bool]
ScoreDefinition = Callable[[float, int, int, int], float]


def allowed(mask: Mask, q_len: int, kv_len: int, b: int = 0, h: int = 0, num_heads: int = 1) -> Tensor:
    """bool [q_len, kv_len]: the mask evaluated at every pair of indices."""
    context = {"q_len": q_len, "kv_len": kv_len, "num_heads": num_heads}
    indices = (torch.tensor(b), torch.tensor(h), torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :])
    return torch.as_tensor(call_mod(mask, indices, context)).expand(q_len, kv_len)


def scored(mod: ScoreMod, scores: Tensor, b: int = 0) -> Tensor:
    """float [H, q_len, kv_len]: the score mod applied to `scores` of that shape."""
    heads, q_len, kv_len = scores.shape
    context = {"q_len": q_len, "kv_len": kv_len, "num_heads": heads}
    h, q, kv = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    result: Tensor = call_mod(mod, (scores, torch.tensor(b), h, q, kv), context)
    return result


def show_mask(mask: Mask, definition: MaskDefinition, q_len: int, kv_len: int | None = None) -> None:
    """Print the mask, queries down and keys across, `#` allowed; compare it with `definition(q, kv)`."""
    kv_len = q_len if kv_len is None else kv_len
    grid = allowed(mask, q_len, kv_len)
    print(mask)
    print("\n".join("".join("#" if pair else "." for pair in row) for row in grid.tolist()))
    for q in range(q_len):
        for kv in range(kv_len):
            if bool(grid[q, kv]) != definition(q, kv):
                raise AssertionError(f"{mask!r} at q={q}, kv={kv}: {bool(grid[q, kv])}, not so by definition")
    print(f"{q_len * kv_len} pairs agree with the definition")


def show_score(
    mod: ScoreMod, definition: ScoreDefinition, heads: int = 2, q_len: int = 6, kv_len: int = 6
) -> None:
    """Print the scores of head 0 for raw scores 0; compare random ones with `definition(score, h, q, kv)`."""
    print(mod)
    for row in scored(mod, torch.zeros(heads, q_len, kv_len))[0].tolist():
        print(" ".join(f"{value:7.3f}" for value in row))
    raw = 3 * torch.randn(heads, q_len, kv_len, generator=torch.Generator().manual_seed(0))
    result = scored(mod, raw)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in raw.shape)).tolist():
        value, wanted = float(result[tuple(index)]), definition(float(raw[tuple(index)]), *index)
        if not math.isclose(value, wanted, rel_tol=1e-5, abs_tol=1e-5):
            raise AssertionError(f"{mod!r} at (h, q, kv)={tuple(index)}: {value}, by definition {wanted}")
    print(f"{raw.numel()} scores agree with the definition")


def show_table(rows: list[tuple[Any, ...]]) -> None:
    """Print rows of numbers and words in columns."""
    for row in rows:
        print("  ".join(f"{cell:>10.4f}" if isinstance(cell, float) else f"{cell!s:>10}" for cell in row))
