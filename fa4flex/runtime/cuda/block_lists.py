"""Classes of blocks from the lists of a block map, by one launch, for which the host reads no contents."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4flex.codegen.emit.source import Source
from fa4flex.compiler.compile import Kernel, compile_kernel
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.arguments import BLOCK_LISTS
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


_kernels = KeptKernels()
"""Kernels by the dtypes of the lists."""

SOURCE = Source(
    "block_lists",
    '"""Makes classes of blocks from lists."""\n\n'
    "from fa4flex.kernels.block_lists.kernel import BlockLists\n\n"
    "kernel = BlockLists()\n",
)


def kernel_of(lists: Lists) -> Kernel:
    """The kernel for such lists."""
    dtypes = tuple([None if x is None else x.dtype for x in lists])

    def compiled(arch: str) -> Kernel:
        named = list(zip(BLOCK_LISTS.names, dtypes))
        optional = tuple([name for name, dtype in named[2:] if dtype is not None])
        wide = tuple([name for name, dtype in named if dtype == torch.int64])
        return compile_kernel(SOURCE, Problem(64, 64), Signature(given=optional, wide=wide), arch)

    return _kernels.of(dtypes, lists[0], compiled)
