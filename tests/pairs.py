"""Backward passes by other CTAs than the planner would take for the few keys and queries of tests: by pairs
of them, or such as are for few tiles, or for many, or for many queries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from fa4flex.kernels import dispatch
from fa4flex.kernels.bwd_sm90 import plan as hopper
from fa4flex.kernels.bwd_sm100.two_cta.plan import TWO_CTA, TwoCtaPlan, plan_two_cta
from fa4flex.kernels.plan.request import Request
from fa4flex.runtime.cuda import engine
from fa4flex.runtime.cuda.known import Shortlist


@contextlib.contextmanager
def hopper_pairs(wanted: bool) -> Iterator[None]:
    """Pairs of CTAs on Hopper where products are shared out, or none, whatever the planner would choose."""
    with patch.object(hopper, "PAIRED", 192 if wanted else 0), _apart():
        yield


@contextlib.contextmanager
def few_tiles(wanted: bool) -> Iterator[None]:
    """Tiles of keys of dense lengths are few where not all keys are, or none are, however many there are."""

    def few(request: Request) -> bool:
        dense = request.problem.lengths == "dense"
        return wanted and dense and not request.sizes.kv.at_most(hopper.FEW_KEYS)

    with patch.object(hopper, "_few_tiles", few), _apart():
        yield


@contextlib.contextmanager
def long_steps() -> Iterator[None]:
    """Steps of queries are long where scores are plain, however few queries there are."""
    first = patch.object(hopper, "least", lambda seconds, error: 0)
    with first, patch.object(hopper, "FEW_CLEARED", 0), _apart():
        yield


@contextlib.contextmanager
def many_keys() -> Iterator[None]:
    """Keys of Hopper's backward passes are many, however few there are: sums of dQ are added up."""
    with patch.object(hopper, "FEW_KEYS", 0), _apart():
        yield


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Keeps what is made ready here from all others. Calls are recognised by their keys alone: known launches
    are recognised without one, by their tensors."""
    key, this = engine.Engine.key, object()

    def of_this(self: engine.Engine, call: Any, *bits: Any) -> Any:
        found = key(self, call, *bits)
        return None if found is None else ((this, *found[0]), found[1])

    # Programs that are first called in here are called later, too: they keep nothing, rather than no list.
    none_known = property(lambda self: (), lambda self, known: vars(self).update(kept=()))
    with (
        patch.object(engine.Engine, "key", of_this),
        patch.object(Shortlist, "kept", none_known, create=True),
    ):
        yield


@contextlib.contextmanager
def in_pairs() -> Iterator[None]:
    """Whatever the kernel of pairs has, and something must be; what is made ready is not kept for others."""
    planned: list[TwoCtaPlan] = []

    def noted(request: Request) -> TwoCtaPlan:
        planned.append(plan_two_cta(request))
        return planned[-1]

    always = replace(TWO_CTA, accepts=lambda problem, target, sizes: target.family == "sm100", plan=noted)
    with patch.object(dispatch, "PIPELINES", (always, *dispatch.PIPELINES)), _apart():
        yield
    assert planned, "no backward pass by pairs of CTAs was planned"
