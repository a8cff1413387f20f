"""Ranks of a group, in processes, one of which ends or stops in the middle of a call: all others raise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
RANKS, ODD, TIMEOUT, ANSWER = 3, 1, 8.0, 3.0
"""Seconds of the group's timeout, and those in which the others say which of them still answer."""


STOPPED = pytest.param("stopped", TIMEOUT + ANSWER, marks=pytest.mark.slow)


@pytest.mark.parametrize(("how", "within"), [("killed", TIMEOUT), STOPPED])
def test_all_others_raise_and_name_the_rank(how: str, within: float, tmp_path: Path) -> None:
    space = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), how, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=space,
            text=True,
        )
        for rank in range(RANKS)
    ]
    others = [process for rank, process in enumerate(processes) if rank != ODD]
    try:
        said = [process.communicate(timeout=100)[0] for process in others]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[ODD].returncode == -signal.SIGKILL
    for process, text in zip(others, said, strict=True):
        assert process.returncode == 0, text
        assert f"rank {ODD} did not answer" in text, text
        seconds = float(re.findall(r"raised after ([\d.]+) s", text)[0])
        assert seconds <= within + 2, text  # 2: of a machine that has other work to do


def main(rank: int, how: str, results: Path) -> None:
    import fa4flex
    from fa4flex.parallel.rectangle import Rectangles
    from fa4flex.variants import causal

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{results}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT),
    )
    cp = fa4flex.compile(mask=causal).parallel(dist.group.WORLD, tile=4)
    x = cp.shard(torch.randn(1, 2, 48, 8), 2).requires_grad_()
    cp(x, x, x).sum().backward()
    dist.barrier()
    backward, start = Rectangles.backward, time.monotonic()

    def ending(*given: Any) -> Any:
        if rank == ODD:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return backward(*given)

    Rectangles.backward = ending  # type: ignore[method-assign]
    try:
        cp(x, x, x, lengths=48).sum().backward()
    except RuntimeError as error:
        print(error, *error.__notes__)
        print(f"raised after {time.monotonic() - start:.2f} s", flush=True)
    else:
        raise AssertionError("no error")
    os._exit(0)  # the group cannot be left in order


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
