"""Block diffusion training mask: noisy tokens x_t in [0, n), then their clean copies x_0 in [n, 2n).

With Q and K the blocks (of `block` tokens) of query and key within their halves:
    noisy -> noisy   Q == K          clean -> clean   Q >= K
    noisy -> clean   Q > K           clean -> noisy   never

Source: Arriola et al., Block Diffusion (BD3-LM), arXiv:2503.09573, section 3.1 and appendix B.6.
"""

from __future__ import annotations

from typing import Any

import torch

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, member, show
from fa4flex.variants._common import whole


@mask_family
def block_diffusion(seq_len: int, block: int) -> MaskMod:
    """Self-attention over 2 * seq_len tokens; indices are absolute. The last block may be short.

    Raises InputError unless seq_len >= 1 and block >= 1.
    """
    seq_len = whole("block_diffusion", "seq_len", seq_len)
    block = whole("block_diffusion", "block", block)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        noisy = q_idx < seq_len
        # Where the query's block begins, in its own half; both kinds of keys are intervals bounded by it.
        begin = torch.where(noisy, q_idx, q_idx - seq_len) // block * block
        own_block = noisy & (kv_idx >= begin) & (kv_idx < begin + block) & (kv_idx < seq_len)
        clean_stop = seq_len + torch.where(noisy, begin, begin + block)
        return own_block | ((kv_idx >= seq_len) & (kv_idx < clean_stop))

    return mod


def definition(q: int, kv: int, seq_len: int, block: int) -> bool:
    q_clean, q_block = q // seq_len == 1, (q % seq_len) // block
    kv_clean, kv_block = kv // seq_len == 1, (kv % seq_len) // block
    if not kv_clean:
        return not q_clean and q_block == kv_block
    return q_block >= kv_block if q_clean else q_block > kv_block


def _case(s: Sizes) -> Drawn:
    seq_len, block = s.of(320), s.of(24, least=s.some(2))
    return member(s.square(2 * seq_len), block_diffusion, definition, seq_len, block)


CASES = (Case(_case),)
PICTURE = Picture("block_diffusion(64, 8)")


if __name__ == "__main__":
    show(CASES)
