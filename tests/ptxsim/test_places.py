"""Places at which boxes of TMA must not begin: an illegal instruction on hardware, a fault of the kernel
here."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

from kernels.case import BOTH, built
from kernels.small import BY_NAME

from ptxsim import Fault, device

ASKEW, BEFORE = "misaligned: .* no multiple of 16 bytes", "out of bounds: .* begins before the tensor"
PLANTED = (
    ("tma_load_1d", (170,), ASKEW),
    ("tma_load_1d", (-10,), ASKEW),
    ("tma_load_1d", (-12,), None),
    ("tma_load_3d", (-1, -2, -3), ASKEW),
    ("tma_load_3d", (4, 18, 30), ASKEW),
    ("tma_load_3d", (-1, -3, -8), None),
    ("tma_store_f32_128", (0, 3), ASKEW),
    ("tma_store_f32_128", (0, -8), BEFORE),
    ("tma_store_f32_128", (-10, 0), BEFORE),
    ("tma_store_f32_128", (61, 132), None),
    ("tma_add_bf16", (0, 4), ASKEW),
    ("tma_add_bf16", (-1, 8), BEFORE),
    ("tma_add_bf16", (0, -8), BEFORE),
    ("tma_add_bf16", (39, 128), None),
)
"""Case, place of the last box in its stead, what is said; nothing is, where it is as good."""


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in PLANTED))
def test_planted_places(name: str, arch: str, seed: int) -> None:
    case = BY_NAME[name]
    function = built(case, arch)
    for place, says in ((place, says) for planted, place, says in PLANTED if planted == name):
        (places, source), outputs = case.inputs(), case.outputs()
        places[-1] = places.new_tensor(place)
        with device(arch, seed=seed, timing="random") as gpu:
            if says:
                with pytest.raises(Fault, match=says):
                    function(places, source, *outputs)
                continue
            function(places, source, *outputs)
        assert not gpu.findings
