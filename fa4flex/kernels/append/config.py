"""Configuration of the kernel that appends to pages."""

from __future__ import annotations

from dataclasses import dataclass

E4M3_LARGEST = 448.0
"""Largest number of e4m3: larger ones are stored as it."""


@dataclass(frozen=True)
class Config:
    """dtype        of keys, values and queries
    pool         dtype of the pools: as the tokens, or uint8, the bytes of e4m3
    angles       dtype of cosines and sines
    weights      dtype of the norms' weights
    packed       tokens of all sequences follow each other; otherwise sequences are padded to one length
    together     elements that a thread moves at once: 8, or 1 of tensors of any strides
    interleaved  elements 2 i and 2 i + 1 turn together; otherwise i and i + half of those that turn
    unit_offset  heads are multiplied by 1 + weight
    own_scales   each token's heads get scales of their own, which are written, too
    """

    dtype: str = "bfloat16"
    pool: str = "bfloat16"
    angles: str = "float32"
    weights: str = "float32"
    packed: bool = False
    together: int = 8
    interleaved: bool = False
    unit_offset: bool = False
    own_scales: bool = False

    @property
    def eight_bit(self) -> bool:
        return self.pool == "uint8"
