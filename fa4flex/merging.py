"""Merging of attention over parts of the keys, by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fa4flex import calls
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.auxiliary import Aux, merged_aux
from fa4flex.runtime.marks import marked
from fa4flex.variant import compose


def merge(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    *,
    output_mod: Callable[..., Any] | None = None,
    varlen: Varlen | None = None,
    aux: Sequence[Aux] | None = None,
) -> Any:
    """Output and log-sum-exp over the keys of all parts, each key being in one part.

    outs    per part, as attention returns them: [B, H, S, D], or [B, S, H, D] with layout="bshd", or packed
            [T, H, D]; a sequence of tensors, or one with the parts along its first dimension
    lses    natural logarithms, [B, H, S] in either layout, or packed [H, T]
    output_mod   an output function, as `compile` takes it: it is applied once, to what was merged
    varlen  lengths of the queries, for an output function of packed parts
    aux     per part, the other statistics that it returned: the result is (out, lse, fa4flex.Aux) then, with
            those of the whole. max_scores and max_logit are the largest of the parts; with the parts' shares
            P = exp(lse_part - lse), the entropy is the sum of P (entropy_part - log P), which is exact

    Computed in float32, in float64 for float64, on any device. A row without keys in a part ignores that
    part; a row without keys in any part has output 0 and log-sum-exp -inf. Gradients reach
    all outs and lses. The output has the parts' dtype. Raises InputError for shapes that do not agree, and
    UnsupportedError for parts that went through an output function each.

        near, far = (attn(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (late, early))
        out, lse = fa4flex.merge(*zip(near, far))
    """
    _refuse_parts_of_functions(lses)
    parts, sums = _stacked("outs", outs), _stacked("lses", lses)
    dtype = torch.float64 if parts.dtype == torch.float64 else torch.float32
    by_row = layout == "bshd" or parts.ndim == 4
    result = sums.to(dtype)
    placed = result.transpose(-1, -2) if by_row else result
    if placed.shape != parts.shape[:-1]:
        raise InputError(
            f"outs {tuple(parts.shape)} and lses {tuple(sums.shape)}, parts first, with layout={layout!r}",
            "a log-sum-exp for each row of each part: [B, H, S], or [H, T] for packed sequences",
            "pass what attention returns with return_lse=True",
        )
    largest = placed.detach().amax(0)
    weights = (placed - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = weights.sum(0)
    some = total > 0
    safe = total.masked_fill(~some, 1.0)
    shares = (weights / safe).unsqueeze(-1)
    values = parts.to(dtype).masked_fill(shares == 0, 0.0)
    merged = (largest + safe.log()).masked_fill(~some, -torch.inf)
    out = (shares * values).sum(0).to(parts.dtype)
    if output_mod is not None:
        if parts.ndim == 4 and varlen is None:
            raise InputError(
                "an output function of packed parts without their lengths",
                "varlen=Varlen(cu_seqlens_q): b and q_idx are those of each sequence",
                "pass the varlen of the calls that gave the parts",
            )
        out = calls.output_of(compose(output_mod=output_mod, layout=layout), out, varlen)
    whole = merged.transpose(-1, -2) if by_row else merged
    return (out, whole) if aux is None else (out, whole, merged_aux(aux, result, whole))


def _refuse_parts_of_functions(lses: Sequence[Tensor] | Tensor) -> None:
    """f(a) and f(b) do not make f of what a and b make."""
    for lse in [lses] if isinstance(lses, Tensor) else lses:
        function = marked(lse)
        if function is not None:
            raise UnsupportedError(
                f"parts that went through the output function {function} each",
                "outputs before it: it applies once, to the output over all keys",
                "attend with a variant without output_mod, and pass output_mod to merge",
            )


def _stacked(name: str, arguments: Sequence[Tensor] | Tensor) -> Tensor:
    """All parts along the first dimension."""
    if isinstance(arguments, Tensor):
        return arguments
    parts = list(arguments)
    if not parts or len({(x.shape, x.dtype, x.device) for x in parts}) > 1:
        raise InputError(
            f"{name} of shapes {[tuple(x.shape) for x in parts]} and dtypes {[x.dtype for x in parts]}",
            "one or more tensors of one shape, dtype and device",
            "pass the results of one kind of call",
        )
    return torch.stack(parts)
