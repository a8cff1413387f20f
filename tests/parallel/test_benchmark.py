"""benchmarks/parallel.py at tiny sizes, in two processes over gloo."""

from __future__ import annotations

import importlib
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


@pytest.mark.slow
def test_growth_runs_on_cpus(tmp_path: Path) -> None:
    """Four ranks beside one with as many tokens: efficiency is the rate of pairs, the plan's over one's."""
    out = tmp_path / "times.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["benchmarks/parallel_growth.py", "--device", "cpu", "--scale", "128", "--rounds", "1"]
    command += ["--tokens", "65536", "--rows", "ALiBi", "--ways", "fa4flex", "--out", str(out)]
    space = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=space, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(out.read_text()).values()
    one, all_of_them = found["one GPU"]["ms"], found["fa4flex"]["ms"]
    # Tiles of 128 on the diagonal and before it: 4 in a row for one, 16 for all, of which each has a quarter.
    tiles = (16 * 17 / 2 / 4) / (4 * 5 / 2)
    assert found["fa4flex"]["efficiency"] == pytest.approx(tiles * one / all_of_them)
    assert "predicted" in ended.stdout and "errors" not in ended.stdout


def test_overlap_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    growth = importlib.import_module("parallel_growth")
    spans = [(0, 10, "attention"), (5, 8, "attention"), (12, 20, "attention"), (0, 9, "other")]
    assert growth.overlap([*spans, (4, 14, "exchange"), (6, 7, "exchange")]) == (10, 8)
    assert growth.overlap(spans) == (0, 0)
    drawn = importlib.import_module("draw_spans").picture([spans, [*spans, (4, 14, "exchange")]])
    assert drawn.count("<rect") == 2 + 1 + 2 + 1 + 1 and "GPU 1" in drawn
