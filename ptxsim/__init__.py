"""A Hopper and a Blackwell GPU on every CPU: runs the PTX that was compiled, and finds races, hangs and
leaks.

    with ptxsim.device("sm_90a", seed=1, timing="late") as gpu:
        out = attn(q, k, v)  # CPU tensors; any CuTe-DSL function works as well
    print(gpu.report())

`launch` runs a kernel given as PTX text. docs/simulator.md says what is modelled and how to read a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptxsim.doors.device import Gpu, device
    from ptxsim.doors.tensors import aligned
    from ptxsim.run.launch import Result, Shape, launch
    from ptxsim.watch.findings import Fault, Finding

__all__ = ["Fault", "Finding", "Gpu", "Result", "Shape", "aligned", "device", "launch"]

_HOME = {
    "Gpu": "doors.device",
    "aligned": "doors.tensors",
    "device": "doors.device",
    "Fault": "watch.findings",
    "Finding": "watch.findings",
}
_HOME |= {"Result": "run.launch", "Shape": "run.launch", "launch": "run.launch"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ptxsim.{_HOME[name]}"), name)
