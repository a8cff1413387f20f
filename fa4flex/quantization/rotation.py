"""Rotation of queries and keys by random signs and a Hadamard matrix: q.k stays, outliers are spread.

QuIP (Chee et al. 2023) and FlashAttention-3 (Shah et al. 2024, section 3.3) call it incoherent processing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.default_device import on_the_host


@dataclass(frozen=True)
class Rotation:
    """x -> H (s * x) on the last dimension of `width` channels.

    s are signs drawn from `seed`; H is the orthogonal Hadamard matrix of the largest power of two that
    divides `width`, on each block of so many channels.
    """

    width: int
    seed: int = 0

    @property
    def block(self) -> int:
        return self.width & -self.width

    def signs(self, device: torch.device) -> Tensor:
        """Signs [width] in float32, never to be written to."""
        return _on(self, device)[0]

    def of(self, x: Tensor) -> Tensor:
        """Rotated x, in float32."""
        signs, matrix = _on(self, x.device)
        return ((x.float() * signs).unflatten(-1, (-1, self.block)) @ matrix).flatten(-2)

    def undone(self, x: Tensor) -> Tensor:
        """x such that `of` it is this."""
        signs, matrix = _on(self, x.device)
        return (x.float().unflatten(-1, (-1, self.block)) @ matrix).flatten(-2) * signs


def _on(rotation: Rotation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Signs [width] and matrix [block, block], which is symmetric and its own inverse."""
    if torch.compiler.is_compiling():
        return _made(rotation, device)
    return _kept(rotation, device)


def _made(rotation: Rotation, device: torch.device) -> tuple[Tensor, Tensor]:
    channels = torch.arange(rotation.width, device=device)
    signs = 1.0 - 2.0 * (_mixed(channels + (rotation.seed << 20)) & 1)
    row = torch.arange(rotation.block, device=device)
    shared = row[:, None] & row  # an element's sign is the parity of the bits that its indices share
    for shift in (16, 8, 4, 2, 1):
        shared = shared ^ (shared >> shift)
    return signs, (1.0 - 2.0 * (shared & 1)) / math.sqrt(rotation.block)


_kept = functools.lru_cache(maxsize=64)(on_the_host(_made))
"""The same, kept by the rotation's numbers and the device, and never written to."""


def _mixed(x: Tensor) -> Tensor:
    """Integers of 32 bits whose low bits look random: twice a product and a shift, as hash functions end."""
    for factor in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
