"""quantize: queries, keys and values to 8 and 4 bits, by PyTorch operations on any device, which a GPU has
kernels for (fa4flex/runtime/cuda/quantize.py): of dense batches of 16 bits, without gradients.

    keys     k - mean, rotated, one scale for each tile of 128 keys; the mean's part of q.k is kept as a bias
    queries  rotated, one scale for each token
    values   v - mean, one scale for each channel; what is added back is mean(v) minus the mean of what the
             codes stand for, so that no bias of the rounding remains; transposed for the tensor cores

The mean of the keys changes no softmax by itself; it changes the log-sum-exp, sinks and score mods, which
therefore see the bias. Scales of tiles and centred keys are SageAttention's (Zhang et al. 2024), the rotation
that of FlashAttention-3 (Shah et al. 2024).

Gradients pass straight through the rounding (Bengio et al. 2013): codes stand for what was rounded, as if it
had not been. Centring and the bias are differentiated as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.latent import refuse_latent
from fa4flex.primitives.products import GIVEN, KEYS, OF_KEYS, OF_VALUES, VALUES, check_format
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.arrangement import Arrangement, repeated
from fa4flex.quantization.formats import E4M3, FORMATS, TILE, Format, in_blocks
from fa4flex.quantization.quantized import Keys, Quantized, Values
from fa4flex.quantization.rotation import Rotation
from fa4flex.quantization.tokens import Tokens
from fa4flex.runtime import autocast
from fa4flex.runtime.checks import check_strided, in_transforms
from fa4flex.runtime.flex.choice import by_kernels


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
    gives what the codes stand for. Where q, k or v require gradients, these pass straight through the
    rounding: the codes keep the tensors, and attention over the codes is differentiated as if they were what
    they stand for. Raises InputError for shapes and dtypes that do not fit, UnsupportedError for formats that
    lose what they must keep, and inside transforms of torch.func.
    """
    _check_formats(qk, pv)
    place = Arrangement(layout, varlen)
    _check(q, k, v, place)
    _refuse_transforms(q, k, v)
    with autocast.off(q):
        return _Rounding(qk, pv, rotate, center_k, center_v, seed).of((q, k, v), place)


@dataclass(frozen=True)
class _Rounding:
    """Arguments of `quantize` that say how tensors are rounded."""

    qk: Keys
    pv: Values
    rotate: bool
    center_k: bool
    center_v: bool
    seed: int

    def of(self, qkv: tuple[Tensor, Tensor, Tensor], place: Arrangement) -> Quantized:
        """Codes of checked tensors."""
        q, k, v = qkv
        learn = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
        if not learn and place.varlen is None:
            made = self._by_kernels(qkv, place)
            if made is not None:
                return made
        form, queries, keys = FORMATS[self.qk], place.of_queries(q), place.of_keys(k)
        of_q, of_k, of_v = (place.tokens(x.detach()).float() for x in qkv)
        bias, rotation = None, Rotation(q.shape[-1], self.seed) if self.rotate else None
        if self.center_k:
            mean = keys.means(place.tokens(k))
            of_k = of_k - keys.of_sequences(mean.detach())
            shared = repeated(queries.of_sequences(mean), of_q.shape[1])
            bias = place.rows((place.tokens(q).float() * shared).sum(-1), q)
        if rotation is not None:
            of_q, of_k = rotation.of(of_q), rotation.of(of_k)
        (q_codes, q_scale, k_codes, k_scale), whole = _scores(of_q, of_k, keys, form)
        values, v_scale, offset = v, None, None
        if self.pv != GIVEN:
            values, v_scale, offset = _values(of_v, keys, self.center_v, place)
        if not form.block:
            q_scale = place.rows(q_scale, q)
            k_scale = _by_tile(k_scale, keys, place)
        return Quantized(
            place.laid(q_codes, q), place.laid(k_codes, k), values, q_scale, k_scale, v_scale, bias, offset,
            whole, **self._told(q, place), given=qkv if learn else None,
        )  # fmt: skip

    def _told(self, q: Tensor, place: Arrangement) -> dict[str, Any]:
        """Fields of codes that the arguments decide."""
        return {
            "qk": self.qk, "pv": self.pv, "rotation": (q.shape[-1], self.seed) if self.rotate else None,
            "layout": place.layout, "varlen": place.varlen, "dtype": q.dtype,
        }  # fmt: skip

    def _by_kernels(self, qkv: tuple[Tensor, Tensor, Tensor], place: Arrangement) -> Quantized | None:
        """Codes of a dense batch by kernels; None where they are not for it."""
        q, values = qkv[0], self.pv != GIVEN
        if torch.compiler.is_compiling() or not by_kernels(q):
            return None
        from fa4flex.runtime.cuda import quantize as kernels

        if not kernels.takes(qkv, self.qk, values, place.layout):
            return None
        signs = Rotation(q.shape[-1], self.seed).signs(q.device) if self.rotate else None
        form = kernels.Form(self.qk, values, self.center_k, self.center_v, signs)
        made = kernels.quantize(qkv, form, place.layout)
        return None if made is None else Quantized(**made, whole=None, **self._told(q, place))  # type: ignore[arg-type]


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
    return scale.unflatten(0, (keys.sequences, keys.tiles_of_each)).transpose(1, 2).contiguous()


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
    return turned(codes, keys, place), scale, offset


