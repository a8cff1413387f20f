"""Measured tables say what the bench wrote, only stand between their markers, and agree in both pages."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(**peers: Any) -> dict[str, Any]:
    return {
        "row": "causal",
        "peers": peers,
        "ratio to best peer": 1.256,
        "best peer": "FA4",
        "ratio to flex": None,
        "verdicts": [{"says": "cost over full", "value": 0.0312}, {"says": "speed over flex", "value": 1}],
    }


def peer(tflops: float) -> dict[str, Any]:
    return {"tflops": tflops, "errors": {"over plain": 1.0}}


def wrong(over_plain: float) -> dict[str, Any]:
    return {"reason": "WRONG RESULT", "errors": {"over plain": over_plain}}


def test_tables(tables: ModuleType, tmp_path: Path) -> None:
    about = {"name": "NVIDIA H200", "torch": "2.11.0"}
    rows = [row(FA4=peer(499.6), fa4flex=peer(627.5), flex=wrong(11.0), cuDNN={"reason": "takes no mods"})]
    rows.append(row(fa4flex=peer(1.0), cuDNN=peer(2.0), flex=peer(1.0), FA4=wrong(float("nan"))))
    same = {**row(fa4flex=peer(61.0)), "row": "causal ordered"}
    for suite, given in {"dense": rows, "cost": rows, "backward": [*rows[:1], same]}.items():
        text = json.dumps({"environment": about, "rows": given})
        (tmp_path / f"bench-{suite}.json").write_text(text)
    found, backward = tables.sections(tmp_path).values()
    assert "NVIDIA H200" in found and "torch 2.11.0" in found
    assert "|  | fa4flex | FA4 | flex | cuDNN | over the best other | over flex |" in found
    assert "| causal | 628 | 500 | wrong | - | 1.26 (FA4) | - |" in found
    assert "| causal | 1 | wrong | 1 | 2 | 1.26 (FA4) | - |" in found
    assert "cuDNN: takes no mods" in found
    assert "| causal | full | +3.1% |" in found
    assert "|  | fa4flex | the same bits | FA4 | over the best other | over flex |" in backward
    assert "| causal | 628 | 61 | 500 | 1.26 (FA4) | - |" in backward


def test_only_what_stands_between_the_markers_is_replaced(tables: ModuleType) -> None:
    text = tables.PAGE.read_text()
    for which in tables.TABLES:
        start, end = tables.START.format(which), tables.END.format(which)
        once = tables.replace_between(text, which, "new")
        assert once == tables.replace_between(once, which, "new")
        assert once == f"{text.split(start)[0]}{start}\nnew\n{end}{text.split(end)[1]}"
        with pytest.raises(SystemExit, match="once each"):
            tables.replace_between(text + end, which, "new")


def test_nothing_measured_is_an_error(tables: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no bench"):
        tables.sections(tmp_path)


def test_the_readme_says_what_the_page_of_benchmarks_says(tables: ModuleType) -> None:
    readme, made = tables.README.read_text(), tables.summary(tables.PAGE.read_text())
    assert tables.replace_between(readme, "summary", made) == readme, "run scripts/readme_tables.py"
    assert len(made.splitlines()) == 2 + 8


def test_summary(tables: ModuleType) -> None:
    head = "|  | fa4flex | flex | over the best other | over flex |\n| --- | --- | --- | --- | --- |"
    suites = {"variants": "| a | 3 | 2 | 1.50 (flex) | 1.50 |\n| b | 9 | 1 | 9 (flex) | 9 |",
              "backward-variants": "| a | 4 | 2 | 2.00 (flex) | 2.00 |"}  # fmt: skip
    page = "\n\n".join(f"{tables.TITLES[name]}\n\n{head}\n{rows}" for name, rows in suites.items())
    *_, row = tables.summary(page).splitlines()
    assert row == "| a | 3 | 1.50 | 1.50 (flex) | 4 | 2.00 | 2.00 (flex) |"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
