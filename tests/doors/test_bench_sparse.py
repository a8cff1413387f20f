"""The sparse suite: what its rows draw, what is judged wrong, and a dry run of every kind of row."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fa4flex import reference
from fa4flex.__main__ import main
from fa4flex.bench.measure import Samples
from fa4flex.bench.report import Measured, RowReport
from fa4flex.bench.sparse_peers import PEERS, SparsePeer, peers_of
from fa4flex.bench.sparse_rows import (
    ROWS,
    ListsRow,
    MapRow,
    Problem,
    StepRow,
    TopkRow,
    judged,
    step_lists,
)
from fa4flex.bench.sparse_suite import attempt, problem_of
from fa4flex.variants import causal

CPU = torch.device("cpu")
BY_NAME = {row.name: row for row in ROWS}
FORMS = [
    "map 64x16 25% 16k", "map 128x128 25% 16k backward", "map 64x64 12.5% 64k new",
    "blocks 64:4 window backward",
    "blocks 64:4 window alike", "tokens 128:1 K=V", "tokens 128:1 shuffled", "decode 64:4 blocks",
    "top 2048 of 64 x 128k ties", "MoBA step 64k",
]  # fmt: skip


def small(name: str, seed: int) -> Problem:
    return problem_of(BY_NAME[name].small(), CPU, seed)


def test_rows_have_names_of_their_own_and_bases_that_exist() -> None:
    assert len(BY_NAME) == len(ROWS)
    assert all(row.base in BY_NAME for row in ROWS if row.base)
    names = {peer.name for peer in PEERS} | {"best"}
    assert {target.against for row in ROWS for target in row.targets} <= names


@pytest.mark.parametrize("name", [row.name for row in ROWS if isinstance(row, MapRow) and not row.base])
def test_maps_have_the_density_of_their_row(name: str) -> None:
    row = BY_NAME[name]
    assert isinstance(row, MapRow)
    sizes = row.rows, row.keys
    few = replace(row, heads=3, length=128 * 64, width=8)
    blocks = problem_of(few, CPU, 0).blocks
    listed = (blocks.classes > 0).sum(-1)
    assert blocks.block_size == sizes and listed.unique().tolist() == [
        round(128 * 64 / row.keys * row.density / 100)
    ]
    assert not torch.equal(blocks.classes[0, 0], blocks.classes[0, 1])
    products = 10 if row.backward else 4
    assert problem_of(few, CPU, 0).work == products * int(listed.sum()) * math.prod(sizes) * 8


@pytest.mark.parametrize("name", [row.name for row in ROWS if isinstance(row, ListsRow)])
def test_lists_say_each_key_once_and_none_of_the_future(name: str, seed: int) -> None:
    problem = small(name, seed)
    row, lists = problem.row, problem.blocks
    assert isinstance(row, ListsRow) and lists.unit == row.keys
    assert tuple(lists.ids.shape) == (row.batch, row.kv_heads, row.q_len, row.entries)
    places = (torch.arange(row.q_len) + row.kv_len - row.q_len).view(1, 1, -1, 1)
    assert (lists.ids * row.keys <= places).all()
    for ids in lists.ids.flatten(0, 2):
        live = ids[ids >= 0]
        assert live.numel() == live.unique().numel()
        assert row.shuffled or torch.equal(live, live.sort().values)
    if row.alike > 1:
        assert torch.equal(lists.ids[:, :, 32], lists.ids[:, :, 33]) or row.kv_len != row.q_len


def test_lists_of_few_keys_say_each_once(seed: int) -> None:
    """Two entries may be drawn from one key where a query has little more keys than entries."""
    ids = problem_of(ListsRow("few", 2, 2, 1, 200, 200, 64, 1), CPU, seed).blocks.ids
    for row in ids.flatten(0, 2):
        live = row[row >= 0]
        assert live.numel() == live.unique().numel()


@pytest.mark.parametrize("name", FORMS)
def test_what_is_ours_is_right(name: str, seed: int) -> None:
    problem = small(name, seed)
    run, accuracy = attempt(peers_of(smoke=True)[0], problem)
    assert accuracy is not None and accuracy.ratio <= 2, run


@pytest.mark.parametrize("name", FORMS)
def test_what_is_wrong_is_seen(name: str, seed: int) -> None:
    """A result with channels, or rows of gradients, or units in the places of others."""

    class Wrong(SparsePeer):
        def prepare(self, problem: Problem) -> Any:
            run: Any = peers_of(smoke=True)[0].prepare(problem)

            def moved() -> Any:
                out = run()
                row = problem.row
                return out.add(1).remainder(row.units) if isinstance(row, TopkRow) else out.roll(1, -1)

            return moved

    problem = small(name, seed)
    if problem.dout is not None:
        run, _ = attempt(peers_of(smoke=True)[0], problem)
        found = [x.roll(1, 2) for x in run()]  # type: ignore[operator]
        assert judged(problem, found, True).ratio > 10
        return
    _, accuracy = attempt(Wrong("wrong", "torch"), problem)
    assert accuracy is not None and accuracy.ratio > 10


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_gradient_of_lists_that_lacks_keys_or_rows_is_seen(which: int, seed: int) -> None:
    problem = small("blocks 64:4 window backward", seed)
    run, accuracy = attempt(peers_of(smoke=True)[0], problem)
    assert accuracy is not None and accuracy.ratio <= 2
    found = [x.clone() for x in run()]  # type: ignore[operator]
    found[which][:, :, : found[which].shape[2] // 2] = 0
    assert judged(problem, found, True).ratio > 10


def test_a_map_row_judges_by_the_oracle(seed: int) -> None:
    problem = small("map 64x64 25% 16k", seed)
    allowed = problem.blocks.mask()
    out, _ = reference.attention(*(x.double() for x in problem.tensors), None, allowed)
    assert judged(problem, out, True).element < 1e-12


def test_a_step_judges_by_the_oracle(seed: int) -> None:
    problem = small("MoBA step 64k", seed)
    assert isinstance(problem.row, StepRow)
    out, _ = reference.attention(
        *(x.double() for x in problem.tensors), None, step_lists(problem).mask(causal)
    )
    assert judged(problem, out, True).element < 1e-12


@pytest.mark.parametrize("name", ["map 128x128 25% 16k", "tokens 128:1 K=V", "top 2048 of 64 x 1M"])
def test_peers_that_are_here_agree(name: str, seed: int) -> None:
    peers = {peer.name: peer for peer in peers_of(smoke=True)}
    who = {"map": "flex", "tok": "gym gather", "top": "torch.topk"}[name[:3]]
    if who == "gym gather":
        pytest.importorskip("attn_gym.sparse.gather_attn")
    run, accuracy = attempt(peers[who], small(name, seed))
    assert accuracy is not None and accuracy.ratio <= 3, run


def test_a_peer_that_is_not_installed_is_said_so(seed: int) -> None:
    pytest.importorskip("torch")
    peers = {peer.name: peer for peer in peers_of(smoke=True)}
    try:
        import cudnn.block_sparse_attention  # noqa: F401
    except ImportError:
        run, _ = attempt(peers["cuDNN BSA"], small("map 64x64 25% 16k", seed))
        assert "No module named" in run.reason  # type: ignore[union-attr]
    run, _ = attempt(peers["cuDNN BSA"], small("map 64x16 25% 16k", seed))
    assert run.reason == "has square blocks alone"  # type: ignore[union-attr]


def test_what_computes_something_else_is_no_competitor() -> None:
    row = BY_NAME["MoBA step 64k"]
    times = {"fa4flex": 2.0, "selecting": 0.5, "fla MoBA": 1.0, "flex": 4.0}
    peers = {n: Measured(Samples((t,)), aside=n in ("selecting", "fla MoBA")) for n, t in times.items()}
    report = RowReport(row, 1, peers)
    assert report.best_peer == "flex" and report.ratio("best") == 2 and report.ratio("selecting") == 0.25


def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "map 64x64 6% 16k,blocks 64:4 NSA,top 8 of 16384 x 128 ties,MoBA"
    chosen = ["--suite", "sparse", "--rows", rows, "--rounds", "1", "--seed", "3", "--out", str(tmp_path)]
    assert main(["bench", "--device", "cpu", "--smoke", *chosen]) == 0
    printed = capsys.readouterr().out
    assert "TB/s" in printed and "peer cuDNN BSA" in printed and "FAIL" not in printed
    found = {row["row"]: row for row in json.loads((tmp_path / "bench-sparse.json").read_text())["rows"]}
    assert set(found) == {*rows.split(",")[:3], "MoBA step 64k"}
    assert found["top 8 of 16384 x 128 ties"]["peers"]["fa4flex"]["tbytes"] > 0
    assert found["map 64x64 6% 16k"]["shape"]["density"] == 6
    assert "selecting" in found["MoBA step 64k"]["peers"]


def test_peers_of_other_suites_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--smoke", "--suite", "sparse", "--peers", "FA4"]) == 2
    assert "torch.topk" in capsys.readouterr().err
