"""The producer warp of codes: brings them as fwd_sm90's brings numbers. Transposed values of packed sequences
begin at whole tiles of scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutlass import Int32

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.codes import at_tiles
from fa4flex.kernels.common.key_values import KeyValues
from fa4flex.kernels.common.work import Work
from fa4flex.kernels.fwd_8bit_sm90.config import Config
from fa4flex.kernels.fwd_sm90 import producer as forward
from fa4flex.kernels.fwd_sm90.producer import Block


class Producer(forward.Producer):
    config: Config

    def contiguous(self, work: Work, kv_head: Int32, arguments: Arguments, block: Block) -> KeyValues:
        found: Any = super().contiguous(work, kv_head, arguments, block)
        if arguments.first_tiles is not None and self.config.transposed:
            of_tiles: Any = super().contiguous(at_tiles(work, arguments), kv_head, arguments, block)
            found = replace(found, v=of_tiles.v)
        made: KeyValues = found
        return made
