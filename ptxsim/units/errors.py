"""Errors of a unit for what it does not know, and what cannot be."""

from __future__ import annotations

from ptxsim.errors import InputError, UnsupportedError


def unmodelled(given: str, known: str) -> UnsupportedError:
    """For what hardware may do and this simulator does not: `known` says what it does."""
    return UnsupportedError(given, known, "compile without it, or model it in ptxsim/units")


def invalid(given: str, expected: str) -> InputError:
    """For what no hardware accepts by the PTX ISA."""
    return InputError(given, expected, "the kernel builds it wrongly: look at what it is computed from")
