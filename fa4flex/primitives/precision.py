"""Precision: the dtypes of scores, softmax, sums and output, and the probability that may be left out."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import torch

from fa4flex.errors import InputError, UnsupportedError

COMPUTE = {"float32": torch.float32, "float64": torch.float64}
OUTPUT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# name -> (why not, what to do instead)
_NOT_BUILT = {
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "fp8", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        (
            "no product here is computed in fp8, and no output scaled to it",
            "quantise outside; keys and values may be e4m3, with kv_scales",
        ),
    ),
    **dict.fromkeys(
        ("float16", "bfloat16", "fp16", "bf16"),
        (
            "a softmax summed in half precision loses the tails of long rows",
            'leave compute="auto": float32 sums',
        ),
    ),
    "tf32": ("products of float32 inputs are exact here", 'use compute="float32"'),
}


@dataclass(frozen=True)
class Precision:
    """compute  "auto": float32, and float64 for float64 inputs; or "float32" / "float64" for all inputs
    output   dtype of the output; None means that of q
    skip     probability that each query may leave out, 0 <= skip < 1: tiles of keys that are proved to hold
             less than their share of it take neither exponentials nor values. None and 0 leave out nothing

    Each element of an output is off by at most skip * (max v - min v), over the values of its channel at the
    allowed keys, and 0 where there are sinks; the LSE is lower by at most -log(1 - skip). docs/primitives.md
    has the proof. The LSE has the dtype of the computation. Raises UnsupportedError for meaningful but
    unsupported dtypes (fp8, half-precision sums), InputError for anything else.
    """

    compute: str = "auto"
    output: torch.dtype | None = None
    skip: float = 0.0

    skip_text: ClassVar[str]
    """The same in digits, which graphs hold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", _share(self.skip))
        object.__setattr__(self, "skip_text", repr(self.skip))
        name = str(self.compute).removeprefix("torch.")
        if name in _NOT_BUILT:
            reason, instead = _NOT_BUILT[name]
            raise UnsupportedError(f"compute={name!r}: {reason}", f"one of {('auto', *COMPUTE)}", instead)
        if name != "auto" and name not in COMPUTE:
            raise InputError(
                f"compute={self.compute!r}", f"one of {('auto', *COMPUTE)}", 'leave it at "auto"'
            )
        object.__setattr__(self, "compute", name)
        if self.output is None or self.output in OUTPUT:
            return
        name, expected = str(self.output).removeprefix("torch."), f"None or one of {OUTPUT}"
        if name in _NOT_BUILT:
            reason, instead = _NOT_BUILT[name][0], "cast the bfloat16 output with your own scale"
            raise UnsupportedError(f"output={name!r}: {reason}", expected, instead)
        raise InputError(f"output={self.output!r}", expected, "leave it out for the dtype of q")

    def compute_dtype(self, inputs: torch.dtype) -> torch.dtype:
        """The dtype of scores, softmax and sums for inputs of dtype `inputs`."""
        if self.compute != "auto":
            return COMPUTE[self.compute]
        return torch.float64 if inputs == torch.float64 else torch.float32

    def output_dtype(self, inputs: torch.dtype) -> torch.dtype:
        """The dtype of the output for inputs of dtype `inputs`."""
        return inputs if self.output is None else self.output


def _share(skip: object) -> float:
    if skip is None:
        return 0.0
    if isinstance(skip, bool) or not isinstance(skip, Real) or not 0 <= float(skip) < 1:
        raise InputError(
            f"skip={skip!r}",
            "the probability that a query may leave out, at least 0 and below 1",
            "use 1e-3, or 0 to leave out nothing",
        )
    return float(skip)


BY_FLEX = 'backend "flex"', "torch's kernels leave out no tile for its scores"
"""Name of torch's flex_attention in refusals, and the reason."""


def check_skip(precision: Precision, composed: dict[str, Any]) -> None:
    """Raise UnsupportedError for what Precision(skip=...) cannot be combined with in a variant."""
    if composed["backend"] == "flex":
        refuse_skip(precision.skip, *BY_FLEX)


def refuse_skip(skip: float, beside: str, reason: str) -> None:
    """Raise UnsupportedError if something may be left out beside what allows no such bound."""
    if skip:
        raise UnsupportedError(
            f"Precision(skip={skip:g}) with {beside}: {reason}",
            "skip=0, which leaves out nothing",
            f"leave skip out, or leave out {beside}",
        )
