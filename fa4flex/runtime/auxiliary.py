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
    modified ones, before dropout. float32, or float64 for float64 inputs. With `Precision(skip=...)` lse and
    entropy are of the keys that are not left out, and the maxima are exact.

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
            "return_lse=True and return_aux",
            "one of them",
            'ask for the log-sum-exp in return_aux=("lse", ...)',
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


def merged_aux(parts: Sequence[Aux], lses: Tensor, lse: Tensor) -> Aux:
    """Statistics over the keys of all parts, whose log-sum-exps are `lses`, parts first. Raises InputError
    for parts that have different ones."""
    told = [
        tuple([name for name, x in zip(Aux._fields, part, strict=True) if x is not None]) for part in parts
    ]
    if len(parts) != len(lses) or len(set(told)) > 1:
        raise InputError(
            f"aux of {len(parts)} parts, with {told}, beside {len(lses)} log-sum-exps",
            "one Aux for each part, all with the same statistics",
            "ask for the same return_aux in all calls",
        )
    largest, of_heads, entropies = (
        None if getattr(parts[0], name) is None else torch.stack([getattr(part, name) for part in parts])
        for name in Aux._fields[1:]
    )
    entropy = None
    if entropies is not None:
        missing = lses == -torch.inf
        safe = lse.masked_fill(lse == -torch.inf, 0)
        more = (safe - lses.masked_fill(missing, 0)).masked_fill(missing, 0)
        shares = (-more).exp().masked_fill(missing, 0)
        entropy = (shares * (entropies + more)).sum(0).to(entropies.dtype)
    return Aux(
        lse if "lse" in told[0] else None,
        None if largest is None else largest.amax(0),
        None if of_heads is None else of_heads.amax(0),
        entropy,
    )


def lse_alone(return_aux: Any, return_lse: bool, where: str) -> Statistics:
    """The statistics that a call asks for where there is no other than the log-sum-exp. Raises
    UnsupportedError for others."""
    statistics = statistics_of(return_aux, return_lse)
    others = [name for name in statistics if name != "lse"]
    if others:
        raise UnsupportedError(
            f"{' and '.join(others)} {where}",
            "out and lse",
            "leave them out, or ask for them in a call of the attention itself, of local tensors",
        )
    return statistics


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
