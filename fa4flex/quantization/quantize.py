"""quantize: queries, keys and values to 8 and 4 bits, by PyTorch operations on any device.

    keys     k - mean, rotated, one scale for each tile of 128 keys; the mean's part of q.k is kept as a bias
    queries  rotated, one scale for each token
    values   v - mean, one scale for each channel; what is added back is mean(v) minus the mean of what the
             codes stand for, so that no bias of the rounding remains; transposed for the tensor cores

The mean of the keys changes no softmax by itself; it changes the log-sum-exp, sinks and score mods, which
therefore see the bias. Scales of tiles and centred keys are SageAttention's (Zhang et al. 2024), the rotation
that of FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.latent import refuse_latent
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.arrangement import Arrangement, repeated
from fa4flex.quantization.formats import E4M3, FORMATS, TILE, Format, in_blocks
from fa4flex.quantization.quantized import Keys, Quantized, Values
from fa4flex.quantization.rotation import Rotation
from fa4flex.quantization.tokens import Tokens

_REFUSED = {
    "float8_e5m2": ("twice the error of e4m3 at the same speed: scales give the range", "float8_e4m3"),
    "mxfp4": ("scales of powers of two for 32 channels lose an outlier's neighbours", "nvfp4"),
    "bfloat16": ("nothing to quantise in q and k", "int8"),
}
_REFUSED_VALUES = {
    "int8": ("a sink's small value is lost beside large ones (17 % error)", "float8_e4m3"),
    "nvfp4": ("probabilities and values of 4 bits lose a sink's value (83 % error)", "float8_e4m3"),
    "mxfp8": ("scales along the keys would belong to tiles of probabilities", "float8_e4m3"),
    "float8_e5m2": ("twice the error of e4m3: scales of channels give the range", "float8_e4m3"),
}


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qk: Keys = "int8",
    pv: Values = "float8_e4m3",
    rotate: bool = True,
    center_k: bool = True,
    center_v: bool = True,
    seed: int = 0,
    varlen: Varlen | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> Quantized:
    """Codes and scales of q, k and v, for `attn(quantized)`.

    q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], packed with `varlen` as in a call of attention;
    bfloat16, float16 or float32. D is a multiple of 32.

    qk        of q and k: "int8", "float8_e4m3", "mxfp8" or "nvfp4"
    pv        of v: "float8_e4m3", or "bfloat16" for values as they are
    rotate    spread outliers of q and k over channels, by signs drawn from `seed` and a Hadamard matrix
    center_k  take the mean of each sequence's keys out before rounding
    center_v  take the mean of each channel of v out before rounding

    A row or tile that holds a NaN or an infinity stands for NaN. Nothing waits for the device. dequantize()
    gives what the codes stand for. Raises InputError for shapes and dtypes that do not fit, UnsupportedError
    for formats that lose what they must keep, and for tensors that require gradients.
    """
    form = _form(qk, pv)
    place = Arrangement(layout, varlen)
    _check(q, k, v, place, form)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError(
            "quantize of tensors that require gradients: rounding has none",
            "tensors without gradients",
            "call it under torch.no_grad(), or detach q, k and v",
        )
    queries, keys = place.of_queries(q), place.of_keys(k)
    of_q, of_k, of_v = (place.tokens(x).float() for x in (q, k, v))
    bias = None
    if center_k:
        mean = keys.means(of_k)
        of_k = of_k - keys.of_sequences(mean)
        shared = repeated(queries.of_sequences(mean), of_q.shape[1])
        bias = place.rows((of_q * shared).sum(-1), q.shape[0])
    rotation = Rotation(of_q.shape[-1], seed) if rotate else None
    if rotation is not None:
        of_q, of_k = rotation.of(of_q), rotation.of(of_k)
    (q_codes, q_scale, k_codes, k_scale), whole = _scores(of_q, of_k, keys, form)
    values, v_scale, offset = (v, None, None) if pv == "bfloat16" else _values(of_v, keys, center_v, place)
    if not form.block:
        q_scale = place.rows(q_scale, q.shape[0])
        k_scale = _by_tile(k_scale, keys, place)
    return Quantized(
        place.laid(q_codes, q.shape[0]), place.laid(k_codes, k.shape[0]), values, q_scale, k_scale, v_scale,
        bias, offset, whole, qk, pv, None if rotation is None else (rotation.width, seed), layout, varlen,
        q.dtype,
    )  # fmt: skip


# --- queries and keys ---------------------------------------------------------------------------------------

_Codes = tuple[Tensor, Tensor, Tensor, Tensor]


def _scores(q: Tensor, k: Tensor, keys: Tokens, form: Format) -> tuple[_Codes, tuple[Tensor, Tensor] | None]:
    """Codes and scales of q and k [T, H, D], and scales of whole heads where the format has some."""
    if form.block:
        q_codes, q_scale, of_q = in_blocks(q, form)
        k_codes, k_scale, of_k = in_blocks(k, form)
        return (q_codes, q_scale, k_codes, k_scale), (of_q, of_k)
    q_scale = form.divisors(q.abs().amax(-1))
    k_scale = form.divisors(keys.greatest_of_tiles(k.abs().amax(-1)))
    q_codes = form.divided(q, q_scale.unsqueeze(-1))
    k_codes = form.divided(k, keys.of_tiles(k_scale).unsqueeze(-1))
    return (q_codes, q_scale, k_codes, k_scale), None


def _by_tile(scale: Tensor, keys: Tokens, place: Arrangement) -> Tensor:
    """Scales [T, H] of tiles as [B, H, tiles of a sequence], or [H, T] of packed sequences."""
    if place.packed:
        return scale.T.contiguous()
    return scale.unflatten(0, (keys.sequences, -1)).transpose(1, 2).contiguous()


# --- values -------------------------------------------------------------------------------------------------


def _values(
    v: Tensor, keys: Tokens, center: bool, place: Arrangement
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Transposed codes of v [T, H, D], scales [N, H, D], and what is to be added to each value [N, H, D]."""
    mean = keys.means(v) if center else None
    centred = v if mean is None else v - keys.of_sequences(mean)
    scale = E4M3.divisors(keys.greatest_of_sequences(centred.abs()))
    codes = E4M3.divided(centred, torch.cat([scale, torch.ones_like(scale[:1])])[keys.sequence])
    offset = None if mean is None else mean - keys.means(E4M3.numbers(codes)) * scale
    columns = torch.zeros(keys.tiles * TILE + 1, *v.shape[1:], dtype=torch.uint8, device=v.device)
    columns[keys.column] = codes.view(torch.uint8)
    turned = columns[:-1].view(codes.dtype)
    if place.packed:
        turned = turned.permute(1, 2, 0)
    else:
        turned = turned.unflatten(0, (keys.sequences, -1)).permute(0, 2, 3, 1)
    return turned.contiguous(), scale, offset


