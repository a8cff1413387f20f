"""Compiling as far as PTX, which is what the simulator runs.

The assembler takes a quarter of the time that CuTe DSL's compiler takes, for machine code that nobody would
read. What it would refuse or spill is for a compilation outside of the simulator to find.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

PIPELINE = "cute-to-nvvm{"
ASSEMBLER = "cuda-to-binary{"
"""The pass that makes PTX, and an image of machine code or of PTX, as a module's targets ask for."""
UNREAD = "dump-cubin-path= ", "collect-compiler-diagnostics=false "
"""Options of this pass where nobody asks for machine code, or for what the assembler says."""
MACHINE_CODE, PTX = "compute_target<sass,", "compute_target<ptx,"


def to_ptx(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Compiler.compile, but the images in compiled modules hold PTX alone."""

    @functools.wraps(compile)
    def compiled(compiler: Any, *args: Any, **kwargs: Any) -> Any:
        passes = compiler.passmanager
        parse = functools.partial(_parsed, passes.PassManager.parse)
        compiler.passmanager = SimpleNamespace(PassManager=SimpleNamespace(parse=parse))
        try:
            return compile(compiler, *args, **kwargs)
        finally:
            compiler.passmanager = passes

    return compiled


def _parsed(parse: Callable[[str], Any], pipeline: str) -> Any:
    """A pass manager of the pipeline, in two stages where that is possible."""
    whole = parse(pipeline)
    before, found, last = str(whole).partition(ASSEMBLER)
    if not found or PIPELINE not in pipeline or not all(option in last for option in UNREAD):
        return whole
    return _Stages(
        parse(pipeline.replace(PIPELINE, PIPELINE + "llvm-only=true ", 1)),
        parse(f"{before[: before.index('(') + 1]}{found}{last}"),
    )


class _Stages:
    """Pass managers of what comes before machine code, and of the rest."""

    def __init__(self, before: Any, rest: Any) -> None:
        self._before, self._rest = before, rest

    def enable_verifier(self, enable: bool) -> None:
        self._before.enable_verifier(enable)
        self._rest.enable_verifier(enable)

    def run(self, operation: Any) -> None:
        self._before.run(operation)
        for inner in operation.regions[0].blocks[0].operations:
            if "compute_targets" in inner.operation.attributes:
                targets = str(inner.operation.attributes["compute_targets"]).replace(MACHINE_CODE, PTX)
                inner.operation.attributes["compute_targets"] = _attribute(targets, operation.context)
        self._rest.run(operation)


def _attribute(text: str, context: Any) -> Any:
    from cutlass._mlir import ir

    return ir.Attribute.parse(text, context)
