"""Forward kernels of codes, compiled for sm_100a: what spills is known, shared memory is as planned, and
products are those of 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
from test_codes_resources import ALIBI, CAPPED, E4M3, HALF, INT8, compiled

from fa4flex.kernels.plan.keys import Codes
from fa4flex.kernels.plan.target import SM100A
from fa4flex.variants import causal

FEW: dict[str, Any] = {
    "plain 128, e4m3": ({}, (128, 128), E4M3),
    "causal 128, int8": ({"mask": causal}, (128, 128), INT8),
}
MORE: dict[str, Any] = {
    f"{mods} {d}, {name}": (pieces, (d, dv), codes)
    for mods, pieces in (("plain", {}), ("causal", {"mask": causal}), ("alibi", ALIBI), ("soft cap", CAPPED))
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128))
    for name, codes in (("e4m3", E4M3), ("int8", INT8), ("int8, 16-bit values", HALF))
}
KINDS = {"int8": "kind::i8", "float8_e4m3fn": "kind::f8f6f4", "bfloat16": "kind::f16"}


MOST = 200
"""Bytes spilled, at most, by variants besides FEW: heads of (192, 128) and score mods."""


def check(pieces: dict[str, Any], widths: tuple[int, int], codes: Codes, spilled: int = 0) -> None:
    plan, found = compiled(pieces, widths, codes, target=SM100A)
    resources = found.resources
    print(widths, codes.qk, codes.pv, resources)
    assert resources.spill_bytes <= spilled and not resources.ignored
    assert resources.shared_bytes == plan.memory.total
    used = {KINDS[codes.qk], KINDS[codes.pv]}
    assert all((kind in found.ptx) == (kind in used) for kind in KINDS.values())
    assert ("cvt.rn.satfinite.e4m3x2.f32" in found.ptx) == codes.transposed


@pytest.mark.parametrize("name", FEW)
def test_nothing_spills(name: str) -> None:
    check(*FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_little_spills_in_others(name: str) -> None:
    check(*MORE[name], MOST)
