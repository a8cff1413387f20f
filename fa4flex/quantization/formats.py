"""Formats of elements in 8 and 4 bits, and of their scales.

A scale is constant along what is summed, unless the tensor cores have block scales: queries have one for
each token, keys one for each tile of TILE keys, values one for each channel. MXFP8 (OCP 2023) and NVFP4 have
scales for blocks of 32 and 16 channels of every token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

TILE = 128
"""Keys of a tile, which share a scale."""


@dataclass(frozen=True)
class Format:
    """One format of elements.

    largest   greatest number that is one of its elements
    codes     function from float32 numbers within [-largest, largest] to the nearest elements, ties to even
    numbers   function from elements to float32 numbers
    block     channels of a token that share a scale; 0 where scales belong to tokens, tiles or channels
    scale     dtype of the scales
    """

    name: str
    largest: float
    codes: Callable[[Tensor], Tensor]
    numbers: Callable[[Tensor], Tensor]
    block: int = 0
    scale: torch.dtype = torch.float32

    def divisors(self, greatest: Tensor) -> Tensor:
        """Scales of float32 for greatest absolute values: 1 for zeros; NaN and infinity stay, so that what is
        scaled by them is NaN."""
        return torch.where(greatest == 0, 1.0, greatest / self.largest)

    def divided(self, x: Tensor, divisor: Tensor) -> Tensor:
        """Elements of x / divisor."""
        return self.codes((x / divisor).nan_to_num(0.0).clamp(-self.largest, self.largest))


def _floats(x: Tensor) -> Tensor:
    return x.to(torch.float32)


INT8 = Format("int8", 127.0, lambda x: x.round().to(torch.int8), _floats)
E4M3 = Format("float8_e4m3", 448.0, lambda x: x.to(torch.float8_e4m3fn), _floats)
MXFP8 = Format("mxfp8", 448.0, E4M3.codes, _floats, 32, torch.float8_e8m0fnu)


# --- four bits ----------------------------------------------------------------------------------------------

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1, by code."""


def _e2m1_codes(x: Tensor) -> Tensor:
    """Two elements of e2m1 in a byte, the first in its low half."""
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for number, (below, above) in enumerate(pairwise(_E2M1)):
        middle = (below + above) / 2
        code += (size >= middle if number % 2 else size > middle).to(torch.uint8)
    code |= torch.signbit(x).to(torch.uint8) << 3
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def _e2m1_numbers(codes: Tensor) -> Tensor:
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)
    return table[both]


NVFP4 = Format("nvfp4", 6.0, _e2m1_codes, _e2m1_numbers, 16, torch.float8_e4m3fn)


# --- block scales -------------------------------------------------------------------------------------------


def in_blocks(x: Tensor, form: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x [T, H, D], scales [T, H, D / block], and a float32 scale of each head [H].

    The last is 1 but for NVFP4, whose e4m3 scales need one to lie within their range.
    """
    blocks = x.unflatten(-1, (-1, form.block))
    greatest = blocks.abs().amax(-1)
    if form.scale == torch.float8_e8m0fnu:
        # The next power of two above: what is scaled by the one below would pass the greatest number.
        half, exponent = torch.frexp(torch.where(greatest.isfinite(), greatest, 0.0) / form.largest)
        exponent = torch.where(half == 0.5, exponent - 1, exponent)
        scales = torch.where(greatest == 0, 1.0, exponent.clamp(-127, 127).float().exp2())
        whole = torch.ones(x.shape[1], device=x.device)
    else:
        finite = torch.where(greatest.isfinite(), greatest, 0.0)
        most = finite.amax((0, 2)) if len(x) else finite.new_zeros(x.shape[1])
        whole = most / (form.largest * E4M3.largest)
        whole = torch.where(whole == 0, 1.0, whole)
        of_blocks = greatest / form.largest / whole[:, None]
        least = 2.0**-9  # the least number above zero: a block of zeros must not divide by zero
        scales = of_blocks.clamp(least, E4M3.largest).to(torch.float8_e4m3fn).float()
    # NaN for infinities as well: of these e4m3 makes its largest number.
    scales = torch.where(greatest.isfinite(), scales, torch.nan)
    divisor = (scales * whole[:, None]).unsqueeze(-1)
    codes = form.divided(blocks, divisor).flatten(-2)
    return codes, scales.to(form.scale), whole


def of_blocks(codes: Tensor, scales: Tensor, whole: Tensor, form: Format) -> Tensor:
    """Numbers [T, H, D] that codes of `in_blocks` stand for."""
    numbers = form.numbers(codes).unflatten(-1, (-1, form.block))
    return (numbers * (scales.float() * whole[:, None]).unsqueeze(-1)).flatten(-2)


FORMATS: dict[str, Format] = {form.name: form for form in (INT8, E4M3, MXFP8, NVFP4)}
"""Formats of queries and keys, by name."""
