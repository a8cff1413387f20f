"""Refusals of what torch's flex_attention cannot express, with reasons and nearest alternatives."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.expr import loads
from fa4flex.errors import UnsupportedError
from fa4flex.primitives.precision import BY_FLEX, Precision, refuse_skip
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime.flex.mods import unrolled

MOST_PLACES = 8
"""Places that may read one captured tensor that needs a gradient."""

INSTEAD = "on a CPU, or a GPU with generated kernels"


def refuse_schedule(schedule: Schedule, on_cpu: bool, captured_gradients: bool) -> None:
    """Raise UnsupportedError for a schedule that torch's kernels do not have."""
    if schedule.split is not None:
        raise UnsupportedError(
            f'Schedule(split={schedule.split}) with backend "flex": torch cuts keys into parts by the shapes '
            "of a call, and bits depend on these",
            "split=None",
            f'leave split out, or use backend="auto" {INSTEAD}',
        )
    if schedule.next_tile != "auto":
        raise UnsupportedError(
            f'Schedule(next_tile={schedule.next_tile!r}) with backend "flex", whose kernels have one order',
            'next_tile="auto"',
            'leave it at "auto"',
        )
    if schedule.deterministic and captured_gradients and not on_cpu:
        raise UnsupportedError(
            'Schedule(deterministic=True) with backend "flex" and gradients of captured tensors, which torch '
            "adds up by atomic operations",
            "deterministic=False, or captured tensors without gradients",
            f'detach them, or use backend="auto" {INSTEAD}',
        )


def refuse_entropy(statistics: tuple[str, ...]) -> None:
    """Raise UnsupportedError for a statistic that torch's kernels do not compute."""
    if "entropy" in statistics:
        raise UnsupportedError(
            'the entropy with backend "flex": torch returns log-sum-exps and largest scores of rows',
            "lse, max_scores and max_logit",
            f'leave the entropy out, or use backend="auto" {INSTEAD}',
        )


def refuse_precision(precision: Precision, dtype: torch.dtype, on_cpu: bool) -> None:
    """Raise UnsupportedError for dtypes that torch's kernels do not compute with or write, and for what they
    cannot leave out."""
    refuse_skip(precision.skip, *BY_FLEX)
    own = torch.float64 if dtype == torch.float64 else torch.float32
    if precision.compute_dtype(dtype) != own:
        raise UnsupportedError(
            f'Precision(compute={precision.compute!r}) for {dtype} inputs with backend "flex"',
            f"{own}, in which torch computes scores and sums of such inputs",
            'leave compute="auto", or use backend="auto" on a CPU',
        )
    output = precision.output_dtype(dtype)
    if torch.finfo(output).eps < torch.finfo(dtype).eps:
        raise UnsupportedError(
            f'Precision(output={output}) for {dtype} inputs with backend "flex", which rounds outputs '
            f"to {dtype}",
            f"output=None, or a dtype that {dtype} holds",
            f"pass q, k and v in {output}",
        )
    if dtype == torch.float64 and not on_cpu:
        raise UnsupportedError(
            'float64 tensors on a GPU with backend "flex"',
            "bfloat16, float16 or float32",
            "cast them, or move them with .cpu() for exact arithmetic",
        )


def refuse_tensors(operands: tuple[Tensor, ...], names: tuple[str, ...]) -> None:
    """Raise UnsupportedError for captured tensors that torch's mods cannot read."""
    for tensor, name in zip(operands, names, strict=True):
        if tensor.dtype == torch.uint64:
            raise UnsupportedError(
                f'captured tensor {name!r} is uint64 with backend "flex": torch has few operations for it',
                "integers of another dtype",
                f"convert {name!r} with .to(torch.int64)",
            )


def places_of(facts: Facts, slots: frozenset[int]) -> frozenset[int]:
    """Slots, of those whose tensors need gradients, that several places of the score mod read.

    Raises UnsupportedError where there are too many for a copy each.
    """
    results = [node.value for node in loads(unrolled(facts.score))]
    for slot in slots:
        if results.count(slot) > MOST_PLACES:
            raise UnsupportedError(
                f"a captured tensor that needs a gradient, read in {results.count(slot)} places of a score "
                'mod, with backend "flex"',
                f"at most {MOST_PLACES}: torch differentiates one read of a tensor, each other has a copy",
                f'detach it, or use backend="auto" {INSTEAD}',
            )
    return frozenset(slot for slot in slots if results.count(slot) > 1)
