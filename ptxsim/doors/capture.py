"""Taking part in what CuTe DSL compiles and launches, on a machine without a GPU.

Everything is attached when a `capturing` begins and detached when it ends; nothing has to be set before
cutlass is imported. sm_90a and sm_100a can take turns in one process: the target is a field of the DSL's
settings, which are read at each compilation.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from ptxsim.doors import kept, shim
from ptxsim.doors.launch import Launch
from ptxsim.doors.passes import to_ptx
from ptxsim.doors.questions import Replacement, questions
from ptxsim.doors.shim import Device, Receiver
from ptxsim.doors.tensors import DeviceCheck, taking_cpu_tensors
from ptxsim.errors import UnsupportedError
from ptxsim.unprinted import enter_module

DEVICES = {
    "sm_90a": Device("sm_90a", (9, 0), "simulated H200", 132),
    "sm_100a": Device("sm_100a", (10, 0), "simulated B200", 148),
}


@contextlib.contextmanager
def capturing(arch: str, on_launch: Callable[[Launch], None], sms: int | None = None) -> Iterator[Device]:
    """Within, CuTe-DSL functions compile for `arch`, and launches call `on_launch`, one after another.

    Holds for what is compiled within: with cute.compile, plain or with --enable-tvm-ffi, and by calling a
    @cute.jit function. Tensors are CPU tensors, whose addresses stand in the parameters. `sms` is the number
    of SMs that host code is told of. Exceptions of `on_launch` reach the caller of the compiled function.

    The function also works in a later `capturing` of the same `arch`. Outside of one, a call raises
    UnsupportedError. So does exporting such a function, or loading an exported one within: object files hold
    no PTX. torch.cuda's questions about the current device are answered for a GPU of `arch`, in all threads.
    """
    if arch not in DEVICES:
        raise UnsupportedError(f"arch={arch!r}", f"one of {', '.join(DEVICES)}", "simulate one of these")
    device = DEVICES[arch]
    if sms is not None:
        device = Device(arch, device.capability, device.name, sms)
    receiver = Receiver(device, on_launch)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptxsim-"))
        for owner, name, value in (*_settings(arch, folder), *_compiler(), *questions(device)):
            stack.enter_context(_replaced(owner, name, value))
        shim.receivers.append(receiver)
        stack.callback(shim.receivers.remove, receiver)
        yield device


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value; one that was inherited is inherited again afterwards."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


# --- settings -----------------------------------------------------------------------------------------------


def _settings(arch: str, folder: str) -> Iterator[Replacement]:
    """Target and artifacts: PTX is kept, and nothing is taken from caches, whose code is linked to a GPU."""
    from cutlass.cutlass_dsl import CuTeDSL, CuteExperimentalDSL

    for dsl in (CuTeDSL, CuteExperimentalDSL):
        settings = dsl._get_dsl().envar
        if settings.compiler_backend != "legacy":
            raise UnsupportedError(
                f"CUTE_DSL_COMPILER_BACKEND={settings.compiler_backend}",
                "the backend `legacy`, which is CuTe DSL's own",
                "unset the variable",
            )
        yield settings, "_arch", arch
        yield settings, "keep_ptx", True
        yield settings, "dump_dir", folder
        yield settings, "no_cache", True


# --- compiling ----------------------------------------------------------------------------------------------


def _compiler() -> Iterator[Replacement]:
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule
    from cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder import TVMFFIFunctionBuilder
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase
    from cutlass.cutlass_dsl.tvm_ffi_provider import _aot_support as aot

    compiling: list[tuple[int, bool]] = []
    """Compilations under way: the number of the device code, and whether it is called through TVM-FFI."""
    compile_module, jit = BaseDSL.compile_and_cache, Compiler.jit
    create, to_bytes = TVMFFIJitCompiledFunctionBase._create_tvm_ffi_function, aot.export_module_to_bytes

    @functools.wraps(compile_module)
    def compile_and_cache(dsl: Any, *args: Any, **kwargs: Any) -> Any:
        compiling.append((shim.new_binary(), dsl.compile_options.enable_tvm_ffi))
        try:
            compiled = compile_module(dsl, *args, **kwargs)
        finally:
            binary, _ = compiling.pop()
        if compiled.has_gpu_module and compiled.engine is not None:
            shim.set_ptx(binary, _ptx(compiled))
            compiled.__class__ = _simulated(type(compiled))
        return compiled

    @functools.wraps(jit)
    def jit_linked(compiler: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        binary, by_tvm_ffi = compiling[-1]
        if by_tvm_ffi:  # `create` replaces this code by its own before anybody calls it
            return _NoCode()
        with shim.linked(module, binary):
            return jit(compiler, module, *args, **kwargs)

    @functools.wraps(create)
    def create_linked(compiled: Any) -> Any:
        binary, _ = compiling[-1]
        with shim.linked(compiled.ir_module, binary, kept.WORDS) as names:

            def unoptimised(module: Any, **options: Any) -> bytes:
                """Host code runs for microseconds, once per launch: to optimise it takes a tenth of a
                second."""
                code = to_bytes(module, **options | {"opt_level": 0})
                compiled.host_code = kept.HostCode(code, names)
                return kept.filled(code, names, binary)

            with _replaced(aot, "export_module_to_bytes", unoptimised):
                return create(compiled)

    yield CuTeDSL, "_enter_gpu_module", enter_module
    yield BaseDSL, "compile_and_cache", compile_and_cache
    yield Compiler, "compile", to_ptx(Compiler.compile)
    yield Compiler, "jit", jit_linked
    yield TVMFFIJitCompiledFunctionBase, "_create_tvm_ffi_function", create_linked
    yield ExternalBinaryModule, "__init__", _refuse_loading
    yield _Tensor, "__init__", taking_cpu_tensors(_Tensor.__init__)
    builder = TVMFFIFunctionBuilder
    decode, load = DeviceCheck(builder.decode_param_tensor, builder.load_dltensor_device_type).methods()
    yield builder, "decode_param_tensor", decode
    yield builder, "load_dltensor_device_type", load


class _NoCode:
    """In place of an execution engine whose functions nobody calls."""

    def lookup(self, name: str) -> None:
        return None


def _ptx(compiled: Any) -> str:
    """The text that was kept: where the folder for it is missing, only the path is."""
    text = compiled.__ptx__
    if not isinstance(text, str) or ".entry" not in text:
        raise UnsupportedError(
            f"{compiled.function_name}, compiled without a PTX text ({text!r})",
            "a text in a folder that exists",
            "create the folder that --dump-dir names, or leave the option away",
        )
    return text


def _refuse_loading(module: Any, file_path: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedError(
        f"loading {file_path} for the simulator",
        "a function compiled within `with ptxsim.device(...)`: object files hold no PTX",
        "turn off the cache that keeps such files (QUACK_CACHE_ENABLED=0 for quack)",
    )


class _Simulated:
    """In front of the class of a compiled function whose launches are captured, for as long as it lives."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return shim.deliver(super().__call__, *args, **kwargs)  # type: ignore[misc]

    def run_compiled_program(self, *args: Any) -> Any:
        return shim.deliver(super().run_compiled_program, *args)  # type: ignore[misc]

    def to(self, device: Any = None) -> Any:
        executor = super().to(device)  # type: ignore[misc]
        if not isinstance(executor, _Simulated):
            executor.__class__ = _simulated(type(executor))
        return executor

    num_devices = 1

    def _load_cuda_library(self) -> list[Any]:
        super()._load_cuda_library()  # type: ignore[misc]
        return []  # what is listed would be unloaded by the CUDA runtime

    def export_to_c(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "exporting a function that was compiled for the simulator",
            "one that was compiled outside of it",
            "compile it anew, outside of `with ptxsim.device(...)`",
        )

    dump_to_object = export_to_c


_classes: dict[Any, Any] = {}


def _simulated(compiled: Any) -> Any:
    """The class of compiled functions, or of what runs them, with _Simulated in front of it."""
    if compiled not in _classes:
        _classes[compiled] = type(f"Simulated{compiled.__name__}", (_Simulated, compiled), {})
    return _classes[compiled]
