"""Environment of a measurement. Reads settings of the device and never changes them."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

_PACKAGES = (
    "fa4flex",
    "torch",
    "triton",
    "flash-attn-4",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
)
_DEVICE = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit")
_STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def environment(device: torch.device) -> dict[str, str]:
    """Names and versions; on CUDA also the device, its driver and its limits."""
    results = {"python": platform.python_version(), "device": _device_name(device)}
    results |= {package: version_of(package) or "not installed" for package in _PACKAGES}
    if device.type == "cuda":
        results["cuda"] = str(torch.version.cuda)
        results["cudnn"] = str(torch.backends.cudnn.version())
        properties = torch.cuda.get_device_properties(device)
        results["multiprocessors"] = str(properties.multi_processor_count)
        results["L2 bytes"] = str(properties.L2_cache_size)
        results.update(_query(device, _DEVICE))
    return results


def version_of(package: str) -> str:
    """Installed version; empty without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def state(device: torch.device) -> dict[str, str]:
    """Clocks, power and temperature at this moment; ask while the device works."""
    return _query(device, _STATE) if device.type == "cuda" else {}


def state_under_load(device: torch.device, call: Any, seconds_per_call: float) -> dict[str, str]:
    """`state` while about half a second of calls is queued: idle clocks say nothing about a measurement."""
    if device.type != "cuda":
        return {}
    with torch.no_grad():
        for _ in range(min(500, max(1, round(0.5 / seconds_per_call)))):
            call()
    result = state(device)
    torch.cuda.synchronize()
    return result


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _query(device: torch.device, fields: Sequence[str]) -> dict[str, str]:
    identity = str(torch.cuda.get_device_properties(device).uuid)
    command = [
        "nvidia-smi", f"--id=GPU-{identity.removeprefix('GPU-')}",
        f"--query-gpu={','.join(fields)}", "--format=csv,noheader",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": f"not read: {error}"}
    if done.returncode:
        return {"nvidia-smi": f"not read: {(done.stdout + done.stderr).strip()[:200]}"}
    return dict(zip(fields, (value.strip() for value in done.stdout.strip().split(",")), strict=False))
