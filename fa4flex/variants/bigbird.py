"""BigBird: a window, global blocks and a few random blocks, all at the granularity of blocks.

    allowed(q, kv) = Q or K is a global block, or |Q - K| <= window // 2, or K is one of Q's random blocks,
    Q = q // block, K = kv // block

Source: Zaheer et al., Big Bird, arXiv:2007.14062, section 2 and appendix D (ITC, global blocks first).
"""

from __future__ import annotations

import random
from typing import Any

import torch

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, show
from fa4flex.variants._common import whole


@mask_family
def bigbird(
    seq_len: int,
    block: int = 64,
    window: int = 3,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> MaskMod:
    """Self-attention over `seq_len` tokens; indices are absolute. Combine with `causal` for decoders.

    window         blocks in the band around the diagonal, odd
    global_blocks  leading blocks that attend, and are attended by, everyone
    random_blocks  further key blocks of each query block, drawn by `seed`; rows with fewer left take all
    device         where the table of random blocks lives: that of q

    Raises InputError.
    """
    sizes = {"seq_len": seq_len, "block": block, "window": window}
    seq_len, block, window = (whole("bigbird", name, value) for name, value in sizes.items())
    global_blocks = whole("bigbird", "global_blocks", global_blocks, least=0)
    whole("bigbird", "random_blocks", random_blocks, least=0)
    if window % 2 == 0:
        raise InputError(f"bigbird(window={window})", "an odd number of blocks", f"use {window + 1}")
    reach, leading = window // 2, global_blocks * block
    drawn = draw_blocks(-(-seq_len // block), reach, global_blocks, random_blocks, seed)
    columns = [torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*drawn, strict=True)]

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = q_idx // block
        allowed = (kv_idx >= (row - reach) * block) & (kv_idx < (row + reach + 1) * block)
        allowed = allowed | (kv_idx < leading) | (q_idx < leading)
        for column in columns:
            allowed = allowed | (kv_idx // block == column[row])
        return allowed

    return mod


def draw_blocks(blocks: int, reach: int, global_blocks: int, count: int, seed: int) -> list[list[int]]:
    """The random key blocks of each query block; a row with too few candidates repeats its own block."""
    generator = random.Random(seed)
    drawn = []
    for row in range(blocks):
        others = [k for k in range(global_blocks, blocks) if abs(k - row) > reach]
        chosen = generator.sample(others, min(count, len(others)))
        drawn.append(chosen + [row] * (count - len(chosen)))
    return drawn


def definition(q: int, kv: int, block: int, reach: int, global_blocks: int, drawn: list[list[int]]) -> bool:
    row, column = q // block, kv // block
    is_global = row < global_blocks or column < global_blocks
    return is_global or abs(row - column) <= reach or column in drawn[row]


def _of(s: Sizes, reach: int, global_blocks: int, random_blocks: int) -> Drawn:
    total, block, seed = s.of(640), s.of(32), s.some(1, least=0)
    window, device = 2 * reach + 1, torch.get_default_device()
    mask = bigbird(total, block, window, global_blocks, random_blocks, seed, device)
    drawn = draw_blocks(-(-total // block), reach, global_blocks, random_blocks, seed)
    return masked(s.square(total), mask, definition, block, reach, global_blocks, drawn)


CASES = (Case(lambda s: _of(s, 1, 1, 2)), Case(lambda s: _of(s, 0, 0, 1), compiled=False))
PICTURE = Picture("bigbird(128, block=8, random_blocks=2)")


if __name__ == "__main__":
    show(CASES)
