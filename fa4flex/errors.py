"""Every error a user can see: the input, what is expected, how to fix it, and where in their code.

Errors are raised tersely where they occur; `fa4flex.calls` adds the user's names and line. All of them derive
from `Fa4flexError`, and from the built-in exception that a PyTorch user would catch.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass

import ptxsim.errors


@dataclass(frozen=True)
class Origin:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.text else f"{self.file}:{self.line}"


class Fa4flexError(Exception):
    """The base of all errors: `Fa4flexError(given, expected, fix, where=None)`.

    `given` and `expected` say what is wrong, `fix` what to do, `where` is the user's line if known. They are
    the exception's `args`: Dynamo can then make one while it traces, and shows its words in its own error.
    """

    # super().__init__() is what Dynamo cannot trace here.
    def __init__(self, given: str, expected: str, fix: str, where: Origin | None = None) -> None:
        self.args = (given, expected, fix) if where is None else (given, expected, fix, where)

    @property
    def given(self) -> str:
        return str(self.args[0])

    @property
    def expected(self) -> str:
        return str(self.args[1])

    @property
    def fix(self) -> str:
        return str(self.args[2])

    @property
    def where(self) -> Origin | None:
        return self.args[3] if len(self.args) > 3 else None

    def __str__(self) -> str:
        lines = [self.given, f"  expected: {self.expected}", f"  to fix:   {self.fix}"]
        if self.where is not None:
            lines.append(f"  at:       {self.where}")
        return "\n".join(lines)


class InputError(Fa4flexError, ValueError):
    """A tensor, length or option that does not fit."""


class EarlierError(InputError):
    """Invalid inputs of an earlier call, detected on the device while it ran."""


class TraceError(Fa4flexError, TypeError):
    """A mod that cannot be turned into an expression."""


class UnsupportedError(Fa4flexError, NotImplementedError):
    """A request that is meaningful but not supported: names the reason and the nearest alternative."""


# Where torch raises another class than those above, the error is one of that class, too.


class StateError(InputError, RuntimeError):
    """An object that does not fit the call: a block map for other lengths, a sliced BlockMask."""


class OptionError(InputError, AssertionError):
    """An option that is not the caller's to set."""


# --- errors of the simulator, while it runs kernels of this package -----------------------------------------


class SimulatedInputError(InputError, ptxsim.errors.InputError):
    """InputError of the simulator, for those who catch the ones above."""


class SimulatedUnsupportedError(UnsupportedError, ptxsim.errors.UnsupportedError):
    """UnsupportedError of the simulator, for those who catch the ones above."""


ptxsim.errors.SimulatorError.raised_as |= {
    ptxsim.errors.InputError: SimulatedInputError,
    ptxsim.errors.UnsupportedError: SimulatedUnsupportedError,
}
