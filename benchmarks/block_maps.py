"""Kernels for maps of small blocks by other plans than their own, on a Hopper GPU.

    python benchmarks/block_maps.py --kernels blocks usual two --rounds 2 [--rows "map 64x64*"]
    python benchmarks/block_maps.py --smoke     # tiny maps, on a CPU

The rows are maps of `python -m fa4flex bench --suite sparse`, which times this library's own choice beside
its peers. `--kernels` sets how kernels are planned, each in a process of its own: "blocks" as the library
does by itself, "usual" by tiles that are made for any mask, "two" and "three" with so many blocks on a
multiprocessor, where they have room. Printed are medians of TFLOP/s over the blocks that are visited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

OWN = "fa4flex"
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "blocks": {},
    "usual": {"fa4flex.kernels.plan.specialize": {"BLOCK_KEYS": ()}},
    "two": {"fa4flex.kernels.fwd_sm90.tiles": {"SHARING": (2,)}},
    "three": {"fa4flex.kernels.fwd_sm90.tiles": {"SHARING": (3,)}},
}
"""Constants of planners, by module."""


def measure(kernel: str, options: list[str]) -> int:
    """The suite's status, with the planners' constants of a choice."""
    from fa4flex.__main__ import main as command

    for module, constants in CHOICES[kernel].items():
        for name, value in constants.items():
            setattr(import_module(module), name, value)
    return command(["bench", "--suite", "sparse", "--peers", OWN, *options])


def in_processes(given: argparse.Namespace) -> None:
    """Each choice in a process of its own, in turn; medians over the rounds."""
    options = ["--rows", given.rows, *(["--smoke", "--device", "cpu"] if given.smoke else [])]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(given.rounds):
        for kernel in given.kernels:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--measure", kernel, folder, *options]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                path = Path(folder) / "bench-sparse.json"
                if not path.exists():
                    raise SystemExit(f"{kernel}: status {done.returncode}\n{done.stdout[-2000:]}")
                for row in json.loads(path.read_text())["rows"]:
                    found[row["row"]][kernel].append(row["peers"][OWN].get("tflops", 0.0))
    for name, speeds in found.items():
        told = "; ".join(f"{kernel} {statistics.median(x):.4g}" for kernel, x in speeds.items())
        print(f"{name:<36} {told}", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        _, _, kernel, folder, *options = sys.argv
        return measure(kernel, [*options, "--out", folder])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rows", default="map 64*", help="patterns of rows, as of the suite")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kernels", nargs="+", choices=CHOICES, default=["blocks"])
    parser.add_argument("--smoke", action="store_true", help="tiny maps, on a CPU")
    in_processes(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
