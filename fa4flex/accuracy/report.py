"""Errors of precisions against float64: tables, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fa4flex import reference
from fa4flex.accuracy.schemes import Scheme
from fa4flex.accuracy.tensors import QKV


@dataclass(frozen=True)
class Errors:
    """Errors of one precision on one kind of tensors.

    relative   root mean square error of the output over its root mean square
    worst_row  greatest 2-norm of a row's error, over the root mean square norm of a row
    lse        greatest absolute error of the log-sum-exp
    """

    tensors: str
    keys: int
    scheme: str
    relative: float
    worst_row: float
    lse: float


def judged(name: str, qkv: QKV, schemes: Sequence[Scheme]) -> list[Errors]:
    """Errors of every precision on these tensors of bfloat16."""
    exact, lse = reference.attention(*qkv)
    return [_errors(name, qkv[1].shape[2], scheme, scheme.attend(qkv), (exact, lse)) for scheme in schemes]


def _errors(
    name: str, keys: int, scheme: Scheme, found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]
) -> Errors:
    error, size = found[0] - exact[0], exact[0].square().sum(-1).mean().sqrt()
    worst = float(error.square().sum(-1).amax().sqrt() / size)
    relative = float(error.square().sum(-1).mean().sqrt() / size)
    return Errors(name, keys, scheme.name, relative, worst, float((found[1] - exact[1]).abs().max()))


def text(errors: Sequence[Errors]) -> str:
    """A table per number of keys: precisions by tensors, relative error and worst row of each."""
    parts = []
    for keys in dict.fromkeys(one.keys for one in errors):
        mine = [one for one in errors if one.keys == keys]
        names = list(dict.fromkeys(one.tensors for one in mine))
        wide = max(len(one.scheme) for one in mine)
        cell = max(13, *map(len, names))
        lines = [f"{keys} keys: relative error, worst row"]
        lines.append(" " * wide + "".join(f"  {name:>{cell}}" for name in names) + f"  {'lse':>8}")
        for scheme in dict.fromkeys(one.scheme for one in mine):
            row = {one.tensors: one for one in mine if one.scheme == scheme}
            cells = (f"{row[name].relative:.4f}, {row[name].worst_row:.3f}" for name in names)
            largest = max(one.lse for one in row.values())
            lines.append(f"{scheme:<{wide}}" + "".join(f"  {x:>{cell}}" for x in cells) + f"  {largest:8.1e}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def save(errors: Sequence[Errors], path: Path) -> None:
    """Bars of relative errors, a group per kind of tensors; the format is that of the path's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((one.tensors, one.keys) for one in errors))
    schemes = list(dict.fromkeys(one.scheme for one in errors))
    figure = Figure(figsize=(max(6.0, 1.2 * len(groups) + 2), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(schemes)
    for number, scheme in enumerate(schemes):
        by_group = {(one.tensors, one.keys): one.relative for one in errors if one.scheme == scheme}
        places = [i + (number - (len(schemes) - 1) / 2) * width for i in range(len(groups))]
        axes.bar(places, [by_group[group] for group in groups], width, label=scheme)
    axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), [f"{name}\n{keys} keys" for name, keys in groups])
    axes.set_ylabel("relative error of the output")
    axes.legend(frameon=False, ncols=4, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def seeded(seed: int | None) -> int:
    """The seed, or a fresh one."""
    return int(torch.seed() % 2**31) if seed is None else seed
