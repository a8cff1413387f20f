"""From generated source to a function that launches: trace, compile, link, keep.

Compiling needs no GPU. What is kept on disk is a shared library, which a later process loads without
importing the compiler; see cache.py for where and how.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import glob
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4flex.compiler import ahead, background, cache
from fa4flex.compiler.link import shared_library
from fa4flex.compiler.signature import Signature
from ptxsim.active import keeper, simulating, target

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.kernels.plan.problem import Problem

    Job = tuple[Source, Problem, Signature, str]
    """Inputs of a compilation: source, problem, signature and chip."""

ENTRY = "attention"
HERE = Path(__file__).parent
KERNELS = HERE.parent / "kernels"
PLANS = HERE.parent / "kernels" / "plan"
"""Folder that kernels and entry points read beside their own: sizes, places in memory, rows of arguments."""

SETTINGS = "CUTE_DSL_"
NO_CODE = tuple(
    SETTINGS + name
    for name in ("CACHE", "DISABLE_FILE_CACHING", "DUMP", "FILTER", "JIT", "LOG", "NO_CACHE", "PRINT", "SHOW")
)
"""Beginnings of variables that the compiler reads; of those, the ones that change no code."""

compiler_lock = threading.Lock()
"""Two compilations at the same time end the process: the compiler's context belongs to one thread."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled pass. `launch` takes the arguments of its schema (kernels/plan/arguments.py), in order, on
    torch's current stream.

    `compiled` tells whether this process compiled it or found it on disk; `seconds` is what that took.
    """

    name: str
    key: str
    launch: Callable[..., None]
    compiled: bool
    seconds: float


_kernels: dict[str, Kernel] = {}


def compile_kernel(
    source: Source, problem: Problem, signature: Signature = Signature(), arch: str = "sm_90a"
) -> Kernel:
    """The kernel of `source`: from memory, from disk, or compiled now. Safe in any thread and process."""
    key = kernel_key(source.key, problem, signature, arch)
    result = _kernels.get(key)
    if result is not None:
        return result
    with compiler_lock, without_collector():
        result = _kernels.get(key)
        if result is None:
            ahead.wait(key)
            result = _kernels[key] = _obtain(source, problem, signature, arch, key)
        return result


def compile_ahead(
    source: Source, problem: Problem, signature: Signature = Signature(), arch: str = "sm_90a"
) -> None:
    """Begin to compile in another process what `compile_kernel` will be asked for, if it would have to."""
    folder = None if simulating() or not ahead.useful() else cache.directory()
    if folder is None or kept(source, problem, signature, arch):
        return
    job = job_of(source, problem, signature, arch)
    ahead.start(job.key, job.text)


def prepare_ahead(arch: str) -> None:
    """Begin the process of `compile_ahead` before it is known what it is to compile, where nothing is kept:
    its imports take a while. `ahead.dismiss` ends it if it gets no job."""
    folder = None if simulating() or not ahead.useful() else cache.directory()
    if folder is not None and cache.empty(folder):
        ahead.prepare(arch)


def job_of(
    source: Source, problem: Problem, signature: Signature, arch: str, plan: Any = None
) -> background.Job:
    """A kernel as another process is asked for it, where kernels are kept on disk. plan: one to check before,
    where this process has not."""
    folder = cache.directory()
    assert folder is not None, "kernels that another process makes are found on disk"
    job: Job = source, problem, signature, arch
    text = pickle.dumps((job, folder.absolute(), plan))
    return background.Job(kernel_key(source.key, *job[1:]), source.name, text, folder)


def kept(source: Source, problem: Problem, signature: Signature = Signature(), arch: str = "sm_90a") -> bool:
    """True if this kernel has been compiled, by this process or one with the same folder."""
    key = kernel_key(source.key, problem, signature, arch)
    folder = cache.directory()
    return key in _kernels or (folder is not None and cache.holds(folder, key))


def _obtain(source: Source, problem: Problem, signature: Signature, arch: str, key: str) -> Kernel:
    start = time.perf_counter()

    def build() -> tuple[str, bytes]:
        return build_object(source, problem, signature, arch)

    folder = cache.directory()
    if simulating():
        launch, compiled = _obtain_simulated(source, problem, signature, arch, folder and folder / key)
    elif folder is None:
        launch, compiled = _load_once(*build()), True
    else:
        path, compiled = cache.obtain(folder, key, build)
        try:
            launch = load(path)
        except Exception:  # a whole file that does not load was built for other libraries: build it again
            path = cache.store(folder, key, *build())
            launch, compiled = load(path), True
    return Kernel(source.name, key, launch, compiled, time.perf_counter() - start)


def _obtain_simulated(
    source: Source, problem: Problem, signature: Signature, arch: str, place: Path | None
) -> tuple[Callable[..., None], bool]:
    """A kernel whose launches are caught, and whether it was compiled. Its PTX is in no object file: whoever
    catches launches knows how to keep it, under `place`."""

    def compile() -> Callable[..., None]:
        launch: Callable[..., None] = trace_and_compile(
            source, problem, signature, f"--enable-tvm-ffi --gpu-arch {arch}"
        )
        return launch

    keeping = keeper()
    if place is None or keeping is None:
        return compile(), True
    made: list[Callable[..., None]] = []

    def build() -> tuple[str, bytes]:
        made.append(compile())
        return cache.SIMULATED, keeping.packed(made[0])

    path, _ = cache.obtain(place.parent, place.name, build)
    if made:
        return made[0], True
    try:
        return keeping.loaded(cache.content(path)), False
    except Exception:  # gone since it was found, or from elsewhere
        return compile(), True


# --- identity ---------------------------------------------------------------------------------------------


def kernel_key(source: str, problem: Problem, signature: Signature, arch: str) -> str:
    """sha256 of everything that decides the compiled code, `source` being the key of its source."""
    parts = (
        source,
        repr(problem),
        repr(signature),
        arch,
        target(),
        *toolchain(),
        *settings(),
        digest(KERNELS),
        digest(HERE),
        digest(PLANS),
        _text_of(problem.keys.loader),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def toolchain() -> tuple[str, ...]:
    """Versions of the compiler, its assemblers and the calling convention, and where the run-time libraries
    are."""
    versions = (importlib.metadata.version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    assemblers = (_version_of(f"nvidia-cutlass-dsl-libs-{cuda}") for cuda in ("cu12", "cu13"))
    home = importlib.metadata.distribution("nvidia-cutlass-dsl").locate_file("")
    return (*versions, *assemblers, str(home), platform.machine())


def settings() -> tuple[str, ...]:
    """Variables of the environment by which the compiler makes other code, such as its optimisation."""
    results = (name for name in os.environ if name.startswith(SETTINGS) and not name.startswith(NO_CODE))
    return tuple([f"{name}={os.environ[name]}" for name in sorted(results)])


def _text_of(loader: str) -> str:
    """The file of a loader of keys that is none of this package's, "" for others."""
    module = loader.partition(":")[0]
    if not module or module.startswith("fa4flex."):
        return ""
    return inspect.getsource(importlib.import_module(module))


