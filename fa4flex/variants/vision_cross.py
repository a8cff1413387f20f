"""Cross-attention from text to the images that are in force: each image serves an interval of the text.

    allowed(q, kv) = start[i] <= q < stop[i],   i = kv // tokens_per_image

Source: Alayrac et al., Flamingo, arXiv:2204.14198, section 2.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, show
from fa4flex.variants._common import INTEGERS, table, whole


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


def definition(q: int, kv: int, intervals: list[list[int]], tokens_per_image: int) -> bool:
    owner = [image for image in range(len(intervals)) for _ in range(tokens_per_image)][kv]
    return q in range(*intervals[owner])


def _case(s: Sizes) -> Drawn:
    text, each = s.of(330), s.of(60)
    bounds = [[0, 80], [60, 200], [330, 330], [9, 330]]
    if s.rng is None:
        bounds = [[start * text // 330, stop * text // 330] for start, stop in bounds]
    else:
        bounds = [sorted(s.rng.randint(0, text) for _ in range(2)) for _ in bounds]
    mask = vision_cross(torch.tensor(bounds), each)
    return masked(replace(s, q_len=text, kv_len=4 * each), mask, definition, bounds, each)


CASES = (Case(_case),)
PICTURE = Picture("vision_cross(torch.tensor([[0, 60], [20, 60], [60, 128]]), 32)", 128, 96)

if __name__ == "__main__":
    show(CASES)
