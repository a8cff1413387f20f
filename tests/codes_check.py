"""Results of draws over codes (codes_draws.py) beside the formula in float64 of what the codes stand for.

NaN: a row that may see a NaN is NaN, one that cannot is right; where a key that is hidden holds a NaN, rows
of its head may be either, as docs/execution.md says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from algebra_check import CHIPS, Dense, Given, Made, One, Ours, Outcome, exactly, in_pytorch, judged, within
from codes_draws import CodesDraw
from sequences.oracle import Wrong, judge, units
from torch import Tensor

import fa4flex
from fa4flex import Quantized, reference
from fa4flex.kernels.fwd_8bit_sm90.plan import LOST

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass
class CodesGiven(Given):
    """Tensors that a draw's code made, and codes of them. numbers: q, k and v that products are of, where
    they are not those of `qkv`."""

    codes: Quantized | None = None
    cache: Any = None
    numbers: QKV | None = None
    handed: tuple[Any, ...] = ()

    @classmethod
    def made(cls, draw: CodesDraw, **where: Any) -> CodesGiven:
        names = draw.made(**where)
        given = cls(**vars(Given.of(names)), codes=names.get("codes"))
        if draw.kind == "cache":
            given.cache = names["k8"], names["v8"], names["scales"]
        given.handed = given._handed(draw.kind)
        return given

    def _handed(self, kind: str) -> tuple[Any, ...]:
        if kind == "cache":
            self.call["kv_scales"] = self.cache[2]
            return (self.qkv[0], *self.cache[:2])
        if kind == "precision":
            return self.qkv
        self.call.pop("varlen", None)  # codes say it
        return (self.codes,)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.handed

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.qkv, *self.learned]


@dataclass
class Stand(Given):
    """The same with what codes stand for in place of q, k and v; `of` are the tensors that were rounded."""

    of: list[Tensor] = field(default_factory=list)

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.of, *self.learned]


def stand(given: CodesGiven, kind: str, dtype: torch.dtype) -> Stand:
    """Meaning of a call, in `dtype`: numbers of codes, with gradients straight through, and their bias."""
    composition = dict(given.composition)
    precision = composition.pop("precision", None)
    if precision is not None and precision.skip:
        composition["precision"] = fa4flex.Precision(skip=precision.skip)
    if kind == "cache":
        qkv, bias = _of_cache(given), None
    else:
        assert given.codes is not None
        with torch.no_grad():
            exact = given.codes.dequantize()
        qkv, bias = tuple(x.double() for x in exact[:3]), exact.bias
        if given.codes.given is not None:
            qkv, bias = _straight(given, qkv, bias is not None)
    varlen = given.varlen if given.codes is None else given.codes.varlen
    score = composition.get("score_mod")
    if bias is not None:
        scale = given.option("scale")
        shift = _shift(bias.double() * (qkv[0].shape[-1] ** -0.5 if scale is None else scale), varlen)
        both = shift if score is None else fa4flex.as_score(shift) >> fa4flex.as_score(score)
        composition["score_mod"] = fa4flex.as_score(both)
    return Stand(
        tuple(x.to(dtype) for x in qkv), given.learned, composition, given.call, given.classes, given.paging,
        varlen, list(given.qkv),
    )  # type: ignore[arg-type]  # fmt: skip


def _of_cache(given: CodesGiven) -> QKV:
    """q, and keys and values of a cache by the definition of its scales."""
    made = [given.qkv[0].detach().double()]
    k, v, scales = given.cache
    for x, scale in ((k, scales.k), (v, scales.v)):
        numbers = x.double()
        if scale is not None:
            heads = 1 if x.ndim == 3 or not (given.swapped or given.paging is not None) else 2
            if scale.ndim == 1:
                shape = [1] * x.ndim
                shape[heads] = -1
                scale = scale.view(shape)
            elif tuple(scale.shape) == tuple(x.shape[:-1]):
                scale = scale.unsqueeze(-1)
            else:
                scale = scale[:, :, None, None] if heads == 1 else scale[:, None, :, None]
            numbers = numbers * scale.double()
        made.append(numbers)
    return tuple(made)  # type: ignore[return-value]


def _straight(given: CodesGiven, numbers: QKV, centred: bool) -> tuple[QKV, Tensor | None]:
    """The numbers as if they were q, k minus its mean, and v; and the bias that the mean leaves."""
    q, k, v = (x.double() for x in given.qkv)
    bias, shifted = None, k
    if centred:
        shifted, bias = _centred(given, q, k)
    qkv = tuple(x + (n - x).detach() for n, x in zip(numbers, (q, shifted, v), strict=True))
    return qkv, bias  # type: ignore[return-value]


def _centred(given: CodesGiven, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """k minus the mean of each sequence's keys, and q times that mean, as biases are laid out."""
    assert given.codes is not None
    varlen, swapped = given.codes.varlen, given.swapped
    if varlen is not None and varlen.packed:
        shifted, biases = [], []
        of_q, of_k = varlen.cu_seqlens_q.tolist(), varlen.cu_k.tolist()
        for n in range(len(of_q) - 1):
            keys, rows = k[of_k[n] : of_k[n + 1]], q[of_q[n] : of_q[n + 1]]
            mean = keys.sum(0) / max(1, len(keys))
            shifted.append(keys - mean)
            biases.append((rows * _for_heads(mean, rows.shape[1])).sum(-1).T)
        return torch.cat([*shifted, k[of_k[-1] :]]), torch.cat(
            [*biases, q.new_zeros(len(biases[0]), len(q) - of_q[-1])], 1
        )
    first = (x.transpose(1, 2) if swapped else x for x in (q, k))
    q, k = first
    shifted, biases = [], []
    for n in range(len(q)):
        used = k.shape[2] if varlen is None or varlen.seqused_k is None else int(varlen.seqused_k[n])
        mean = k[n, :, :used].sum(1) / max(1, used)
        shifted.append(k[n] - mean[:, None])
        biases.append((q[n] * _for_heads(mean, q.shape[1])[:, None]).sum(-1))
    made = torch.stack(shifted)
    return made.transpose(1, 2) if swapped else made, torch.stack(biases)


