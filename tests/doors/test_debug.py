"""FA4FLEX_DEBUG: what is printed of each kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

import fa4flex
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.target import SM90A
from fa4flex.lower import Given, Lowered, lower_forward
from fa4flex.view.gpu import inputs_of
from fa4flex.view.sizes import setting


def lowered(attn: fa4flex.Attention, width: int = 64) -> Lowered:
    program = attn.program
    inputs = inputs_of(program, setting(program, 256, 256).shape, {"head_dim": width})
    given = Given(program.facts, attn.variant.schedule, inputs, program.captured(), SM90A)
    return lower_forward(given)


def test_each_level_prints_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path))
    found = lowered(fa4flex.compile(mask=fa4flex.variants.causal))
    found.compile(Signature())
    assert "fa4flex:" not in capfd.readouterr().err
    told = []
    for level in range(1, 5):
        monkeypatch.setenv("FA4FLEX_DEBUG", str(level))
        found.compile(Signature())
        told.append(capfd.readouterr().err)
    marks = "a mask of key intervals", "shared memory", "HOOKS = ", ".visible .entry"
    for level, text in enumerate(told):
        there = [mark in text for mark in marks]
        assert there == [number <= level for number in range(4)], (level + 1, text[:2000])
    assert all(f"source {found.source.key[:16]}" in text for text in told)


@pytest.mark.parametrize("given", ["5", "-1", "verbose"])
def test_other_levels_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4FLEX_DEBUG", given)
    found = lowered(fa4flex.compile(mask=fa4flex.variants.causal))
    with pytest.raises(fa4flex.InputError, match=f"FA4FLEX_DEBUG='{given}'(.|\n)*0 \\(nothing\\)"):
        found.compile(Signature())
