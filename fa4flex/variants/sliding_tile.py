"""Sliding tile attention: neighbourhood attention between whole tiles of an image or a video.

Per axis of n tiles, with I the query's and J the key's tile and k the kernel in tiles:
    allowed = start <= J < start + k,   start = clamp(I - k // 2, 0, n - k)
Text tokens behind the canvas attend, and are attended by, everything.

Source: Zhang et al., Fast Video Generation with Sliding Tile Attention, arXiv:2502.04507, section 3.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, member, show
from fa4flex.variants._common import coordinate, strides, whole

Shape = tuple[int, ...]


@mask_family
def sliding_tile(canvas: Shape, kernel: Shape, tile: Shape, text: int = 0) -> MaskMod:
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


def definition(q: int, kv: int, canvas: Shape, kernel: Shape, tile: Shape, text: int) -> bool:
    """Literally: enumerate the tokens with their tiles, then compare tiles along each axis."""
    counts = [size // side for size, side in zip(canvas, tile, strict=True)]
    tokens = [place for place in product(*map(range, counts)) for _ in range(math.prod(tile))]
    if q >= len(tokens) or kv >= len(tokens):
        return kv < len(tokens) + text
    for axis, count in enumerate(counts):
        width = kernel[axis] // tile[axis]
        first = min(max(tokens[q][axis] - width // 2, 0), count - width)
        if tokens[kv][axis] not in range(first, first + width):
            return False
    return True


def _of(s: Sizes, *arguments: Any) -> Drawn:
    canvas, _, _, text = arguments
    return member(s.square(math.prod(canvas) + text), sliding_tile, definition, *arguments)


def _image(s: Sizes) -> Drawn:
    large = s.scale == 1
    return _of(s, (16, 24), (8, 12), (4, 4), 14) if large else _of(s, (4, 6), (2, 4), (2, 2), 3)


def _image_or_video(s: Sizes) -> Drawn:
    if s.rng is None:
        return _of(s, (2, 2, 4), (1, 2, 4), (1, 2, 2), 0)
    rng, axes = s.rng, s.rng.choice([2, 3])
    tile, tiles = (tuple(rng.randint(1, most) for _ in range(axes)) for most in (2, 3))
    canvas = tuple(n * side for n, side in zip(tiles, tile, strict=True))
    kernel = tuple(rng.randint(1, n) * side for n, side in zip(tiles, tile, strict=True))
    return _of(s, canvas, kernel, tile, rng.randint(0, 3))


CASES = (Case(_image), Case(_image_or_video, compiled=False))
PICTURE = Picture("sliding_tile((12, 12), (12, 4), (4, 4))", 144, 144)

if __name__ == "__main__":
    show(CASES)
