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
RANKS, TIMEOUT, ANSWER = 3, 8.0, 3.0
"""Seconds of the group's timeout, and those in which the others say which of them still answer."""

ENDINGS = {"killed": (1, "rank 1 did not answer"), "stopped": (1, "rank 1 did not answer")}
ENDINGS["killed with the store"] = 0, "cannot be told"
"""The rank that ends, and what the others say."""


STOPPED = pytest.param("stopped", TIMEOUT + ANSWER, marks=pytest.mark.slow)
KEEPER = pytest.param("killed with the store", TIMEOUT, marks=pytest.mark.slow)


@pytest.mark.parametrize(("how", "within"), [("killed", TIMEOUT), STOPPED, KEEPER])
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
    odd, words = ENDINGS[how]
    others = [process for rank, process in enumerate(processes) if rank != odd]
    try:
        said = [process.communicate(timeout=100)[0] for process in others]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[odd].returncode == -signal.SIGKILL
    for process, text in zip(others, said, strict=True):
        assert process.returncode == 0, text
        assert words in text, text
        seconds = float(re.findall(r"raised after ([\d.]+) s", text)[0])
        assert seconds <= within + 2, text  # 2: of a machine that has other work to do


def store_of(how: str, rank: int, results: Path) -> dist.Store:
    """A store that is a file, or that rank 0 keeps."""
    if how != "killed with the store":
        return dist.FileStore(f"{results}/store", RANKS)
    said = results / "port"
    if rank == 0:
        keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (results / "written").write_text(str(keeper.port))
        (results / "written").rename(said)
        return keeper
    while not said.exists():
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", int(said.read_text()), wait_for_workers=False)


def main(rank: int, how: str, results: Path) -> None:
    import fa4flex
    from fa4flex.parallel.rectangle import Rectangles
    from fa4flex.variants import causal

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=store_of(how, rank, results),
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
        if rank == ENDINGS[how][0]:
            os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
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
