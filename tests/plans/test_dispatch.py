"""The table of pipelines: entries that are not loaded yet say of their pipelines what is true of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import TARGETS
from fa4flex.kernels import dispatch

CODE = """
import sys
from fa4flex.codegen.plan.problem import Problem
from fa4flex.codegen.plan.target import SM90A
from fa4flex.kernels import dispatch

dispatch.choose("forward", Problem(128, 128), SM90A)
print(*sorted(name for name in sys.modules if name.startswith("fa4flex.kernels.")))
"""


@pytest.mark.parametrize("entry", dispatch.PIPELINES, ids=lambda entry: entry.name)
def test_entries_say_which_chips_and_passes_theirs_are_for(entry: dispatch.Entry) -> None:
    assert isinstance(entry, dispatch.Unloaded) and entry.family in {target.family for target in TARGETS}
    pipeline = entry.load()
    assert pipeline.direction == entry.direction
    widths = [Problem(width, width) for width in (64, 128, 256)]
    problems = [
        replace(one, few_rows=few, few_queries=few, row_class=16 * few, kv_dtype=kv_dtype)
        for one in widths
        for few in (False, True)
        for kv_dtype in ("", "float8_e4m3fn")
    ]
    others = [target for target in TARGETS if target.family != entry.family]
    assert others and not any(pipeline.accepts(one, target) for one in problems for target in others)


def test_a_forward_pass_loads_those_of_its_chip() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert "fa4flex.kernels.fwd_sm90.plan" in found
    assert not [name for name in found if "sm100" in name]


def test_all_are_named_where_none_is_the_one() -> None:
    assert len(dispatch.loaded("forward")) + len(dispatch.loaded("backward")) == len(dispatch.PIPELINES)
