"""Quantized: queries, keys and values in 8 and 4 bits, and all that tells what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fa4flex.primitives.base import show
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.arrangement import Arrangement
from fa4flex.quantization.formats import E4M3, FORMATS, of_blocks
from fa4flex.quantization.rotation import Rotation
from fa4flex.quantization.tokens import Tokens
from fa4flex.runtime import autocast

Keys = Literal["int8", "float8_e4m3", "mxfp8", "nvfp4"]
"""Formats of queries and keys."""
Values = Literal["float8_e4m3", "bfloat16"]
"""Formats of values; "bfloat16" are values as they were given."""


class Dequantized(NamedTuple):
    """Numbers that codes stand for, in float32: scores are scale * (q.k + bias) before a score mod.

    q, k, v   in the layout that was quantised
    bias      [B, Hq, Sq], packed [Hq, Tq]: the part of q.k that the mean of the keys has; None without one
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """Codes and scales, as fa4flex.quantize makes them. N sequences, T tiles of 128 keys of all of them.

    q, k       codes in the layout that was given; two to a byte for "nvfp4"
    v          e4m3 [B, Hkv, Dv, columns], packed [Hkv, Dv, 128 T]: transposed, 16 keys in the order
               0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, tiles filled up with zeros; or the values as given
    q_scale    float32 [B, Hq, Sq], packed [Hq, Tq]: one of each token; or of blocks of channels
               [tokens, Hq, D / block], with `whole` [2, heads] over q and k
    k_scale    float32 [B, Hkv, tiles], packed [Hkv, T]: one of each tile of a sequence; or of blocks
    v_scale    float32 [N, Hkv, Dv]; None for values as given
    q_bias     float32 [B, Hq, Sq], packed [Hq, Tq]: q times the mean of the keys; None where it stayed in k
    v_offset   float32 [N, Hkv, Dv], added to every value; None without one
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor | None
    q_bias: Tensor | None
    v_offset: Tensor | None
    whole: tuple[Tensor, Tensor] | None
    qk: Keys
    pv: Values
    rotation: tuple[int, int] | None
    """Width and seed of the rotation that q and k went through (see fa4flex/quantization/rotation.py)."""
    layout: Literal["bhsd", "bshd"]
    varlen: Varlen | None
    dtype: torch.dtype
    """dtype of q as it was given, and of outputs."""
    k_scales: Literal["tile", "token"] = "tile"
    """Granularity of k_scale: that of tokens is [B, Hkv, Skv], packed [Hkv, Tk]."""
    v_scales: Literal["channel", "token"] = "channel"
    """Granularity of v_scale: with that of tokens, v is e4m3 in the layout that was given."""
    given: tuple[Tensor, Tensor, Tensor] | None = None
    """Tensors that were rounded, to which gradients pass; None where none requires some."""

    def dequantize(self) -> Dequantized:
        """Numbers that the codes stand for, rotated back. They are what attention over the codes means.

        Their gradients are those of what was rounded: of q and v as they are, of k minus its mean.
        """
        with autocast.off(self.q):
            return _learned(_dequantized(self), self)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name}={show(getattr(self, name))}" for name in "qkv")
        varlen = "" if self.varlen is None else f", varlen={self.varlen!r}"
        return f"Quantized(qk={self.qk!r}, pv={self.pv!r}, {tensors}{varlen})"


# --- numbers ------------------------------------------------------------------------------------------------


def _dequantized(codes: Quantized) -> Dequantized:
    """Queries, keys, values and bias of codes; tokens that take no part are zeros in k and v."""
    place = Arrangement(codes.layout, codes.varlen)
    keys, form = place.of_keys(codes.k), FORMATS[codes.qk]
    q, k = place.tokens(codes.q), place.tokens(codes.k)
    if codes.whole is not None:
        q = of_blocks(q, codes.q_scale, codes.whole[0], form)
        k = of_blocks(k, codes.k_scale, codes.whole[1], form)
    else:
        q = form.numbers(q) * place.of_rows(codes.q_scale).unsqueeze(-1)
        by_token = codes.k_scales == "token"
        of_k = codes.k_scale if by_token else _tiles_first(codes.k_scale, place)
        each = place.of_rows(of_k) if by_token else keys.of_tiles(of_k)
        k = keys.cleared(form.numbers(k) * each.unsqueeze(-1))
    if codes.rotation is not None:
        rotation = Rotation(*codes.rotation)
        q, k = rotation.undone(q), rotation.undone(k)
    v = codes.v.float() if codes.v_scale is None else place.laid(_values(codes, keys, place), codes.k)
    return Dequantized(place.laid(q, codes.q), place.laid(k, codes.k), v, codes.q_bias)


def _tiles_first(scale: Tensor, place: Arrangement) -> Tensor:
    """Scales [tiles, H] of all sequences."""
    return scale.T if place.packed else scale.transpose(1, 2).flatten(0, 1)


def _values(codes: Quantized, keys: Tokens, place: Arrangement) -> Tensor:
    """Values [T, H, D] of codes."""
    assert codes.v_scale is not None
    if codes.v_scales == "token":
        numbers = E4M3.numbers(place.tokens(codes.v)) * place.of_rows(codes.v_scale).unsqueeze(-1)
        return keys.cleared(numbers)
    columns = codes.v.permute(2, 0, 1) if place.packed else codes.v.permute(0, 3, 1, 2).flatten(0, 1)
    numbers = E4M3.numbers(columns)[keys.column.clamp(max=len(columns) - 1)]
    v = numbers * keys.of_sequences(codes.v_scale)
    return v if codes.v_offset is None else v + keys.of_sequences(codes.v_offset)


# --- gradients ----------------------------------------------------------------------------------------------


def _learned(exact: Dequantized, codes: Quantized) -> Dequantized:
    """The same numbers, whose gradients are those of what was rounded."""
    if codes.given is None or not torch.is_grad_enabled():
        return exact
    q, k, v = codes.given
    if codes.q_bias is not None and k.requires_grad:
        place = Arrangement(codes.layout, codes.varlen)
        keys, tokens = place.of_keys(k), place.tokens(k).float()
        k = place.laid(tokens - keys.of_sequences(keys.means(tokens)), k)
    of_v = exact.v if codes.v_scale is None else _straight(exact.v, v)
    return Dequantized(_straight(exact.q, q), _straight(exact.k, k), of_v, exact.bias)


def _straight(numbers: Tensor, x: Tensor) -> Tensor:
    """The numbers, with gradients of x: what is added is zero. Padding may hold NaN."""
    if not x.requires_grad:
        return numbers
    return numbers + (x.float() - x.detach().float()).nan_to_num(0.0)
