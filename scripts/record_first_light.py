"""Write results of the simulated chips that `python -m fa4flex first-light` compares with.

    python scripts/record_first_light.py

Takes minutes. The file holds, for each recorded case, a digest of all bits of each result, and some elements.
It is written anew when kernels change what they round.
"""

from __future__ import annotations

import json
import time

from fa4flex.first_light.command import tasks_of
from fa4flex.first_light.processes import Done, run_all
from fa4flex.first_light.report import RECORDED

CHIPS = "sm_90a", "sm_100a"


def tell(done: Done) -> None:
    print(
        f"{done.task.device} {done.task.name}: {done.seconds:.0f} s {done.said.get('error', '')}", flush=True
    )


def main() -> None:
    recorded: dict[str, dict[str, object]] = {}
    for chip in CHIPS:
        tasks = tasks_of(chip, "", 0)
        for done in run_all(tasks, 2, time.monotonic() + 3600, tell):
            assert not done.said["findings"], done.said
            recorded.setdefault(chip, {})[done.task.name] = {
                x["name"]: {"digest": x["digest"], "sample": x["sample"]} for x in done.said["results"]
            }
    RECORDED.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
