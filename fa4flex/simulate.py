"""python -m fa4flex simulate: a variant's GPU kernel, run on the CPU and watched."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa4flex.api import Attention

TOLERANCE = 2e-2
"""Largest error against float64 that bfloat16 inputs of unit variance excuse."""


def add_options(parser: argparse.ArgumentParser) -> None:
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--arch", default="sm_90a", help="sm_90a (default) or sm_100a")
    parser.add_argument("--q-len", **number, default=256, help="queries (default 256)")  # type: ignore[arg-type]
    parser.add_argument("--kv-len", **number, help="keys (default: as many as queries)")  # type: ignore[arg-type]
    parser.add_argument("--heads", **number, default=1, help="heads (default 1)")  # type: ignore[arg-type]
    parser.add_argument("--head-dim", **number, default=64, help="width of a head (default 64)")  # type: ignore[arg-type]
    parser.add_argument("--timing", default="late", help="eager, late (default) or random")
    parser.add_argument("--seed", **number, default=0, help="of inputs and timing (default 0)")  # type: ignore[arg-type]
    unexecuted = "list the instructions that were never executed"
    parser.add_argument("--unexecuted", action="store_true", help=unexecuted)
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a picture of the warps, SVG")


def run(attn: Attention, arguments: argparse.Namespace) -> int:
    """Prints the report and the error against float64; 1 where something was found or the result is wrong."""
    import torch

    from ptxsim.doors.device import device
    from ptxsim.run.timeline import svg
    from ptxsim.watch.findings import Fault

    torch.manual_seed(arguments.seed)
    keys = arguments.kv_len or arguments.q_len
    shape = (1, arguments.heads), (arguments.head_dim,)
    q, k, v = (
        torch.randn(*shape[0], n, *shape[1], dtype=torch.bfloat16) for n in (arguments.q_len, keys, keys)
    )
    out, fault_is_reported = None, contextlib.suppress(Fault)
    with device(arguments.arch, arguments.seed, arguments.timing) as gpu, torch.no_grad(), fault_is_reported:
        out = attn(q, k, v)
    print(gpu.report(arguments.unexecuted))
    if arguments.timeline is not None:
        arguments.timeline.write_text(svg(gpu.results[-1]))
        print(f"timeline in {arguments.timeline}")
    if out is None:
        return 1
    error = (out.double() - attn(q.double(), k.double(), v.double())).abs().max().item()
    print(f"largest error against float64: {error:.2e}")
    return 1 if gpu.findings or not error <= TOLERANCE else 0
