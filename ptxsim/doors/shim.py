"""Stand-ins for the CUDA runtime, which compiled host code calls while it is simulated.

CuTe DSL compiles the host side of a kernel to LLVM: functions that fill in a launch configuration and call
wrappers of the CUDA runtime (_cudaLibraryLoadData, _cudaLaunchKernelEx and their kin), which are declared
there and found when the code is linked. `linked` gives these declarations bodies for as long as code is
generated from the module: each calls a Python function here, by address. So nothing has to be built or
preloaded, it does not matter which libraries the process has loaded before, and code that is compiled at
other times calls the real runtime.

A Python exception cannot travel through compiled code: it is kept, an error code is returned, and `deliver`
raises it again for whoever called the compiled function.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ptxsim.doors.launch import (
    MOST_SHARED_BYTES,
    Launch,
    read_config,
    read_parameters,
    static_shared_bytes,
    target_of,
)
from ptxsim.doors.tensor_maps import read_sizes, tensor_map
from ptxsim.errors import UnsupportedError

LAUNCH_FAILURE = 719
"""cudaErrorLaunchFailure: what compiled code gets to see of an exception."""


@dataclass(frozen=True)
class Device:
    """Properties of a GPU that host code may ask for."""

    arch: str
    capability: tuple[int, int]
    name: str
    sms: int

    def attribute(self, number: int) -> int:
        """The device attribute with this number in cudaDeviceAttr. Raises UnsupportedError."""
        known = {1: 1024, 10: 32, 16: self.sms, 75: self.capability[0], 76: self.capability[1]}
        known |= {8: 49152, 81: MOST_SHARED_BYTES + 1024, 97: MOST_SHARED_BYTES}
        if number not in known:
            raise _unmodelled(f"device attribute {number} (cudaDeviceAttr)")
        return known[number]


@dataclass
class Binary:
    """The device code of one compiled module; `ptx` is known once it is compiled."""

    ptx: str | None = None


@dataclass(frozen=True)
class Receiver:
    """Receiver of the launches."""

    device: Device
    on_launch: Callable[[Launch], None]


receivers: list[Receiver] = []
"""The last one is asked; none while nothing is simulated."""

# Compiled code holds numbers only, and may outlive every Python object that was made with it: these stay.
_binaries: dict[int, Binary] = {}
_handles: dict[tuple[int, str], int] = {}
"""Handles of kernels, by their binary's number and name."""
_kernels: dict[int, tuple[Binary, str]] = {}
_numbers = itertools.count(1)


def _unmodelled(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"host code that needs {what}",
        "calls that load, configure and launch kernels",
        "do without it, or add it to ptxsim/doors/shim.py",
    )


def _receiver() -> Receiver:
    if not receivers:
        raise UnsupportedError(
            "a call of a function that was compiled for the simulator, outside of it",
            "a call within `with ptxsim.device(...)`",
            "call it there, or compile it anew for a GPU",
        )
    return receivers[-1]


# --- exceptions ---------------------------------------------------------------------------------------------


class _Pending(threading.local):
    error: BaseException | None = None


_pending = _Pending()


