"""Launches of compiled CuTe-DSL functions, taken on a machine without a GPU."""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, cute
from cutlass.base_dsl.compiler import Compiler
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import tvm_ffi_provider as provider

from ptxsim.doors import capture, shim
from ptxsim.doors import launch as launches
from ptxsim.doors.capture import capturing
from ptxsim.doors.launch import Launch, parameters_of
from ptxsim.doors.tensors import aligned
from ptxsim.errors import InputError, UnsupportedError

SIZE = 1000


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, a: Float32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 96 + thread
    if i < x.shape[0]:
        y[i] = x[i] * a


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, a: Float32, stream: cuda.CUstream) -> None:
    scale_kernel(x, y, a).launch(
        grid=[4, 6, 2], block=[96, 2, 1], cluster=[2, 3, 1], smem=4096, stream=stream
    )


STREAM = cuda.CUstream(0)


def refuse(launch: Launch) -> None:
    raise AssertionError(f"not expected: {launch}")


@pytest.fixture(scope="module")
def plain() -> Callable[..., Any]:
    """scale, compiled for sm_100a from CPU tensors of static extents."""
    with capturing("sm_100a", refuse):
        like = from_dlpack(torch.empty(SIZE))
        return cute.compile(scale, like, like, Float32(0), STREAM)


@pytest.fixture(scope="module")
def with_tvm_ffi() -> Callable[..., Any]:
    """scale, compiled for sm_90a with extents that are known when it is called."""
    with capturing("sm_90a", refuse):
        n = cute.sym_int32()
        like = make_fake_tensor(Float32, (n,), (1,))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(scale, like, like, Float32(0), stream, options="--enable-tvm-ffi")


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SIZE), torch.empty(SIZE)


def call_plain(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], a: float) -> None:
    function(*map(from_dlpack, tensors), a, STREAM)


# --- what a launch holds ------------------------------------------------------------------------------------


def test_a_plain_function_launches_with_exactly_its_configuration(plain: Any, tensors: Any) -> None:
    x, y = tensors
    seen: list[Launch] = []
    with capturing("sm_100a", seen.append):
        call_plain(plain, tensors, 2.5)
        call_plain(plain, (y, x), -1.0)
        call_plain(plain.to(0), tensors, 4.0)
    first, second, third = seen
    assert (first.grid, first.block, first.cluster) == ((4, 6, 2), (96, 2, 1), (2, 3, 1))
    assert first.shared_bytes == 4096
    assert first.params == struct.pack("<QQf", x.data_ptr(), y.data_ptr(), 2.5)
    assert second.params == struct.pack("<QQf", y.data_ptr(), x.data_ptr(), -1.0)
    assert third.params == struct.pack("<QQf", x.data_ptr(), y.data_ptr(), 4.0)
    assert first.attributes == {"programmatic_stream_serialization": 0, "cooperative": 0}
    assert "scale_kernel" in first.kernel
    assert f".entry {first.kernel}(" in first.ptx and ".target sm_100a" in first.ptx


def test_a_tvm_ffi_function_takes_cpu_tensors(with_tvm_ffi: Any, tensors: Any) -> None:
    x, y = tensors
    seen: list[Launch] = []
    with capturing("sm_90a", seen.append):
        with_tvm_ffi(x[:300], y[:300], 2.0)
    (found,) = seen
    places = parameters_of(found.ptx, found.kernel)
    assert [size for _, size in places] == [16, 16, 4]
    at = [start for start, _ in places]
    assert struct.unpack_from("<Qi", found.params, at[0]) == (x.data_ptr(), 300)
    assert struct.unpack_from("<Qi", found.params, at[1]) == (y.data_ptr(), 300)
    assert struct.unpack_from("<f", found.params, at[2]) == (2.0,)
    assert found.cluster == (2, 3, 1) and ".target sm_90a" in found.ptx
    with capturing("sm_90a", refuse), pytest.raises(ValueError, match=r"expected to match x\.shape"):
        with_tvm_ffi(x, y[:300], 2.0)
    with capturing("sm_90a", seen.append), patch.object(shim, "static_shared_bytes", refuse):
        with_tvm_ffi(x, y, 2.0)  # it is not loaded, and so not configured, a second time
    assert len(seen) == 2


