"""Tensor maps that host code asks the driver for are made here, and its errors reach the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

import cutlass
import cutlass.experimental.cuda as driver
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from cutlass.experimental import primitives as prims

import ptxsim
from ptxsim.doors.tensor_maps import tensor_map
from ptxsim.errors import InputError, UnsupportedError
from ptxsim.units.tensormap import TensorMap

ROWS, COLUMNS, BEGIN = 8, 32, 24
"""A box, and the row of the tensor at which it begins: half of it lies beyond the last row."""


@cute.kernel
def copy_box(map: cutlass.GridConstant[driver.TensorMap], out: cute.Tensor, row: cutlass.Int32) -> None:
    box = cutlass.Array(cutlass.Float32, ROWS * COLUMNS, space=cutlass.AddressSpace.smem, alignment=128)
    bar = cutlass.Array(cutlass.Int64, 1, space=cutlass.AddressSpace.smem)
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        prims.mbarrier_init(bar, 1)
        prims.fence_mbarrier_init()
        prims.mbarrier_arrive_expect_tx(bar, map.global_tx_bytes())
        prims.cp_async_bulk_tensor_shared_cta_global(box, map.get_ptr(), (cutlass.Int32(0), row), bar)
    prims.barrier_cta_sync(0)
    while not prims.mbarrier_try_wait_parity(bar, cutlass.Int32(0), time_limit=1000):
        pass
    for i in cutlass.range_constexpr(ROWS):
        (out.iterator.raw_ptr() + i * COLUMNS + thread).store((box.data_ptr() + i * COLUMNS + thread).load())


@cute.jit
def copy(x: cute.Tensor, out: cute.Tensor, stride: cutlass.Constexpr) -> None:
    map = driver.create_tensor_map_tiled(
        global_address=x.iterator.toint(),
        dtype=cutlass.Float32,
        global_dims=[COLUMNS, x.shape[0]],
        global_strides=[stride],
        box_dims=[COLUMNS, ROWS],
        swizzle=driver.TensorMapSwizzle.none,
    )
    copy_box(map, out, cutlass.Int32(BEGIN)).launch(grid=(1, 1, 1), block=(COLUMNS, 1, 1))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    x = ptxsim.aligned(torch.randn(BEGIN + ROWS // 2, COLUMNS))
    return x, ptxsim.aligned(torch.full((ROWS, COLUMNS), torch.nan))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_map_that_host_code_asks_for(arch: str) -> None:
    x, out = tensors()
    with ptxsim.device(arch) as gpu:
        copy(from_dlpack(x), from_dlpack(out), COLUMNS * 4 // 16)
    assert not gpu.findings
    assert torch.equal(out[: ROWS // 2], x[BEGIN:]) and not out[ROWS // 2 :].any()


def test_what_the_driver_refuses_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code would end the process."""
    from ptxsim.doors import shim

    def refuse(*args: Any) -> bytes:
        raise InputError("a map", "another", "ask for that")

    monkeypatch.setattr(shim, "tensor_map", refuse)
    x, out = tensors()
    with ptxsim.device("sm_100a"), pytest.raises(InputError, match="a map"):
        copy(from_dlpack(x), from_dlpack(out), COLUMNS * 4 // 16)
    assert out.isnan().all()


GOOD: dict[str, Any] = {
    "element": 9, "address": 1 << 20, "sizes": ((64, 100), (256,), (64, 8), (1, 2)),
    "interleave": 0, "swizzle": 3, "fill": 1,
}  # fmt: skip


def test_what_a_map_says() -> None:
    found = TensorMap.decode(tensor_map(**GOOD))
    assert (found.element, found.dims, found.strides) == ("bf16", (64, 100), (2, 256))
    assert (found.box, found.steps, found.nan, found.swizzle.span) == ((64, 8), (1, 2), True, 128)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"address": (1 << 20) + 8}, InputError),
        ({"sizes": ((64, 100), (264,), (64, 8), (1, 1))}, InputError),
        ({"sizes": ((64, 100), (256,), (64, 257), (1, 1))}, InputError),
        ({"sizes": ((64, 100), (256,), (64, 8), (1, 9))}, InputError),
        ({"sizes": ((64, 100), (256,), (128, 8), (1, 1))}, InputError),
        ({"element": 16}, InputError),
        ({"swizzle": 5}, UnsupportedError),
        ({"interleave": 1}, UnsupportedError),
    ],
)
def test_maps_that_are_refused(changed: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        tensor_map(**{**GOOD, **changed})
