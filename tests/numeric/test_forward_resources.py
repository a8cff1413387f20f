"""Every variant's forward kernel compiles for sm_90a and costs what the record says; none spills.

A kernel takes seconds to compile, so by default every variant is compiled at one head width and plain and
causal attention at all of them; `-m exhaustive` compiles the others.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
from forward_kernels import CASES, KINDS, WIDTHS, Built, Case, build, compiler, read, representative, write

from fa4flex import variants
from fa4flex.codegen.plan import SM90A

WORKERS = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl, which exists for Linux"
)


class Compiler:
    """Compiles all kernels that this run selected, WORKERS at a time, in the order of the tests."""

    def __init__(self, cases: list[Case]) -> None:
        self._pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))
        self._built: dict[Case, Future[Built]] = {case: self._pool.submit(build, case) for case in cases}

    def result(self, case: Case) -> Built:
        return self._built[case].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    here = (item for item in request.session.items if getattr(item, "module", None) is request.module)
    found = Compiler([item.callspec.params["case"] for item in here if hasattr(item, "callspec")])  # type: ignore[attr-defined]
    yield found
    found.close()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if representative(case) else pytest.mark.exhaustive)
        for case in CASES
    ],
)
def test_forward_kernel(case: Case, kernels: Compiler, pytestconfig: pytest.Config) -> None:
    built = kernels.result(case)
    found, recorded = built.resources, read()
    if pytestconfig.getoption("--update-golden"):
        recorded[built.row.key] = built.row
        write(recorded)
    assert found.spill_bytes == 0 and found.stack_bytes == 0, built.row
    assert not found.ignored, "the compiler dropped what the kernel asks for"
    assert found.shared_bytes == built.planned_bytes <= SM90A.shared_memory
    before = recorded.get(built.row.key)
    assert built.row == before, (
        f"{built.row}, where the record has {before}; nvidia-cutlass-dsl is {compiler()}. "
        "If that is meant, run with --update-golden"
    )


@pytest.mark.exhaustive
def test_the_record_holds_every_kernel() -> None:
    assert list(read()) == [(case.kind, case.heads) for case in CASES], 'run -m "" --update-golden'


def test_the_record_holds_what_a_run_compiles() -> None:
    assert {(case.kind, case.heads) for case in CASES if representative(case)} <= set(read())


def test_nothing_in_the_record_spills() -> None:
    assert all((row.spilled, row.stack) == ("0", "0") for row in read().values())


def test_a_run_compiles_every_variant_and_every_width() -> None:
    chosen = [case for case in CASES if representative(case)]
    assert {case.kind for case in chosen} == set(KINDS) >= set(variants.__all__)
    assert {case.width for case in chosen} == set(WIDTHS) and len(chosen) < len(CASES) / 3
