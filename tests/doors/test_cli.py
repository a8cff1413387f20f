"""The command line: what it prints against brute force, its exit statuses, and errors without tracebacks."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fa4flex
from fa4flex import check as check_module
from fa4flex import demo
from fa4flex.__main__ import main
from fa4flex.errors import InputError
from fa4flex.selection import select

MODS = """
import torch
bias = torch.linspace(-1, 1, 999, requires_grad=True)

def relative(score, b, h, q_idx, kv_idx):
    return score + bias[q_idx - kv_idx + 499]

def band(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 5
"""


@pytest.fixture
def mods(tmp_path: Path) -> str:
    path = tmp_path / "my_mods.py"
    path.write_text(MODS)
    return str(path)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("sliding_window(5)", lambda q, kv: 0 <= q - kv < 5),
        ("causal & ~sliding_window(3)", lambda q, kv: q - kv >= 3),
        ("sliding_window(2) | prefix_lm(4)", lambda q, kv: kv <= q or kv < 4),
        ("~causal | sliding_window(window=2)", lambda q, kv: q - kv < 2),
    ],
)
def test_draw_is_the_mask(
    text: str, allowed: Callable[[int, int], bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", text, "--size", "24"]) == 0
    drawn = capsys.readouterr().out.splitlines()[-24:]
    assert drawn == ["".join("#" if allowed(q, kv) else "." for kv in range(24)) for q in range(24)]


def test_parameters_as_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "sliding_window", "--window", "3", "--size", "12"]) == 0
    by_option = capsys.readouterr().out.splitlines()[2:]
    assert main(["draw", "sliding_window(3)", "--size", "12"]) == 0
    assert by_option == capsys.readouterr().out.splitlines()[2:]
    assert by_option[5] == "...###......"


def test_draw_tile_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "causal", "--size", "32", "--tile", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == ["+...", "#+..", "##+.", "###+"]


def test_file_functions_compose(mods: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", f"causal & {mods}:band", "--size", "10"]) == 0
    drawn = capsys.readouterr().out.splitlines()[-10:]
    assert drawn == ["".join("#" if 0 <= q - kv < 5 else "." for kv in range(10)) for q in range(10)]
    chosen = select(f"{mods}:relative >> softcap(5.0), causal")
    assert set(chosen) == {"score_mod", "mask"}


def test_show_names_the_users_lines(mods: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{mods}:relative"]) == 0
    listing = capsys.readouterr().out
    assert "# my_mods.py:6: return score + bias[q_idx - kv_idx + 499]" in listing
    assert "bias[" in listing and "receives a gradient" in listing
    for stage in ("facts", "gradient"):
        assert main(["show", f"{mods}:relative", "--stage", stage]) == 0
        assert "bias" in capsys.readouterr().out


def test_check_passes_and_fails(
    mods: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["check", f"{mods}:relative, causal", "--q-len", "40", "--kv-len", "56"]
    assert main(arguments) == 0
    assert "dbias" in capsys.readouterr().out
    # A wrong oracle stands for a wrong result: check must notice either.
    exact = check_module.reference.attention
    monkeypatch.setattr(
        check_module.reference, "attention", lambda q, *args, **options: exact(q * 1.001, *args, **options)
    )
    assert main(arguments) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["draw", "no_such_variant"], "sliding_window"),
        (["draw", "causal", "--window", "3"], "window"),
        (["draw", "causal & sliding_window", "--window", "3"], "sliding_window(window=3)"),
        (["draw", "prefix_lm"], "prefix"),
        (["draw", "sliding_window(0)"], "int >= 1"),
        (["draw", "causal", "--size", "0"], "positive"),
        (["draw", "__import__('os').getcwd()"], "not understood"),
        (["draw", "causal.__class__"], "not understood"),
        (["draw", "sliding_window(open('x'))"], "a number"),
        (["draw", "causal, sliding_window"], "two masks"),
        (["draw", "no_such_file.py:mod"], "existing"),
        (["draw", "causal", "--size", "8", "--tile", "2", "3", "4"], "one or two numbers"),
        (["show", "causal", "--stage", "nothing"], "trace, facts, gradient"),
        (["doctor", "--nothing"], "see --help"),
    ],
)
def test_errors_are_words(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and says in printed.err and not printed.out


def test_a_name_that_is_no_function(mods: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", f"{mods}:bias"]) == 2
    assert "is a Tensor" in capsys.readouterr().err


def test_selection_is_not_evaluated(tmp_path: Path) -> None:
    target = tmp_path / "written"
    with pytest.raises(InputError):
        select(f"sliding_window(open({str(target)!r}, 'w'))")
    assert not target.exists()


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "alibi, sliding_window(64)", "--q-len", "512"]) == 0
    text = capsys.readouterr().out
    assert "bottom-right" in text and "q_len=512" in text


def test_runs_as_a_module(tmp_path: Path) -> None:
    """In a process of its own, from another folder: prints help for every command, and no traceback."""
    command = [sys.executable, "-m", "fa4flex"]
    root = Path(__file__).resolve().parents[2]
    help_text = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, check=True, cwd=root
    ).stdout
    assert all(name in help_text for name in ("doctor", "demo", "draw", "show", "explain", "check"))
    wrong = subprocess.run([*command, "draw", "nope"], capture_output=True, text=True, check=False, cwd=root)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--ranks 0", "numbers above 0"), ("--ranks 8..4", "a range that rises"), ("--ranks x", "8..1024"),
        ("--tokens 0", "a number above 0"), ("--heads 32 --kv-heads 5", "a multiple of KV heads"),
    ],
)  # fmt: skip
def test_plan_parallel_names_what_is_wrong(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-parallel", "causal", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert says in said and "digits" not in said


@pytest.mark.parametrize(
    "arguments",
    ["plan-parallel causal --heads 0", "plan-parallel causal --link 0", "plan-parallel causal --tflops nan",
     "draw causal --size 0", "check causal --q-len -3", "explain causal --head-dim 0"],
)  # fmt: skip
def test_sizes_and_rates_are_above_zero(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert f"error: {' '.join(arguments.split()[-2:])}\n" in said and "a positive number" in said


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_demo_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar on a terminal, which is taken away; lines elsewhere, ten seconds apart."""
    screen, file, now = Screen(), io.StringIO(), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    for written in (screen, file):
        monkeypatch.setattr("sys.stderr", written)
        progress = demo.Progress("long", 200, "rows")
        for row in range(0, 200, 50):
            now[0] += 5.0
            progress.reached(row + 50)
        progress.close()
    assert "######" in screen.getvalue() and "\n" not in screen.getvalue()
    assert screen.getvalue().split("\r")[-2].strip() == ""
    assert file.getvalue().splitlines() == ["  long: 100 of 200 rows", "  long: 200 of 200 rows"]


def test_demo_measures_in_a_process_that_is_stopped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MOST_SECONDS", 0)
    monkeypatch.setattr(demo, "DENSE_NEEDS_GB", 0)
    assert demo._measured("fa4flex") == "stopped after 0 s"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"fa4flex {fa4flex.__version__}"


@pytest.mark.parametrize(
    ("text", "meant"),
    [("slidng_window(3)", "sliding_window"), ("causl & document", "causal"), ("~Natten", "natten")],
)
def test_a_mistyped_variant_is_suggested(text: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", text]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_mistyped_variant_is_suggested_by_the_package() -> None:
    with pytest.raises(AttributeError, match=r"'slidingwindow'; did you mean sliding_window\?"):
        fa4flex.variants.slidingwindow  # noqa: B018
    with pytest.raises(AttributeError, match=r"'xyzzy'; it has alibi"):
        fa4flex.variants.xyzzy  # noqa: B018


def test_explain_describes_a_gpu_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "causal", "--arch", "sm_100a", "--head-dim", "64"]) == 0
    assert "forward kernel for sm_100a (B200): heads of 64" in capsys.readouterr().out