def _version_of(package: str) -> str:
    """Version of a package that need not be installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def digest(folder: Path) -> str:
    """sha256 of all Python files below a folder, with their names."""
    total = hashlib.sha256()
    for name in sorted(glob.iglob("**/*.py", root_dir=folder, recursive=True)):
        with open(os.path.join(folder, name), "rb", buffering=0) as file:
            content = file.read()
        total.update(f"{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


# --- build ------------------------------------------------------------------------------------------------


def build_object(source: Source, problem: Problem, signature: Signature, arch: str) -> tuple[str, bytes]:
    """Compile to (".so", a shared library), or (".o", an object file) where no linker is installed."""
    from cutlass import cute

    compiled = trace_and_compile(source, problem, signature, f"--enable-tvm-ffi --gpu-arch {arch}")
    with tempfile.TemporaryDirectory(prefix="fa4flex-") as folder:
        path = Path(folder, "kernel.o")
        compiled.export_to_c(str(path), function_name=ENTRY)
        content = path.read_bytes()
    libraries = cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)
    linked = shared_library(content, libraries)
    return (".o", content) if linked is None else (".so", linked)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Tracing makes objects by the hundred thousand, few of them garbage: looking for that takes a tenth of
    the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def trace_and_compile(source: Source, problem: Problem, signature: Signature, options: str) -> Any:
    """Result of cute.compile for the kernel of `source` with these arguments."""
    from cutlass import cute

    from fa4flex.compiler.entry import entry_point, fake_arguments
    from ptxsim.unprinted import unprinted

    kernel = source.load()
    value = fake_arguments(kernel, problem, signature)
    function = entry_point(kernel, problem, signature)
    # What is launched is the linked file: code for this process alone would be made for nothing.
    with unprinted():
        return cute.compile(function, *value, options=options, no_jit_engine=not simulating())


# --- load -------------------------------------------------------------------------------------------------


def load(path: Path) -> Callable[..., None]:
    """The entry point of a compiled file."""
    if path.suffix == ".so":
        import tvm_ffi

        module = tvm_ffi.load_module(str(path))
    else:
        from cutlass import cute

        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    launch: Callable[..., None] = getattr(module, ENTRY)
    return launch


def _load_once(suffix: str, content: bytes) -> Callable[..., None]:
    """Load code that is not kept: its file is gone when this returns, its pages stay."""
    descriptor, name = tempfile.mkstemp(prefix="fa4flex-", suffix=suffix)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return load(Path(name))
    finally:
        os.unlink(name)
