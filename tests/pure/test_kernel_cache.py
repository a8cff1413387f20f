"""Compiled kernels on disk: whole or absent, verified, private, and found by all that decides them."""

from __future__ import annotations

import importlib.metadata
import os
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fa4flex.compiler import cache
from fa4flex.compiler import compile as compile_module
from fa4flex.compiler.compile import digest, kernel_key
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.plan.arguments import SCHEMAS
from fa4flex.kernels.plan.keys import PAGE_TABLE, PAGES, Codes, Keys, LatentKeys, in_pages
from fa4flex.kernels.plan.problem import Problem
from fa4flex.primitives.heads import Shares

KEY = "k" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FA4FLEX_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("FA4FLEX_CACHE", raising=False)
    cache._warned.clear()
    found = cache.directory()
    assert found is not None
    yield found


def body(path: Path) -> bytes:
    return path.read_bytes()[: -cache._TRAILER]


def refuse() -> tuple[str, bytes]:
    raise AssertionError("nothing was to be built")


def test_what_was_built_is_found_again(folder: Path) -> None:
    content = os.urandom(3000)
    path, built = cache.obtain(folder, KEY, lambda: (".so", content))
    assert built and body(path) == content
    assert cache.obtain(folder, KEY, refuse) == (path, False)
    assert [x.name for x in folder.iterdir()] == [f"{KEY}.so"], "no lock or temporary file is left"


@pytest.mark.parametrize("damage", ["truncated", "emptied", "one bit flipped", "another trailer"])
def test_a_damaged_file_is_built_again(folder: Path, damage: str) -> None:
    content = os.urandom(3000)
    path, _ = cache.obtain(folder, KEY, lambda: (".so", content))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[1234] ^= 16
    damaged = {
        "truncated": whole[:1500],
        "emptied": b"",
        "one bit flipped": bytes(flipped),
        "another trailer": whole[:-1] + bytes([whole[-1] ^ 1]),
    }[damage]
    path.write_bytes(damaged)
    path, built = cache.obtain(folder, KEY, lambda: (".so", content))
    assert built and path.read_bytes() == whole


