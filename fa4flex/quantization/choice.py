"""Choice: formats of each head's products, by a bound of what rounding costs its output.

Row i has scores s_j = f(scale q_i.k_j), and s'_j = f(scale (q'_i.k'_j + bias_i)) over codes; L is the
Lipschitz constant of the score mod f. Then |s'_j - s_j| <= d_i, and weights and outputs differ by at most

    d_i = L scale (|q_i - q'_i| max_j |k_j - mean| + |q'_i| max_j |k'_j - (k_j - mean)|)
    sum_j |p'_j - p_j| / 2 <= tanh(d_i / 2)
    |o'_i - o_i| <= tanh(d_i / 2) range(v) + max_j |v'_j - v_j| + rounding of p' in e4m3

docs/precision.md has the proof. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fa4flex.kernels.fwd_8bit_sm90.plan import LOST, STEP
from fa4flex.primitives.products import GIVEN
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.arrangement import Arrangement, repeated
from fa4flex.quantization.formats import TILE
from fa4flex.quantization.quantized import Dequantized, Quantized
from fa4flex.quantization.tokens import Tokens

FORMATS_OF_HEADS = ((GIVEN, GIVEN), ("int8", GIVEN), ("int8", "float8_e4m3"))
"""Formats of q.k and of P v that a head may have, from the most exact to the fastest."""

OF_WEIGHTS = 2.0**-4 + TILE // STEP * LOST
"""Error of a sum of e4m3 probabilities times values, over the largest value: half a unit of their last digit,
and what sums of 13 fraction bits lose of a tile."""

SMALLEST = 2.0**-18
"""Error of one probability below the normal numbers of e4m3, over the largest of its row, which is 256."""

UNIT = 2.0**-8
"""Least range of values, over the largest of them: no output of bfloat16 tells less apart."""

ULPS = 2.0**-22
"""Error of float32 norms and differences, relative to what is subtracted from."""


@dataclass(frozen=True)
class Scores:
    """Scores of a variant as bounds need them: scale, Lipschitz constant of its score mod, and whether a
    sink has a part of the weights, with a value of 0."""

    scale: float
    lipschitz: float = 1.0
    sinks: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """Formats of heads, as `attn.choose` makes them: attn(choice) attends with them.

    tolerance    largest error of an output, over the largest range of a channel of its sequence's and head's
                 values, or over 2^-8 of the largest of these where that is more
    formats      int64 [groups]: index in FORMATS_OF_HEADS of each group of heads that share keys and values
    bounds       float32 [3, groups]: largest bound of all rows with each format, over that range
    certificate  float32 [B, Hq, Sq], packed [Hq, Tq]: largest error of each row's output, in units of v
    scores       what the bounds hold for
    """

    codes: Quantized
    given: tuple[Tensor, Tensor, Tensor]
    tolerance: float
    formats: Tensor
    bounds: Tensor
    certificate: Tensor
    scores: Scores
    reason: str = ""
    """Reason that no head may be rounded; "" where rows decide."""

    @property
    def q(self) -> Tensor:
        return self.codes.q

    @property
    def varlen(self) -> Varlen | None:
        return self.codes.varlen

    @property
    def layout(self) -> str:
        return self.codes.layout

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @cached_property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """Formats of q.k and P v of each query head. Waits for the device."""
        place = Arrangement(self.codes.layout, self.codes.varlen)
        heads = self.codes.q.shape[2 if not place.packed and place.layout == "bshd" else 1]
        each = self.formats.repeat_interleave(heads // len(self.formats)).tolist()
        return tuple(FORMATS_OF_HEADS[x] for x in each)

    def settled(self) -> Quantized | Choice:
        """The codes alone where all heads take the same ones, for kernels that multiply codes; else this.
        Waits for the device."""
        found = set(self.formats.tolist())
        if found == {2}:
            return self.codes
        if found == {1}:
            values = {"v": self.given[2], "v_scale": None, "v_offset": None, "pv": GIVEN}
            return replace(self.codes, **values)  # type: ignore[arg-type]
        return self

    def dequantize(self) -> Dequantized:
        """Numbers that products are of, in float32: what codes stand for, or q, k and v as they are."""
        exact, place = self.codes.dequantize(), Arrangement(self.codes.layout, self.codes.varlen)
        made = []
        for rounded, given, least in zip(exact[:3], self.given, (1, 1, 2), strict=True):
            heads = place.tokens(given).shape[1]
            each = (self.formats >= least).repeat_interleave(heads // len(self.formats))
            at = [1] * given.ndim
            at[1 if place.packed or place.layout == "bhsd" else 2] = heads
            made.append(torch.where(each.view(at), rounded, given.float()))
        bias = exact.bias
        if bias is not None:
            each = (self.formats >= 1).repeat_interleave(bias.shape[-2] // len(self.formats))
            bias = torch.where(each.unsqueeze(-1), bias, 0.0)
        return Dequantized(made[0], made[1], made[2], bias)

    def explain(self) -> str:
        """Formats of each head, and the bounds that decide. Waits for the device."""
        lines = [
            f"tolerance {self.tolerance:g}: errors of outputs over the range of a head's values, as proved",
            *([f"  all heads have 16 bits: {self.reason}"] if self.reason else []),
        ]
        group = len(self.heads) // len(self.formats)
        of_int8, of_both = self.bounds[1].tolist(), self.bounds[2].tolist()
        for n in range(len(self.formats)):
            qk, pv = self.heads[n * group]
            named = f"head {n}" if group == 1 else f"heads {n * group} to {(n + 1) * group - 1}"
            lines.append(
                f"  {named}: q.k of {qk}, P v of {pv}; bounds {of_int8[n]:.3g} with int8 q.k,"
                f" {of_both[n]:.3g} with e4m3 values too"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Choice({self.codes!r}, tolerance={self.tolerance!r})"


def chosen(
    codes: Quantized, given: tuple[Tensor, Tensor, Tensor], tolerance: float, scores: Scores, reason: str = ""
) -> Choice:
    """The fastest formats of each group of heads whose bound is within the tolerance.

    codes: int8 and e4m3 ones of `given`. reason: why no head may be rounded, "" where one may.
    """
    with torch.no_grad():
        place = Arrangement(codes.layout, codes.varlen)
        rows, spans = _bounds(codes, given, scores, place)
        groups = math.gcd(*(place.tokens(x).shape[1] for x in given[1:]))
        # [3, N, groups]: the largest of the rows and heads of a sequence
        queries = place.of_queries(given[0])
        worst = torch.stack([queries.greatest_of_sequences(x) for x in rows])
        worst = worst.unflatten(-1, (groups, -1)).amax(-1)
        span = spans.unflatten(-1, (groups, -1)).amax(-1)
        share = torch.where(worst == 0, 0.0, worst / span).amax(1)
        if reason:
            share[1:] = torch.inf
        within = share <= tolerance  # False for NaN
        formats = torch.where(within[2], 2, torch.where(within[1], 1, 0))
        each = formats.repeat_interleave(rows[0].shape[1] // groups)
        certificate = torch.where(each == 2, rows[2], torch.where(each == 1, rows[1], rows[0]))
    return Choice(codes, given, tolerance, formats, share, place.rows(certificate, given[0]), scores, reason)


def _bounds(
    codes: Quantized, given: tuple[Tensor, Tensor, Tensor], scores: Scores, place: Arrangement
) -> tuple[list[Tensor], Tensor]:
    """Bounds [Tq, Hq] of each row's error with each of the formats, and what they are a share of [N, Hq]."""
    with torch.no_grad():
        exact = codes.dequantize()
    q, k, v = (place.tokens(x.detach()).float() for x in given)
    of_q, of_k, of_v = (place.tokens(x.detach()) for x in exact[:3])
    queries, keys, heads = place.of_queries(given[0]), place.of_keys(given[1]), q.shape[1]
    mean = keys.means(k) if codes.q_bias is not None else k.new_zeros(keys.sequences, *k.shape[1:])
    centred = k - keys.of_sequences(mean)
    size_k = _most(centred.norm(dim=-1), keys, heads)
    error_k = _most((of_k - centred).norm(dim=-1), keys, heads)
    shift = repeated(queries.of_sequences(mean.norm(dim=-1)), heads)
    error_q, size_q = (of_q - q).norm(dim=-1), of_q.norm(dim=-1)
    of_keys, off_keys = queries.of_sequences(size_k), queries.of_sequences(error_k)
    whole = (q.norm(dim=-1) + size_q) * (of_keys + shift)
    moved = error_q * of_keys + size_q * off_keys + ULPS * q.shape[-1] * whole
    none = torch.zeros_like(moved)
    span, size_v = _range(v, keys, scores.sinks, heads)
    total = torch.tanh(moved * (abs(scores.scale) * scores.lipschitz / 2))
    values = _of_values(codes, (v, of_v), keys, place)
    values = repeated(values, heads)
    of_span = queries.of_sequences(span)
    by_keys = (total * of_span) * (1 + ULPS * 16) + ULPS * of_span
    return [none, by_keys, by_keys + queries.of_sequences(values) * (1 + ULPS * 16)], span.maximum(
        UNIT * size_v
    )


