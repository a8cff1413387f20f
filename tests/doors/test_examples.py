"""The examples that are programs, run small."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve", EXAMPLES / "serve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve", module)  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


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
