"""Normalizers: how weights are made of scores.

    p[q, k] = f(s[q, k]) / Z[q],     Z[q] = sum_k g(s[q, k]) + c           out[q] = sum_k p[q, k] v[k]
    ds[q, k] = (f'(s) dP - g'(s) delta[q]) / Z[q],     delta[q] = sum_k p[q, k] dP[q, k]

    kind          f                  g              c
    softmax       exp(s)             exp(s)         n, of `plus`: no weight for n keys of score 0 and value 0
    softpick      max(exp(s)-1, 0)   |exp(s) - 1|   eps
    elementwise   any function       none: Z is 1, nothing is summed

Pairs that the mask hides take part in no sum, and weigh exactly 0: neither f nor g is asked about them. A
query without allowed keys gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import Family, Made, Mod, kind_of, settle
from fa4flex.primitives.precision import refuse_skip
from fa4flex.primitives.score import ModScore, ScoreMod, as_score
from fa4flex.primitives.sinks import Sinks
from fa4flex.primitives.weights import SOFTMAX, Kind, Weights


@dataclass(frozen=True, eq=False, repr=False)
class Normalizer(Mod):
    """One normaliser. Make it by `softmax`, `softpick` or `elementwise`; variants have published ones."""

    kind: Kind = "softmax"
    plus: float = 0.0
    eps: float = 0.0
    function: ScoreMod | None = None
    made: Made | None = None

    role, noun = "normalizer", "normaliser"
    combined_with = "a score mod before it"

    @staticmethod
    def softmax(plus: float = 0.0) -> Normalizer:
        """exp(s) / (sum exp(s) + plus), with plus >= 0: as a sink of the constant logit log(plus).

        The LSE includes it: log(sum exp(s) + plus). Raises InputError.
        """
        number = _number("plus", plus)
        if number < 0:
            raise InputError(
                f"Normalizer.softmax(plus={plus!r})",
                "a number of 0 or more",
                "leave plus out for the softmax",
            )
        return Normalizer(plus=number)

    @staticmethod
    def softpick(eps: float = 1e-6) -> Normalizer:
        """max(exp(s) - 1, 0) / (sum |exp(s) - 1| + eps), with eps > 0. Raises InputError.

        Zuhri et al., "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax",
        arXiv:2504.20966, whose eps is relative to the largest exponential of a row; here it is added to the
        sum itself, so that the result does not depend on how scores are shifted.
        """
        number = _number("eps", eps)
        if number <= 0:
            raise InputError(
                f"Normalizer.softpick(eps={eps!r})", "a number above 0", "leave eps out for 1e-6"
            )
        return Normalizer("softpick", eps=number)

    @staticmethod
    def elementwise(function: Callable[..., Any]) -> Normalizer:
        """function(score, b, h, q_idx, kv_idx), of the score after the score mod, is the weight itself.

        It is traced as a score mod is, may capture tensors, which receive gradients, and may take q_len,
        kv_len and num_heads. There is no LSE. Raises InputError for what is no such function.
        """
        return Normalizer("elementwise", function=as_score(function))

    @property
    def weights(self) -> Weights:
        return SOFTMAX if self.kind == "softmax" else Weights(self.kind, self.eps)

    def __repr__(self) -> str:
        if self.made is not None:
            return repr(self.made)
        if self.kind == "elementwise":
            return f"Normalizer.elementwise({self.function!r})"
        name, value = ("plus", self.plus) if self.kind == "softmax" else ("eps", self.eps)
        return f"Normalizer.{self.kind}({name}={value!r})"

    @property
    def parts(self) -> tuple[Mod, ...]:
        return () if self.function is None else (self.function,)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf:
        return float(value)
    raise InputError(
        f"a normaliser with {name}={value!r}",
        "a finite number",
        "pass a Python number; a learned one is a sink: sinks=torch.full((heads,), log n, requires_grad=True)"
        if isinstance(value, Tensor)
        else "pass a Python number",
    )


_ENTMAX = "entmax", "sparsemax", "alpha_entmax"


def as_normalizer(value: Any) -> Normalizer:
    """`value` as a Normalizer: one, or a family of them (its defaults).

    Raises InputError for anything else, and UnsupportedError for entmax by name.
    """
    value = settle(value)
    if isinstance(value, Normalizer):
        return value
    if isinstance(value, str) and value.lower() in _ENTMAX:
        raise UnsupportedError(
            f"normalizer={value!r}: its threshold follows from a sort of each row's scores, so that no "
            "weight is known before all scores are, while kernels see a row tile by tile",
            "softmax, softpick, or an elementwise function",
            "Normalizer.softpick() gives weights of exactly 0, too; or compute it densely in PyTorch",
        )
    what = f"the {value.noun} {value!r}" if isinstance(value, Mod) else kind_of(value)
    raise InputError(
        f"{what} was given as a normaliser",
        "a fa4flex.Normalizer: softmax(plus=), softpick(), elementwise(function), or one of fa4flex.variants",
        "Normalizer.elementwise(lambda score, b, h, q, kv: torch.sigmoid(score))",
    )


def _wrapped(function: Any, label: str, made: Made) -> Normalizer:
    if not isinstance(function, Normalizer):
        function = Normalizer.elementwise(ModScore(function, label, made))
    return replace(function, made=made)


def normalizer_family(make: Callable[..., Any]) -> Family[Normalizer]:
    """Decorator: a function from parameters to a Normalizer, or to the function of an elementwise one,
    becomes a variant: a family of normalisers."""
    return Family(make, _wrapped)


# --- in a variant -------------------------------------------------------------------------------------------


def check_composition(variant: Any) -> None:
    """Raise UnsupportedError for what a variant's normaliser does not go together with."""
    normalizer = variant.normalizer
    if normalizer is None or normalizer.kind == "softmax":
        return
    if variant.sinks is not None:
        why = "has no sum" if normalizer.kind == "elementwise" else "has a sum that is no sum of exponentials"
        raise UnsupportedError(
            f"sinks with {normalizer!r}, which {why}: a sink is one more term of the softmax's",
            "sinks with the softmax",
            "leave the sinks out; a learned bias of the score takes their place: score + bias[h]",
        )
    if variant.backend == "flex":
        raise refuse_flex(repr(normalizer))
    if variant.precision.skip:
        refuse_skip(variant.precision.skip, repr(normalizer), "its bound is of a softmax's probabilities")


