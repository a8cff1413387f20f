"""flex_attention: the arguments, results, warnings and error types of torch's function of that name."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from fa4flex import calls
from fa4flex.errors import InputError, OptionError, StateError, UnsupportedError
from fa4flex.mask_calls import Options, with_block_mask
from fa4flex.primitives.heads import ratio, refuse_apart
from fa4flex.primitives.precision import Precision
from fa4flex.primitives.schedule import Schedule
from fa4flex.runtime import autocast
from fa4flex.runtime.auxiliary import aux_of, statistics_of
from fa4flex.runtime.call import Statistics
from fa4flex.runtime.checks import DTYPES, check_strided
from fa4flex.torch_internals import constant_in_graphs, flex_warnings_shown

QKV = tuple[Tensor, Tensor, Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | Sequence[str] | None = None,
) -> Any:
    """Drop-in for torch.nn.attention.flex_attention.flex_attention, with its arguments and results.

    query [B, Hq, L, E], key [Bkv, Hkv, S, E], value [Bkv, Hkv, S, Ev]; Bkv is B, or 1 to share keys over the
    batch (torch requires a block_mask of batch B then). dtypes as fa4flex.compile has them; key and value may
    have others than query, without gradients: the output has query's. Under autocast all three are cast.

    Returns the output [B, Hq, L, Ev] in query's dtype, its dimensions in memory in the order of query's; with
    `return_lse` also lse [B, Hq, L]; with `return_aux` also an AuxOutput of lse and max_scores, or a
    fa4flex.Aux where it is a tuple of names, as compiled variants take it.

    Unlike eager flex_attention, a BlockMask without mask_mod masks (its unlisted blocks are not allowed).
    kernel_options: BLOCK_M and BLOCK_N together set the tile; those that only tune torch's kernels are
    ignored with a warning; any other raises. Errors are Fa4flexErrors, and of the classes that torch raises.
    """
    if return_lse and return_aux is not None:
        argument = "Cannot specify both return_lse and return_aux. return_lse is deprecated"
        raise InputError(argument, "one of them", "use return_aux=AuxRequest(lse=True)")
    statistics = _asked_for(return_lse, return_aux)
    if return_lse:
        _warn_of_return_lse()
    max_scores = "max_scores" in statistics or "max_logit" in statistics
    schedule = _SCHEDULE if not kernel_options else _schedule(kernel_options, max_scores)
    qkv, precision = _prepared(query, key, value, enable_gqa)
    results, options = None, Options(score_mod, scale, schedule, precision)
    if isinstance(block_mask, BlockMask) and not torch.compiler.is_compiling():
        results = with_block_mask(qkv, block_mask, options, statistics)
    if results is None:
        results = calls.run(options.variant(block_mask), None, qkv, None, None, statistics)
    out = results[0]
    if return_lse:
        return out, results[1]
    if return_aux is None:
        return out
    aux = aux_of(results, statistics)
    return out, AuxOutput(aux.lse, aux.max_scores) if isinstance(return_aux, AuxRequest) else aux


def _asked_for(return_lse: bool, return_aux: Any) -> Statistics:
    """The statistics that a call asks for, in torch's words or ours."""
    if isinstance(return_aux, AuxRequest):
        return ("lse",) * bool(return_aux.lse) + ("max_scores",) * bool(return_aux.max_scores)
    if return_aux is not None and not isinstance(return_aux, (tuple, list)):
        raise InputError(
            f"return_aux is a {type(return_aux).__name__}", "an AuxRequest", "e.g. AuxRequest(lse=True)"
        )
    return statistics_of(return_aux, return_lse)


_SCHEDULE, _PRECISION = Schedule(), Precision()


