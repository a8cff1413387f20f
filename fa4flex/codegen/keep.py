"""The pairs that dropout keeps, in PyTorch operations: primitives/dropout.py has the definition.

Numbers of 32 bits lie in int64 tensors; products of two of them wrap at 64 bits, as int64 does.
"""

from __future__ import annotations

import torch
from torch import Tensor

Value = Tensor | int

ROW_START, KEY_START = 0x243F6A88, 0x85A308D3
ROW_STEP, KEY_STEP = 0x9E3779B1, 0x85EBCA77
ROW_BITS = 0x80000001
LOW_SALT, HIGH_SALT = 0x53C5CA59, 0x74743C1B
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shifts and factors of MurmurHash3's finaliser, after which comes one more shift, by 16."""
WORD = 0xFFFFFFFF


def keep(seed: Value, threshold: Value, b: Value, h: Value, q: Value, kv: Value) -> Tensor:
    """True for pairs that are kept; all are int64, of shapes that broadcast with each other."""
    seed, b, h, q, kv = (torch.as_tensor(x, dtype=torch.int64) for x in (seed, b, h, q, kv))
    words = seed & WORD, (seed >> 32) & WORD, b, h
    row = ((_chain(ROW_START, words) + q * ROW_STEP) & WORD) | ROW_BITS
    pair = ((kv >> 4) << 3) | (kv & 7)
    group = (_chain(KEY_START, words) + pair * KEY_STEP) & WORD
    product = row * group
    product = ((product & WORD) ^ LOW_SALT) * (((product >> 32) & WORD) ^ HIGH_SALT)
    bits = product ^ (product >> 32)
    return ((bits >> ((kv & 8) << 1)) & 0xFFFF) >= threshold


def _chain(start: int, words: tuple[Tensor, ...]) -> Tensor:
    x = torch.full((), start, dtype=torch.int64, device=words[0].device)
    for word in words:
        x = _mix(x ^ (word & WORD))
    return x


def _mix(x: Tensor) -> Tensor:
    for shift, factor in MIX:
        x = ((x ^ (x >> shift)) * factor) & WORD
    return x ^ (x >> 16)
