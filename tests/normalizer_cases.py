"""Normalisers with what they capture, for calls of every kind: see output_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from output_cases import Sizes
from torch import Tensor

from fa4flex.primitives.normalizer import Normalizer
from fa4flex.variants import relu_squared, sigmoid_attention, silu_attention, softmax_plus, softpick

Leaf = Callable[..., Tensor]


def biased(s: Sizes, leaf: Leaf) -> tuple[Any, list[Tensor]]:
    """A function of all indices, with learned tensors."""
    bias, slope = leaf(s.heads), leaf(7)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, num_heads: Any) -> Any:
        return torch.sigmoid(score + bias[h]) * slope[(q_idx + 2 * kv_idx) % 7] + (b + 1) / num_heads

    return Normalizer.elementwise(mod), [bias, slope]


def linear(s: Sizes, leaf: Leaf) -> tuple[Any, list[Tensor]]:
    """The score itself."""
    return Normalizer.elementwise(lambda score, b, h, q_idx, kv_idx: score), []


def wild(s: Sizes, leaf: Leaf) -> tuple[Any, list[Tensor]]:
    """A function that is infinite, or no number, of scores that a causal mask hides: it is not asked about
    them."""

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        return torch.sigmoid(score) / torch.sqrt(1.0 + q_idx + (kv_len - q_len) - kv_idx)

    return Normalizer.elementwise(mod), []


NORMALIZERS: dict[str, Callable[[Sizes, Leaf], tuple[Any, list[Tensor]]]] = {
    "softmax_plus": lambda s, leaf: (softmax_plus(2.5), []),
    "softpick": lambda s, leaf: (softpick(), []),
    "sigmoid": lambda s, leaf: (sigmoid_attention(), []),
    "silu": lambda s, leaf: (silu_attention(), []),
    "relu_squared": lambda s, leaf: (relu_squared(4.0), []),
    "biased": biased,
    "linear": linear,
}
ELEMENTWISE = ("sigmoid", "silu", "relu_squared", "biased", "linear")