def refuse_flex(what: str) -> UnsupportedError:
    """The error for torch's flex_attention, which has one normaliser."""
    return UnsupportedError(
        f"{what} through torch's flex_attention, which knows the softmax alone",
        'the softmax, also plus a constant; others with backend="auto" on a CPU or a GPU with kernels',
        "Normalizer.softmax(plus=n), or move the tensors with .cpu()",
    )


def check_statistics(variant: Any, wanted: tuple[str, ...]) -> None:
    """Raise UnsupportedError for statistics of a call that the variant's normaliser does not have."""
    normalizer = variant.normalizer
    if normalizer is None or normalizer.kind == "softmax" or not wanted:
        return
    names = " and ".join({"lse": "return_lse=True"}.get(name, name) for name in wanted)
    instead = "leave it out; outputs over parts of the keys are added: out = first + second"
    if normalizer.kind == "softpick":
        instead = "leave it out; parts of the keys cannot be merged, as eps is added to each of their sums"
    raise UnsupportedError(
        f"{names} with {normalizer!r}, which sums no exponentials of scores",
        "the log-sum-exp of the softmax",
        instead,
    )


def sinks_of(normalizer: Normalizer, own: Sinks | None, place: Tensor) -> Sinks | None:
    """Sinks by which the softmax's kernels add the constant of its sum, beside sinks of the variant.

    place    [query heads], of the dtype of sums, on the device of q: its memory is theirs
    """
    if not normalizer.plus:
        return own
    constant = math.log(normalizer.plus)
    if own is None:
        return Sinks(place.fill_(constant))
    logits = own.now()
    wide = logits.to(torch.promote_types(logits.dtype, place.dtype))
    return Sinks(torch.logaddexp(wide, wide.new_full((), constant)))
