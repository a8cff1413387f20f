"""benchmarks/parallel.py at tiny sizes, in two processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240


@pytest.mark.slow
def test_it_runs_on_cpus(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["benchmarks/parallel.py", "--device", "cpu", "--scale", "512", "--rounds", "1"]
    command += ["--rows", "ALiBi-causal 64k,sliding", "--margins", "4"]
    command += ["--out", str(out)]
    space = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=space, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    assert set(found) == {"ALiBi-causal 64k", "sliding 4k at 128k"}
    for row in found.values():
        ours = row["fa4flex, keys"]
        assert ours["ms"] > 0 and 0 < max(ours["errors"].values()) <= 1
        assert row["exchange alone"]["received"] == ours["received"] and row["without exchange"]["ms"] > 0
        assert row["fa4flex, keys, margin 4"]["received"] == ours["received"]
    assert "ms are not hidden" in ended.stdout
    # Head-tail over 128 tokens: rank 0 has the ends and receives keys and values of the middle 64; gradients
    # come back of its first 32, which the middle sees.
    one_key = 2 * 8 * 128 * 2
    assert found["ALiBi-causal 64k"]["fa4flex, keys"]["received"] == (64 + 32) * one_key
    # Heads: 64 tokens of 16 + 2 * 4 heads arrive, and 16 of results with float32 lse; then gradients.
    by_heads = 64 * 2 * ((16 + 2 * 4) * 128 * 2 + 16 * 128 * 2) + 64 * 16 * 4
    assert found["ALiBi-causal 64k"]["fa4flex, heads"]["received"] == by_heads
    assert found["ALiBi-causal 64k"]["one GPU"]["received"] == 0
