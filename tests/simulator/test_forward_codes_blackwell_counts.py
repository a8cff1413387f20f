"""Clocks of the Blackwell kernel of codes: counted, and by the model of time, beside that of 16 bits."""

from __future__ import annotations

import pytest
import torch
from code_calls import EIGHT_BIT, FORMATS, Size, drawn

import fa4flex
import ptxsim
from ptxsim import model
from ptxsim.run.counts import cycles, shared_memory

SIZE = Size(heads=1, q_len=512, kv_len=1280, d=128, dv=128)
"""A pair of CTAs, and ten tiles of keys."""

TILES = SIZE.q_len * SIZE.kv_len // 128**2


def attend(form: str) -> None:
    q, k, v = (torch.randn(1, 1, n, SIZE.d).bfloat16() for n in (SIZE.q_len, SIZE.kv_len, SIZE.kv_len))
    with torch.no_grad():
        if form == "bfloat16":
            fa4flex.compile()(q, k, v)
        else:
            fa4flex.compile()(drawn(SIZE, **FORMATS[form]))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "polynomials"), [("e4m3", 3 / 8), ("int8", 1 / 4)])
def test_clocks_of_a_tile(form: str, polynomials: float) -> None:
    """Per 128 x 128 tile, in each CTA of a pair: K 32 for scores of 128 rows of q and 64 of k, four times; 64
    channels of values of 32 keys, four times; and exponentials that are no polynomials."""
    with ptxsim.device("sm_100a", timing="eager") as gpu:
        attend(form)
    assert not gpu.findings
    (result,) = (one for one in gpu.results if EIGHT_BIT in one.kernel)
    assert result.shape.cluster == (2, 1, 1)
    found = cycles(result)
    print(form, {name: x / TILES for name, x in found.items()}, shared_memory(result))
    assert shared_memory(result)["operands of MMAs"] == 4 * 32 * (128 + 64 + 64) // 128 * TILES
    assert 0 <= found["special functions"] / (1024 * TILES) - (1 - polynomials) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("form", "speed"), [("e4m3", 1.1)])
def test_a_step_is_shorter_than_that_of_16_bits(form: str, speed: float) -> None:
    """In the steady state, by the model of time."""
    steps = []
    for each in ("bfloat16", form):
        torch.manual_seed(0)  # which rows raise their maxima shifts some warps by some clocks
        with model.recording("sm_100a") as recorder:
            attend(each)
        steps.append(model.predict(recorder.traces[-1]).cycles_per_step)
    assert steps[0] >= speed * steps[1], steps
