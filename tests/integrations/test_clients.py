"""`make clients` without its engines: its words, its stand-ins, and what tokens are compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa4flex.integrations import layers

CLIENTS = Path(__file__).parents[2] / "scripts" / "clients"
sys.path.append(str(CLIENTS))
pytest.importorskip("transformers", reason="transformers is not installed")
import client_models  # noqa: E402
import serve_cases  # noqa: E402
from client_cases import MODS, Case  # noqa: E402
from engine_environments import NotInstalled, step  # noqa: E402


@pytest.mark.parametrize("layer", [0, 1])
def test_mods_are_by_definition(layer: int) -> None:
    layers.assign_from(MODS)
    q, k, v = (torch.randn(1, heads, 30, 8, dtype=torch.float64) for heads in (4, 2, 2))
    hidden = torch.full((30, 30), -torch.inf, dtype=torch.float64).triu(1)
    module = SimpleNamespace(layer_idx=layer)
    defined = client_models.attention_with_mods(module, q, k, v, hidden, 0.4)[0].transpose(1, 2)
    attn = layers.LayerAttention(layers.LayerSettings(0.4)).named(f"model.layers.{layer}.self_attn.attn")
    torch.testing.assert_close(attn(q, k, v), defined)


def test_rounded_keys_are_by_definition() -> None:
    """Those of a cache of 8 bits whose scales are 1."""
    q, k, v = (torch.randn(1, heads, 30, 8, dtype=torch.float64) for heads in (4, 2, 2))
    hidden = torch.full((30, 30), -torch.inf, dtype=torch.float64).triu(1)
    defined = client_models.attention_rounded(None, q, k, v, hidden, 0.4)[0].transpose(1, 2)
    attn = layers.LayerSettings(0.4).attention({})
    e4m3 = torch.float8_e4m3fn
    torch.testing.assert_close(attn(q, k.to(e4m3), v.to(e4m3)), defined)


def test_outcomes_are_told_apart(tmp_path: Path) -> None:
    refused = Case("a cache of 8 bits", refused="a cache of fp8")
    log = tmp_path / "0.log"
    log.write_text("Loading\n12:30 [worker] fa4flex.errors.UnsupportedError: a cache of fp8\nlater\n")
    assert serve_cases.judge(refused, tmp_path, 0) == (
        "refused: fa4flex.errors.UnsupportedError: a cache of fp8",
        True,
    )
    words, right = serve_cases.judge(Case("another"), tmp_path, 0)
    assert words.startswith("failed: fa4flex.errors.UnsupportedError") and not right
    log.write_text("Loading\nOSError: no file /tmp/some/place/model.bin\n")
    assert serve_cases.judge(refused, tmp_path, 0) == ("failed: OSError: no file model.bin", False)
    log.write_text("")
    assert serve_cases.judge(refused, tmp_path, 0) == ("failed: it ended", False)
    (tmp_path / "0.json").write_text(json.dumps(["2 of 5 sequences equal", False]))
    assert serve_cases.judge(refused, tmp_path, 0) == ("2 of 5 sequences equal", False)


def test_a_step_that_fails_says_so() -> None:
    failing = "import sys; sys.exit('collecting\\nERROR: no matching distribution\\nmore')"
    with pytest.raises(NotInstalled, match="an engine cannot be installed: ERROR: no matching distribution"):
        step([sys.executable, "-c", failing], "an engine")
    assert step([sys.executable, "-c", "print('done')"], "an engine") == "done\n"


def test_absent_modules_are_imported_but_not_used() -> None:
    code = """
import absent_package.inner as inner
from absent_package import functional, Base
class Derived(Base.Inner): pass
try:
    functional(1)
except RuntimeError as error:
    print(error)
import other_package
"""
    environment = {**os.environ, "PYTHONPATH": str(CLIENTS / "stubs"), "FA4FLEX_ABSENT": "absent_package"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert found.stdout.startswith("absent_package.functional is not installed")
    assert found.stderr.endswith("No module named 'other_package'\n")
