"""Time of the first call, in a process of its own: `python -m fa4flex.bench.first_call cuda`.

The parent runs it twice with one empty cache folder: the first run compiles, the second finds kernels there.
A run before these, with a folder of its own, leaves byte code, as `pip` does of packages that it installs:
translating the compiler's sources takes longer than compiling a kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CACHE = "FA4FLEX_CACHE_DIR"
"""Environment variable that names the folder of compiled kernels."""
NO_BYTE_CODE, BYTE_CODE = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
"""Environment variables that keep Python from writing byte code, and that name a folder for it."""
RUNS: dict[str, tuple[str, ...]] = {
    "byte code": ("others", "gradients"),
    "first": ("forward",),
    "second": ("forward",),
    "first with gradients": ("both", "gradients"),
    "second with gradients": ("both", "gradients"),
}
"""Folder of kernels, and arguments beside the device, of each fresh process, in order."""
MOST = {"first": 3.0, "second": 0.5, "first with gradients": 4.5, "second with gradients": 0.3}
"""Most seconds from `fa4flex.compile` to a result, with an empty cache and from the disk cache: of a forward
pass, and of it with its backward pass."""


def once(device: str, gradients: bool = False) -> dict[str, float]:
    """Seconds of `import fa4flex`, and from compile to a result; torch and the device have started before."""
    import torch

    inputs = [torch.randn(1, 2, 512, 128, device=device, dtype=torch.bfloat16) for _ in range(3)]
    slopes = torch.tensor([0.5, 0.25], device=device)
    if gradients:
        for x in inputs:
            x.requires_grad_().sum().backward()
    _finish(device)
    start = time.perf_counter()
    import fa4flex

    imported = time.perf_counter()

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    with torch.set_grad_enabled(gradients):
        out = fa4flex.compile(alibi, causal)(*inputs)
    if gradients:
        # Of a sum: autograd compares shapes of a gradient that it is given, for which torch imports sympy.
        out.sum().backward()
    _finish(device)
    return {"import": imported - start, "call": time.perf_counter() - imported}


def _finish(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def first_and_second(device: str) -> dict[str, Any]:
    """Seconds of each of RUNS, by its name, or {"reason": ...}."""
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for which, (kernels, *mode) in RUNS.items():
            done = subprocess.run(
                [sys.executable, "-m", "fa4flex.bench.first_call", device, *mode],
                env=_environment(Path(folder), kernels), capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                return {"reason": f"{which} process failed: {lines[-1][:200]}"}
            results[which] = json.loads(done.stdout.splitlines()[-1])
    return results


def _environment(folder: Path, kernels: str) -> dict[str, str]:
    """The environment with kernels in `folder`, and byte code, too, where it is not to be written beside
    sources."""
    results = {**_with_package(dict(os.environ)), CACHE: str(folder / kernels)}
    if results.pop(NO_BYTE_CODE, ""):
        results[BYTE_CODE] = str(folder / "byte code")
    return results


def _with_package(environment: dict[str, str]) -> dict[str, str]:
    """The child must import the fa4flex that is running, wherever the command was started."""
    root = str(Path(__file__).resolve().parents[2])
    others = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join([root, others]) if others else root}


if __name__ == "__main__":
    # `-m` has imported fa4flex's package file by now; what it loads lazily is still to come.
    print(json.dumps(once(sys.argv[1], "gradients" in sys.argv[2:])))