# --- checks -------------------------------------------------------------------------------------------------


def _form(qk: str, pv: str) -> Format:
    for name, value, refused, known in (
        ("qk", qk, _REFUSED, tuple(FORMATS)),
        ("pv", pv, _REFUSED_VALUES, ("float8_e4m3", "bfloat16")),
    ):
        if value in refused:
            reason, instead = refused[value]
            raise UnsupportedError(f"{name}={value!r}: {reason}", f"one of {known}", f"{name}={instead!r}")
        if value not in known:
            raise InputError(f"{name}={value!r}", f"one of {known}", f"{name}={known[0]!r}")
    return FORMATS[qk]


def _check(q: Tensor, k: Tensor, v: Tensor, place: Arrangement, form: Format) -> None:
    refuse_latent("k", k)
    value = ", ".join(f"{n} {x.dtype} {list(x.shape)} on {x.device}" for n, x in zip("qkv", (q, k, v)))
    dimensions = 3 if place.packed else 4
    if any(x.ndim != dimensions for x in (q, k, v)):
        expected = "q, k, v [tokens, heads, width]" if place.packed else "q, k, v of four dimensions"
        raise InputError(value, expected, "pass varlen=Varlen(cu_seqlens) with packed tokens, and only then")
    heads = 1 if place.packed or place.layout == "bhsd" else 2
    alike = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1]
    batches = place.packed or q.shape[0] == k.shape[0]
    grouped = k.shape[heads] > 0 and q.shape[heads] % k.shape[heads] == 0
    if not (alike and batches and grouped and q.device == k.device == v.device):
        raise InputError(
            value,
            "k and v of as many tokens and heads, q of their width and a multiple of their heads, one device",
            "see the shapes of a call of attention",
        )
    if not all(x.dtype in (torch.bfloat16, torch.float16, torch.float32) for x in (q, k, v)):
        raise InputError(value, "bfloat16, float16 or float32", "cast them with .to(torch.bfloat16)")
    if q.shape[-1] % 32 or v.shape[-1] % 8:
        raise UnsupportedError(
            f"heads of {q.shape[-1]}, values of {v.shape[-1]}",
            "heads of a multiple of 32, which 8-bit products take at once, and values of a multiple of 8",
            "pad q and k with zeros: q.k stays what it is",
        )
    if place.varlen is not None and not torch.compiler.is_compiling():
        if place.packed:
            place.varlen.check(q.shape[0], k.shape[0])
        else:
            lengths = (q.shape[2], k.shape[2]) if place.layout == "bhsd" else (q.shape[1], k.shape[1])
            place.varlen.check_padded(q.shape[0], *lengths)
