"""Signatures of kernels: how the tensors of a call look, and its captured numbers by their kinds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.arguments import LENGTHS, forward_schema
from fa4flex.kernels.plan.looks import Given
from fa4flex.runtime.call import Call

Kinds = Mapping[int, str]
"""The kind of each captured number, by slot."""


def signature_of(kinds: Kinds, call: Call, more: tuple[str, ...] = ()) -> Signature:
    """Signature of the arguments of a call. more: names of arguments that are given besides the lengths."""
    used = tuple(row.name for row, x in zip(LENGTHS, call.lengths) if row.when is None and x is not None)
    units = tuple(x.ndim == 0 or x.stride(-1) == 1 for x in call.operands)
    heads_first = call.heads_first or call.packed
    even = tuple(map(_even_rows, call.operands))
    return Signature(heads_first, kinds_of(kinds, call), units, even, used + more, _wide(call))


def _wide(call: Call) -> tuple[str, ...]:
    """Integers of the source of keys that are int64."""
    rows = forward_schema(call.keys).found_in("call.kv")
    read = ((row, getattr(call.kv, row.field or row.name)) for row in rows if isinstance(row.look, Given))
    return tuple(row.name for row, x in read if x is not None and x.dtype == torch.int64)


def kinds_of(kinds: Kinds, call: Call) -> tuple[str, ...]:
    """Kinds of the captured numbers of a call."""
    return tuple(kinds.get(slot, "float") for slot in range(len(call.scalars)))


def _even_rows(x: Tensor) -> bool:
    """True if the elements 2 i and 2 i + 1 of any row are one aligned word."""
    steps = x.stride()
    aligned = x.data_ptr() % (2 * x.element_size()) == 0
    return x.ndim > 0 and steps[-1] == 1 and aligned and all(step % 2 == 0 for step in steps[:-1])


def numbers_of(kinds: Kinds, call: Call) -> tuple[int | float, ...]:
    """Captured numbers by their kinds: operators pass all of them as floats."""
    wanted = kinds_of(kinds, call)
    return tuple(
        float(x) if kind == "float" else int(x) for kind, x in zip(wanted, call.scalars, strict=True)
    )
