"""Precisions as kernels have them: formats of q, k and v, rounding of probabilities, and sums.

Sums of 8-bit products are emulated: on Hopper with the chip's 13 fraction bits (ptxsim/units/aligned.py),
added to float32 at every tile or never; on Blackwell they are as good as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fa4flex.accuracy.tensors import QKV
from fa4flex.quantization.formats import E4M3, TILE
from fa4flex.quantization.quantize import quantize
from ptxsim.units.aligned import multiply_add

STEP = 32
"""Keys that one instruction of 8-bit products sums."""
LARGEST_P = 256.0
"""Number that probabilities of 8 bits are multiplied by: the largest of a tile is at most that."""

Sums = Literal["hopper, by tile", "hopper", "float32"]


class Operands(NamedTuple):
    """Numbers that q and k stand for, and values as operands: v = operand * scale + offset, by channel."""

    q: Tensor
    k: Tensor
    bias: Tensor | None
    v: Tensor
    scale: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Scheme:
    """One precision. operands: of q, k, v [1, H, S, D]; probabilities: "bfloat16" or "float8_e4m3"."""

    name: str
    operands: Callable[[QKV], Operands]
    probabilities: str
    sums: Sums = "float32"

    def attend(self, qkv: QKV) -> tuple[Tensor, Tensor]:
        """out [1, H, rows, D] and lse [1, H, rows], float64, of bfloat16 tensors."""
        given = self.operands(qkv)
        scores = given.q.double() @ given.k.double().mT
        if given.bias is not None:
            scores += given.bias.double().unsqueeze(-1)
        scores /= given.q.shape[-1] ** 0.5
        lse = scores.logsumexp(-1)
        values = given.v
        each = [self._product(s, v) for s, v in zip(scores[0], values[0])]
        weighted = torch.stack(each).unsqueeze(0)
        out = weighted * (scores.amax(-1) - lse).exp().unsqueeze(-1)
        return out * given.scale.double() + given.offset.double(), lse

    def _product(self, scores: Tensor, values: Tensor) -> Tensor:
        """Sum over keys of exp(score - largest score of the row) times the operand: scores [rows, keys]."""
        out = scores.new_zeros(len(scores), values.shape[-1])
        largest = scores.new_full((len(scores), 1), -torch.inf)
        whole = torch.zeros_like(out)  # what one level of sums leaves in the accumulator
        for start in range(0, scores.shape[1], TILE):
            tile, of_tile = scores[:, start : start + TILE], values[start : start + TILE]
            before, largest = largest, torch.maximum(largest, tile.amax(1, keepdim=True))
            past = (before - largest).exp()
            weights = (tile - largest).exp().float()
            if self.probabilities == "bfloat16":
                out = out * past + (weights.bfloat16().double() @ of_tile.double())
                continue
            weights = E4M3.numbers(E4M3.codes(weights * LARGEST_P))
            if self.sums == "hopper":
                whole = _steps(weights, of_tile, (whole * past).float())
            elif self.sums == "hopper, by tile":
                out = out * past + _steps(weights, of_tile, torch.zeros_like(out))
            else:
                out = out * past + weights.double() @ of_tile.double()
        out = out + whole
        return out if self.probabilities == "bfloat16" else out / LARGEST_P


def _steps(weights: Tensor, values: Tensor, sums: Tensor) -> Tensor:
    """sums + weights @ values as wgmma adds e4m3 products."""
    total: Any = sums.float().numpy()
    for first in range(0, weights.shape[1], STEP):
        a, b = weights[:, first : first + STEP].numpy(), values[first : first + STEP].float().numpy()
        total = multiply_add(
            np.ascontiguousarray(a), np.ascontiguousarray(b.T), total, ("e4m3", "e4m3"), "f32"
        )
    return torch.from_numpy(total).double()


# --- operands -----------------------------------------------------------------------------------------------


def _as_given(qkv: QKV) -> Operands:
    q, k, v = qkv
    return Operands(q, k, None, v, torch.ones(1), torch.zeros(1))


def _per_head(qkv: QKV) -> Operands:
    """e4m3 with one scale per head and tensor, as FlashAttention-3's kernel and cuDNN's take them."""
    numbers, scales = [], []
    for x in qkv:
        scale = E4M3.divisors(x.float().abs().amax((2, 3), keepdim=True))
        numbers.append(E4M3.numbers(E4M3.divided(x.float(), scale)))
        scales.append(scale)
    q, k = (x * scale for x, scale in zip(numbers[:2], scales))
    return Operands(q, k, None, numbers[2], scales[2], torch.zeros(1))


def _quantized(qk: Any, pv: Any) -> Callable[[QKV], Operands]:
    def operands(qkv: QKV) -> Operands:
        codes = quantize(*qkv, qk=qk, pv=pv)
        q, k, v, bias = codes.dequantize()
        if codes.v_scale is None or codes.v_offset is None:
            return Operands(q, k, bias, v, torch.ones(1), torch.zeros(1))
        scale, offset = (x.unsqueeze(2) for x in (codes.v_scale, codes.v_offset))
        return Operands(q, k, bias, E4M3.numbers(E4M3.codes((v - offset) / scale)), scale, offset)

    return operands


SCHEMES = (
    Scheme("bfloat16", _as_given, "bfloat16"),
    Scheme("e4m3 per head (FA3)", _per_head, "float8_e4m3", "hopper"),
    Scheme("int8, e4m3", _quantized("int8", "float8_e4m3"), "float8_e4m3", "hopper, by tile"),
    Scheme("int8, e4m3, one level", _quantized("int8", "float8_e4m3"), "float8_e4m3", "hopper"),
    Scheme("e4m3, e4m3", _quantized("float8_e4m3", "float8_e4m3"), "float8_e4m3", "hopper, by tile"),
    Scheme("int8, bfloat16", _quantized("int8", "bfloat16"), "bfloat16"),
    Scheme("mxfp8, e4m3", _quantized("mxfp8", "float8_e4m3"), "float8_e4m3"),
    Scheme("nvfp4, e4m3", _quantized("nvfp4", "float8_e4m3"), "float8_e4m3"),
)
"""Products q.k and P v by format. The first is what the others are compared with."""
