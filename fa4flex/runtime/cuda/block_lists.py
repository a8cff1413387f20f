"""Classes of blocks from the lists of a block map, or of units from those of a selection, by one launch, for
which the host reads no contents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.arguments import BLOCK_LISTS, LISTED_UNITS, Schema
from fa4flex.kernels.plan.problem import Problem
from fa4flex.primitives.block_lists import Lists
from fa4flex.runtime.cuda.device import faults
from fa4flex.runtime.cuda.device.kept_kernels import KeptKernels


def block_classes(lists: Lists, columns: int) -> Tensor:
    """Classes uint8 [B, H, R, columns]. What is wrong in the lists, a later call tells."""
    classes = lists[0].new_empty((*lists[0].shape, columns), dtype=torch.uint8)
    if classes.numel():
        kernel_of(lists).launch(*lists, classes, faults.table())
    return classes


def listed_units(ids: Tensor, counts: Tensor | None, columns: int) -> Tensor | None:
    """Classes uint8 [B, H, R, columns] of the units that rows of ids list; None while a CUDA graph is
    captured, before the first call of its kind."""
    lists = ids, counts
    if _kernels.must_wait(_look(lists), ids):
        return None
    classes = ids.new_empty((*ids.shape[:3], columns), dtype=torch.uint8)
    if classes.numel():
        _kernel_of(UNITS, LISTED_UNITS, lists).launch(ids, counts, classes)
    return classes


_kernels = KeptKernels()
"""Kernels by the dtypes of the lists."""

SOURCE = Source(
    "block_lists",
    '"""Makes classes of blocks from lists."""\n\n'
    "from fa4flex.kernels.block_lists.kernel import BlockLists\n\n"
    "kernel = BlockLists()\n",
)
UNITS = Source(
    "listed_units",
    '"""Makes classes of units from lists."""\n\n'
    "from fa4flex.kernels.block_lists.listed import ListedUnits\n\n"
    "kernel = ListedUnits()\n",
)


def kernel_of(lists: Lists) -> Kernel:
    """The kernel for such lists of blocks."""
    return _kernel_of(SOURCE, BLOCK_LISTS, lists)


def _look(lists: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    return tuple([None if x is None else x.dtype for x in lists])


def _kernel_of(source: Source, schema: Schema, lists: Sequence[Tensor | None]) -> Kernel:
    """The kernel of a source for tensors that are the first arguments of its schema."""
    dtypes, x = _look(lists), lists[0]
    assert x is not None

    def compiled(arch: str) -> Kernel:
        named = list(zip(schema.rows, dtypes))
        optional = tuple([row.name for row, dtype in named if row.when is None and dtype is not None])
        wide = tuple([row.name for row, dtype in named if dtype == torch.int64])
        return compile_kernel(source, Problem(64, 64), Signature(given=optional, wide=wide), arch)

    return _kernels.of(dtypes, x, compiled)
