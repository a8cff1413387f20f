"""A short run of random sequences, and checks that the tester sees what it is to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa4flex

from . import changes, pool
from .oracle import Failure
from .run import Setting, run
from .steps import Asked, ask

SECONDS = 20.0


@pytest.mark.slow
def test_sequences(seed: int) -> None:
    """Other sequences each time: `python -m tests.sequences --seed <number> --calls 20000` is a long run."""
    report = run(Setting(seed=seed), seconds=SECONDS, shrink_seconds=15.0, stop_at_first=True)
    assert not report.failures, report.table()
    assert report.calls > 50


def test_as_a_gpu_is_asked(seed: int) -> None:
    """What a GPU would be given, on a CPU."""
    report = run(
        Setting(seed=seed, programs=4, as_gpu=True), sequences=2, shrink_seconds=0.0, stop_at_first=True
    )
    assert not report.failures, report.table()


@pytest.mark.parametrize("name", list(changes.WAYS))
def test_ways_write(name: str) -> None:
    """Each way leaves what was to be written, and its effect on torch's counter is as said."""
    way = changes.WAYS[name]
    if way.gpu:
        pytest.skip("needs a GPU")
    world = Setting().world()
    for new in (torch.randn(5), torch.randint(0, 9, (5,))):
        x = torch.zeros_like(new)
        before = x._version
        try:
            way.write(world, x, new)
        except pool.Skip:
            continue
        assert (
            torch.equal(x, new)
            or name == "by_arithmetic"
            or (name == "by_data_in_part" and new.dtype == torch.float32)
        )
        assert not torch.equal(x, torch.zeros_like(x))
        assert (x._version > before) == way.counted


def asked_of(seed: int) -> Asked:
    """A call of a compiled attention with a table, right as it is."""
    world = Setting(doors=("compile",), left_out=("blocks",)).world()
    world.seed(seed)
    mod = pool.SCORES[0]
    score = pool.write_function(mod, "score", world.sizes, world.rng, world.device)
    next(iter(score.values.values())).read().requires_grad_()
    subject = pool.Subject("compile", fa4flex.compile(score.made), score)
    while True:
        asked = ask(world, pool.draw_call(world, subject))
        if (
            asked.given.mode == "grad"
            and asked.given.problem.q.dtype == torch.float32
            and asked.given.problem.k.numel() > 99
        ):
            return asked


@pytest.mark.parametrize("what", ["out", "lse", "gradients", "dtype", "error"])
def test_faults_are_seen(what: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(seed)
    if "return_lse" not in asked.given.brought:
        asked.given.brought["return_lse"] = True
    asked.run()
    asked.check()
    assert asked.found is not None
    out, lse = asked.found
    if what == "gradients":
        asked.exact.gradients = {x: g + 0.01 * (1 + g.abs().max()) for x, g in asked.exact.gradients.items()}
        with pytest.raises(Failure, match="gradient of"):
            asked.check_gradients()
        return
    found: dict[str, Any] = {
        "out": (out + 0.001 * out.abs().max(), lse), "lse": (out, lse + 0.001 * lse.abs().max()),
        "dtype": (out.double(), lse), "error": (out, lse),
    }  # fmt: skip
    asked.found, asked.error = found[what], KeyError("x") if what == "error" else None
    with pytest.raises(Failure):
        asked.check()
