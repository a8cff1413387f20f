"""Run clients of fa4flex on a CPU, and print a table: `make clients`.

    python scripts/clients FOLDER [--only vllm,sglang,transformers] [--words WORD ...]

vLLM and SGLang are installed into FOLDER, each in an environment of its own, and serve tiny random models
with fa4flex as their attention backend; the tokens are compared with those of eager transformers. The tests
of transformers run with its oldest supported, pinned and newest versions. What cannot be installed or
started becomes a row that says why. Exits with 1 if a row is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_environments import ENVIRONMENTS, ROOT, Environment, NotInstalled, step

HERE = Path(__file__).resolve().parent
STUBS = HERE / "stubs"
CLEAN = ("FA4FLEX_LAYERS", "FA4FLEX_ABSENT", "FA4FLEX_CPU_OPERATORS")
OLDEST, NEWEST = "5.5.4", "newest"
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""vLLM's model runner of GPUs, whose kernels Triton interprets."""
SOME = ["prefix", "preempted", "Gemma 2", "GPT-OSS", "one piece"]
"""Words of the cases that older or slower ways of an engine serve, too."""
MARKS = "not exhaustive and not gpu and not slow"
TESTS = [
    f"tests/integrations/test_{name}.py"
    for name in ("transformers", "caches", "continuous_batching", "model_mask")
]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    client: str
    version: str
    what: str
    result: str
    right: bool

    def __str__(self) -> str:
        mark = "" if self.right else " **(not as it should be)**"
        return f"| {self.client} | {self.version} | {self.what} | {self.result}{mark} |"


def engines(folder: Path, chosen: list[str], words: list[str]) -> Iterator[Row]:
    for each in ENVIRONMENTS:
        if each.name not in chosen:
            continue
        try:
            taken = each.install(sys.executable, folder)
        except NotInstalled as error:
            yield Row(each.name, "none", "nothing", str(error), False)
            continue
        print(f"{each.name}: installed in {taken}", file=sys.stderr)
        if each.other is None:
            yield from served(each, folder, {}, words)
            continue
        over = {
            "PYTHONPATH": str(folder / each.name / "other"),
            "FA4FLEX_CPU_OPERATORS": str(each.packages(folder) / each.other),
        }
        yield from served(each, folder, over, words)
        yield from served(each, folder, over | INTERPRETED, words or SOME)
        yield from served(each, folder, {}, words or SOME)


def served(each: Environment, folder: Path, over: dict[str, str], words: list[str]) -> Iterator[Row]:
    """Rows of one engine, whose processes have these variables besides."""
    sys.path.insert(0, str(HERE))
    engine = __import__(f"serve_{each.name}")
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    environment |= {**engine.ENVIRONMENT, **over, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(STUBS), *filter(None, [over.get("PYTHONPATH")])])
    logs = folder / each.name / f"logs{len(over)}"
    logs.mkdir(parents=True, exist_ok=True)
    command = [str(each.python(folder)), str(HERE / "serve_cases.py"), each.name, str(logs), *words]
    version, rows = "", 0
    with (logs / "errors.log").open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT
        )
        assert process.stdout is not None
        for line in filter(lambda line: line.startswith("{"), process.stdout):
            found = json.loads(line)
            version = found.get("version", version)
            if "what" in found:
                rows += 1
                yield Row(engine.NAME, version, found["what"], found["result"], found["right"])
        process.wait()
    if not rows and not words:
        last = ((logs / "errors.log").read_text().splitlines() or ["no message"])[-1]
        yield Row(engine.NAME, version or "none", "nothing", f"cannot be imported: {last[:300]}", False)


def transformers(folder: Path) -> Iterator[Row]:
    """Tests of the integration with the oldest, the pinned and the newest version."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = next(pin for pin in pins if pin.startswith("transformers==")).partition("==")[2]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("transformers")))
    for version in (OLDEST, pinned, NEWEST):
        target, what = folder / "transformers" / version, f"transformers=={version}".removesuffix("==newest")
        try:
            if not target.exists():
                step([*pip, "--constraint", str(constraints), "--target", str(target), what], what)
        except NotInstalled as error:
            yield Row("transformers", version, "nothing", str(error), False)
            continue
        found = next(target.glob("transformers-*.dist-info")).name.split("-")[1].removesuffix(".dist")
        if version == NEWEST and found == pinned:
            yield Row("transformers", found, "the newest", "is the pinned version", True)
        else:
            yield tested(target, found)


def tested(target: Path, version: str) -> Row:
    """Tests with the packages of a folder."""
    path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    made = subprocess.run(
        [sys.executable, "-m", "pytest", "--tb=line", "-m", MARKS, *TESTS],
        cwd=ROOT, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    last = (made.stdout.splitlines() or ["no output"])[-1].strip("= ").partition(" in ")[0]
    what = "tests of models, caches, continuous batching and masks"
    return Row("transformers", version, what, last, made.returncode == 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--only", default="vllm,sglang,transformers")
    parser.add_argument("--words", nargs="*", default=[])
    given, start, right = parser.parse_args(), time.time(), True
    given.folder.mkdir(parents=True, exist_ok=True)
    only = given.only.split(",")
    print("| client | version | what ran | result |\n|---|---|---|---|", flush=True)
    for make in (
        engines(given.folder, only, given.words),
        transformers(given.folder) if "transformers" in only else iter(()),
    ):
        for row in make:
            print(row, flush=True)
            right &= row.right
    print(f"in {(time.time() - start) / 60:.0f} minutes", file=sys.stderr)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
