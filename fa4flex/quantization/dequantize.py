"""Numbers that codes stand for, in float32."""

from __future__ import annotations

from torch import Tensor

from fa4flex.primitives.quantized import Dequantized, Quantized
from fa4flex.quantization.arrangement import Arrangement
from fa4flex.quantization.formats import E4M3, of_blocks
from fa4flex.quantization.quantize import FORMATS
from fa4flex.quantization.rotation import Rotation
from fa4flex.quantization.tokens import Tokens


def dequantized(codes: Quantized) -> Dequantized:
    """Queries, keys, values and bias of codes; tokens that take no part are zeros in k and v."""
    place = Arrangement(codes.layout, codes.varlen)
    keys, form = place.of_keys(codes.k), FORMATS[codes.qk]
    q, k = place.tokens(codes.q), place.tokens(codes.k)
    if codes.whole is not None:
        q = of_blocks(q, codes.q_scale, codes.whole[0], form)
        k = of_blocks(k, codes.k_scale, codes.whole[1], form)
    else:
        q = form.numbers(q) * place.of_rows(codes.q_scale).unsqueeze(-1)
        k = form.numbers(k) * keys.of_tiles(_tiles_first(codes.k_scale, place)).unsqueeze(-1)
    if codes.rotation is not None:
        rotation = Rotation(*codes.rotation)
        q, k = rotation.undone(q), rotation.undone(k)
    v = (
        codes.v.float()
        if codes.v_scale is None
        else place.laid(_values(codes, keys, place), codes.k.shape[0])
    )
    return Dequantized(place.laid(q, codes.q.shape[0]), place.laid(k, codes.k.shape[0]), v, codes.q_bias)


def _tiles_first(scale: Tensor, place: Arrangement) -> Tensor:
    """Scales [tiles, H] of all sequences."""
    return scale.T if place.packed else scale.transpose(1, 2).flatten(0, 1)


def _values(codes: Quantized, keys: Tokens, place: Arrangement) -> Tensor:
    """Values [T, H, D] of transposed codes."""
    assert codes.v_scale is not None
    columns = codes.v.permute(2, 0, 1) if place.packed else codes.v.permute(0, 3, 1, 2).flatten(0, 1)
    numbers = E4M3.numbers(columns)[keys.column.clamp(max=len(columns) - 1)]
    v = numbers * keys.of_sequences(codes.v_scale)
    return v if codes.v_offset is None else v + keys.of_sequences(codes.v_offset)
