"""The Blackwell forward of heads up to 256, on a simulated B200: right, clean, the same bits under every
timing.

Dense calls are made by pairs of CTAs, others by one. A run takes a few calls; `-m exhaustive` takes all.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import blackwell
import pytest
from blackwell import DRAWS, PACKED, SMALL, TIMINGS, WORKERS, Call, Maker, dense, drawn, packed, random_map
from helpers import backward_launches, of_backward
from numeric.cuda_cases import BF16, F16, FEW, Draw, Sizes
from test_blackwell_forward import check
from test_simulated_backward import COMPOSED, judged

import ptxsim
from fa4flex.primitives.schedule import Schedule

WIDTHS = ((256, 256), (200, 200), (160, 160), (256, 128), (64, 256), (208, 136))
ALONE, ASKED = Schedule(tile=(128, 64)), Schedule(next_tile="launch_control")


def _variants() -> Iterator[tuple[str, Maker]]:
    """Every composition of every variant; widths and multiprocessors by turns."""
    for (name, draw), width in zip(DRAWS.items(), itertools.cycle(WIDTHS)):
        sizes = replace(SMALL, batch=1).wide(*width)
        yield name, functools.partial(drawn, draw, sizes, workers=WORKERS[width[0] % 3])


def _shapes() -> Iterator[tuple[str, Maker]]:
    """Rows of one key tile and of several, alone and before each other; tiles that end early; GQA."""
    made, names = functools.partial, ("dense", "causal", "softcap window", "sinks window")
    rows = (1, 1), (129, 128), (257, 129), (512, 385), (700, 300)
    for name, lengths, dtype in itertools.product(names[:2], rows, (BF16, F16)):
        sizes = Sizes(1, 2, 1, *lengths, dtype=dtype).wide(256)
        yield f"{name} {lengths} {str(dtype)[6:]}", made(drawn, FEW[name], sizes, workers=2)
    for name, (label, schedule) in itertools.product(names, (("alone", ALONE), ("asked", ASKED))):
        yield f"{name}, {label}", made(scheduled, FEW[name], SMALL.wide(256), schedule)
    for name in names:
        yield f"{name} 4:1", made(drawn, FEW[name], Sizes(1, 4, 1, 150, 190).wide(256), workers=2)
        yield f"{name}, threshold 0", made(drawn, FEW[name], SMALL.wide(256), rescale=0.0)
    for name in names[:2]:
        sizes = Sizes(1, 2, 1, 1, 300).wide(256)
        yield f"{name}, one query in a pair", made(scheduled, FEW[name], sizes, Schedule(tile=(256, 128)))
    yield "map", made(mapped, Schedule())
    yield "map, alone", made(mapped, ALONE)


def scheduled(draw: Draw, sizes: Sizes, schedule: Schedule) -> Call:
    return dense(sizes, draw.make(sizes), schedule=schedule, workers=2, approximate=draw.approximate)


def mapped(schedule: Schedule) -> Call:
    sizes = Sizes(1, 2, 1, 400, 500).wide(256)
    return dense(sizes, {"mask": random_map(sizes, blackwell.sparse_rows)}, schedule=schedule, workers=2)


def _packed() -> Iterator[tuple[str, Maker]]:
    for (name, draw), width in zip(PACKED.items(), itertools.cycle(WIDTHS)):
        yield f"packed {name}", functools.partial(packed, draw, width, BF16)
    for name in ("dense", "causal", "prefix per sequence"):
        yield f"packed, used {name}", functools.partial(packed, PACKED[name], (256, 256), F16, True)


GROUPS: dict[str, dict[str, Maker]] = {
    "variants": dict(_variants()),
    "shapes": dict(_shapes()),
    "packed": dict(_packed()),
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_sample(group: str) -> None:
    name = random.choice(list(GROUPS[group]))
    check(name, GROUPS[group][name], random.sample(TIMINGS, 2))


EVERY = [pytest.param(group, name, id=f"{group}: {name}") for group in GROUPS for name in GROUPS[group]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("group", "name"), EVERY)
def test_call(group: str, name: str) -> None:
    check(name, GROUPS[group][name], list(TIMINGS))


@pytest.mark.slow
def test_gradients() -> None:
    """Both passes of a call with gradients, in which dV has a kernel of its own."""
    name = random.choice(sorted(COMPOSED))
    shapes = ((1, 4, 150, 256), (1, 2, 130, 256), (1, 2, 130, 256))
    with_kernel = judged(name, COMPOSED[name], shapes, ptxsim.device("sm_100a", 0, "late", sms=2), BF16)
    assert len(of_backward(with_kernel)) == backward_launches("sm_100a", 130, 256)
