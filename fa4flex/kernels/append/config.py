"""Configuration of the kernel that appends to pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """dtype        of keys, values and pools
    angles       dtype of cosines and sines
    packed       tokens of all sequences follow each other; otherwise sequences are padded to one length
    together     elements that a thread moves at once: 8, or 1 of tensors of any strides
    interleaved  elements 2 i and 2 i + 1 turn together; otherwise i and i + half of those that turn
    """

    dtype: str = "bfloat16"
    angles: str = "float32"
    packed: bool = False
    together: int = 8
    interleaved: bool = False
