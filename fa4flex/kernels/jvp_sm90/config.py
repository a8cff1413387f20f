"""Configuration of the Hopper kernel of attention and its tangents, besides hooks."""

from __future__ import annotations

from dataclasses import dataclass

from fa4flex.kernels.fwd_sm90 import config as forward


@dataclass(frozen=True)
class Config(forward.Config):
    """The forward kernel's: tiles of queries and keys are found as there. moved: which of "q", "k" and "v"
    have tangents."""

    moved: tuple[str, ...] = ("q", "k", "v")

    @property
    def scores_move(self) -> bool:
        """True if scores have tangents."""
        return "q" in self.moved or "k" in self.moved

    @property
    def passes(self) -> bool:
        """False: warpgroups without rows multiply like others."""
        return False