def deliver(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`call(...)`, which raises what a Python function raised that it called through compiled code."""
    _pending.error = None
    failure: BaseException | None = None
    result = None
    try:
        result = call(*args, **kwargs)
    except BaseException as error:
        failure = error
    kept, _pending.error = _pending.error, None
    try:
        if kept is not None:
            raise kept
        if failure is not None:
            raise failure
    finally:
        del kept, failure  # an exception's traceback refers to this frame
    return result


def _keeping(function: Callable[..., None]) -> Callable[..., int]:
    """The function as compiled code calls it: returns an error code instead of raising."""

    @functools.wraps(function)
    def called(*args: Any) -> int:
        try:
            function(*args)
        except BaseException as error:  # not even KeyboardInterrupt passes through compiled code
            _pending.error = _pending.error or error
            return LAUNCH_FAILURE
        return 0

    return called


# --- the runtime's functions --------------------------------------------------------------------------------

_functions: dict[str, tuple[Any, bool]] = {}
"""The runtime's functions by name: the function as ctypes makes it callable, and whether its first argument
is a binary's number."""

_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def _models(name: str, *types: Any, of_binary: bool = False) -> Callable[[Callable[..., None]], None]:
    def register(function: Callable[..., None]) -> None:
        prototype = ctypes.CFUNCTYPE(_INT, *((_LONG,) if of_binary else ()), *types)
        _functions[name] = prototype(_keeping(function)), of_binary

    return register


def _store(address: int, value: int, kind: Any = ctypes.c_int32) -> None:
    kind.from_address(address).value = value


@_models("_cudaGetDevice", _POINTER)
def _get_device(found: int) -> None:
    _store(found, 0)


@_models("_cudaGetDeviceCount", _POINTER)
def _get_device_count(found: int) -> None:
    _store(found, 1)


@_models("_cudaSetDevice", _INT)
def _set_device(number: int) -> None:
    if number != 0:
        raise _unmodelled(f"CUDA device {number}")


@_models("_cudaDeviceGetAttribute", _POINTER, _INT, _INT)
def _device_attribute(found: int, attribute: int, device: int) -> None:
    _store(found, _receiver().device.attribute(attribute))


@_models(
    "_cudaLibraryLoadData",
    _POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT,
    of_binary=True,
)  # fmt: skip
def _load_library(binary: int, library: int, code: int, *options: int) -> None:
    _receiver()
    _store(library, binary, ctypes.c_uint64)


@_models("_cudaLibraryGetKernel", _POINTER, _POINTER, ctypes.c_char_p)
def _get_kernel(found: int, library: int, name: bytes) -> None:
    key = library, name.decode()
    if key not in _handles:
        _handles[key] = next(_numbers)
        _kernels[_handles[key]] = _binaries[library], key[1]
    _store(found, _handles[key], ctypes.c_uint64)


@_models("_cuKernelGetAttribute", _POINTER, _INT, _POINTER, _INT)
def _kernel_attribute(found: int, attribute: int, kernel: int, device: int) -> None:
    if attribute != 1:  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        raise _unmodelled(f"function attribute {attribute} (CUfunction_attribute)")
    _store(found, static_shared_bytes(_ptx(kernel)[1]))


def _set_attribute(kernel: int, attribute: int, value: int) -> None:
    """cudaFuncAttribute: 8 dynamic shared memory, 9 its carve-out, 14 clusters of more than 8 CTAs."""
    if attribute not in (8, 9, 14):
        raise _unmodelled(f"function attribute {attribute} (cudaFuncAttribute)")
    if attribute == 8 and value > MOST_SHARED_BYTES:
        raise _unmodelled(f"{value} bytes of shared memory in {_ptx(kernel)[0]}")


@_models("_cudaFuncSetAttribute", _POINTER, _INT, _INT)
def _set_function_attribute(kernel: int, attribute: int, value: int) -> None:
    _set_attribute(kernel, attribute, value)


@_models("_cudaKernelSetAttributeForDevice", _POINTER, _INT, _INT, _INT)
def _set_kernel_attribute(kernel: int, attribute: int, value: int, device: int) -> None:
    _set_attribute(kernel, attribute, value)


@_models("_cudaLaunchKernelEx", _POINTER, _POINTER, _POINTER)
def _launch_ex(config: int, kernel: int, values: int) -> None:
    _receive(read_config(*_ptx(kernel), config, values))


@_models("_cudaLaunchKernel", _POINTER, *(_INT,) * 6, _POINTER, _LONG, _POINTER)
def _launch(kernel: int, *rest: int) -> None:
    gx, gy, gz, bx, by, bz, values, shared_bytes, _ = rest
    name, ptx = _ptx(kernel)
    params = read_parameters(ptx, name, values)
    _receive(Launch(name, ptx, (gx, gy, gz), (bx, by, bz), (1, 1, 1), shared_bytes, params))


@_models("_cuTensorMapEncodeTiled", _POINTER, _INT, _INT, *(_POINTER,) * 5, *(_INT,) * 4)
def _encode_tensor_map(found: int, element: int, rank: int, address: int | None, *rest: int) -> None:
    """`rest`: addresses of four lists of sizes; then interleave, swizzle, L2 promotion and fill."""
    interleave, swizzle, _, fill = rest[4:]
    sizes = read_sizes(rank, rest[:4])
    described = tensor_map(element, address or 0, sizes, interleave, swizzle, fill)
    ctypes.memmove(found, described, len(described))


def _receive(launch: Launch) -> None:
    if _pending.error is not None:  # host code that only asserts success goes on after an error
        raise _pending.error
    receiver = _receiver()
    target = target_of(launch.ptx)
    if target != receiver.device.arch:
        raise UnsupportedError(
            f"a launch of {launch.kernel}, compiled for {target}, on {receiver.device.arch}",
            "code for the GPU that is simulated",
            f"compile it anew within this `with`, or simulate {target}",
        )
    receiver.on_launch(launch)


@_models("cuda_dialect_init_library_once", _POINTER, _POINTER, _POINTER, _POINTER)
def _load_once(state: int, load: int, configure: int, set_error: int) -> None:
    """Loads as the real one does, but for one device: `state` holds the library afterwards, and 0 before."""
    loaded = ctypes.c_uint64.from_address(state)
    if loaded.value:
        return
    library = ctypes.c_uint64()
    at = ctypes.addressof(library)
    code = ctypes.CFUNCTYPE(_INT, _POINTER)(load)(at)
    code = code or ctypes.CFUNCTYPE(_INT, _POINTER, _INT)(configure)(at, 0)
    if code:
        assert _pending.error is not None, "only functions of this module return error codes"
        # the caller takes the error as set; `deliver` replaces it
        set_message = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(set_error)
        set_message(b"RuntimeError", b"loading a kernel failed")
        raise _pending.error
    loaded.value = library.value


def _ptx(kernel: int) -> tuple[str, str]:
    """Name and PTX of a kernel by its handle."""
    binary, name = _kernels[kernel]
    assert binary.ptx is not None, "code runs after it is compiled"
    return name, binary.ptx


# --- linking ------------------------------------------------------------------------------------------------

_REPLACED = re.compile(r"_cu[A-Z]\w*|_cuda\w+|cuda_dialect_(un|init_|assert_)\w+")
"""Names of functions that would reach for a GPU, or end the process after an error. What else host code
declares is the C library's, TVM-FFI's, or turns error codes into messages."""

_TYPE = re.compile(r"!llvm\.func<(\w+) \(([^()]*)\)>")


def new_binary() -> int:
    """The number of device code about to be compiled; `binary` is its other end."""
    number = next(_numbers)
    _binaries[number] = Binary()
    return number


def set_ptx(binary: int, ptx: str) -> None:
    _binaries[binary].ptx = ptx


@dataclass(frozen=True)
class Words:
    """Words in the data of host code, to be filled later (kept.py): `binary` is the name of that of the
    device code's number, others are named as the functions whose addresses they hold. `at` is what a word is
    until then."""

    binary: str
    at: Callable[[str], int]


@contextlib.contextmanager
def linked(module: Any, binary: int, words: Words | None = None) -> Iterator[tuple[str, ...]]:
    """While inside, what host code declares of the CUDA runtime is defined in its (MLIR) module: by numbers
    of this process, or by `words`. Yields the names of these functions."""
    from cutlass._mlir import ir

    declared = []
    for op in module.body.operations:
        operation = op.operation
        if operation.name == "llvm.func" and not operation.regions[0].blocks:
            name = ir.StringAttr(operation.attributes["sym_name"]).value
            if _REPLACED.fullmatch(name):
                declared.append((operation, name))
    names = tuple(name for _, name in declared)
    text = "" if words is None else _globals(words, names)
    for operation, name in declared:
        text += _definition(name, str(operation.attributes["function_type"]), binary, words)
    with module.context, ir.Location.unknown():
        given = ir.Module.parse(text)
        for operation, _ in declared:
            operation.detach_from_parent()
        end = ir.InsertionPoint(module.body)
        defined = [op.operation.clone(end) for op in given.body.operations]
        try:
            yield names
        finally:
            for body in reversed(defined):
                body.operation.erase()
            for operation, _ in declared:
                module.body.append(operation)


def _globals(words: Words, names: tuple[str, ...]) -> str:
    """Words as MLIR, by the name that `_number` knows them by."""
    return "".join(
        f"llvm.mlir.global internal @word_{name}({words.at(name)} : i64) {{addr_space = 0 : i32}} : i64\n"
        for name in (words.binary, *names)
    )


def _number(result: str, value: int, word: str, words: Words | None) -> str:
    """Lines of MLIR after which `result` is a value: itself, or what the word of this name will hold."""
    if words is None:
        return f"  %{result} = llvm.mlir.constant({value} : i64) : i64\n"
    place = f"%at_{result} = llvm.mlir.addressof @word_{word} : !llvm.ptr"
    return f"  {place}\n  %{result} = llvm.load %at_{result} : !llvm.ptr -> i64\n"


def address_of(name: str) -> int:
    """Address of the function that stands in for one of the CUDA runtime."""
    function = _functions[name][0] if name in _functions else _refusal(name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _definition(name: str, kind: str, binary: int, words: Words | None) -> str:
    """A function of type `kind` that calls the one here for `name`, as text in MLIR's LLVM dialect."""
    found = _TYPE.fullmatch(kind)
    assert found is not None, f"{name} is declared as {kind}"
    types = [_mlir(t.strip()) for t in found[2].split(",") if t.strip()]
    given = ", ".join(f"%a{i}: {t}" for i, t in enumerate(types))
    if found[1] == "void":
        # cuda_dialect_unload_library_once, perhaps after Python has ended: nothing to unload; and
        # cuda_dialect_assert_success: `deliver` raises what is kept
        return f"llvm.func internal @{name}({given}) {{ llvm.return }}\n"
    assert found[1] == "i32", f"{name} returns {found[1]}"
    refused, of_binary = name not in _functions, name in _functions and _functions[name][1]
    values = [] if refused else ["%binary"] * of_binary + [f"%a{i}" for i in range(len(types))]
    passed = [] if refused else ["i64"] * of_binary + types
    return (
        f"llvm.func internal @{name}({given}) -> i32 {{\n"
        + (_number("binary", binary, words.binary if words else "", words) if of_binary else "")
        + _number("address", address_of(name), name, words)
        + f"  %function = llvm.inttoptr %address : i64 to !llvm.ptr\n"
        f"  %code = llvm.call %function({', '.join(values)}) : !llvm.ptr, ({', '.join(passed)}) -> i32\n"
        f"  llvm.return %code : i32\n}}\n"
    )


def _mlir(kind: str) -> str:
    return "!llvm.ptr" if kind == "ptr" else kind


@functools.cache
def _refusal(name: str) -> Any:
    """Stand-in for a function that is not modelled: calling it raises an error that names it."""

    def refuse() -> None:
        raise _unmodelled(name.removeprefix("_"))

    return ctypes.CFUNCTYPE(_INT)(_keeping(refuse))
