"""Time of the first call, in a process of its own: `python -m fa4flex.bench.first_call cuda`.

The parent runs it twice with one empty cache folder: the first run compiles, the second finds kernels there.
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
MOST_FIRST, MOST_SECOND = 3.0, 0.5
"""Seconds from `fa4flex.compile` to a result: with an empty cache, and from the disk cache."""


def once(device: str) -> dict[str, float]:
    """Seconds of `import fa4flex`, and from compile to a result; torch and the device have started before."""
    import torch

    inputs = [torch.randn(1, 2, 512, 128, device=device, dtype=torch.bfloat16) for _ in range(3)]
    slopes = torch.tensor([0.5, 0.25], device=device)
    _finish(device)
    start = time.perf_counter()
    import fa4flex

    imported = time.perf_counter()

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    with torch.no_grad():
        fa4flex.compile(alibi, causal)(*inputs)
    _finish(device)
    return {"import": imported - start, "call": time.perf_counter() - imported}


def _finish(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def first_and_second(device: str) -> dict[str, Any]:
    """{"first": {...}, "second": {...}} of two fresh processes, or {"reason": ...}."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for which in ("first", "second"):
            done = subprocess.run(
                [sys.executable, "-m", "fa4flex.bench.first_call", device],
                env=_with_package({**os.environ, CACHE: folder}), capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                return {"reason": f"{which} process failed: {lines[-1][:200]}"}
            found[which] = json.loads(done.stdout.splitlines()[-1])
    return found


def _with_package(environment: dict[str, str]) -> dict[str, str]:
    """The child must import the fa4flex that is running, wherever the command was started."""
    root = str(Path(__file__).resolve().parents[2])
    others = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join([root, others]) if others else root}


if __name__ == "__main__":
    # `-m` has imported fa4flex's package file by now; what it loads lazily is still to come.
    print(json.dumps(once(sys.argv[1])))
