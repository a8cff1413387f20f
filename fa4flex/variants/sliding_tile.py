"""Sliding tile attention: neighbourhood attention between whole tiles of an image or a video.

Per axis of n tiles, with I the query's and J the key's tile and k the kernel in tiles:
    allowed = start <= J < start + k,   start = clamp(I - k // 2, 0, n - k)
Text tokens behind the canvas attend, and are attended by, everything.

Source: Zhang et al., Fast Video Generation with Sliding Tile Attention, arXiv:2502.04507, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._alone import show_mask
from fa4flex.variants._check import whole
from fa4flex.variants._positions import coordinate, strides

Sizes = tuple[int, ...]


@mask_family
def sliding_tile(canvas: Sizes, kernel: Sizes, tile: Sizes, text: int = 0) -> MaskMod:
    """Tokens in tile-major order: tile after tile (row-major), and all tokens of a tile together.

    canvas, kernel and tile are (height, width) or (time, height, width) in tokens; canvas and kernel are
    multiples of tile, kernel at most canvas. `text` tokens follow the canvas. Indices are absolute, over
    prod(canvas) + text tokens. Raises InputError.
    """
    if not all(
        isinstance(sizes, tuple) and len(sizes) == len(canvas) in (2, 3) for sizes in (canvas, kernel, tile)
    ):
        raise InputError(
            f"sliding_tile(canvas={canvas!r}, kernel={kernel!r}, tile={tile!r})",
            "three tuples of 2 or of 3 sizes",
            "e.g. sliding_tile((48, 48), (24, 24), (8, 8))",
        )
    for size, window, side in zip(canvas, kernel, tile, strict=True):
        _check_axis(size, window, side)
    text = whole("sliding_tile", "text", text, least=0)
    tiles = tuple(size // side for size, side in zip(canvas, tile, strict=True))
    windows = tuple(window // side for window, side in zip(kernel, tile, strict=True))
    per_tile, vision = math.prod(tile), math.prod(canvas)
    total = vision + text
    axes = [
        (coordinate(stride, tiles[i], i == 0), windows[i], windows[i] // 2, tiles[i] - windows[i])
        for i, stride in enumerate(strides(tiles))
    ]

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_tile, kv_tile = q_idx // per_tile, kv_idx // per_tile
        near = (q_idx < vision) & (kv_idx < vision)
        for place, window, half, last_start in axes:
            start = torch.clamp(place(q_tile) - half, 0, last_start)
            near = near & (place(kv_tile) >= start) & (place(kv_tile) < start + window)
        return near | ((kv_idx >= vision) & (kv_idx < total)) | ((q_idx >= vision) & (kv_idx < total))

    return mod


def _check_axis(size: int, window: int, side: int) -> None:
    for name, value in (("canvas", size), ("kernel", window), ("tile", side)):
        whole("sliding_tile", name, value)
    if size % side or window % side or window > size:
        raise InputError(
            f"sliding_tile: canvas {size}, kernel {window}, tile {side} along one axis",
            "canvas and kernel multiples of tile, kernel <= canvas",
            "pad the canvas, or choose another tile",
        )


def definition(q: int, kv: int, canvas: Sizes, kernel: Sizes, tile: Sizes, text: int) -> bool:
    """Two axes, literally: enumerate the tokens with their tiles, then compare tiles."""
    rows, columns = canvas[0] // tile[0], canvas[1] // tile[1]
    tokens = [(r, c) for r in range(rows) for c in range(columns) for _ in range(tile[0] * tile[1])]
    if q >= len(tokens) or kv >= len(tokens):
        return kv < len(tokens) + text
    for axis, count in enumerate((rows, columns)):
        width = kernel[axis] // tile[axis]
        first = min(max(tokens[q][axis] - width // 2, 0), count - width)
        if tokens[kv][axis] not in range(first, first + width):
            return False
    return True


def main() -> None:
    sizes = ((4, 8), (4, 6), (2, 2))
    show_mask(sliding_tile(*sizes, text=3), lambda q, kv: definition(q, kv, *sizes, 3), 35)


if __name__ == "__main__":
    main()
