"""The examples that are programs, run small."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("serve", monkeypatch)


@pytest.fixture
def rollout_trees(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("rollout_trees", monkeypatch)


def test_served_tokens_are_eagers(serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """More requests than there are pages for, and prompts longer than a step. The seed is the example's own:
    other weights may have two tokens of equal logits."""
    serve.MOST_TOKENS = 48
    assert serve.main(["--requests", "7", "--pages", "24"]) == 0
    assert "one by one: 7 of 7 requests" in capsys.readouterr().out


def test_the_check_finds_what_is_wrong(serve: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = serve.write
    monkeypatch.setattr(serve, "write", lambda caches, new, slots: real(caches, new, slots ^ 1))
    assert serve.main(["--requests", "3"]) == 3


def test_requests_that_never_fit_are_told(serve: ModuleType) -> None:
    server = serve.Server(serve.Model(1), pages=2)
    with pytest.raises(ValueError, match="a request of 4 pages for a cache of 2"):
        list(server.serve([serve.Request([1] * 50, 3)]))
    assert torch.equal(server.caches[server.model.layers[0]][0], torch.zeros(2, 16, 2, 32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_serving_on_a_gpu(serve: ModuleType) -> None:
    assert serve.main([]) == 0


SMALL = ["--prompt", "40", "--rollouts", "3", "--response", "12", "--layers", "1", "--steps", "2"]


def test_folded_rollouts_train_alike(rollout_trees: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout_trees.main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "6 sequences of 295 tokens in 2 trees of 135" in printed and "the same within rounding" in printed
    packed, folded = (
        next(x for x in printed.splitlines() if x.startswith(n)).split() for n in ("packed", "folded")
    )
    assert float(folded[3]) < float(packed[3])  # memory


def test_another_mask_is_noticed(rollout_trees: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_trees.Folded, "mask", rollout_trees.causal())
    assert rollout_trees.main(SMALL) == 1


VIDEO = ["--frames", "4", "--size", "8", "--steps", "2"]


@pytest.mark.slow
def test_block_maps_of_a_video(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    video_steps = example("video_steps", monkeypatch)
    assert video_steps.main(VIDEO) == 0
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split()[2] for line in steps] == ["100%", "94%"]
    whole, sparse = (float(line.split()[8]) for line in steps)
    assert whole < 1e-5 and sparse > 1e-2
    near = video_steps.near
    monkeypatch.setattr(video_steps, "near", lambda frames, tokens, *more: near(frames, tokens, 1, "cpu"))
    assert video_steps.main(VIDEO) == 1


def test_what_a_video_needs_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    video_steps = example("video_steps", monkeypatch)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert video_steps.main(VIDEO) == 2
    assert "pip install" in capsys.readouterr().out
