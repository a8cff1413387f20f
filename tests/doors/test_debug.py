"""FA4FLEX_DEBUG, and the names under which profilers show kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fa4flex
from fa4flex.codegen.plan.target import SM90A
from fa4flex.compiler.compile import trace_and_compile
from fa4flex.compiler.signature import Signature
from fa4flex.lower import Given, Lowered, lower_backward, lower_forward
from fa4flex.view.gpu import inputs_of
from fa4flex.view.sizes import setting


def lowered(attn: fa4flex.Attention, direction: str = "forward", width: int = 64) -> Lowered:
    program = attn.program
    inputs = inputs_of(program, setting(program, 256, 256).shape, {"head_dim": width})
    given = Given(program.facts, attn.variant.schedule, inputs, program.captured(), SM90A)
    return {"forward": lower_forward, "backward": lower_backward}[direction](given)


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
    assert all(found.kernel_name in text for text in told)
    assert f".entry {found.kernel_name}" in told[-1]


@pytest.mark.parametrize("given", ["5", "-1", "verbose"])
def test_other_levels_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4FLEX_DEBUG", given)
    found = lowered(fa4flex.compile(mask=fa4flex.variants.causal))
    with pytest.raises(fa4flex.InputError, match=f"FA4FLEX_DEBUG='{given}'(.|\n)*0 \\(nothing\\)"):
        found.compile(Signature())


@pytest.mark.slow
def test_names_of_all_kernels_of_a_pass(tmp_path: Path) -> None:
    """The number behind a name is the compiler's."""
    found = lowered(fa4flex.compile(mask=fa4flex.variants.causal), "backward")
    assert re.fullmatch(r"fa4flex_bwd_sm90_bfloat16_d64_dense_queries_[0-9a-f]{8}", found.kernel_name)
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir={tmp_path}"
    ptx = trace_and_compile(found.source, found.problem, Signature(), options).__ptx__
    names = [name.rstrip("0123456789") for name in re.findall(r"\.entry (\w+)\(", ptx)]
    assert names == [
        f"{x}_" for x in ("fa4flex_bwd_preprocess", found.kernel_name, "fa4flex_bwd_postprocess")
    ]


def test_variants_have_names_of_their_own() -> None:
    first = lowered(fa4flex.compile(mask=fa4flex.variants.causal))
    other = lowered(fa4flex.compile(mask=fa4flex.variants.causal, score_mod=fa4flex.variants.softcap(5.0)))
    wide = lowered(fa4flex.compile(mask=fa4flex.variants.causal), width=128)
    assert len({x.kernel_name for x in (first, other, wide)}) == 3
    shown = fa4flex.compile(mask=fa4flex.variants.causal).source(
        "plan", q_len=256, kv_len=256, arch="sm_90a", head_dim=64
    )
    assert shown.endswith(f"profilers show {first.kernel_name}")
