"""Statistics that a call returns beside its output: `out, aux = attn(q, k, v, return_aux=("max_logit",))`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.plan.problem import STATISTICS
from fa4flex.primitives.base import kind_of
from fa4flex.runtime.call import Results, Statistics

__all__ = ["Aux"]


class Aux(NamedTuple):
    """Statistics of a call, each None where it was not asked for: of p = exp(score - lse), the scores being
    modified ones. float32, or float64 for float64 inputs.

    lse         log(sum(exp(score))) of each row, [B, H, S] or packed [H, T], with the sink, if there is one.
                Differentiable. -inf for a row without allowed keys and sink
    max_scores  the largest score of each row, without the sink; -inf for a row without allowed keys
    max_logit   [H], the largest score of each query head over all batch entries and queries: what QK-clip
                (MuonClip; Kimi K2, 2025) compares with its bound. -inf where no pair was allowed
    entropy     -sum(p log p) of each row in nats, like lse; the sum is over the allowed keys and the sink, if
                there is one: these are a distribution. Differentiable. 0 for a row without allowed keys
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    max_logit: Tensor | None = None
    entropy: Tensor | None = None


def statistics_of(return_aux: Any, return_lse: bool = False) -> Statistics:
    """The statistics that a call is asked for, in order. Raises InputError for names that there are not."""
    if return_aux is None:
        return ("lse",) if return_lse else ()
    if return_lse:
        raise InputError(
            "return_lse=True and return_aux", "one of them", 'ask for the log-sum-exp in return_aux=("lse", ...)'
        )
    if not isinstance(return_aux, (tuple, list)):
        raise InputError(
            f"return_aux of {kind_of(return_aux)}",
            f"a tuple of names out of {', '.join(STATISTICS)}",
            'e.g. return_aux=("max_logit",)',
        )
    for name in return_aux:
        if name not in STATISTICS:
            raise InputError(
                f"the statistic {name!r} in return_aux",
                f"names out of {', '.join(STATISTICS)}",
                'e.g. return_aux=("max_logit", "entropy")',
            )
    return tuple([name for name in STATISTICS if name in return_aux])


def aux_of(results: Results, statistics: Statistics) -> Aux:
    """The statistics that were asked for, of what a call computed."""
    _, lse, largest, *more = results
    of_heads, entropy = more or (None, None)
    return Aux(
        lse if "lse" in statistics else None,
        largest if "max_scores" in statistics else None,
        of_heads if "max_logit" in statistics else None,
        entropy if "entropy" in statistics else None,
    )