def _of_values(codes: Quantized, values: tuple[Tensor, Tensor], keys: Tokens, place: Arrangement) -> Tensor:
    """Largest error [N, Hv] of an output that values of 8 bits, and probabilities beside them, cause."""
    v, of_v = values
    off = keys.greatest_of_sequences((of_v - v).abs()) + ULPS * keys.greatest_of_sequences(v.abs())
    operand = of_v if codes.v_offset is None else of_v - keys.of_sequences(codes.v_offset)
    size = keys.greatest_of_sequences(operand.abs())
    count = v.new_zeros(keys.sequences + 1).index_add(0, keys.sequence, v.new_ones(len(v)))[:-1]
    small = (count * SMALLEST).clamp(max=1.0)[:, None, None]
    return (off + (OF_WEIGHTS + small) * size).amax(-1)


def _range(v: Tensor, keys: Tokens, sinks: bool, heads: int) -> tuple[Tensor, Tensor]:
    """Largest range [N, Hq] of a channel of each sequence's values, 0 among them where there are sinks, and
    their largest size."""
    start = v.new_full((keys.sequences + 1, *v.shape[1:]), 0.0 if sinks else -torch.inf)
    index = keys.sequence.view(-1, 1, 1).expand_as(v)
    most, least = (start.scatter_reduce(0, index, x, "amax")[:-1] for x in (v, -v))
    size = most.maximum(least).clamp(min=0).amax(-1)
    return repeated((most + least).clamp(min=0).amax(-1), heads), repeated(size, heads)


def _most(x: Tensor, keys: Tokens, heads: int) -> Tensor:
    """Largest of x [T, H] of each sequence, for each query head: [N, Hq]."""
    return repeated(keys.greatest_of_sequences(x), heads)
