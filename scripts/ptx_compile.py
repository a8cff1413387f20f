"""Compilation of a case to the PTX and the launches of its kernels, without a GPU.

What the project would compile for a call is asked of tests/numeric/kernel_programs.py, which the tests of
registers and spills ask as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import ptx_normal_form
from kernel_programs import Given, launched_backward, launched_forward
from ptx_cases import Case

from fa4flex.compiler.compile import kernel_key, trace_and_compile, without_collector
from fa4flex.compiler.inspect import bytes_of_launches
from fa4flex.kernels.plan.target import SM90A, SM100A

TARGETS = {target.name: target for target in (SM90A, SM100A)}

# --- what the project is asked ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Input of the compiler. Programs of equal keys are one."""

    given: Given
    arch: str

    @property
    def key(self) -> str:
        source, problem, signature = self.given
        return kernel_key(source.key, problem, signature, self.arch)


def forward(case: Case) -> Program:
    """The program of the one kernel of the pass."""
    return Program(launched_forward(case.kind, case.width, TARGETS[case.chip])[1], case.chip)


def backward(case: Case) -> Program:
    """The program of all kernels of the pass: what runs before and after the products as well."""
    return Program(launched_backward(case.kind, case.width, TARGETS[case.chip])[1], case.chip)


PASSES: dict[str, Callable[[Case], Program]] = {"forward": forward, "backward": backward}


# --- what it compiles ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """`code` is the digest of its PTX; `launch` are its blocks, clusters, shared memory and grid."""

    code: str
    launch: str

    def __str__(self) -> str:
        return f"{self.code}  {self.launch}"


def compiled(program: Program) -> tuple[Kernel, ...]:
    """Kernels of a program, in the order in which they are launched."""
    launches: list[Launch] = []
    with tempfile.TemporaryDirectory(prefix="fa4flex-") as folder, without_collector(), _to_ptx(launches):
        options = f"--enable-tvm-ffi --gpu-arch {program.arch} --keep-ptx --dump-dir={folder}"
        found = trace_and_compile(*program.given, options)
        ptx, shared = found.__ptx__, bytes_of_launches(str(found.ir_module))
    texts = ptx_normal_form.kernels(ptx)
    if set(texts) != {launch.kernel for launch in launches} or len(shared) > len(launches):
        raise RuntimeError(f"{len(texts)} kernels, {len(launches)} launches, {len(shared)} sizes of memory")
    # Where launches are not configured one after another, host code does not say whose size is whose.
    sizes = shared if len(shared) == len(launches) else [None] * len(launches)
    return tuple(
        Kernel(ptx_normal_form.digest(texts[launch.kernel]), replace(launch, shared=size).text)
        for launch, size in zip(launches, sizes, strict=True)
    )


# --- launches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """`kernel` is its symbol; `settings` are other than 0; `grid` a digest of what its sizes are made of;
    `shared` bytes, None where they are not known."""

    kernel: str
    block: str
    settings: tuple[str, ...]
    grid: str
    shared: int | None = 0

    @property
    def text(self) -> str:
        shared = "any" if self.shared is None else str(self.shared)
        return ", ".join([f"block {self.block}", *self.settings, f"{shared} bytes", f"grid {self.grid}"])


ASSEMBLED, NOT_ASSEMBLED = "cubin-format=bin", "cubin-format=isa"


@contextlib.contextmanager
def _to_ptx(launches: list[Launch]) -> Iterator[None]:
    """Makes the compiler stop at PTX, which saves the time of its assembler, and collects all launches."""
    from cutlass.base_dsl.compiler import Compiler

    whole: Any = Compiler.compile

    def compile(compiler: Any, module: Any, pipeline: str, *args: Any, **options: Any) -> Any:
        launches.extend(_launches(module))
        return whole(compiler, module, pipeline.replace(ASSEMBLED, NOT_ASSEMBLED), *args, **options)

    with patch.object(Compiler, "compile", compile):
        yield


def _launches(module: Any) -> list[Launch]:
    """Return the launches that traced host code configures."""
    from cutlass._mlir import ir

    found: list[Launch] = []

    def visit(operation: Any) -> Any:
        if operation.name == "cuda.launch_cfg.create":
            found.append(_launch(operation))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _launch(configuration: Any) -> Launch:
    *block, _, x, y, z, _ = configuration.operands
    kernel, settings = "", []
    for use in configuration.results[0].uses:
        user = use.owner.operation
        if user.name == "cuda.launch_ex":
            kernel = str(user.attributes["callee"]).rpartition("@")[2]
        else:
            values = [_constant(value) for value in list(user.operands)[1:]]
            settings += [f"{user.name.rpartition('.')[2]} {'x'.join(values)}"] * any(v != "0" for v in values)
    known: dict[Any, str] = {}
    grid = hashlib.sha256(" ".join(_made(value, known) for value in (x, y, z)).encode()).hexdigest()
    return Launch(kernel, "x".join(map(_constant, block)), tuple(sorted(settings)), grid[:12])


def _constant(value: Any) -> str:
    """An integer, or "?" where it is computed."""
    operation = getattr(value, "value", value).owner
    return str(operation.attributes["value"].value) if operation.name == "arith.constant" else "?"


def _made(value: Any, known: dict[Any, str]) -> str:
    """Digest of how a value is computed, whichever arguments of its types that starts from."""
    from cutlass._mlir import ir

    value = getattr(value, "value", value)
    if isinstance(value.owner, ir.Block):
        return str(value.type)
    operation = value.owner.operation
    if operation not in known:
        inner = [_made(operand, known) for operand in operation.operands]
        types = [str(result.type) for result in operation.results]
        text = "\n".join([*_parts(operation), *types, *inner])
        known[operation] = hashlib.sha256(text.encode()).hexdigest()
    return f"{known[operation]} {ir.OpResult(value).result_number}"


def _parts(operation: Any) -> list[str]:
    """An operation and those within it, without their operands."""
    from cutlass._mlir import ir

    found: list[str] = []

    def visit(part: Any) -> Any:
        found.extend([part.name, *(f"{name}={part.attributes[name]}" for name in part.attributes)])
        return ir.WalkResult.ADVANCE

    operation.walk(visit)
    return found
