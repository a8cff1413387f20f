"""Serve the cases of one engine: python scripts/clients/serve_cases.py vllm|sglang FOLDER [WORD ...]

Runs in an environment that has the engine. Each case is a process of its own, forked after the imports, that
writes to a log in FOLDER. A line of JSON is printed for each: {"what", "result", "right"}, after one with the
engine's version. WORDs choose the cases whose words hold one of them.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

LIMIT = 900
"""Seconds for a case."""


def outcome(engine: Any, case: Any, folder: Path) -> tuple[str, bool]:
    """(words for the table, whether it is as it should be)"""
    import client_models

    rounds = [client_models.PROMPTS, client_models.LONGER] if case.again else [client_models.PROMPTS]
    path = client_models.make(case.model, folder)
    served = engine.serve(path, case.options, rounds)
    attention, prompts = case.attention, [*chain(*rounds)]
    wanted = client_models.expected(path, prompts, attention, **case.reference)
    usual = attention == "eager" or client_models.expected(path, prompts)
    assert usual != wanted, f"{attention} changes no token"
    same = sum(map(list.__eq__, served.tokens, wanted))
    found = f", {served.cached} tokens from the cache" if case.again else ""
    right = same == len(wanted) and not case.refused and (served.cached > 0 or not case.again)
    return f"{same} of {len(wanted)} sequences equal{found}", right


def run(engine: Any, case: Any, folder: Path, number: int) -> None:
    """The child's work. Its outputs go to a log."""
    os.setsid()  # an engine's processes are ended with it
    log = os.open(folder / f"{number}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(case.environment)
    words, right = outcome(engine, case, folder)
    (folder / f"{number}.json").write_text(json.dumps([words, right]))
    os._exit(0)  # some engines wait for their processes, which end with this one


def judge(case: Any, folder: Path, number: int) -> tuple[str, bool]:
    """Result that a case's process left behind."""
    left = folder / f"{number}.json"
    if left.exists():
        words, right = json.loads(left.read_text())
        return words, right
    lines = (folder / f"{number}.log").read_text(errors="replace").splitlines()
    if case.refused and any(re.search(case.refused, line) for line in lines):
        said = next(line for line in reversed(lines) if re.search(case.refused, line))
        return f"refused: {_message(said)}", True
    errors = [line for line in lines if re.search(r"^(\S.*)?\b\w*Error\b", line)]
    return f"failed: {_message((errors or lines or ['it ended'])[-1])}", False


def _message(line: str) -> str:
    """A log's line without its time and process, without paths."""
    line = re.sub(r"^.*?(?=\b[\w.]*(Error|Exception)\b)", "", line.strip())
    return re.sub(r"(/[\w.+-]+){2,}/", "", line)[:300]


def main(name: str, place: str, *words: str) -> None:
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    engine = importlib.import_module(f"serve_{name}")
    print(json.dumps({"version": engine.prepare()}), flush=True)
    fork = multiprocessing.get_context("fork")
    for number, case in enumerate(engine.CASES):
        if words and not any(word in case.what for word in words):
            continue
        (folder / f"{number}.json").unlink(missing_ok=True)
        process = fork.Process(target=run, args=(engine, case, folder, number))
        process.start()
        process.join(LIMIT)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        found, right = judge(case, folder, number)
        print(json.dumps({"what": case.what, "result": found, "right": right}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
