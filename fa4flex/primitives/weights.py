"""Rules by which programs make weights of scores: the part of normalisers that is compiled in."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["softmax", "softpick", "elementwise"]


class Weights(NamedTuple):
    """The rule by which programs make weights of modified scores; of an elementwise one the modified score is
    the weight."""

    kind: Kind = "softmax"
    eps: float = 0.0

    @property
    def summed(self) -> bool:
        """True if weights of a row are divided by a sum over it."""
        return self.kind != "elementwise"


SOFTMAX = Weights()
