"""Base of forward kernels for few query rows, whose blocks share the keys of a tile: a kernel merges them."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from fa4flex.kernels.combine.kernel import Combine, combine_arguments
from fa4flex.kernels.common.arguments import Arguments, kv_heads
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.common.packed_rows import slices_of
from fa4flex.kernels.plan.target import ALL_SHARED


class SplitForward:
    """A kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    direction = "forward"
    """Schema of its arguments."""

    config: Any
    hooks: Hooks

    def merging(self, width: int, arguments: type) -> tuple[Combine, type]:
        """The kernel that merges splits, and the class of its arguments, `arguments` being this one's. width:
        of the output."""
        return Combine(width, self.hooks), combine_arguments(self.hooks.output is not None)

    def launch(self, device: Any, arguments: Arguments, stream: cuda.CUstream) -> None:
        """A block for each split of a sequence and KV head, and of a slice of its heads where they have
        several. device: the kernel with its arguments."""
        pairs = arguments.q.shape[0] * kv_heads(arguments)
        if self.config.slice_rows:
            pairs = pairs * slices_of(arguments, self.config.slice_rows)
        device.launch(
            grid=[pairs * arguments.splits, 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.config.blocks,
            preferred_smem_carveout=ALL_SHARED,
        )
