"""The command accuracy: what it emulates against sums and roundings written anew, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fa4flex.__main__ import main
from fa4flex.accuracy import command, report, tensors
from fa4flex.accuracy.schemes import SCHEMES, Scheme
from fa4flex.accuracy.tensors import DISTRIBUTIONS, Drawn, drawn

BY_NAME = {scheme.name: scheme for scheme in SCHEMES}


def test_options_name_all_distributions() -> None:
    assert tuple(DISTRIBUTIONS) == command.TENSORS


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_precisions_are_ordered_as_their_formats_are(name: str, seed: int) -> None:
    """16 bits before int8 with 16-bit values, before 8 bits, before 4; and an error that is one."""
    qkv = drawn(name, Drawn(16, 512, 1, 64, seed))
    chosen = [BY_NAME[x] for x in ("bfloat16", "int8, bfloat16", "int8, e4m3", "nvfp4, e4m3")]
    errors = [one.relative for one in report.judged(name, qkv, chosen)]
    assert errors[0] < errors[1] * 1.1 and errors[1] < errors[2] * 1.1 and errors[2] < errors[3]
    assert 0 < errors[3] < 1.5


def test_sums_of_hopper_lose_values_of_one_sign(seed: int) -> None:
    """In one level, as long as the sequence is; not where every tile is added in float32."""
    qkv = drawn("one sign", Drawn(4, 2048, 1, 32, seed))
    head = BY_NAME["e4m3 per head (FA3)"]
    by_tile = Scheme("", head.operands, head.probabilities, "hopper, by tile")
    exactly = Scheme("", head.operands, head.probabilities, "float32")
    one, two, three = (x.relative for x in report.judged("", qkv, (head, by_tile, exactly)))
    assert one > 5 * two and abs(two - three) < 0.003 < one


def test_attend_is_a_softmax(seed: int) -> None:
    """Without rounding of probabilities to speak of: bfloat16 values and float32 sums are the oracle's."""
    qkv = drawn("normal", Drawn(8, 300, 2, 32, seed))
    found = report.judged("", qkv, (BY_NAME["bfloat16"],))[0]
    assert found.relative < 0.004 and found.lse < 1e-10


def test_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["accuracy", "--keys", "160,256", "--rows", "8", "--heads", "1", "--head-dim", "32"]
    picture = tmp_path / "errors.svg"
    assert main([*small, "--tensors", "normal,sink", "--seed", "3", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "--seed 3" in printed and "160 keys" in printed and "256 keys" in printed and picture.exists()
    assert all(scheme.name in printed for scheme in SCHEMES)


def test_tensors_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.pt"
    torch.save(
        {"q": torch.randn(2, 4, 9, 32), "k": torch.randn(2, 2, 70, 32), "v": torch.randn(2, 2, 70, 32)}, path
    )
    assert main(["accuracy", "--file", str(path), "--rows", "5"]) == 0
    assert "mine.pt" in capsys.readouterr().out
    q, k, v = tensors.loaded(path, 5)
    assert q.shape == (1, 4, 5, 32) and k.shape == v.shape == (1, 4, 70, 32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--keys", "none"], "--keys none"), (["--tensors", "normal,odd"], "--tensors odd")],
)
def test_bad_options(arguments: list[str], words: str, capsys: Any) -> None:
    assert main(["accuracy", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_bad_files(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.pt"
    for contents in (
        [torch.ones(2)],
        {name: torch.ones(1, 3, 4, 8) for name in "qkv"} | {"k": torch.ones(2, 8)},
    ):
        torch.save(contents, path)
        assert main(["accuracy", "--file", str(path)]) == 2
        assert "error:" in capsys.readouterr().err
