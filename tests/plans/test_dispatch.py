"""The table of pipelines: entries that are not loaded yet say of their pipelines what is true of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from checked_plans import sizes_of

from fa4flex.kernels import dispatch
from fa4flex.kernels.plan.keys import CONTIGUOUS, eight_bit, in_pages
from fa4flex.kernels.plan.lengths import Lengths
from fa4flex.kernels.plan.pipeline import Direction
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import TARGETS

NOT_FOR_CALLS_OF_KERNELS = """
import sys
import fa4flex
import fa4flex.variants as variants

fa4flex.compile(variants.alibi, variants.causal)
import fa4flex.runtime.launch
print(*sorted(name for name in sys.modules if name.startswith("fa4flex.")))
"""

CODE = """
import sys
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A
from fa4flex.kernels import dispatch

dispatch.choose("forward", Problem(128, 128), SM90A)
print(*sorted(name for name in sys.modules if name.startswith("fa4flex.kernels.")))
"""


def every_lengths(problems: list[Problem]) -> list[Problem]:
    """The same problems for all kinds of lengths, from pages and not."""
    kinds: tuple[Lengths, ...] = ("dense", "used", "packed")
    return [
        replace(one, lengths=lengths, keys=replace(keys, dtype=one.keys.dtype))
        for one in problems
        for lengths in kinds
        for keys in (CONTIGUOUS, in_pages(16))
    ]


@pytest.mark.parametrize("entry", dispatch.PIPELINES, ids=lambda entry: entry.name)
def test_entries_say_which_chips_and_passes_theirs_are_for(entry: dispatch.Entry) -> None:
    assert isinstance(entry, dispatch.Unloaded) and entry.family in {target.family for target in TARGETS}
    pipeline = entry.load()
    assert pipeline.direction == entry.direction
    widths = [Problem(width, width) for width in (64, 128, 256)]
    problems = [replace(one, keys=keys) for one in widths for keys in (CONTIGUOUS, eight_bit(0))]
    for sizes in (sizes_of(1), sizes_of(5000)):
        refused = [one for one in every_lengths(problems) if not entry.may(one, sizes)]
        assert not any(pipeline.accepts(one, target, sizes) for one in refused for target in TARGETS)
        others = [target for target in TARGETS if target.family != entry.family]
        assert others
        assert not any(pipeline.accepts(one, target, sizes) for one in problems for target in others)


def test_a_forward_pass_loads_those_of_its_chip() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert "fa4flex.kernels.fwd_sm90.plan" in found
    assert not [name for name in found if "sm100" in name or "decode" in name or "mixed" in name]


def test_calls_of_kernels_wait_for_no_other_engine() -> None:
    """Neither the executor for CPUs, nor flex_attention's, nor what proves a plan that is compiled."""
    done = subprocess.run(
        [sys.executable, "-c", NOT_FOR_CALLS_OF_KERNELS], capture_output=True, text=True, check=True
    )
    found = done.stdout.split()
    assert "fa4flex.runtime.cuda.engine" in found
    others = ("runtime.cpu", "runtime.blockwise", "runtime.flex.engine", "kernels.plan.verify", "simulator")
    assert not [name for name in found if name.removeprefix("fa4flex.").startswith(others)]


def test_all_are_named_where_none_is_the_one() -> None:
    passes: tuple[Direction, ...] = ("forward", "backward", "tangents", "mass")
    assert sum(len(dispatch.loaded(one)) for one in passes) == len(dispatch.PIPELINES)