def _for_heads(mean: Tensor, heads: int) -> Tensor:
    return mean.repeat_interleave(heads // len(mean), 0)


def _shift(bias: Tensor, varlen: Any) -> Any:
    """The score mod that adds a number of each query."""
    starts = varlen.cu_seqlens_q if varlen is not None and varlen.packed else None

    def shift(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (bias[b, h, q_idx] if starts is None else bias[h, starts[b] + q_idx])

    return shift


# --- NaN ----------------------------------------------------------------------------------------------------


def seeing(one: One) -> Made:
    """The oracle's results of numbers without NaN, with NaN where a row sees one, and infinity where it may
    be either."""
    q, k, _ = one.qkv
    clean = One(tuple(x.nan_to_num(0.0, 0.0, 0.0) for x in one.qkv), one.n, one.given, one.skip)  # type: ignore[arg-type]
    made = exactly(clean)
    one.slack = clean.slack
    heads = q.shape[1]
    bad_q, bad_k, bad_v = (~x.isfinite() for x in one.qkv)
    bad_k, bad_v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (bad_k, bad_v))
    bad_k = bad_k.any(-1)
    allowed = reference.allowed_pairs(one.mask, (*q.shape[:3], k.shape[2]))
    of_row = (allowed & (bad_q.any(-1)[..., None] | bad_k[:, :, None])).any(-1)
    of_value = (allowed.double() @ bad_v.double()) > 0
    infinite = any(x.isinf().any() for x in one.qkv)  # a soft cap makes a number of infinity
    plain = one.normalizer is None and one.options["dropout"] is None
    sure = plain and not one.skip and not infinite
    anywhere = bad_k.any(-1)[:, :, None] | bad_q.any(-1) | bad_v.any(-1).any(-1)[:, :, None]
    seen = of_row[..., None] | of_value
    either = torch.where(
        seen, torch.nan if sure else torch.inf, torch.where(anywhere[..., None], torch.inf, 0.0)
    )
    found = {"out": made["out"] + either}
    for name, x in made.items():
        if name == "max_logit":
            found[name] = torch.where(anywhere.any(0).any(-1), torch.inf, x)
        elif name != "out":
            certain = torch.nan if sure and name == "lse" else torch.inf
            found[name] = torch.where(of_row, certain, torch.where(anywhere & (name != "lse"), torch.inf, x))
    return found


def judge_seen(what: str, found: Tensor, exact: Tensor, plain: Any, unit: float) -> None:
    """judge, where the oracle is that of `seeing`."""
    must, may = exact.isnan(), exact == torch.inf
    if not found[must].isnan().all():
        raise Wrong(f"{what}: {int((~found[must].isnan()).sum())} numbers that see NaN are none")
    rest = ~must & ~may
    if found[rest].isnan().any():
        raise Wrong(f"{what}: {int(found[rest].isnan().sum())} of {int(rest.sum())} are NaN and see none")
    judge(
        what,
        torch.where(rest, found.double(), 0.0),
        torch.where(rest, exact, 0.0),
        lambda: torch.where(rest, plain().double(), 0.0),
        unit,
    )


# --- comparison ---------------------------------------------------------------------------------------------


def outcome_of(draw: CodesDraw, device: str = "cpu", dtype: str = "float32") -> Outcome:
    """Run a draw and compare."""

    def call() -> Ours:
        return Ours.of(CodesGiven.made(draw, device="cpu" if device in CHIPS else device, dtype=dtype))

    def check(ours: Ours) -> None:
        if any("paging" in x for x in draw.conflicts):
            raise Wrong("codes beside pages were taken")
        _compare(draw, ours, device, dtype)

    return judged(call, check, device, draw.conflicts, Outcome("right", draw.kind))


def _compare(draw: CodesDraw, ours: Ours, device: str, dtype: str) -> None:
    """Raise Wrong unless all results are near those of the oracle."""
    kind = getattr(torch, dtype)
    wide = CodesGiven.made(draw, device="cpu", dtype=dtype, wide="float64")
    means = stand(wide, draw.kind, torch.float64)
    nan = not all(x.isfinite().all() for x in means.qkv)
    exact = Dense(means, seeing if nan else exactly, draw.skip)
    narrow = kind if draw.kind == "cache" or device != "cpu" else torch.float32
    narrow = torch.bfloat16 if device != "cpu" and narrow == torch.float32 else narrow
    plain: list[Dense] = []

    def measured(name: str, at: int | None = None) -> Tensor:
        if not plain:
            alike = stand(CodesGiven.made(draw, device="cpu", dtype=dtype), draw.kind, narrow)
            plain.append(Dense(alike, in_pytorch, 0.0))
        return plain[0].results[name] if at is None else plain[0].gradients(ours.upstream)[at]

    unit = units(kind, narrow)
    for found in (ours.results, ours.alone):
        for name, x in found.items():
            wanted, slack = exact.results[name].detach(), exact.slack.get(name)
            if device != "cpu" and draw.formats[1] and draw.kind != "cache":
                more = _of_kernels(name, exact, draw)
                slack = more if slack is None else slack + more
            nearer = within(x.detach().cpu(), wanted, slack)
            (judge_seen if nan else judge)(
                name, nearer, wanted, lambda name=name: measured(name).detach(), unit
            )
    if nan or not draw.smooth:
        return
    slack = exact.slack_of_gradients(ours.upstream)
    for at, g in enumerate(exact.gradients(ours.upstream)):
        if at < 3 and not draw.learns:  # codes that have no gradients
            continue
        what = f"gradient of {('q', 'k', 'v')[at] if at < 3 else f'captured tensor {at - 3}'}"
        judge(what, within(ours.gradients[at].cpu(), g, slack), g, lambda at=at: measured("", at), unit)


def _of_kernels(name: str, exact: Dense, draw: CodesDraw) -> Tensor | float:
    """Error that kernels of codes may have besides: probabilities of e4m3 are off by 2^-4 at most, and sums
    have 13 fraction bits."""
    if name in ("lse", "max_scores", "max_logit", "entropy"):
        return 1e-4 if draw.formats[0] == "int8" else 1e-2
    if draw.formats[1] == "bfloat16":
        return 0.0
    most = max(
        float(one.qkv[2].detach().nan_to_num().abs().max()) if one.qkv[2].numel() else 0.0
        for one in exact.parts
    )
    return (2.0**-4 + 4 * LOST) * most
