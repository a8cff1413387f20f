"""Seeds, time limits and durations of tests, in a pytest of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    here = Path(__file__).parents[1]
    pytester.makeconftest((here / "conftest.py").read_text())
    pytester.makepyfile(kernel_faults=(here / "kernel_faults.py").read_text())
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


def test_slow_tests_without_a_mark_are_listed(tests: pytest.Pytester, pytestconfig: pytest.Config) -> None:
    """Process time counts, that of children too, and no time of waiting; reports keep it between workers."""
    tests.makepyfile(
        """
        import subprocess, sys, time, conftest, pytest
        conftest.SLOW = 0.1

        def test_that_computes():
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass

        def test_of_a_child():
            program = "import time\\nwhile time.process_time() < 0.2: pass"
            subprocess.run([sys.executable, "-c", program], check=True)

        def test_that_waits():
            time.sleep(0.2)

        @pytest.mark.slow
        def test_with_the_mark():
            test_that_computes()

        @pytest.mark.exhaustive
        def test_of_all_cases():
            test_that_computes()

        def test_that_fails():
            test_that_computes()
            assert False
        """
    )
    tests.makeini("[pytest]\nmarkers =\n    slow\n    exhaustive")
    # in this process: importing torch again takes seconds; without a limit: this test has the only alarm
    found = tests.runpytest_inprocess("--time-limit", "0")
    found.assert_outcomes(passed=5, failed=1)
    listed = [line.split() for line in found.outlines if "s of process time: " in line]
    assert all(0.1 < float(line[0]) < 2.0 for line in listed)
    names = [line[-1].split("::")[1] for line in listed]
    assert sorted(names) == ["test_of_a_child", "test_that_computes", "test_that_fails"]
    hooks, sent = pytestconfig.hook, []
    for report in found.reprec.getreports("pytest_runtest_logreport"):  # type: ignore[attr-defined]
        data = json.dumps(hooks.pytest_report_to_serializable(config=pytestconfig, report=report))
        sent.append(hooks.pytest_report_from_serializable(config=pytestconfig, data=json.loads(data)))
    slow = [x for x in sent if hasattr(x, "unmarked_seconds")]
    assert sorted(x.nodeid.split("::")[1] for x in slow) == sorted(names)


SHARE = """
    import pytest

    @pytest.mark.slow
    @pytest.mark.parametrize("n", range(200))
    def test_slow(n):
        pass

    def test_quick():
        pass
"""


@pytest.mark.slow
def test_a_run_draws_a_share_of_the_slow_tests(tests: pytest.Pytester) -> None:
    """Workers agree on it, and its seed repeats it. All run where no share is asked for."""
    tests.makepyfile(SHARE)
    tests.makeini("[pytest]\nmarkers = slow")
    found = tests.runpytest_subprocess("-n", "2", "--slow-one-in", "3", timeout=120)
    (said,) = [line for line in found.outlines if line.startswith("one in 3 slow tests: ")]
    number = found.parseoutcomes()["passed"]
    assert found.ret == 0 and 30 < number < 110

    def drawn(*options: str) -> set[str]:
        # in this process, as above
        run = tests.runpytest_inprocess("-v", "-p", "no:xdist", "--time-limit", "0", *options)
        return {line.split("::")[1].split()[0] for line in run.outlines if "PASSED" in line}

    again, other = drawn(*said.split(": ")[1].split()), drawn("--slow-one-in", "3", "--slow-seed", "7")
    assert len(again) == number and "test_quick" in again & other and again != other
    assert len(drawn()) == 201


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
    # in this process, as above: what is drawn depends on the seed alone
    options = "-s", "--time-limit", "0", "--seed"
    runs = [tests.runpytest_inprocess(*options, seed).outlines for seed in ("7", "7", "8")]
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
    assert twice <= {"conftest", "__init__", "__main__"}
