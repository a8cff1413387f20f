"""Elements in which q.k and P v are multiplied, and which pairs of them lose nothing that matters.

Figures are relative errors of outputs: docs/precision.md has the tables.
"""

from __future__ import annotations

from fa4flex.errors import InputError, UnsupportedError

GIVEN = "bfloat16"
"""Name for tensors as they are given, of 16 or 32 bits."""
KEYS = ("int8", "float8_e4m3", "mxfp8", "nvfp4")
"""Formats that queries and keys may be rounded to."""
MULTIPLIED = ("int8", "float8_e4m3")
"""Those of them that kernels multiply as they are."""
VALUES = ("float8_e4m3",)
"""Formats that probabilities and values may be rounded to."""

Refused = dict[str, tuple[str, str]]
"""Formats that are known and refused: why, and what to take instead."""

OF_KEYS: Refused = {
    "float8_e5m2": ("twice the error of e4m3 at the same speed: scales give the range", "float8_e4m3"),
    "mxfp4": ("scales of powers of two for 32 channels lose an outlier's neighbours", "nvfp4"),
    "int4": ("an error of 18 %, and no tensor cores for it on the chips that have kernels", "nvfp4"),
}
OF_VALUES: Refused = {
    "int8": ("a sink's small value is lost beside large ones (17 % error)", "float8_e4m3"),
    "nvfp4": ("probabilities and values of 4 bits lose a sink's value (83 % error)", "float8_e4m3"),
    "mxfp4": ("probabilities and values of 4 bits lose a sink's value (83 % error)", "float8_e4m3"),
    "mxfp8": ("scales along the keys would belong to tiles of probabilities", "float8_e4m3"),
    "float8_e5m2": ("twice the error of e4m3: scales of channels give the range", "float8_e4m3"),
}
OF_BACKWARD: Refused = dict.fromkeys(
    ("float8_e4m3", "float8_e5m2", "mxfp8", "int8", "nvfp4"),
    (
        "8-bit products of a backward pass give gradients errors of 5 to 7 % (e4m3; e5m2 9 to 13 %), and on"
        " an H200 cuDNN's have 0.65 of the speed of 16 bits where causal, 1.08 to 1.18 of it where full",
        GIVEN,
    ),
)


def format_name(value: object) -> str:
    """Name of a format, which may be given as a dtype of torch."""
    name = str(value).removeprefix("torch.")
    return "float8_e4m3" if name == "float8_e4m3fn" else name


def check_format(argument: str, name: str, known: tuple[str, ...], refused: Refused) -> None:
    """Raise UnsupportedError for a format that is known and refused, InputError for one that is not known."""
    if name in known:
        return
    if name in refused:
        reason, instead = refused[name]
        raise UnsupportedError(f"{argument}={name!r}: {reason}", f"one of {known}", f"{argument}={instead!r}")
    raise InputError(f"{argument}={name!r}", f"one of {known}", f"{argument}={known[0]!r}")


def check_products(qk: str, pv: str, promote: bool, backward: str) -> None:
    """Raise UnsupportedError for products that are refused, alone or as a pair."""
    check_format("qk", qk, (*KEYS, GIVEN), OF_KEYS)
    check_format("pv", pv, (*VALUES, GIVEN), OF_VALUES)
    check_format("backward", backward, (GIVEN,), OF_BACKWARD)
    if qk == GIVEN and pv != GIVEN:
        raise UnsupportedError(
            f"qk={qk!r} with pv={pv!r}: 8-bit values cost an error of 3 %, and int8 q.k, which saves as many "
            "products, one of 1 %",
            f"8-bit q.k, with pv={GIVEN!r} or with pv={pv!r}",
            f'qk="int8", pv={GIVEN!r}',
        )
    if not isinstance(promote, bool):
        raise InputError(f"promote={promote!r}", "True or False", "leave it at True")
    if not promote and pv == GIVEN:
        raise UnsupportedError(
            f"promote=False with pv={GIVEN!r}: sums of 16-bit products are float32 in any case",
            "8-bit values, whose sums Hopper's tensor cores keep in 13 fraction bits",
            'leave promote out, or pv="float8_e4m3"',
        )