def test_host_code_for_tvm_ffi_is_made_once_and_not_optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make it twice, and fast, took a tenth of a compilation; outside of the simulator nothing changes."""
    made: list[int] = []
    to_bytes = provider._aot_support.export_module_to_bytes

    def noted(module: Any, *, opt_level: int, **options: Any) -> Any:
        made.append(opt_level)
        return to_bytes(module, opt_level=opt_level, **options)

    monkeypatch.setattr(Compiler, "jit", refuse)
    monkeypatch.setattr(provider._aot_support, "export_module_to_bytes", noted)
    like = make_fake_tensor(Float32, (cute.sym_int32(),), (1,))
    arguments = like, like, Float32(0), make_fake_stream(use_tvm_ffi_env_stream=True)
    with capturing("sm_90a", refuse):
        cute.compile(scale, *arguments, options="--enable-tvm-ffi")
    assert made == [0]
    assert (Compiler.jit, provider._aot_support.export_module_to_bytes) == (refuse, noted)


def test_parameters_lie_as_the_ptx_declares_them() -> None:
    ptx = """.target sm_90a
.visible .entry k(
	.param .u8 a,
	.param .align 64 .b8 b[128],
	.param .u64 .ptr .global .align 16 c,
	.param .align 4 .b8 d[12],
	.param .f64 e
)
.reqntid 64, 2, 1
.reqnctapercluster 2
{ ret; }
.entry none() { ret; }
"""
    assert parameters_of(ptx, "k") == ((0, 1), (64, 128), (192, 8), (200, 12), (216, 8))
    assert parameters_of(ptx, "none") == ()
    assert launches.directives_of(ptx, "k") == {"reqntid": (64, 2, 1), "reqnctapercluster": (2, 1, 1)}
    with pytest.raises(InputError, match="kernel other"):
        parameters_of(ptx, "other")
    with pytest.raises(UnsupportedError, match=r"parameter `\.param \.texref t`"):
        parameters_of(".entry k(.param .texref t) { ret; }", "k")


def test_a_configuration_without_attributes_takes_the_clusters_that_the_kernel_declares() -> None:
    ptx = ".entry k(.param .u32 a) .reqnctapercluster 2, 1, 1 { ret; }"
    value = ctypes.c_uint32(7)
    values = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    config = launches._Config(grid=(4, 1, 1), block=(32, 1, 1), shared_bytes=16)
    found = launches.read_config("k", ptx, ctypes.addressof(config), ctypes.addressof(values))
    assert found == Launch("k", ptx, (4, 1, 1), (32, 1, 1), (2, 1, 1), 16, struct.pack("<I", 7))
    attribute = launches._Attribute(id=13)
    config.attributes, config.count = ctypes.pointer(attribute), 1
    assert launches.read_config("k", ptx, ctypes.addressof(config), ctypes.addressof(values)) == found
    attribute.value[0] = 1
    with pytest.raises(UnsupportedError, match="launch attribute 13"):
        launches.read_config("k", ptx, ctypes.addressof(config), ctypes.addressof(values))


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"grid": (0, 1, 1)}, "no extent of 0"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "whole clusters"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "16 CTAs"),
        ({"block": (64, 1, 1)}, "reqntid"),
        ({"shared_bytes": 232449}, "232448 bytes"),
    ],
)
def test_a_launch_that_a_gpu_refuses_is_refused(changed: dict[str, Any], rule: str) -> None:
    legal: dict[str, Any] = {"grid": (2, 1, 1), "block": (32, 1, 1), "cluster": (1, 1, 1), "shared_bytes": 0}
    ptx = ".entry k() .reqntid 32, 1, 1 { ret; }"
    Launch("k", ptx, **legal, params=b"")
    with pytest.raises(InputError, match=rule):
        Launch("k", ptx, **legal | changed, params=b"")


def test_static_shared_memory_is_added_up() -> None:
    ptx = (
        "\t.shared .align 4 .b8 a[6];\n.shared .align 16 .b8 b[2][8];\n.extern .shared .align 1024 .b8 c[];\n"
    )
    assert launches.static_shared_bytes(ptx) == 32


# --- exceptions ---------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Not even an Exception."""


def test_exceptions_reach_the_caller(plain: Any, with_tvm_ffi: Any, tensors: Any) -> None:
    error = Stop("in the callback")

    def stop(launch: Launch) -> None:
        raise error

    calls = (
        ("sm_100a", lambda: call_plain(plain, tensors, 1.0)),
        ("sm_100a", lambda: call_plain(plain.to(None), tensors, 1.0)),
        ("sm_90a", lambda: with_tvm_ffi(*tensors, 1.0)),
    )
    for arch, call in calls:
        with capturing(arch, stop), pytest.raises(Stop) as caught:
            call()
        assert caught.value is error and error.__context__ is None
    seen: list[Launch] = []
    with capturing("sm_90a", seen.append):
        with_tvm_ffi(*tensors, 1.0)
    assert len(seen) == 1, "the next call is not disturbed"


