"""Precision: the dtypes of products, scores, softmax, sums and output, and the probability that may be left
out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar

import torch

from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.products import GIVEN, check_products, format_name

COMPUTE = {"float32": torch.float32, "float64": torch.float64}
OUTPUT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# name -> (why not, what to do instead)
_NOT_BUILT = {
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "fp8", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        (
            "sums of 8 bits lose long rows, and no output is scaled to them",
            'products of 8 bits are Precision(qk="int8", pv="float8_e4m3")',
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
    qk       what q and k are rounded to at each call: "int8", "float8_e4m3", "mxfp8" or "nvfp4"; "bfloat16":
             they are multiplied as they are given
    pv       the same of v: "float8_e4m3", or "bfloat16"
    promote  False: sums of 8-bit products may stay in the tensor cores' accumulators, 13 fraction bits on
             Hopper; True: they go to float32 after each tile of keys
    backward   products of the backward pass: "bfloat16", those of what was rounded, as it is
    tolerance  in place of qk and pv: each head rounds as far as errors of its outputs are proved to be at
             most this share of the range of its values, see fa4flex.Choice; None and 0: no head
             does. Over fa4flex.Planes: the same of tiles of keys that are left out

    Each element of an output is off by at most skip * (max v - min v), over the values of its channel at the
    allowed keys, and 0 where there are sinks; the LSE is lower by at most -log(1 - skip). docs/primitives.md
    has the proof. The LSE has the dtype of the computation.

    With qk, attention is over what `fa4flex.quantize` makes of q, k and v (16 or 32 bits): docs/precision.md
    has the errors. Gradients pass straight through the rounding. Raises UnsupportedError for meaningful but
    unsupported formats and pairs of them, with the reason, InputError for anything else.
    """

    compute: str = "auto"
    output: torch.dtype | None = None
    skip: float = 0.0
    qk: str = GIVEN
    pv: str = GIVEN
    promote: bool = True
    backward: str = GIVEN
    tolerance: float = 0.0

    skip_text: ClassVar[str]
    """The same in digits, which graphs hold."""
    coded: ClassVar[bool]
    """True where q and k are rounded to codes at each call."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", _share(self.skip))
        object.__setattr__(self, "tolerance", _tolerance(self.tolerance))
        object.__setattr__(self, "skip_text", repr(self.skip))
        for product in ("qk", "pv", "backward"):
            object.__setattr__(self, product, format_name(getattr(self, product)))
        check_products(self.qk, self.pv, self.promote, self.backward)
        if self.tolerance and self.qk != GIVEN:
            raise InputError(
                f"tolerance={self.tolerance:g} with qk={self.qk!r}, pv={self.pv!r}",
                "a tolerance, by which each head's formats are chosen, or formats of all heads",
                "leave one of them out",
            )
        object.__setattr__(self, "coded", self.qk != GIVEN or self.tolerance > 0)
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
    # A compiled step that has a symbol here is one step for each share: graphs hold its digits.
    return float.fromhex(float(skip).hex())


def _tolerance(given: object) -> float:
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) < float("inf"):
        raise InputError(
            f"tolerance={given!r}",
            "the largest error of an output over the range of the values, at least 0",
            "use 0.1, or 0 to round nothing",
        )
    return float.fromhex(float(given).hex())  # as skip: one compiled step for each


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


def refuse_codes(precision: Precision, beside: str, instead: str) -> None:
    """Raise UnsupportedError for codes of q, k and v beside what does not know them."""
    if precision.coded:
        raise UnsupportedError(
            f"{rounding(precision)} {beside}",
            "calls of fa4flex.compile(...), fa4flex.attention and fa4flex.nn.Attention",
            instead,
        )


def rounding(precision: Precision) -> str:
    """The precision as far as it rounds, for messages."""
    return (
        f"Precision(tolerance={precision.tolerance:g})"
        if precision.tolerance
        else f"Precision(qk={precision.qk!r})"
    )


def of_numbers(precision: Precision) -> Precision:
    """The precision of attention over what codes stand for."""
    plain = {"qk": GIVEN, "pv": GIVEN, "promote": True, "tolerance": 0.0}
    return replace(precision, **plain) if precision.coded else precision  # type: ignore[arg-type]


def told(precision: Precision) -> dict[str, Any]:
    """All fields, of which `read` makes the same again, as JSON has them."""
    value = {one.name: getattr(precision, one.name) for one in fields(precision)}
    output = None if precision.output is None else str(precision.output).removeprefix("torch.")
    return value | {"output": output}


def read(told: dict[str, Any]) -> Precision:
    """The precision that `told` has told of, among other things; fields that an older version did not know
    have their defaults. Raises KeyError without the first two, which all versions know."""
    given = {one.name: told[one.name] for one in fields(Precision) if one.name in told}
    given["compute"], output = told["compute"], told["output"]
    return Precision(**{**given, "output": None if output is None else getattr(torch, output)})
