"""Check of a release: what an index would get is built, installed in an empty environment, and used there.

    python scripts/release_check.py                       the files of the last commit
    python scripts/release_check.py --final               the changelog has to say when it was released, too
    python scripts/release_check.py --extras transformers,diffusers
    python scripts/release_check.py --skip-demo           without the demo, which takes minutes

The wheel is built from the sdist, and that from `git archive`, so that no file of the checkout alone helps.
Packages come from where pip finds them, in the versions of constraints.txt: about 1.5 GB on disk, in a folder
that is removed at the end (--keep leaves it). Each check is a line; the exit status is the number of those
that failed, and a check without which later ones mean nothing ends the run.
"""

from __future__ import annotations

import argparse
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

USED = """
import torch, fa4flex
from fa4flex.variants import alibi, causal
q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
out = fa4flex.compile(alibi, causal)(q, k, v)
exact, _ = fa4flex.reference.attention(q, k, v, alibi(), causal())
torch.testing.assert_close(out, exact)
ours = torch.autograd.grad(out.square().sum(), (q, k, v))
torch.testing.assert_close(ours, torch.autograd.grad(exact.square().sum(), (q, k, v)))
print(fa4flex.__file__)
"""


class Failed(Exception):
    """A check that failed, with what it says."""


class Report:
    """Checks, each printed as it is done; `failed` counts."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, name: str, call: Callable[[], str]) -> bool:
        """Run a check, which returns what it found or raises Failed."""
        began = time.perf_counter()
        try:
            said, word = call(), "ok"
        except Failed as error:
            said, word = str(error), "FAILED"
            self.failed += 1
        print(f"{word:<7} {name:<12} {time.perf_counter() - began:6.1f} s  {said}", flush=True)
        return word == "ok"


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Output of a command in a folder, without this checkout on its path. Raises Failed."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([*map(str, command)], cwd=folder, env=alone, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise Failed(f"{' '.join(map(str, command[:4]))} ... exited with {done.returncode}:\n{tail}")
    return done.stdout


# --- checks -------------------------------------------------------------------------------------------------


def versions(root: Path) -> str:
    """The version, the same in pyproject.toml and in the package."""
    declared: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    found = re.search(r'^__version__ = "(.*)"$', (root / "fa4flex" / "__init__.py").read_text(), re.MULTILINE)
    if found is None or found[1] != declared:
        own = "none" if found is None else found[1]
        raise Failed(f"pyproject.toml says {declared}, fa4flex.__version__ is {own}")
    return declared


def changelog(text: str, version: str, final: bool) -> str:
    """The section of the version: it is the first one, it says something, and when it was released."""
    sections = re.split(r"^## +", text, flags=re.MULTILINE)[1:]
    title, _, body = sections[0].partition("\n") if sections else ("nothing", "", "")
    if title.split()[0] != version:
        raise Failed(f"CHANGELOG.md begins with {title!r}, not with a section of {version}")
    if not re.search(r"^- ", body, re.MULTILINE):
        raise Failed(f"CHANGELOG.md says nothing under {title!r}")
    if final and not re.fullmatch(r"\S+ \(?\d{4}-\d{2}-\d{2}\)?", title):
        raise Failed(f"CHANGELOG.md has {title!r}: write the day, as in '{version} (2026-12-31)'")
    return title


def build(root: Path, folder: Path) -> Path:
    """The wheel, of an sdist of the last commit."""
    source = folder / "checkout"
    source.mkdir()
    run(["git", "archive", "--output", folder / "checkout.tar", "HEAD"], root)
    unpack(folder / "checkout.tar", source)
    sdist = folder / run([sys.executable, "-c", HOOK, "build_sdist", folder], source).split()[-1]
    unpack(sdist, folder)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    return folder / run([sys.executable, "-c", HOOK, "build_wheel", folder], unpacked).split()[-1]


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")


def metadata(wheel: Path, version: str) -> str:
    """Name, version, description and Python versions, which an index shows. Raises Failed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        fields: email.message.Message = email.message_from_bytes(archive.read(name))
    wanted = {"Name": "fa4flex", "Version": version, "Description-Content-Type": "text/markdown"}
    wrong = {key: fields[key] for key, value in wanted.items() if fields[key] != value}
    missing = [key for key in ("Summary", "Requires-Python", "License-Expression") if not fields[key]]
    if wrong or missing or len(str(fields.get_payload())) < 1000:
        raise Failed(f"metadata is wrong in {wrong}, lacks {missing}, or has no description")
    size = wheel.stat().st_size / 1e6
    return f"{wheel.name}, {size:.1f} MB, Python {fields['Requires-Python']}"


def install(wheel: Path, folder: Path, python: str, extras: str) -> str:
    """A new environment with the wheel and what it asks for, and which version of torch that is."""
    environment = folder / "environment"
    run([python, "-m", "venv", environment], folder)
    installed = environment / "bin" / "python"
    pip = [installed, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    run([*pip, "--constraint", ROOT / "constraints.txt", what], folder)
    run([installed, "-m", "pip", "check", "--disable-pip-version-check"], folder)
    return run(
        [installed, "-c", "import sys, torch; print(sys.version.split()[0], torch.__version__)"], folder
    ).strip()


def use(python: Path, folder: Path) -> str:
    """Results and gradients, of the package that was installed."""
    place = run([python, "-I", "-c", USED], folder).strip()
    if not Path(place).is_relative_to(python.parents[1]):
        raise Failed(f"{place} was imported, not the wheel")
    return "results and gradients agree with the reference"


def command(python: Path, folder: Path, *arguments: str) -> str:
    """The last line that a command of the package prints."""
    said = run([python, "-I", "-m", "fa4flex", *arguments], folder, FA4FLEX_CACHE_DIR=str(folder / "cache"))
    return said.strip().splitlines()[-1].strip()


def script(python: Path, folder: Path, version: str) -> str:
    said = run([python.parent / "fa4flex", "--version"], folder).strip()
    if said != f"fa4flex {version}":
        raise Failed(f"fa4flex --version says {said!r}")
    return said


def check(options: argparse.Namespace, folder: Path) -> int:
    """Number of checks that failed."""
    report, used = Report(), folder / "elsewhere"
    used.mkdir()
    if not report.check("version", lambda: versions(ROOT)):
        return report.failed
    version = versions(ROOT)
    report.check("changelog", lambda: changelog((ROOT / "CHANGELOG.md").read_text(), version, options.final))
    if not report.check("build", lambda: build(ROOT, folder).name):
        return report.failed
    (wheel,) = folder.glob("*.whl")
    report.check("metadata", lambda: metadata(wheel, version))
    if not report.check("install", lambda: install(wheel, folder, options.python, options.extras)):
        return report.failed
    python = folder / "environment" / "bin" / "python"
    report.check("use", lambda: use(python, used))
    report.check("--version", lambda: script(python, used, version))
    report.check("doctor", lambda: command(python, used, "doctor"))
    report.check("check", lambda: command(python, used, "check", "alibi, causal", "--q-len", "40"))
    if not options.skip_demo:
        report.check("demo", lambda: command(python, used, "demo"))
    return report.failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="Python of the new environment")
    parser.add_argument("--extras", default="", help="extras to install, with commas between them")
    parser.add_argument(
        "--final", action="store_true", help="the changelog has to have the day of the release"
    )
    parser.add_argument("--skip-demo", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the folder, and say where it is")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="fa4flex-release-"))
    try:
        return check(options, folder)
    finally:
        if options.keep:
            print(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
