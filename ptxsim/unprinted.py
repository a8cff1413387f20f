"""Tracing without CuTe DSL's log of it: before each kernel it prints the whole module, 30 to 40 ms each time,
for a log that is turned off unless CUTE_DSL_LOG_TO_CONSOLE or its like are set."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any


def enter_module(dsl: Any) -> Any:
    """Insertion point at the device code of a module, as CuTe DSL's own function returns it."""
    from cutlass._mlir import ir

    return ir.InsertionPoint(dsl.gpu_module.bodyRegion.blocks[0])


@contextlib.contextmanager
def unprinted() -> Iterator[None]:
    """Within, no module is printed unless somebody reads the log."""
    from cutlass.base_dsl.utils.logger import log
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    own = CutlassBaseDSL._enter_gpu_module
    if not log().isEnabledFor(logging.INFO):
        CutlassBaseDSL._enter_gpu_module = enter_module
    try:
        yield
    finally:
        CutlassBaseDSL._enter_gpu_module = own
