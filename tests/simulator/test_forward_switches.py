"""Hopper forward kernels as comparisons set them: right on the simulator, and planned as they are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from cases import Size
from own_forward import TIMINGS, Own, captured_forward

from fa4flex import lower
from fa4flex.codegen.plan import specialize
from fa4flex.kernels.fwd_sm90 import plan, tiles
from fa4flex.runtime.cuda import engine

MODULES = (plan, tiles, specialize)


@dataclass(frozen=True)
class Case:
    """Constants of plans by name, and a launch that they matter to."""

    settings: dict[str, Any]
    size: Size
    masked: bool = False

    def capture(self) -> Own:
        with switched(self.settings):
            return captured_forward("sm_90a", self.size, self.masked)


@contextmanager
def switched(settings: dict[str, Any]) -> Iterator[None]:
    """Constants of plans, as a process of its own sets them; looks of ready launches contain them."""
    look = engine.Engine.look

    def with_settings(self: engine.Engine, call: Any) -> Any:
        found = look(self, call)
        return None if found is None else ((*found[0], *settings.items()), found[1])

    with ExitStack() as stack:
        stack.enter_context(patch.object(lower, "_forward", lower._forward.__wrapped__))
        stack.enter_context(patch.object(engine.Engine, "look", with_settings))
        for name, value in settings.items():
            (owner,) = (module for module in MODULES if hasattr(module, name))
            stack.enter_context(patch.object(owner, name, value))
        yield


SHORT = Size(batch=2, heads=3, q_len=250, kv_len=250, dim=64)
HEADS = Size(batch=2, heads=3, q_len=300, kv_len=300, dim=128)
WIDE = Size(batch=1, heads=1, q_len=200, kv_len=330, dim=256)
CASES = {
    "divisors": Case({"DIVISORS": True}, SHORT),
    "divisors, causal": Case({"DIVISORS": True}, HEADS, True),
    "divisors of sections": Case({"DIVISORS": True, "SECTION_BYTES": 4 * 300 * 512}, HEADS, True),
    "sections": Case({"SECTION_BYTES": 4 * 300 * 512}, HEADS, True),
    "sections of tiles": Case({"SECTION_BYTES": 1, "SECTION_WAVES": 8.0}, HEADS, True),
    "short": Case({"QUERIES_APART": True}, SHORT),
    "short, causal": Case({"QUERIES_APART": True}, SHORT, True),
    "queries ahead": Case({"QUERY_STAGES": 2}, SHORT),
    "queries ahead, causal": Case({"QUERY_STAGES": 2}, HEADS, True),
    "short and deep": Case({"QUERIES_APART": True, "NARROW_STAGES": 4, "DIVISORS": True}, SHORT),
    "a row settled": Case({"SETTLED_ROWS": 1}, WIDE, True),
    "both rows settled": Case({"SETTLED_ROWS": 2}, WIDE, True),
    "wide turns": Case({"PINGPONG_WIDEST": 256}, WIDE, True),
    "wide turns and a row settled": Case({"PINGPONG_WIDEST": 256, "SETTLED_ROWS": 1}, WIDE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_switched_kernel_is_right(name: str) -> None:
    own = CASES[name].capture()
    for timing, seed in TIMINGS[:3]:
        assert own.clean(timing, seed), (timing, seed)
