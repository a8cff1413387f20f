"""Families of Hugging Face models by kinds of call: within twice eager's own error, or refused in words."""

from __future__ import annotations

import pytest
import torch
from models import FAMILIES, model_families, transformers

from fa4flex.errors import UnsupportedError

OWN = "bloom", "falcon", "mpt", "deberta_v2"
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
REFUSED = {*OWN} if VERSION >= (5, 24) else {*OWN, "gptj"}
ALL_COLUMNS = {"llama", "gemma3", "gpt_oss", "deepseek_v3", "t5", "paligemma", "bert", "clip"}
COMPILED = ("llama", "gemma3", "gpt_oss", "t5", "paligemma", "bert")


def cells() -> list[tuple[str, str]]:
    """Each family in pieces with caches, and where it has none, whole; some families in every column."""
    return [
        (family.name, column)
        for family in FAMILIES.values()
        for column in model_families.COLUMNS
        if family.name not in REFUSED
        and column != "compiled"
        and model_families.applies(family, column)
        and (
            family.name in ALL_COLUMNS
            or column in ("chunks", "sliding", "generate")
            or (column == "prefill" and family.kind in ("encoder", "vision"))
        )
    ]


@pytest.mark.parametrize(("name", "column"), cells())
def test_agrees_with_eager(name: str, column: str) -> None:
    with torch.no_grad():
        try:
            assert model_families.cell(FAMILIES[name], column) <= model_families.ALLOWED
        except model_families.EagerFails as error:
            pytest.skip(f"not in transformers: {error.__cause__}")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_agrees_with_eager_when_compiled(name: str) -> None:
    """fullgraph, with and without padding, and steps with a static cache."""
    with torch.no_grad():
        try:
            assert model_families.cell(FAMILIES[name], "compiled") <= model_families.ALLOWED
        except model_families.EagerFails as error:
            pytest.skip(f"eager does not compile with torch {torch.__version__}: {error.__cause__}")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_that_compute_attention_themselves_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="computes its attention itself and would ignore"):
        FAMILIES[name].build("fa4flex", torch.float32)


def test_the_table_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["model_families.py", "--families", "llama,bloom,bert", "--columns", "prefill,static"]
    monkeypatch.setattr("sys.argv", arguments)
    assert model_families.main() == 0
    table, _, notes = capsys.readouterr().out.partition("\n\n")
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| llama", "| bloom", "| bert"]
    assert "| refused [1] | refused [1] |" in table and table.endswith("- |")
    assert notes.startswith("[1] UnsupportedError: BloomForCausalLM")