def test_a_jit_function_called_at_once(tensors: Any) -> None:
    """Its first call fails, and it is compiled again at each call."""
    x, y = tensors
    seen: list[Launch] = []

    def receive(launch: Launch) -> None:
        seen.append(launch)
        raise KeyError("twelve")

    with capturing("sm_100a", receive), pytest.raises(KeyError, match="twelve"):
        scale(from_dlpack(x), from_dlpack(y), Float32(3.0), STREAM)
    assert seen[0].params == struct.pack("<QQf", x.data_ptr(), y.data_ptr(), 3.0)


def test_what_is_compiled_here_runs_nowhere_else(
    plain: Any, with_tvm_ffi: Any, tensors: Any, tmp_path: Any
) -> None:
    with pytest.raises(UnsupportedError, match="outside of it"):
        call_plain(plain, tensors, 1.0)
    with pytest.raises(UnsupportedError, match="outside of it"):
        with_tvm_ffi(*tensors, 1.0)
    with (
        capturing("sm_90a", refuse),
        pytest.raises(UnsupportedError, match="compiled for sm_100a, on sm_90a"),
    ):
        call_plain(plain, tensors, 1.0)
    for function, place in ((plain, (str(tmp_path), "k")), (with_tvm_ffi, (str(tmp_path / "k.o"),))):
        with pytest.raises(UnsupportedError, match="exporting"):
            function.export_to_c(*place)
    with capturing("sm_90a", refuse), pytest.raises(UnsupportedError, match=r"k\.o.*\n.*no PTX"):
        cute.runtime.load_module(str(tmp_path / "k.o"))
    with pytest.raises(UnsupportedError, match="arch='sm_80'"), capturing("sm_80", refuse):
        pass


def test_a_missing_folder_for_the_ptx_is_reported(tensors: Any, tmp_path: Any) -> None:
    like = from_dlpack(tensors[0])
    options = f"--keep-ptx --dump-dir={tmp_path / 'absent'}"
    with capturing("sm_100a", refuse), pytest.raises(UnsupportedError, match="--dump-dir names"):
        cute.compile(scale, like, like, Float32(0), STREAM, options=options)


HOST_CODE = """
llvm.func @_cudaMalloc(!llvm.ptr, i64) -> i32
llvm.func @_cudaGetDevice(!llvm.ptr) -> i32
llvm.func @cuda_dialect_unload_library_once(!llvm.ptr)
llvm.func @printf(!llvm.ptr, ...) -> i32
llvm.func @host(%p: !llvm.ptr) -> i32 attributes {llvm.emit_c_interface} {
  %n = llvm.mlir.constant(64 : i64) : i64
  llvm.call @cuda_dialect_unload_library_once(%p) : (!llvm.ptr) -> ()
  %0 = llvm.call @_cudaGetDevice(%p) : (!llvm.ptr) -> i32
  %1 = llvm.call @_cudaMalloc(%p, %n) : (!llvm.ptr, i64) -> i32
  llvm.return %1 : i32
}
"""


def test_a_runtime_function_that_is_not_modelled_is_named() -> None:
    from cutlass._mlir import execution_engine, ir

    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(HOST_CODE)
        before = sorted(str(op) for op in module.body.operations)
        with shim.linked(module, shim.new_binary()):
            built = execution_engine.ExecutionEngine(module)
        assert sorted(str(op) for op in module.body.operations) == before
    host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(built.raw_lookup("host"))
    device, code = ctypes.c_int32(-1), ctypes.c_int32(-1)
    argument = ctypes.c_void_p(ctypes.addressof(device))
    packed = (ctypes.c_void_p * 2)(ctypes.addressof(argument), ctypes.addressof(code))
    with pytest.raises(UnsupportedError, match="cudaMalloc"):
        shim.deliver(host, ctypes.addressof(packed))
    assert (device.value, code.value) == (0, shim.LAUNCH_FAILURE)


# --- attaching and detaching --------------------------------------------------------------------------------


def attached() -> Iterator[Any]:
    """Everything that capturing replaces, as it is now."""
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
    from cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder import TVMFFIFunctionBuilder
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import CuTeDSL, CuteExperimentalDSL
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase
    from cutlass.utils import HardwareInfo

    owners = (Compiler, BaseDSL, ExternalBinaryModule, TVMFFIFunctionBuilder, _Tensor, HardwareInfo)
    for owner in (*owners, TVMFFIJitCompiledFunctionBase, torch.cuda, torch.cuda.nvtx, torch.Tensor):
        yield owner, dict(vars(owner))
    yield [dict(vars(dsl._get_dsl().envar)) for dsl in (CuTeDSL, CuteExperimentalDSL)]
    yield dict(os.environ), list(shim.receivers)


