"""Rows one after another, in a process of its own: `python -m fa4flex.bench.row_worker`.

A request is a line of JSON: the row's fields, the seed of its inputs, peers by name, device, smoke and
rounds. The answer is the row as in `bench-<suite>.json`. Where the device is broken afterwards the process
ends without one."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch

from fa4flex.bench.command import Options, measure_group
from fa4flex.bench.isolated import tell
from fa4flex.bench.peers import PEERS, SMOKE_PEERS
from fa4flex.bench.report import OURS, as_json
from fa4flex.bench.suites import Row, Target

BROKEN = 70
"""Exit status where a kernel has broken the device."""


def row_of(fields: dict[str, Any]) -> Row:
    """The row that was made a dictionary of."""
    return Row(**{**fields, "targets": tuple(Target(**x) for x in fields["targets"])})


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The row as JSON. Whatever fa4flex or a peer raises is its reason in the row; what is raised elsewhere
    is an error of the row."""
    smoke, device = request["smoke"], torch.device(request["device"])
    offered = tuple(x for x in (SMOKE_PEERS if smoke else PEERS) if x.name in (OURS, *request["peers"]))
    options = Options(
        device,
        smoke,
        request["rounds"],
        request["seed"],
        float("inf"),
        offered,
        lambda name: at(name, device),
    )
    row = row_of(request["row"])
    try:
        return as_json(measure_group([row.small() if smoke else row], offered, options))[0]
    except Exception as error:
        words = " ".join(str(error).split())[:500]
        return {"row": row.name, "error": f"{type(error).__name__}: {words}"}


def at(name: str, device: torch.device) -> None:
    """Tell which peer is next. Ends the process where the one before has broken the device for all that come
    after: the parent then knows who it was."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            print(error, flush=True)
            os._exit(BROKEN)
    tell(at=name)


def main() -> int:
    for line in sys.stdin:
        request = json.loads(line)
        found = answer(request)
        gc.collect()
        at("", torch.device(request["device"]))
        torch.cuda.empty_cache()
        tell(answer=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
