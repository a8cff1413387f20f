"""Resources of a compiled kernel on a multiprocessor, and its PTX: facts for records and for reading.

Compiles anew, with the compiler's reports on, and keeps what they say beside compiled kernels (cache.py),
until anything that decides a kernel's code changes (its key). No GPU is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fa4flex.compiler import cache
from fa4flex.compiler.compile import compiler_lock, kernel_key, trace_and_compile, without_collector
from fa4flex.compiler.signature import Signature
from fa4flex.errors import UnsupportedError

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.kernels.plan.problem import Problem


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, as ptxas reports: registers per thread before warps trade them, bytes that
    registers spill per thread (stores and loads together), bytes of stack, hardware barriers; and the bytes
    of shared memory that a launch asks for. `ignored` are ptxas' warnings that it dropped something (C7508
    and such)."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    barriers: int
    shared_bytes: int
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """A compiled program. `resources` are those of the kernel that was asked for, `seconds` the processor
    time that compiling took when it was done."""

    resources: Resources
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    report: str = field(repr=False, default="")
    shared_bytes: int = 0
    seconds: float = 0.0

    def resources_of(self, entry: str) -> Resources:
        """Resources of the kernel with `entry` in its name, with the shared memory of the largest."""
        return read_report(_about(self.report, entry), self.shared_bytes)

    @property
    def instructions(self) -> Counter[str]:
        """Number of occurrences of each PTX instruction, by its full name
        ("wgmma.mma_async.sync.aligned....")."""
        statements = re.split(r"[;{}\n]", self.ptx)
        results = (
            re.match(r"\s*(?:@!?%?\w+\s+)?([a-z]\w*(?:\.[\w:]+)+)(?:\s|$)", text) for text in statements
        )
        return Counter(match[1] for match in results if match)


def inspect(
    source: Source,
    problem: Problem,
    signature: Signature = Signature(),
    arch: str = "sm_90a",
    entry: str = "",
) -> Inspection:
    """Compile `source` for `arch` and read what the compiler says about it: of its several kernels about the
    one with `entry` in its name, whose shared memory is the largest."""
    key = hashlib.sha256(f"report on {kernel_key(source.key, problem, signature, arch)}".encode()).hexdigest()

    def build() -> tuple[str, bytes]:
        return cache.REPORT, _packed(_compile(source, problem, signature, arch))

    folder = cache.directory()
    if folder is None:
        whole = _compile(source, problem, signature, arch)
    else:
        path, _ = cache.obtain(folder, key, build)
        whole = _unpacked(cache.content(path))
    return replace(whole, resources=whole.resources_of(entry)) if entry else whole


def _compile(source: Source, problem: Problem, signature: Signature, arch: str) -> Inspection:
    """Report on all kernels of a program, and the resources of the first."""
    started = _processor_time()
    with tempfile.TemporaryDirectory(prefix="fa4flex-") as folder, compiler_lock, without_collector():
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir={folder}"
        with _without_locations():
            compiled, report = _reported(
                lambda: trace_and_compile(source, problem, signature, f"{options} remarks{{ptx}}")
            )
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    shared = shared_bytes(str(compiled.ir_module))
    resources, seconds = read_report(_about(report, ""), shared), _processor_time() - started
    return Inspection(resources, ptx, cubin, report, shared, seconds)


def _processor_time() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    return sum(os.times()[:4])


def _packed(result: Inspection) -> bytes:
    about: dict[str, Any] = {"ptx": result.ptx, "report": result.report, "shared_bytes": result.shared_bytes}
    about["seconds"] = result.seconds
    return zlib.compress(json.dumps(about).encode() + b"\0" + result.cubin, 1)


def _unpacked(content: bytes) -> Inspection:
    text, _, cubin = zlib.decompress(content).partition(b"\0")
    about = json.loads(text)
    resources = read_report(_about(about["report"], ""), about["shared_bytes"])
    return Inspection(resources, cubin=cubin, **about)


def _about(report: str, entry: str) -> str:
    """Part of a report about the first kernel with `entry` in its name."""
    _, *reports = re.split(r"(?=Compiling entry function)", report)
    # Where registers spill, the report is indented and its lines are broken.
    return next((part for part in reports if entry in part.partition("Function properties")[0]), "")


def read_report(report: str, shared: int) -> Resources:
    """The numbers in the text that `ptxas -v` prints. Raises UnsupportedError where there are none."""
    used = re.search(r"Used (\d+) registers(?:, used (\d+) barriers)?", report)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if used is None or frame is None:
        raise UnsupportedError(
            f"a compiler report without resources: {report[-200:]!r}",
            "the lines that ptxas prints with -v",
            "check that the installed nvidia-cutlass-dsl is a version that this was written for (4.8)",
        )
    ignored = tuple(re.findall(r"\(C7\d+\)[^\n]*", report))
    stack, stores, loads = map(int, frame.groups())
    return Resources(int(used[1]), stores + loads, stack, int(used[2] or 0), shared, ignored)


_LAUNCH = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
"""cudaLaunchConfig_t: grid, block, dynamic shared memory, stream, attributes and their number."""


def shared_bytes(ir: str) -> int:
    """Dynamic shared memory of the largest launch in lowered host code."""
    return max(bytes_of_launches(ir))


def bytes_of_launches(ir: str) -> list[int]:
    """Dynamic shared memory of every launch in lowered host code: constants that its configurations hold."""
    results = []
    for place in re.finditer(rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\][^\n]*{_LAUNCH}", ir):
        store = re.search(rf"llvm\.store (%\d+), {place[1]} : i64", ir[place.end() :])
        constant = store and rf"{store[1]} = llvm\.mlir\.constant\((\d+) : i64\)"
        results += re.findall(constant, ir[: place.end()])[-1:] if constant else []
    if not results:
        raise UnsupportedError(
            "host code without a constant size of shared memory",
            "a launch whose shared memory is known when it is compiled",
            "check that the installed nvidia-cutlass-dsl is a version that this was written for (4.8)",
        )
    return list(map(int, results))


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Reports name no line of Python: to look for that of every operation takes a third of the time."""
    from cutlass.base_dsl import dsl

    look_for = dsl._set_enable_frame_filtering
    dsl._set_enable_frame_filtering = lambda enable: look_for(False)
    try:
        yield
    finally:
        dsl._set_enable_frame_filtering = look_for


def _reported(action: Callable[[], Any]) -> tuple[Any, str]:
    """Result of `action`, and what was written to standard error meanwhile: by Python, and past it by the
    compiler's libraries."""
    kept, own = os.dup(2), io.StringIO()
    with tempfile.TemporaryFile() as file, contextlib.redirect_stderr(own):
        os.dup2(file.fileno(), 2)
        try:
            result = action()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            report = file.read().decode(errors="replace")
    return result, report + own.getvalue()
