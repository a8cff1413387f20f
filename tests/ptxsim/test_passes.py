"""Kernels compiled for the simulator end at PTX, which is the same as with machine code."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

import cuda.bindings.driver as cuda
from cutlass import Float32, cute
from cutlass.base_dsl.utils.logger import log
from cutlass.cute.runtime import make_fake_tensor
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

from ptxsim.doors import passes
from ptxsim.doors.capture import capturing
from ptxsim.unprinted import enter_module, unprinted


@cute.kernel
def add_kernel(x: cute.Tensor, a: Float32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = x[thread] + a


@cute.jit
def add(x: cute.Tensor, a: Float32, stream: cuda.CUstream) -> None:
    add_kernel(x, a).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def compiled(arch: str, options: str = "") -> tuple[str, str]:
    """PTX, and the module with its image."""
    with capturing(arch, lambda launch: None):
        like: Any = make_fake_tensor(Float32, (32,), (1,))
        found = cute.compile(add, like, Float32(0), cuda.CUstream(0), options=options)
        return found.__ptx__, str(found.ir_module)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_image_holds_the_same_ptx_and_no_machine_code(arch: str) -> None:
    ptx, module = compiled(arch)
    with patch.object(passes, "ASSEMBLER", "no such pass"):
        same, whole = compiled(arch)
    assert ptx == same and ".entry" in ptx
    assert ".nv.info" in whole and ".nv.info" not in module


def test_machine_code_that_is_asked_for_is_made(tmp_path: Any) -> None:
    _, module = compiled("sm_90a", f"--keep-cubin --dump-dir {tmp_path}")
    assert ".nv.info" in module and list(tmp_path.glob("*.cubin"))


def test_the_assembler_says_what_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    _, module = compiled("sm_90a", "remarks{ptx}")
    assert ".nv.info" in module and "registers" in capfd.readouterr().err


def test_modules_are_printed_for_a_log_that_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = CutlassBaseDSL._enter_gpu_module
    with unprinted():
        assert CutlassBaseDSL._enter_gpu_module is enter_module
    assert CutlassBaseDSL._enter_gpu_module is own
    monkeypatch.setattr(log(), "isEnabledFor", lambda level: True)
    with unprinted():
        assert CutlassBaseDSL._enter_gpu_module is own
