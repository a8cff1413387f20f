"""A composed attention trains a model: the loss falls as with dense attention in PyTorch, step by step."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "train_character_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_loss_curve_is_that_of_dense_attention(script: ModuleType) -> None:
    """Documents differ from step to step, and biases learn: gradients reach both layers' tables."""
    sizes, seed = script.Sizes(2, 96, 24), int(torch.randint(1000, ()))
    runs = {kind: script.train(kind, sizes, 8, "cpu", seed) for kind in ("float32", "fa4flex")}
    exact, ours = runs["float32"], runs["fa4flex"]
    apart = [abs(a - b) for a, b in zip(ours.losses, exact.losses, strict=True)]
    assert max(apart) < 1e-4, f"seed {seed}: losses {ours.losses}, not {exact.losses}"
    assert ours.losses[-1] < ours.losses[0], f"seed {seed}: {ours.losses}"
    for one, other in zip(ours.model.layers, exact.model.layers, strict=True):
        assert one.bias.abs().max() > 0
        torch.testing.assert_close(one.bias, other.bias, rtol=0, atol=2e-3)


def test_documents_are_right(script: ModuleType) -> None:
    """Every sum that a row holds whole is right, and numbers change where documents do."""
    text, numbers = next(script.batches(script.Sizes(1, 400, 8), 3, "cpu"))
    line = "".join(script.ALPHABET[i] for i in text[0].tolist())
    whole = line.split(";")[:-1]
    assert whole and all(
        int(x.split("+")[0]) + int(x.split("+")[1].split("=")[0]) == int(x.split("=")[1]) for x in whole
    )
    assert set(numbers[0].diff().tolist()) <= {0, 1}
