"""The package as users get it: an sdist of this checkout, the wheel built from that, installed on its own.

The environment holds the wheel and the packages that it declares, nothing else: the latter are linked from
the environment of the tests, where installing them anew would load torch again.
"""

from __future__ import annotations

import email.message
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

import fa4flex

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
MOST_WHEEL_BYTES = 2_500_000
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

SMOKE = """
import sys
import torch
import fa4flex
from fa4flex.variants import alibi, causal, sliding_window

assert not ({"sympy", "cutlass", "matplotlib", "transformers"} & set(sys.modules)), "imports are lazy"
attn = fa4flex.compile(score_mod=alibi, mask=causal & sliding_window(16))
q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
out = attn(q, k, v)
exact, _ = fa4flex.reference.attention(q, k, v, alibi(), causal() & sliding_window(16))
torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
ours = torch.autograd.grad(out.square().sum(), (q, k, v))
torch.testing.assert_close(ours, torch.autograd.grad(exact.square().sum(), (q, k, v)), rtol=1e-10, atol=1e-10)
if sys.platform == "linux":
    assert ".target sm_90a" in attn.source("ptx", head_dim=64)
print(fa4flex.__file__)
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), as `python -m build` makes them: the wheel from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    copy = folder / "checkout"  # building writes beside the sources
    shutil.copytree(ROOT, copy, ignore=NOT_SOURCE)
    sdist = _build("build_sdist", copy, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return sdist, _build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def _build(hook: str, source: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", HOOK, hook, str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and the packages that it declares."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    # on PYTHONPATH, or in the folder, pip would find this checkout and call the wheel installed
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--quiet", str(distributions[1])], check=True, cwd=venv, env=alone)
    (packages,) = venv.glob("lib/python*/site-packages")
    for distribution in declared(_metadata(distributions[1]).get_all("Requires-Dist") or []):
        _link(distribution, packages)
    return python


def declared(requirements: list[str], extra: str = "") -> Iterator[Distribution]:
    """Distributions here that meet `requirements`, and what they require in turn, each once."""
    waiting, seen = [(Requirement(text), extra) for text in requirements], set[tuple[str, str]]()
    while waiting:
        requirement, wanted = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted}):
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        for further in ("", *requirement.extras):
            key = (distribution.name, further)
            if key not in seen:
                seen.add(key)
                waiting += [(Requirement(text), further) for text in distribution.requires or []]
                if not further:
                    yield distribution


def _link(distribution: Distribution, packages: Path) -> None:
    """Link the files of `distribution` into another site-packages, each at its top."""
    tops = {PurePosixPath(file).parts[0] for file in distribution.files or [] if ".." not in file.parts}
    for top in tops - {"__pycache__"}:
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(top))))


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def _run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python arguments` in `cwd`, isolated: neither the folder nor PYTHONPATH is looked through."""
    environment: Mapping[str, str] = {**os.environ, "FA4FLEX_CACHE_DIR": str(cwd / "cache")}
    return subprocess.run(
        [str(python), "-I", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    wheel = distributions[1]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    information = f"fa4flex-{fa4flex.__version__}.dist-info/"
    assert {name.split("/")[0] + "/" for name in names} == {"fa4flex/", "ptxsim/", information}
    packages = ("fa4flex", "ptxsim")
    sources = {str(path.relative_to(ROOT)) for name in packages for path in (ROOT / name).rglob("*.py")}
    others = {"fa4flex/py.typed", "fa4flex/first_light/recorded.json", "ptxsim/py.typed", "ptxsim/README.md"}
    assert {name for name in names if not name.startswith(information)} == sources | others
    assert f"{information}licenses/LICENSE" in names
    assert wheel.stat().st_size < MOST_WHEEL_BYTES


def test_the_sdist_holds_what_builds_the_wheel(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        tops = {PurePosixPath(name).parts[1] for name in archive.getnames() if "/" in name}
    generated = {"PKG-INFO", "setup.cfg", "fa4flex.egg-info"}
    files = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "fa4flex", "ptxsim", "pyproject.toml"}
    assert tops == generated | files


def test_metadata(distributions: tuple[Path, Path]) -> None:
    metadata = _metadata(distributions[1])
    assert metadata["Version"] == fa4flex.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "bench", "dev", "diffusers", "docs", "notebook", "plot", "transformers",
    }  # fmt: skip
    assert f"## {fa4flex.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_it_runs_with_nothing_but_what_it_declares(installed: Path, tmp_path: Path) -> None:
    """Outside of the checkout: results and gradients, a GPU kernel's PTX, and the command line."""
    smoke = _run(installed, "-c", SMOKE, cwd=tmp_path)
    assert smoke.returncode == 0, smoke.stderr
    assert Path(smoke.stdout.strip()).is_relative_to(installed.parents[1])
    absent = _run(installed, "-c", "import matplotlib", cwd=tmp_path)
    assert "ModuleNotFoundError" in absent.stderr, "the environment holds more than is declared"


@pytest.mark.slow
def test_its_commands_run(installed: Path, tmp_path: Path) -> None:
    for command in (
        ["doctor"],
        ["draw", "causal", "--size", "8"],
        ["check", "alibi, causal", "--q-len", "40"],
    ):
        done = _run(installed, "-m", "fa4flex", *command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    script = subprocess.run(
        [str(installed.parent / "fa4flex"), "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert script.stdout.strip() == f"fa4flex {fa4flex.__version__}"
