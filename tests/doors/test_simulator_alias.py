"""The simulator's old place keeps working, with a warning; its errors are caught as this package's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fa4flex.simulator
import ptxsim.model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("old", "new"), [("fa4flex.simulator", "ptxsim"), ("fa4flex.simulator.model", "ptxsim.model")]
)
def test_every_public_name_is_still_there(old: str, new: str) -> None:
    before, now = sys.modules.get(old) or __import__(old, fromlist=["_"]), sys.modules[new]
    assert before.__all__ == now.__all__ and now.__all__
    for name in now.__all__:
        with pytest.warns(FutureWarning, match=rf"use {new}\.{name}$") as caught:
            assert getattr(before, name) is getattr(now, name)
        assert caught[0].filename == __file__


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError):
        fa4flex.simulator.nothing  # noqa: B018


def test_errors_of_the_simulator_are_caught_as_ours() -> None:
    with (
        pytest.raises(fa4flex.UnsupportedError, match="one of sm_90a, sm_100a") as caught,
        ptxsim.device("sm_80"),
    ):
        pass
    assert (
        isinstance(caught.value, (ptxsim.errors.UnsupportedError))
        and caught.value.fix == "simulate one of these"
    )
    with pytest.raises(fa4flex.InputError), ptxsim.device("sm_90a", timing="soon"):
        pass


def test_the_simulator_knows_nothing_of_us() -> None:
    """It imports whole without fa4flex, and raises errors of its own then."""
    code = """
import sys, pkgutil, importlib, ptxsim
for found in pkgutil.walk_packages(ptxsim.__path__, "ptxsim."):
    importlib.import_module(found.name)
assert not [name for name in sys.modules if name.startswith("fa4flex")]
try:
    with ptxsim.device("sm_80"):
        pass
except ptxsim.errors.UnsupportedError as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "UnsupportedError\n", done.stderr
