"""Scenarios of several processes: how a worker's file declares them, and how a test reads their results."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fa4flex import Fa4flexError

SECONDS = 180
"""Most that all scenarios together may take, on a machine that has other work to do."""

_SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(check: Callable[[], None]) -> Callable[[], None]:
    """Declare a function that each process runs; it raises what is wrong."""
    _SCENARIOS[check.__name__] = check
    return check


def raises(words: list[str], call: Callable[[], Any], kind: type[Exception] = Fa4flexError) -> None:
    try:
        call()
    except kind as error:
        missing = [said for said in words if said not in str(error)]
        assert not missing, f"{missing} not in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__} that says {words}")


def main(rank: int, world: int, results: Path, names: list[str]) -> None:
    """Run scenarios by name; write a traceback, or nothing, to results/<scenario>.<rank>."""
    torch.set_num_threads(1)
    store = f"file://{results}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=90)
    )
    for name in names:
        torch.manual_seed(0)
        try:
            _SCENARIOS[name]()
            said = ""
        except Exception:
            said = traceback.format_exc()
        (results / f"{name}.{rank}").write_text(said)
    dist.destroy_process_group()


# --- in the test --------------------------------------------------------------------------------------------


def scenarios_of(worker: Path) -> list[str]:
    return re.findall(r"@scenario\ndef (\w+)", worker.read_text())


def check(world: int, results: Path, name: str) -> None:
    """Assert that a scenario ran on all ranks, and raised on none."""
    for rank in range(world):
        said = results / f"{name}.{rank}"
        assert said.exists(), f"rank {rank} did not finish:\n{(results / f'log.{rank}').read_text()[-3000:]}"
        assert said.read_text() == "", f"rank {rank} of {world}"
