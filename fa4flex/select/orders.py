"""Orders of tokens in which neighbours on a canvas are neighbours in the sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.exact import is_count

Shape = tuple[int, ...]


def tile_order(canvas: Shape, tile: Shape, device: torch.device | str = "cpu") -> Tensor:
    """Tokens of a row-major canvas (time, height, width) tile after tile: x[:, :, tile_order(...)] is in that
    order, and order.argsort() puts it back. Raises InputError for tiles that do not divide the canvas."""
    sizes = (canvas, tile)
    if not all(isinstance(x, (tuple, list)) and x and all(map(is_count, x)) for x in sizes):
        raise InputError(
            f"tile_order({canvas!r}, {tile!r})", "two tuples of positive ints", "e.g. (8, 8, 8), (4, 4, 4)"
        )
    if len(canvas) != len(tile) or any(size % side for size, side in zip(canvas, tile, strict=True)):
        raise InputError(
            f"tile_order({canvas}, {tile})", "tiles that divide the canvas along each axis", "pad the canvas"
        )
    places = torch.arange(math.prod(canvas), device=device)
    counts = [n for size, side in zip(canvas, tile, strict=True) for n in (size // side, side)]
    axes = len(canvas)
    order = (*range(0, 2 * axes, 2), *range(1, 2 * axes, 2))
    return places.view(counts).permute(order).flatten()
