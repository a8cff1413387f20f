"""Head scale: the output of each head is multiplied by a learned number.

    out[b, h, q, d] * scale[h]

Source: Shleifer et al., "NormFormer", arXiv:2110.09456, section 3 (head-wise scaling of attention outputs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.output import OutputFunction, output_family
from fa4flex.variants._cases import Case, Drawn, Sizes, applied, show
from fa4flex.variants._common import FLOATS, for_heads, table
from fa4flex.variants.causal import causal


@output_family
def head_scale(scale: Tensor) -> OutputFunction:
    """scale: learnable floating tensor [H], one number per query head. Raises InputError."""
    scale = table("head_scale", "scale", scale, FLOATS, (1,), "[H]")

    def mod(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
        return out * scale[h]

    return for_heads(mod, scale.shape[0])


def definition(out: float, scale: float) -> float:
    return out * scale


def _learned(s: Sizes) -> Drawn:
    scale = s.learned(1 + torch.randn(s.heads) / 4)
    return applied(s, head_scale, lambda x, b, h, q, d: definition(x, float(scale[h])), scale, mask=causal)


CASES = (Case(_learned),)
PICTURE = None

if __name__ == "__main__":
    show(CASES)
