"""The release check says what is wrong with a release. The release itself is built by test_wheel.py."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fa4flex

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def release_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "scripts" / "release_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "release_check", module)
    spec.loader.exec_module(module)
    return module


def test_this_checkout_has_one_version_and_a_section_for_it(release_check: ModuleType) -> None:
    version = release_check.versions(ROOT)
    assert version == fa4flex.__version__
    assert release_check.changelog((ROOT / "CHANGELOG.md").read_text(), version, False).startswith(version)


def test_versions_that_differ(release_check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "fa4flex").mkdir()
    for own, said in (('__version__ = "1.1.9"\n', "1.1.9"), ("", "none")):
        (tmp_path / "fa4flex" / "__init__.py").write_text(own)
        with pytest.raises(release_check.Failed, match=f"1.2.0, .*{said}"):
            release_check.versions(tmp_path)


@pytest.mark.parametrize(
    ("text", "final", "wrong"),
    [
        ("# Changelog\n\n## 1.2.0 (2026-12-01)\n\n- One.\n\n## 1.1.0\n", True, None),
        ("# Changelog\n\n## 1.2.0 (not released)\n\n### Added\n\n- One.\n", False, None),
        ("# Changelog\n\n## 1.2.0 (not released)\n\n- One.\n", True, "write the day"),
        ("# Changelog\n\n## 1.2.0 (2026-12-01)\n\n## 1.1.0\n\n- One.\n", True, "says nothing"),
        ("# Changelog\n\n## 1.2.01\n\n- One.\n\n## 1.2.0\n\n- One.\n", False, "begins with '1.2.01'"),
        ("# Changelog\n", False, "begins with 'nothing'"),
    ],
)
def test_changelogs(release_check: ModuleType, text: str, final: bool, wrong: str | None) -> None:
    if wrong is None:
        assert release_check.changelog(text, "1.2.0", final).startswith("1.2.0")
    else:
        with pytest.raises(release_check.Failed, match=wrong):
            release_check.changelog(text, "1.2.0", final)


def test_metadata_that_an_index_would_not_show(release_check: ModuleType, tmp_path: Path) -> None:
    fields = {
        "Name": "fa4flex", "Version": "1.2.0", "Description-Content-Type": "text/markdown", "Summary": "One.",
        "Requires-Python": ">=3.11", "License-Expression": "BSD-3-Clause",
    }  # fmt: skip

    def wheel(fields: dict[str, str], description: str = "word " * 300) -> Path:
        path = tmp_path / "some.whl"
        with zipfile.ZipFile(path, "w") as archive:
            head = "".join(f"{name}: {value}\n" for name, value in fields.items())
            archive.writestr("fa4flex-1.2.0.dist-info/METADATA", f"{head}\n{description}")
        return path

    assert "Python >=3.11" in release_check.metadata(wheel(fields), "1.2.0")
    for name in fields:
        with pytest.raises(release_check.Failed, match="metadata"):
            release_check.metadata(
                wheel({key: value for key, value in fields.items() if key != name}), "1.2.0"
            )
    with pytest.raises(release_check.Failed, match="metadata"):
        release_check.metadata(wheel(fields), "1.2.1")
    with pytest.raises(release_check.Failed, match="no description"):
        release_check.metadata(wheel(fields, "short"), "1.2.0")


def test_failures_are_counted_and_end_what_depends_on_them(
    release_check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> str:
        raise release_check.Failed("broken")

    monkeypatch.setattr(release_check, "changelog", fail)
    monkeypatch.setattr(release_check, "build", fail)
    assert release_check.main(["--skip-demo"]) == 2
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["ok", "version"], ["FAILED", "changelog"], ["FAILED", "build"]]


def test_a_command_that_fails_is_shown(release_check: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(release_check.Failed, match=r"exited with 3:\nwhy"):
        release_check.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path)
