"""Cross-attention from text to the images that are in force: each image serves an interval of the text.

    allowed(q, kv) = start[i] <= q < stop[i],   i = kv // tokens_per_image

Source: Alayrac et al., Flamingo, arXiv:2204.14198, section 2.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._alone import show_mask
from fa4flex.variants._check import INTEGERS, table, whole


@mask_family
def vision_cross(intervals: Tensor, tokens_per_image: int) -> MaskMod:
    """intervals [images, 2]: the text tokens [start, stop) that attend each image; they may overlap.

    Queries are text tokens, keys the tokens of all images one after the other; indices are absolute.
    Raises InputError.
    """
    intervals = table("vision_cross", "intervals", intervals, INTEGERS, (2,), "[images, 2]")
    if intervals.shape[1] != 2:
        raise InputError(
            f"vision_cross(intervals=<{list(intervals.shape)}>)", "[images, 2]", "stack starts and stops last"
        )
    tokens = whole("vision_cross", "tokens_per_image", tokens_per_image)
    start, stop = intervals[:, 0].contiguous(), intervals[:, 1].contiguous()

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        image = kv_idx // tokens
        return (q_idx >= start[image]) & (q_idx < stop[image])

    return mod


def definition(q: int, kv: int, intervals: list[tuple[int, int]], tokens_per_image: int) -> bool:
    owner = [image for image in range(len(intervals)) for _ in range(tokens_per_image)][kv]
    return q in range(*intervals[owner])


def main() -> None:
    intervals = [(0, 5), (1, 5), (5, 10)]
    show_mask(vision_cross(torch.tensor(intervals), 3), lambda q, kv: definition(q, kv, intervals, 3), 10, 9)


if __name__ == "__main__":
    main()
