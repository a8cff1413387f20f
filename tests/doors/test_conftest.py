"""Seeds and time limits of tests, in a pytest of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    return pytester


LONG = """
    import time
    import pytest

    def waits_for_ever():
        while True:
            time.sleep(0.01)

    def test_that_hangs():
        waits_for_ever()

    @pytest.fixture
    def hanging():
        waits_for_ever()

    def test_whose_setup_hangs(hanging):
        pass

    def test_that_is_done():
        time.sleep(0.05)

    @pytest.mark.timeout_s(0)
    def test_without_limit():
        time.sleep(0.7)

    @pytest.mark.timeout_s(0.1)
    def test_with_a_limit_of_its_own():
        waits_for_ever()

    def test_that_does_not_let_go():
        try:
            waits_for_ever()
        except Exception:
            waits_for_ever()
"""


@pytest.mark.slow
def test_a_test_that_takes_too_long_fails_and_says_where(tests: pytest.Pytester) -> None:
    tests.makepyfile(LONG)
    found = tests.runpytest_subprocess("--time-limit", "0.5", timeout=120)
    found.assert_outcomes(passed=2, failed=3, errors=1)
    text = found.stdout.str()
    for name, seconds in (("that_hangs", 0.5), ("whose_setup_hangs", 0.5), ("with_a_limit_of_its_own", 0.1)):
        assert f"test_{name} took more than {seconds:g} s; it was here:" in text
    assert text.count("in waits_for_ever") >= 4


def test_the_process_ends_where_no_python_code_runs(tests: pytest.Pytester) -> None:
    """Signals reach only Python code: here they are blocked."""
    tests.makepyfile(
        """
        import signal, time, conftest
        conftest.GRACE = 0.5

        def test_in_a_library():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(100)
        """
    )
    found = tests.runpytest_subprocess("--time-limit", "0.5", timeout=90)
    assert found.ret == 1 and "in test_in_a_library" in found.stderr.str()


def test_limits_by_marker(tests: pytest.Pytester) -> None:
    """The default, the longer one of exhaustive tests, and what stands before both."""
    tests.makepyfile(
        """
        import conftest, pytest

        @pytest.fixture
        def seconds(request):
            return conftest.seconds_of(request.node)

        def test_default(seconds):
            assert seconds == conftest.TIME_LIMIT == 300

        @pytest.mark.exhaustive
        def test_exhaustive(seconds):
            assert seconds == conftest.EXHAUSTIVE_LIMIT

        @pytest.mark.exhaustive
        @pytest.mark.timeout_s(7)
        def test_own(seconds):
            assert seconds == 7
        """
    )
    tests.makeini("[pytest]\nmarkers = exhaustive")
    tests.runpytest_subprocess(timeout=90).assert_outcomes(passed=3)


@pytest.mark.slow
def test_a_seed_repeats_what_was_drawn(tests: pytest.Pytester) -> None:
    tests.makepyfile(
        """
        import random, numpy, pytest, torch

        @pytest.mark.parametrize("draw", range(2))
        def test_draws(draw):
            found = random.sample(range(10**6), 2)[draw], numpy.random.rand(), torch.rand(()).item()
            print("found:", draw, found)
        """
    )
    runs = [tests.runpytest_subprocess("-s", "--seed", seed, timeout=90).outlines for seed in ("7", "7", "8")]
    drawn = [[line for line in run if "found:" in line] for run in runs]
    assert len(drawn[0]) == 2 and drawn[0] == drawn[1] and drawn[0] != drawn[2]
    assert drawn[0][0].split("(")[1] != drawn[0][1].split("(")[1]


def test_no_case_is_drawn_while_tests_are_collected() -> None:
    """Such a case is another one in the next run, whatever its seed."""
    folder = Path(__file__).parents[1]
    lines = [
        f"{path.name}: {line}"
        for path in folder.rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("@pytest") and ("random." in line or "torch.rand" in line)
    ]
    assert lines == []


def test_no_two_modules_have_one_name() -> None:
    """Folders of tests and scripts are all in sys.path, where the first of two modules hides the other."""
    root = Path(__file__).parents[2]
    names = [path.stem for folder in ("tests", "scripts") for path in (root / folder).rglob("*.py")]
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= {"conftest", "__init__"}
