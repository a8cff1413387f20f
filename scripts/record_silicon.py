"""Run the simulator's small sm_90a test kernels on a Hopper GPU and keep what they wrote.

    python scripts/record_silicon.py tests/ptxsim/silicon_sm90.npz.xz
    python scripts/record_silicon.py some.npz.xz --only tma_load_bf16_128 sweep_f32_to_32

Inputs are the same in every run. Each result is also compared with what the case expects; differences are
printed and do not stop the recording: the GPU is right, and the case or the ISA's text is to be looked at. A
case that crashes or hangs is left out and named, and the others go on in a fresh process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ptxsim")]
# before cutlass is imported, which looks at it then
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

ARCH = "sm_90a"
PATIENCE = 120.0
"""Seconds without a finished case after which a kernel is taken to hang; compiling one takes a few."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the .npz.xz to write; for a worker, a folder")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases (default: all)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return record(given.out, given.only)
    require_hopper()
    with tempfile.TemporaryDirectory() as folder:
        failed = run_all(Path(folder), given.only or names())
        recorded = gather(Path(folder), given.out)
    print(f"{recorded} cases in {given.out}, {given.out.stat().st_size / 1e6:.1f} MB")
    if failed:
        sys.exit(f"crashed or hung: {' '.join(failed)}")


def require_hopper() -> None:
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("expected a GPU of compute capability 9.0, for which these kernels are compiled")


def names() -> list[str]:
    from kernels import gemm_sm90, small

    return [case.name for case in (*small.CASES, *gemm_sm90.CASES) if ARCH in case.archs]


def record(folder: Path, only: list[str]) -> None:
    """The worker: each case's arrays to a file of its own."""
    import numpy as np
    import torch
    from kernels import gemm_sm90, small
    from kernels.recording import saved

    cases = {case.name: case for case in (*small.CASES, *gemm_sm90.CASES)}
    for name in only:
        case = cases[name]
        inputs, outputs = case.inputs(), case.outputs()
        on_gpu = tuple(tensor.cuda() for tensor in (*inputs, *outputs))
        case.build(ARCH)(*on_gpu)
        torch.cuda.synchronize()
        results = tuple(tensor.cpu() for tensor in on_gpu[len(inputs) :])
        try:
            case.check(inputs, results)
            print(f"{name}: as expected", flush=True)
        except AssertionError as differs:
            print(f"{name}: DIFFERS\n{differs}", flush=True)
        part = folder / f"{name}.part"
        with part.open("wb") as file:
            np.savez(file, **saved(name, inputs, results))
        part.rename(folder / f"{name}.npz")


def run_all(folder: Path, wanted: list[str]) -> list[str]:
    """Workers one after another until every case is recorded or has failed; names of those that failed."""
    failed: list[str] = []
    while left := [name for name in wanted if name not in failed and not (folder / f"{name}.npz").exists()]:
        command = [sys.executable, __file__, str(folder), "--worker", "--only", *left]
        worker = subprocess.Popen(command)
        done, since = 0, time.monotonic()
        while worker.poll() is None and time.monotonic() - since < PATIENCE:
            time.sleep(0.2)
            now = sum((folder / f"{name}.npz").exists() for name in left)
            done, since = (now, time.monotonic()) if now > done else (done, since)
        if worker.poll() is None:
            worker.kill()
        worker.wait()
        unfinished = [name for name in left if not (folder / f"{name}.npz").exists()]
        failed += unfinished[:1]
    return failed


def gather(folder: Path, out: Path) -> int:
    """All parts in one compressed file; how many cases."""
    import numpy as np
    from kernels.recording import write

    arrays = {}
    parts = sorted(folder.glob("*.npz"))
    for part in parts:
        with np.load(part) as found:
            arrays |= {key: found[key] for key in found.files}
    write(out, arrays)
    return len(parts)


if __name__ == "__main__":
    main()
