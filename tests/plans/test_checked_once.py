"""Plans are checked before a kernel is compiled, and not again where it is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fa4flex import Schedule, lower
from fa4flex.codegen.analyze.domain import Shape
from fa4flex.codegen.analyze.facts import Facts
from fa4flex.codegen.evaluate import Captured
from fa4flex.compiler import ahead, compile
from fa4flex.compiler.compile import kernel_key
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.inputs import Inputs
from fa4flex.kernels.plan.target import SM90A, Target
from fa4flex.lower import Given, Lowered, lower_backward, lower_forward

SIGNATURE = Signature()
GIVEN = Given(Facts(), Schedule(), Inputs(Shape(2, 4, 512, 512), 4, 64, 64), Captured(), SM90A)


@dataclass(frozen=True)
class Wrong:
    """A plan that does not hold."""

    target: Target = SM90A

    def check(self) -> None:
        raise PlanError("an order of roles", "another", "wait")


@pytest.fixture(params=[lower_forward, lower_backward])
def lowered(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lowered:
    """A pass of which nothing is kept, and whose plan does not hold."""
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(ahead, "useful", lambda: True)
    found: Lowered = request.param(GIVEN)
    found.plan.check()
    return replace(found, plan=Wrong())


def key_of(lowered: Lowered) -> str:
    return kernel_key(lowered.source.key, lowered.problem, SIGNATURE, SM90A.name)


def test_nothing_is_compiled_by_a_plan_that_does_not_hold(
    lowered: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(ahead, "start", lambda *given: begun.append(given))
    monkeypatch.setattr(compile, "build_object", lambda *given: begun.append(given))
    for start in (lowered.compile, lowered.compile_ahead):
        with pytest.raises(PlanError, match="an order of roles"):
            start(SIGNATURE)
    assert not begun and not list((tmp_path / "kernels").glob("*"))


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_what_is_kept_was_checked(
    lowered: Lowered, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = object()
    if place == "memory":
        monkeypatch.setitem(compile._kernels, key_of(lowered), kernel)
    else:
        (tmp_path / "kernels").mkdir(mode=0o700)
        (tmp_path / "kernels" / (key_of(lowered) + ".so")).touch()
        monkeypatch.setattr(lower, "compile_kernel", lambda *given: kernel)
    lowered.compile_ahead(SIGNATURE)
    assert lowered.compile(SIGNATURE) is kernel
