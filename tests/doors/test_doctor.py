"""`python -m fa4flex doctor`: what it reports is so, and what is broken is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fa4flex
from fa4flex import doctor
from fa4flex.__main__ import main
from fa4flex.errors import UnsupportedError
from fa4flex.variants import alibi, sliding_window
from ptxsim import device


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SOME_TOKEN", "not to be read")
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    for line in (
        f"fa4flex       {fa4flex.__version__}",
        f"torch         {torch.__version__}",
        "compiler      nvidia-cutlass",
        f"cache         {tmp_path}: 0 of at most",
        f"FA4FLEX_CACHE_DIR={tmp_path}",
        "self-check    CPU, float32: ok",
        "self-check    compiler: ok",
    ):
        assert line in report
    assert "not to be read" not in report


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path))
    for name in ("one.so", "two.o", "lock"):
        (tmp_path / name).write_bytes(bytes(1_000_000))
    assert doctor.kept_kernels() == f"{tmp_path}: 2 of at most 2048 kernels, 2.0 MB"
    tmp_path.chmod(0o777)
    assert "others may write to it" in doctor.kept_kernels()
    monkeypatch.setenv("FA4FLEX_CACHE", "0")
    assert "turned off" in doctor.kept_kernels()


def test_a_failed_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an installation raises is printed, the other checks run, and the status is 1."""

    def raises() -> bool:
        raise ImportError("no symbol")

    checks = [("one", raises), ("two", lambda: "off by 3"), ("three", lambda: True)]
    monkeypatch.setattr(doctor, "self_checks", lambda: checks)
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert "one: FAILED: ImportError: no symbol\n" in report
    assert "two: FAILED: off by 3\n" in report and "three: ok in" in report


def test_a_refusal_is_no_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> bool:
        raise UnsupportedError("a GPU", "another GPU", "move the tensors")

    monkeypatch.setattr(doctor, "self_checks", lambda: [("GPU", refuses)])
    assert doctor.run_self_checks()
    assert "GPU: not run: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_check_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU, which launches the kernels of both passes."""
    monkeypatch.setattr(doctor, "LENGTH", 128)
    monkeypatch.setattr(doctor, "HEADS", 1)
    with device("sm_90a"):
        assert doctor.in_16_bits(torch.device("cpu")) is True


def test_the_check_of_a_kernel_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    other = fa4flex.compile(score_mod=alibi, mask=sliding_window(doctor.WINDOW - 1))
    monkeypatch.setattr(fa4flex, "compile", lambda **_: other)
    found = doctor.in_16_bits(torch.device("cpu"))
    assert isinstance(found, str) and "dk is off by" in found


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend of each GPU, and the reason."""
    capabilities = [(9, 0), (8, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(doctor, "environment", lambda device: {"driver_version": "580.1"})
    _, hopper, ampere, *_ = doctor.devices()
    assert "driver 580.1, " in hopper and "generated kernels (GPU 0: " in hopper and "9.0" in hopper
    assert "torch's flex_attention (GPU 1 has compute capability 8.0; generated kernels are for" in ampere