def test_only_the_user_can_read_and_write(folder: Path) -> None:
    path, _ = cache.obtain(folder, KEY, lambda: (".o", b"code"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_a_directory_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert cache.directory() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert cache.directory() is None
    folder.chmod(0o755)
    assert cache.directory() == folder


def test_a_directory_of_somebody_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        assert cache.directory() is None


def test_the_cache_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4FLEX_CACHE", "0")
    assert cache.directory() is None


def test_the_longest_unused_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_ENTRIES", 3)
    for i, key in enumerate("abc"):
        os.utime(cache.store(folder, key, ".so", b"x"), (1000 + i, 1000 + i))
    assert cache.find(folder, "a") is not None  # now "b" is the one that was not used for longest
    cache.store(folder, "d", ".so", b"x")
    assert sorted(path.stem for path in folder.iterdir()) == ["a", "c", "d"]


def test_a_lock_that_is_never_released_does_not_block_for_ever(folder: Path) -> None:
    lock = folder / "held.lock"
    with cache.locked(lock):
        start = time.monotonic()
        with cache.locked(lock, wait=0.1):
            assert 0.1 <= time.monotonic() - start < 5


# --- keys -------------------------------------------------------------------------------------------------


def test_every_choice_is_part_of_the_key() -> None:
    problem, signature = Problem(64, 64), Signature()
    keys = [
        kernel_key("source", problem, signature, "sm_90a"),
        kernel_key("other source", problem, signature, "sm_90a"),
        kernel_key("source", Problem(64, 128), signature, "sm_90a"),
        kernel_key("source", Problem(64, 64, statistics=("lse", "max_scores")), signature, "sm_90a"),
        kernel_key("source", problem, Signature(scalars=("int",)), "sm_90a"),
        kernel_key("source", problem, Signature(heads_first=False), "sm_90a"),
        kernel_key("source", problem, signature, "sm_100a"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == kernel_key("source", Problem(64, 64), Signature(), "sm_90a")


PROBLEMS: dict[str, Any] = {
    "head_dim": 128, "head_dim_v": 128, "dtype": "float16", "out_dtype": "float16", "lengths": "packed",
    "mask_form": "spans", "sinks": True, "statistics": ("lse", "max_scores"), "wide_index": True,
    "in_range": False, "positive_scale": False, "operands": (("int32", 1),), "sloped": True,
    "met_alike": True, "long_scores": True, "pair_reads": True, "long_masks": True,
    "many_reads": True, "brief": True, "gradients": ((0, "sum"),),
    "deterministic": True, "keys": in_pages(16), "grouped": True, "row_ends": 1, "output": True,
    "blocks": (64, 64), "shares": Shares(1, 2), "skip": 1e-3, "dropout": True, "weights": "elementwise",
    "moved": ("q",),
}  # fmt: skip
KEYS: dict[str, Any] = {
    "loader": PAGES, "together": 32, "rows": (PAGE_TABLE,), "dtype": "float8_e4m3fn", "k_scales": "head",
    "v_scales": "token", "codes": Codes("int8", "bfloat16"),
}  # fmt: skip
CODES: dict[str, Any] = {
    "qk": "float8_e4m3fn", "pv": "float8_e4m3fn", "biased": True, "offset": True, "packed": True,
    "promote": False,
}  # fmt: skip
SIGNATURES: dict[str, Any] = {
    "heads_first": False, "scalars": ("int",), "unit_strides": (True,), "even_rows": (True,),
    "given": ("seqused_q",), "wide": ("cu_seqlens_q",),
}  # fmt: skip
SURROUNDINGS: dict[str, Any] = {
    "target": "simulated sm_90a", "toolchain": ("another version",), "digest": "other kernels",
}  # fmt: skip


def test_every_field_is_part_of_the_key() -> None:
    """Each changed alone: all of a problem, and all of a signature."""
    problem, signature = Problem(64, 64), Signature()
    assert PROBLEMS.keys() == {field.name for field in fields(Problem)}
    assert SIGNATURES.keys() == {field.name for field in fields(Signature)}
    keys = [kernel_key("source", problem, signature, "sm_90a")]
    for name, value in PROBLEMS.items():
        keys.append(kernel_key("source", replace(problem, **{name: value}), signature, "sm_90a"))
    assert KEYS.keys() == {field.name for field in fields(Keys)}
    for name, value in KEYS.items():
        source = replace(in_pages(1), **{name: value}) if name != "loader" else Keys(PAGES, 1)
        dtype = problem.dtype if source.codes is None else source.codes.qk
        keys.append(kernel_key("source", replace(problem, keys=source, dtype=dtype), signature, "sm_90a"))
    keys.append(kernel_key("source", replace(problem, keys=LatentKeys()), signature, "sm_90a"))
    codes = KEYS["codes"]
    assert CODES.keys() == {field.name for field in fields(Codes)}
    for name, value in CODES.items():
        source = replace(in_pages(1), codes=replace(codes, **{name: value}))
        of_codes = replace(problem, keys=source, dtype=source.codes.qk)  # type: ignore[union-attr]
        keys.append(kernel_key("source", of_codes, signature, "sm_90a"))
    for name, value in SIGNATURES.items():
        keys.append(kernel_key("source", problem, replace(signature, **{name: value}), "sm_90a"))
    optional = {row.name for schema in SCHEMAS.values() for row in schema.rows if row.when is None}
    given = [replace(signature, given=(name, "another")) for name in sorted(optional)]
    keys += [kernel_key("source", problem, one, "sm_90a") for one in given]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_compiles_is_part_of_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return kernel_key("source", Problem(64, 64), Signature(), "sm_90a")

    before = key()
    monkeypatch.setattr(compile_module, name, lambda *_: SURROUNDINGS[name])
    assert key() != before
    monkeypatch.undo()
    assert key() == before


def test_settings_of_the_compiler_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was compiled to be debugged serves nobody else."""
    keys = [kernel_key("source", Problem(64, 64), Signature(), "sm_90a")]
    for name, value in (
        ("CUTE_DSL_LOG_LEVEL", "10"),
        ("CUTE_DSL_COMPILER_OPT", "opt-level=0"),
        ("CUTE_DSL_LINEINFO", "1"),
    ):
        monkeypatch.setenv(name, value)
        keys.append(kernel_key("source", Problem(64, 64), Signature(), "sm_90a"))
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize("package", ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi"))
def test_versions_of_the_compiler_are_noticed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version, before = importlib.metadata.version, compile_module.toolchain()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == package else version(name))
    compile_module.toolchain.cache_clear()
    try:
        assert compile_module.toolchain() != before
    finally:
        compile_module.toolchain.cache_clear()


@pytest.mark.parametrize("folder", (compile_module.KERNELS, compile_module.HERE, compile_module.PLANS))
def test_files_of_kernels_and_entry_points_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return kernel_key("source", Problem(64, 64), Signature(), "sm_90a")

    before, digest = key(), compile_module.digest
    assert list(folder.glob("*.py")) and digest(folder) == digest.__wrapped__(folder)
    monkeypatch.setattr(compile_module, "digest", lambda which: digest(which) + "#" * (which == folder))
    assert key() != before


def test_a_change_in_any_kernel_file_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "common" / "b.py").write_text("y = 1\n")
    digests = []
    for change in (
        lambda: None,
        lambda: (tmp_path / "common" / "b.py").write_text("y = 2\n"),
        lambda: (tmp_path / "a.py").rename(tmp_path / "c.py"),
        lambda: (tmp_path / "d.py").write_text(""),
    ):
        change()
        digest.cache_clear()
        digests.append(digest(tmp_path))
    digest.cache_clear()
    assert len(set(digests)) == len(digests)
