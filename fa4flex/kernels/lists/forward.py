"""Launch of a forward kernel for listed keys."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from fa4flex.kernels.combine.split_forward import ALL_SHARED, SplitForward
from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.lists.tiles import tiles_of_launch


class ListsForward(SplitForward):
    """A kernel for one Config and one variant's Hooks; `compile` takes the object itself."""

    def launch(self, device: Any, arguments: Arguments, stream: cuda.CUstream) -> None:
        """A block for each split of a tile."""
        blocks = tiles_of_launch(arguments, self.config)
        if self.config.splits:
            blocks = blocks * arguments.splits
        device.launch(
            grid=[blocks, 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.config.blocks,
            preferred_smem_carveout=ALL_SHARED,
        )
