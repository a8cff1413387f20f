"""Report of a run: verdicts in text, and all that was measured in JSON. It holds no names of people, hosts,
folders or single chips."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4flex.bench.random_report import failure
from fa4flex.first_light.processes import Done

RECORDED = Path(__file__).with_name("recorded.json")
"""Bits of results that the simulator had: by chip, then case, then result."""


@dataclass(frozen=True)
class Verdict:
    """One case: `passed` is None where it was not run, which `says` explains."""

    name: str
    passed: bool | None
    says: str

    @property
    def word(self) -> str:
        return {True: "ok", False: "FAILED", None: "not run"}[self.passed]


def about(device: str, seed: int) -> dict[str, str]:
    """Chip, driver and versions; no more."""
    import torch

    from fa4flex.bench.environment import environment

    if device == "cuda":
        found = environment(torch.device("cuda"))
        found["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    else:
        found = environment(torch.device("cpu")) | {"device": f"{device}, simulated"}
    return found | {"system": platform.system(), "seed": str(seed)}


def heading(about: dict[str, str]) -> str:
    return "\n".join(f"{name:20} {value}" for name, value in about.items())


# --- verdicts -----------------------------------------------------------------------------------------------


def verdict(done: Done) -> Verdict:
    task, said = done.task, done.said
    tool = f" under {task.under[-1]}" if task.under else ""
    name = f"{task.name}{tool}" if task.step == "right" else task.name
    if "error" in said:
        return Verdict(name, False, said["error"])
    if why := said.get("refused") or said.get("skipped"):
        return Verdict(name, None, why)
    if task.step == "fast":
        return _speed(name, said["row"])
    wrong = [x for x in said["results"] if not x["right"]]
    complaints = [f"{x['name']} is off by {x['error']:.1e}, PyTorch by {x['usual']:.1e}" for x in wrong]
    complaints += said["findings"]
    complaints += [x for x in said.get("sanitizer", []) if not x.endswith(" 0 errors")]
    if task.under and not said.get("sanitizer"):
        complaints.append("no summary of the tool")
    if complaints:
        return Verdict(name, False, "; ".join(complaints))
    worst = max(x["error"] / max(x["usual"], 1e-30) for x in said["results"])
    return Verdict(name, True, f"error {worst:.2f} of PyTorch's{_bits(done)}")


def _bits(done: Done) -> str:
    """Words on equality with the simulator's bits, where the inputs are those of its records."""
    known = recorded().get(done.said["arch"], {}).get(done.task.name)
    if known is None or not done.task.recorded:
        return ""
    results = {x["name"]: x for x in done.said["results"]}
    same = sum(results[name]["digest"] == kept["digest"] for name, kept in known.items())
    if same == len(known):
        return ", bits as simulated"
    pairs = [(x, y) for name in known for x, y in zip(results[name]["sample"], known[name]["sample"])]
    apart = max(abs(x - y) for x, y in pairs)
    return f", bits as simulated in {same} of {len(known)} results, samples at most {apart:.1e} apart"


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return found


def _speed(name: str, row: dict[str, Any]) -> Verdict:
    if why := failure(row):
        return Verdict(name, False, why)
    rates = {peer: measured["tflops"] for peer, measured in row["peers"].items() if measured.get("tflops")}
    said = ", ".join(f"{peer} {rate:.0f}" for peer, rate in rates.items())
    others = [rate for peer, rate in rates.items() if peer != "fa4flex"]
    beside = f"; {rates['fa4flex'] / max(others):.2f} of the best peer" if others else "; no peer"
    return Verdict(name, True, f"TFLOP/s: {said}{beside}")


# --- names --------------------------------------------------------------------------------------------------

_PATH = re.compile(r"(?<![\w./:])~?/(?:[^\s/:;,'\"()]+/)+")
"""Folders of an absolute path, up to the name of the file."""
_CHIP = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F]+(?:-[0-9a-fA-F]+)+")


def anonymous(value: Any) -> Any:
    """Text, or what holds texts, without what tells whose machine it is: folders, of which names of files
    stay; names of the host and the user; and serial numbers of chips. Errors of libraries may hold any of
    them."""
    if isinstance(value, dict):
        return {key: anonymous(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [anonymous(held) for held in value]
    if not isinstance(value, str):
        return value
    for folder in (Path.cwd(), Path.home()):  # which may have spaces in their names
        value = value.replace(f"{folder}/", "") if len(folder.parts) > 1 else value
    value = _CHIP.sub("a chip", _PATH.sub("", value))
    for name, word in _names():
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, value)
    return value


def _names() -> list[tuple[str, str]]:
    """Names that tell whose machine it is, longest first, each with a word instead."""
    host = socket.gethostname()
    names = {host: "a host", host.split(".")[0]: "a host"}
    with contextlib.suppress(KeyError, OSError):  # of a user without a name
        names[getpass.getuser()] = "a user"
    return sorted(((name, word) for name, word in names.items() if len(name) > 1), key=lambda x: -len(x[0]))


# --- text and JSON ------------------------------------------------------------------------------------------


def text(verdicts: Sequence[Verdict]) -> str:
    width = max((len(each.name) for each in verdicts), default=0)
    lines = [f"{each.name:{width}}  {each.word:7}  {each.says}" for each in verdicts]
    counts = [sum(each.passed is x for each in verdicts) for x in (True, False, None)]
    return "\n".join([*lines, "", "{} ok, {} failed, {} not run".format(*counts)])


def as_json(about: dict[str, str], done: Sequence[Done], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    cases = [
        {
            "name": each.name,
            "step": one.task.step,
            "passed": each.passed,
            "says": each.says,
            "seconds": round(one.seconds, 1),
            **{key: value for key, value in one.said.items() if key != "output"},
        }
        for one, each in zip(done, verdicts, strict=True)
    ]
    return {"about": about, "cases": cases}