def _prepared(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[QKV, Precision]:
    """q, k, v of one batch size and dtype, and the precision that gives the output its dtype."""
    check_strided(query, key, value)
    if query.ndim == 4 and key.ndim == 4 and value.ndim == 4:
        ratio(query.shape[1], key.shape[1], enable_gqa)
        refuse_apart(key.shape[1], value.shape[1], "flex_attention")
        if key.shape[0] == 1 and query.shape[0] > 1:
            key = key.expand(query.shape[0], -1, -1, -1)
            value = value.expand(query.shape[0], -1, -1, -1)
    qkv = query, key, value
    if query.dtype == key.dtype == value.dtype:
        return qkv, _PRECISION
    return _one_dtype(autocast.cast(*qkv))


# --- key and value of other dtypes than query -------------------------------------------------------------


def _one_dtype(qkv: QKV) -> tuple[QKV, Precision]:
    """Scores are those of k as it is: on a CPU all three are widened to the dtype that computes.

    A GPU multiplies in the query's dtype, to which torch's kernels, too, cast keys and values.
    """
    q, k, v = qkv
    if q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return qkv, _PRECISION
    if not (k.is_floating_point() and v.is_floating_point()):
        return qkv, _PRECISION
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = q.dtype if q.is_cuda else wide
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if torch.compiler.is_compiling():
            raise _mixed(str(q.dtype), str(k.dtype), str(v.dtype))
        return _Cast.apply(wide, q, k, v), Precision(output=q.dtype)
    return (q.to(wide), k.to(wide), v.to(wide)), Precision(output=q.dtype)


class _Cast(torch.autograd.Function):
    """q, k, v in one dtype, without a backward pass."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *qkv: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [str(x.dtype) for x in qkv]
        return tuple([x.to(dtype, copy=True) for x in qkv])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _mixed(*ctx.dtypes)


def _mixed(*dtypes: str) -> InputError:
    return InputError(
        f"Backward pass with mixed query, key, and value dtype is not supported, got {', '.join(dtypes)}",
        "one dtype for query, key and value",
        "cast them to the same dtype",
    )


# --- warnings ---------------------------------------------------------------------------------------------


def _warn_once(key: str, words: str, category: type[Warning]) -> None:
    shown = flex_warnings_shown(torch_flex)
    if key not in shown:
        shown.add(key)
        warnings.warn(words, category, stacklevel=4)


@constant_in_graphs
def _warn_of_return_lse() -> None:
    _warn_once(
        "deprecated_return_lse",
        "return_lse is deprecated by torch. Please use return_aux=AuxRequest(lse=True) instead.",
        FutureWarning,
    )


@constant_in_graphs
def _warn_of_tuning(keys: tuple[str, ...]) -> None:
    _warn_once(
        "fa4flex_kernel_options",
        f"kernel_options {', '.join(keys)}: ignored, as they only tune kernels of torch. fa4flex chooses its "
        "own tiles, or those of BLOCK_M and BLOCK_N where both are given.",
        UserWarning,
    )


# --- kernel_options ---------------------------------------------------------------------------------------

TUNING = frozenset((
    "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2",
    "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION",
    "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu", "BACKEND", "num_consumer_groups",
    "num_buffers_warp_spec", "SPLIT_KV", "PARTITION_SIZE",
))  # fmt: skip
"""Options that choose and tune torch's kernels: results do not depend on them. ROWS_GUARANTEED_SAFE promises
that no row is without keys; such rows are handled nevertheless."""

EXACT = {"FLOAT32_PRECISION": ("'ieee'", "ieee"), "SKIP_MASK_SCORE": (False,)}
"""Options that change results, with the values that match how fa4flex computes."""

BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
OF_TORCH = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")


def _schedule(kernel_options: dict[str, Any], max_scores: bool) -> Schedule:
    """The tile that the options request. Raises for options that are not supported; see `flex_attention`."""
    _check_backend(kernel_options, max_scores)
    rows, keys = kernel_options.get("BLOCK_M"), kernel_options.get("BLOCK_N")
    tiled = rows is not None and keys is not None
    ignored = []
    for name, value in kernel_options.items():
        key = name[4:] if name.startswith(("fwd_", "bwd_")) else name
        if key in OF_TORCH:
            raise OptionError(
                f"{key} must not be in kernel_options", "no such option", "use return_aux=AuxRequest()"
            )
        if key in EXACT:
            _check_exact(name, value, EXACT[key])
        elif key not in TUNING:
            near = _nearest(key)
            raise UnsupportedError(
                f"kernel_options {name!r}, which torch does not know and would ignore",
                "options of torch's FlexKernelOptions",
                f"did you mean {near!r}?" if near else "leave it out",
            )
        elif not (tiled and name in ("BLOCK_M", "BLOCK_N")):
            ignored.append(name)
    if ignored:
        _warn_of_tuning(tuple(ignored))
    return Schedule(tile=(rows, keys)) if tiled else _SCHEDULE  # type: ignore[arg-type]


def _check_backend(kernel_options: dict[str, Any], max_scores: bool) -> None:
    if "BACKEND" not in kernel_options:
        return
    backend = kernel_options["BACKEND"]
    if kernel_options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise StateError(
            "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION",
            "one of them",
            "leave FORCE_USE_FLEX_ATTENTION out; fa4flex needs neither",
        )
    if backend not in BACKENDS:
        value = f"Invalid BACKEND value '{backend}'. Must be one of {BACKENDS}"
        raise InputError(value, "a backend of torch", "leave it out: fa4flex has kernels of its own")
    if backend == "FLASH" and max_scores:
        raise UnsupportedError(
            "Returning max scores is not supported with BACKEND='FLASH'",
            "another backend, or no max_scores",
            "leave BACKEND out: fa4flex returns them",
        )


def _check_exact(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    if value not in legal:
        raise UnsupportedError(
            f"kernel_options {name!r}: {value!r}, which changes results",
            f"{legal[0]!r}, which is how fa4flex computes",
            "leave it out",
        )


@constant_in_graphs
def _nearest(key: str) -> str | None:
    known = sorted({*TUNING, *EXACT})
    result = difflib.get_close_matches(key, known, 1) or difflib.get_close_matches(key.upper(), known, 1)
    return result[0] if result else None
