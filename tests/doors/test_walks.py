"""Modules of the package that a call passes through, counted by a profiler: fewer are easier to read, and
cost less. CPU tensors stand for those of a GPU, and nothing is compiled or launched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from launch_changes import calls_on_gpu

import fa4flex
from fa4flex.runtime.cuda import backward, engine

PACKAGE = str(Path(fa4flex.__file__).parent) + "/"
MAKING = {engine.make_ready.__code__, backward._make_ready.__code__, backward.compile_ahead.__code__}
"""Functions below which a launch is described, lowered and compiled."""

REPEATS = 5
"""Calls after which all that is kept for next ones is there."""


def walk(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Modules of which a function runs in a call, in their order, from api.py on: all of them, and those
    outside of the making of a launch."""
    modules: dict[str, bool] = {}
    inside: list[FrameType] = []

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and inside and inside[-1] is frame:
            inside.pop()
        if event != "call":
            return
        path = frame.f_code.co_filename
        begun = modules or path == f"{PACKAGE}api.py"
        if begun and path.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            name = path.removeprefix(PACKAGE)
            modules[name] = modules.get(name, False) or not inside
        if frame.f_code in MAKING:
            inside.append(frame)

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(modules), [name for name, outside in modules.items() if outside]


MOST = {
    "repeated": 5,
    "one more key per call": 8,
    "pages, new lengths": 9,
    "8-bit cache, one more key per call": 11,
    "captured bias, another tensor": 5,
    "with gradients, forward": 6,
    "forward and backward": 10,
}
"""Modules by row of benchmarks/host_calls.py."""

MOST_OF_FIRST = 10
"""Modules of runtime/ outside of the making of a launch."""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    calls_on_gpu(monkeypatch)


@pytest.mark.parametrize("name", MOST)
def test_calls_like_earlier_ones_pass_through_few_modules(name: str) -> None:
    from host_calls import rows

    call = rows()[name]
    for _ in range(REPEATS):
        call()
    modules, _ = walk(call)
    assert len(modules) <= MOST[name], modules


def test_a_first_call_passes_through_few_modules_besides_those_that_make_its_launch() -> None:
    from host_calls import rows

    _, modules = walk(rows()["repeated"])
    walked = [name for name in modules if name.startswith("runtime/")]
    assert len(walked) <= MOST_OF_FIRST, walked
