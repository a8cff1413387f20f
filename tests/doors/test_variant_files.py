"""A variant is one file: what it lacks is said in words, and nothing else has to be edited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from variant_files import lacking, module_of

from fa4flex import variants

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "documentation"


@pytest.mark.parametrize("name", variants.__all__)
def test_a_file_declares_all_that_is_made_of_it(name: str) -> None:
    assert not list(lacking(module_of(name)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"CASES": ()}, "causal.py declares no CASES"),
        ({"CASES": [SimpleNamespace(compiled=False, kernels=True)]}, "causal.py has no case for GPUs"),
        ({"PICTURE": "causal"}, "causal.py declares no PICTURE"),
        ({"__doc__": "Causal.\n\n    kv <= q\n"}, "causal.py names no source"),
        ({"__doc__": "Causal.\n\nSource: a paper.\n"}, "causal.py states no formula"),
    ],
)
def test_what_a_file_lacks_is_said(change: dict[str, object], said: str) -> None:
    module = ModuleType("fa4flex.variants.causal")
    vars(module).update({**vars(module_of("causal")), "__name__": module.__name__, **change})
    (found,) = lacking(module)
    assert said in found


def test_what_is_written_from_the_files_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import variant_tables

    old = [path.name for path, text in variant_tables.written().items() if path.read_text() != text]
    assert not old, "run python scripts/documentation/variant_tables.py"


STRIDED = '''"""Strided: every stride-th key, and the query's own position.

    allowed(q, kv) = kv divisible by stride, or kv == q

Source: a test.
"""

from fa4flex.primitives.mask import mask_family
from fa4flex.variants._cases import Case, Picture, masked, show


@mask_family
def strided(stride=4):
    """Every stride-th key, and the query's own position; indices are absolute."""

    def mod(b, h, q_idx, kv_idx):
        return (kv_idx % stride == 0) | (q_idx == kv_idx)

    return mod


CASES = (Case(lambda s: masked(s, strided(3), lambda q, kv: kv in range(0, s.kv_len, 3) or kv == q)),)
PICTURE = Picture("strided(8)")

if __name__ == "__main__":
    show(CASES)
'''
PROGRAM = """
import pathlib, random, runpy, sys
import fa4flex
from fa4flex import variants

assert not [x for x in sys.modules if x.startswith("fa4flex.variants.")]
assert "strided" in variants.__all__ and "strided" in dir(variants)
from fa4flex.selection import select, variant_names
assert "strided" in variant_names() and repr(select("strided & causal")["mask"]) == "(strided() & causal())"

import variant_files
cases = [x for x in variant_files.CASES if x.id == "strided 0"]
from fa4flex.variants._cases import Sizes, check
(case,) = cases[0].values
check(Sizes(), case.draw(Sizes()))

from numeric import cuda_cases, kernel_programs, variant_table
assert len(variant_table.TABLE["strided"]) == 1 and "strided" in kernel_programs.KINDS
(draw,) = cuda_cases.VARIANTS["strided"]
from fa4flex.kernels.plan.target import SM90A
_, (source, *_) = kernel_programs.launched_forward(kernel_programs.KINDS["strided"], (64, 64), SM90A)
assert "def mask" in source.text, source.text
import ptx_cases
assert any(x.composition == "strided" for x in ptx_cases.cases().values())

import gallery, variant_tables
assert gallery.PICTURES["strided"].code == "strided(8)"
gallery._figure(pathlib.Path(sys.argv[1]), "strided", gallery.PICTURES["strided"], "strided")
rows = [x for x in variant_tables.table("Masks") if "strided(" in x]
assert rows == ["| `strided(stride=4)` | `kv divisible by stride, or kv == q` | a test |"], rows
runpy.run_path(pathlib.Path(variants.__file__).with_name("strided.py"), run_name="__main__")
"""


@pytest.mark.slow
def test_a_variant_is_one_file(tmp_path: Path) -> None:
    """In a tree of links to this one, with one file more, it is named, drawn, compared with its definition,
    compiled for GPUs, and described."""
    package, drawn = tmp_path / "fa4flex", tmp_path / "pictures"
    for folder in (package, package / "variants", drawn):
        folder.mkdir()
    for one in (ROOT / "fa4flex").iterdir():
        if one.name not in ("variants", "__pycache__"):
            (package / one.name).symlink_to(one)
    for one in (ROOT / "fa4flex" / "variants").glob("*.py"):
        (package / "variants" / one.name).symlink_to(one)
    (package / "variants" / "strided.py").write_text(STRIDED)
    tests = [ROOT / "tests", ROOT / "tests" / "numeric", SCRIPTS, SCRIPTS.parent]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(drawn)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tmp_path, *tests]))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "96 values agree with the definition" in done.stdout and (drawn / "strided.png").exists()
