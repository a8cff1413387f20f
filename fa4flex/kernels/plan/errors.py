"""Error of a plan that contradicts itself."""

from __future__ import annotations

from fa4flex.errors import Fa4flexError


class PlanError(Fa4flexError, ValueError):
    """A plan whose sums, regions or hand-overs do not fit together: a kernel built from it would be wrong."""
