"""Errors for what cannot be simulated: what was given, what is expected, what to do."""

from __future__ import annotations

from typing import Any, ClassVar


class SimulatorError(Exception):
    """The base of all errors: `SimulatorError(given, expected, fix)`.

    A library that runs on the simulator may have its users catch its own errors: `raised_as` names, for a
    class here, a class that derives from it and is raised in its place.
    """

    raised_as: ClassVar[dict[type[SimulatorError], type[SimulatorError]]] = {}

    def __new__(cls, *args: Any) -> SimulatorError:
        return super().__new__(SimulatorError.raised_as.get(cls, cls), *args)

    def __init__(self, given: str, expected: str, fix: str) -> None:
        super().__init__(given, expected, fix)

    def __str__(self) -> str:
        given, expected, fix = self.args[:3]
        return f"{given}\n  expected: {expected}\n  to fix:   {fix}"


class InputError(SimulatorError, ValueError):
    """A launch, text or option that no GPU accepts."""


class UnsupportedError(SimulatorError, NotImplementedError):
    """A feature of hardware or of CuTe DSL that is not simulated."""
