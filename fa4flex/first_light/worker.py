"""One case, in a process of its own: `python -m fa4flex.first_light.worker DEVICE STEP CASE SEED`.

DEVICE is "cuda", or a simulated chip such as "sm_100a". STEP is "right" or "fast". The last line printed is
JSON: the results, or the error in words.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from fa4flex.errors import UnsupportedError


def right(device: str, name: str, seed: int) -> dict[str, Any]:
    """Errors and bits of a case with inputs of `seed`."""
    import ptxsim
    from fa4flex.first_light.cases import Draw, case_named
    from fa4flex.first_light.judge import judge
    from fa4flex.runtime.cuda.device.device import target_of

    case, gpu = case_named(name), torch.device("cuda")
    if device == gpu.type:
        draw, arch, findings = Draw.of(gpu, seed), target_of(gpu).name, []
        judged = judge(case.build(draw), case.gradients, draw.generator)
    else:
        draw, arch = Draw.of(torch.device("cpu"), seed), device
        with ptxsim.device(arch) as simulated:
            judged = judge(case.build(draw), case.gradients, draw.generator)
        findings = [str(finding) for finding in simulated.findings]
    results = [vars(x) | {"right": x.right} for x in judged]
    return {"arch": arch, "results": results, "findings": findings}


def fast(device: str, name: str, seed: int) -> dict[str, Any]:
    """Times of a row of the benchmark, beside the peers that are installed."""
    import time

    from fa4flex.bench.command import Options, measure_group
    from fa4flex.bench.peers import PEERS
    from fa4flex.bench.report import as_json
    from fa4flex.first_light.rows import ROUNDS, row_named

    peers = tuple(peer for peer in PEERS if peer.name != "flex")  # which compiles for minutes
    options = Options(torch.device(device), False, ROUNDS, seed, time.monotonic() + 3600, peers)
    return {"row": as_json(measure_group([row_named(name)], peers, options))[0]}


STEPS = {"right": right, "fast": fast}


def main(arguments: list[str]) -> int:
    device, step, name, seed = arguments
    try:
        found = STEPS[step](device, name, int(seed))
    except UnsupportedError as error:
        found = {"refused": str(error)}
    except Exception as error:  # a new chip may raise anything: the report says it
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}"}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