def turned(codes: Tensor, keys: Tokens, place: Arrangement) -> Tensor:
    """Codes of values [T, H, D] as tensor cores take them: see Quantized."""
    columns = torch.zeros(keys.tiles * TILE + 1, *codes.shape[1:], dtype=torch.uint8, device=codes.device)
    columns[keys.column] = codes.view(torch.uint8)
    made = columns[:-1].view(codes.dtype)
    if place.packed:
        return made.permute(1, 2, 0).contiguous()
    return made.unflatten(0, (keys.sequences, TILE * keys.tiles_of_each)).permute(0, 2, 3, 1).contiguous()


# --- checks -------------------------------------------------------------------------------------------------


def _check_formats(qk: str, pv: str) -> None:
    if qk == GIVEN:
        raise UnsupportedError(
            f"qk={qk!r}: nothing to quantise in q and k", f"one of {KEYS}", 'qk="int8", or no codes at all'
        )
    check_format("qk", qk, KEYS, OF_KEYS)
    check_format("pv", pv, (*VALUES, GIVEN), OF_VALUES)


def _refuse_transforms(*tensors: Tensor) -> None:
    """Raise UnsupportedError inside transforms, where a rule for backward passes would be no derivative."""
    if torch.compiler.is_compiling():
        return
    if in_transforms(*tensors):
        raise UnsupportedError(
            "codes of tensors inside torch.func.grad, vmap or jvp, or with a tangent: the"
            " derivative of rounding is zero",
            "backward passes, which pass straight through it",
            "use torch.autograd.grad, or leave out qk and pv in code that is transformed",
        )


def _check(q: Tensor, k: Tensor, v: Tensor, place: Arrangement) -> None:
    refuse_latent("k", k)
    check_strided(q, k, v)
    check_shapes(q, k, v, place)
    if not all(x.dtype in (torch.bfloat16, torch.float16, torch.float32) for x in (q, k, v)):
        raise InputError(told(q, k, v), "bfloat16, float16 or float32", "cast them with .to(torch.bfloat16)")
    check_lengths(q, k, place)


def told(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Dtypes, shapes and devices, for messages."""
    return ", ".join(f"{n} {x.dtype} {list(x.shape)} on {x.device}" for n, x in zip("qkv", (q, k, v)))


def check_shapes(q: Tensor, k: Tensor, v: Tensor, place: Arrangement) -> None:
    """Raise InputError or UnsupportedError unless q, k and v are tensors of one attention over codes."""
    value, dimensions = told(q, k, v), 3 if place.packed else 4
    if any(x.ndim != dimensions for x in (q, k, v)):
        expected = "q, k, v [tokens, heads, width]" if place.packed else "q, k, v of four dimensions"
        raise InputError(value, expected, "pass varlen=Varlen(cu_seqlens) with packed tokens, and only then")
    heads = 1 if place.packed or place.layout == "bhsd" else 2
    others = [n for n in range(dimensions - 1) if n != heads]
    alike = all(k.shape[n] == v.shape[n] for n in others) and q.shape[-1] == k.shape[-1]
    batches = place.packed or q.shape[0] == k.shape[0]
    grouped = all(x.shape[heads] > 0 and q.shape[heads] % x.shape[heads] == 0 for x in (k, v))
    if not (alike and batches and grouped and q.device == k.device == v.device):
        raise InputError(
            value,
            "k and v of as many tokens, q of k's width and a multiple of the heads of both, one device",
            "see the shapes of a call of attention",
        )
    if q.shape[-1] % 32 or v.shape[-1] % 8:
        raise UnsupportedError(
            f"heads of {q.shape[-1]}, values of {v.shape[-1]}",
            "heads of a multiple of 32, which 8-bit products take at once, and values of a multiple of 8",
            "pad q and k with zeros: q.k stays what it is",
        )


def check_lengths(q: Tensor, k: Tensor, place: Arrangement) -> None:
    """Raise InputError unless the lengths of a ragged batch fit."""
    if place.varlen is not None and not torch.compiler.is_compiling():
        if place.packed:
            place.varlen.check(q.shape[0], k.shape[0])
        else:
            lengths = (q.shape[2], k.shape[2]) if place.layout == "bhsd" else (q.shape[1], k.shape[1])
            place.varlen.check_padded(q.shape[0], *lengths)
