"""Backward passes by pairs of CTAs where the planner would take one CTA alone: tests have few keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from fa4flex.codegen.plan.sm100 import backward_pair
from fa4flex.runtime.cuda import backward, engine


@contextlib.contextmanager
def in_pairs() -> Iterator[None]:
    """Whatever the kernel of pairs has; what is made ready is not kept for others."""
    key = engine.Engine.key

    def of_pairs(self: engine.Engine, *call: Any) -> Any:
        return "pairs", key(self, *call)

    with (
        patch.object(backward_pair, "pays_in_pairs", lambda problem: True),
        patch.object(backward, "program", backward.program.__wrapped__),
        patch.object(engine.Engine, "key", of_pairs),
    ):
        yield
