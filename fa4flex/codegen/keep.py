"""The pairs that dropout keeps, in PyTorch operations: primitives/dropout.py has the definition.

Numbers of 32 bits lie in int64 tensors; products of two of them wrap at 64 bits, as int64 does.
"""

from __future__ import annotations

import torch
from torch import Tensor

Value = Tensor | int

ROW_START, KEY_START = 0x243F6A88, 0x85A308D3
ROW_STEP, KEY_STEP = 0x9E3779B2, 0x85EBCA76
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shifts and factors of MurmurHash3's finaliser, after which comes one more shift, by 16."""
WORD = 0xFFFFFFFF


def keep(seed: Value, threshold: Value, b: Value, h: Value, q: Value, kv: Value) -> Tensor:
    """True for pairs that are kept; all are int64, of shapes that broadcast with each other."""
    seed, b, h, q, kv = (torch.as_tensor(x, dtype=torch.int64) for x in (seed, b, h, q, kv))
    words = seed & WORD, (seed >> 32) & WORD, b, h
    rows, keys = _chain(ROW_START, words), _chain(KEY_START, words)
    row, group = ((x | 1) + _pair(i) * step for x, i, step in ((rows, q, ROW_STEP), (keys, kv, KEY_STEP)))
    x = ((row & WORD) * (group & WORD) + _mix(rows ^ keys)) & WORD
    bits = x * _permuted(x)
    return _signed(bits >> (16 + ((q & 8) << 1) + (kv & 8))) < 128 - threshold


def _pair(i: Tensor) -> Tensor:
    """Number of a pair of indices i and i ^ 8."""
    return ((i >> 4) << 3) | (i & 7)


def _permuted(x: Tensor) -> Tensor:
    """Bytes 3, 2, 1, 0 become those that were 1, 3, 0, 2."""
    return ((x & 0xFF00) << 16) | ((x >> 24) << 16) | ((x & 0xFF) << 8) | ((x >> 16) & 0xFF)


def _signed(x: Tensor) -> Tensor:
    """The lowest byte as a signed number."""
    return ((x & 0xFF) ^ 0x80) - 0x80


def _chain(start: int, words: tuple[Tensor, ...]) -> Tensor:
    x = torch.full((), start, dtype=torch.int64, device=words[0].device)
    for word in words:
        x = _mix(x ^ (word & WORD))
    return x


def _mix(x: Tensor) -> Tensor:
    for shift, factor in MIX:
        x = ((x ^ (x >> shift)) * factor) & WORD
    return x ^ (x >> 16)