def test_what_was_inherited_is_inherited_again() -> None:
    class Base:
        name = "base"

    class Derived(Base):
        pass

    with capture._replaced(Derived, "name", "replaced"), capture._replaced(Derived, "name", "twice"):
        assert (Derived.name, Base.name) == ("twice", "base")
    assert "name" not in vars(Derived)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_nothing_stays_attached(arch: str) -> None:
    before = list(attached())
    with capturing(arch, refuse):
        assert list(attached()) != before
    assert list(attached()) == before
    with pytest.raises(Stop), capturing(arch, refuse), capturing("sm_90a", refuse):
        raise Stop
    assert list(attached()) == before


def test_the_innermost_receiver_is_asked(plain: Any, tensors: Any) -> None:
    outer: list[Launch] = []
    inner: list[Launch] = []
    with capturing("sm_100a", outer.append):
        with capturing("sm_100a", inner.append):
            call_plain(plain, tensors, 1.0)
        call_plain(plain, tensors, 2.0)
    assert [len(inner), len(outer)] == [1, 1]
    assert outer[0].params.endswith(struct.pack("<f", 2.0))


def test_questions_about_the_device_are_answered() -> None:
    with capturing("sm_100a", refuse, sms=3) as device:
        assert device.sms == 3
        assert torch.cuda.get_device_capability() == (10, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 3
        assert int(cuda.CUstream(torch.cuda.current_stream().cuda_stream)) == 0
        assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == 1
        assert cutlass.utils.HardwareInfo().get_device_multiprocessor_count() == 3
    with capturing("sm_90a", refuse):
        assert torch.cuda.get_device_capability(torch.device("cpu")) == (9, 0)


def test_attributes_of_the_device_are_answered() -> None:
    from cutlass.base_dsl.runtime import cuda as runtime

    attributes = cuda.CUdevice_attribute
    with capturing("sm_90a", refuse, sms=3):
        count = attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        assert runtime.get_device_attribute(count) == 3
        with pytest.raises(UnsupportedError, match="attribute CLOCK_RATE"):
            runtime.get_device_attribute(attributes.CU_DEVICE_ATTRIBUTE_CLOCK_RATE)


def test_two_blocks_on_a_multiprocessor(tensors: Any) -> None:
    """CuTe DSL then asks for the shared memory of one, to choose how much of it these take."""
    seen: list[Launch] = []

    @cute.jit
    def twice(x: cute.Tensor, y: cute.Tensor) -> None:
        scale_kernel(x, y, Float32(2)).launch(grid=[1, 1, 1], block=[32, 1, 1], min_blocks_per_mp=2)

    with capturing("sm_90a", seen.append):
        twice(*map(from_dlpack, tensors))
    assert ".minnctapersm 2" in seen[0].ptx


def test_ranges_for_profilers() -> None:
    with capturing("sm_90a", refuse):
        with torch.cuda.nvtx.range("outer"):
            assert torch.cuda.nvtx.range_push("inner") == 1
            assert torch.cuda.nvtx.range_pop() == 1
        torch.cuda.nvtx.mark("here")
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("from here"))


def test_tensors_meant_for_the_host_stay_there() -> None:
    """A function without kernels that works on host memory runs as ever, and takes no other tensors."""

    @cute.jit
    def fill(x: cute.Tensor, n: cutlass.Int32) -> None:
        for i in range(n):
            x[i] = Float32(i)

    with capturing("sm_100a", refuse):
        like = make_fake_compact_tensor(Float32, (cute.sym_int32(),), memspace=cutlass.AddressSpace.generic)
        compiled = cute.compile(fill, like, cutlass.Int32(1), options="--enable-tvm-ffi")
        x = torch.zeros(5)
        compiled(x, 5)
        assert x.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="device_type=cpu"):
            compiled(from_dlpack(x, enable_tvm_ffi=True), 5)


def test_aligned_tensors() -> None:
    """Numbers, shape and strides stay; the address becomes a multiple of 128, or of what is asked for."""
    for shape, order in (((5, 3), (0, 1)), ((4, 2, 8), (2, 0, 1)), ((0, 3), (0, 1))):
        for dtype in (torch.uint8, torch.bfloat16, torch.float64):
            memory = torch.arange(400, dtype=torch.float32).to(dtype)
            size, count = memory.element_size(), math.prod(shape)
            start = next(i for i in range(1, 200) if (memory.data_ptr() + i * size) % 128)
            tensor = memory[start : start + count].view(shape).permute(order)
            before, strides = tensor.clone(), tensor.stride()
            for to in (128, 1024):
                moved = aligned(tensor, to)
                assert moved is tensor and moved.data_ptr() % to == 0
                assert moved.stride() == strides and torch.equal(moved, before)
    there = aligned(torch.ones(4))
    assert aligned(there).data_ptr() == there.data_ptr()
