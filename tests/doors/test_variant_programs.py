"""Every variant is a program that draws and checks itself; the package imports none before it is used."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fa4flex import variants as v


@pytest.mark.parametrize("name", v.__all__)
def test_variant_runs_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(str(v.__file__)).with_name(f"{name}.py")), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["sliding_window", "alibi"])
def test_variant_is_a_program(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"fa4flex.variants.{name}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "agree with the definition" in done.stdout


def test_import_is_lazy_and_names_are_variants_whatever_came_first() -> None:
    program = (
        "import sys, fa4flex.variants as v; "
        "assert not [m for m in sys.modules if m.startswith('fa4flex.variants.')]; "
        "import fa4flex.variants.causal; "
        "from fa4flex.variants import causal, softcap; "
        "assert type(v.causal).__name__ == type(causal).__name__ == 'MaskFamily', type(v.causal); "
        "assert 'fa4flex.variants.natten' not in sys.modules; "
        "assert set(v.__all__) <= set(dir(v))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'casual'; did you mean causal"):
        _ = v.casual
    with pytest.raises(ImportError):
        from fa4flex.variants import nothing  # type: ignore[attr-defined]  # noqa: F401
