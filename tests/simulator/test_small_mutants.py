"""One synchronisation, lane or store less is noticed in this library's small kernels, right as they stand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from append_cases import HOWS
from append_cases import drawn as tokens_of
from helpers import cumulative
from kernel_faults import drop_faults
from mutants import Mutant
from own_calls import Own
from quantize_cases import How, by_operations, check, normal
from test_block_lists import FAULTS, Sizes, assert_classes, assert_told, lists_of, with_fault
from test_block_tables import SHAPE, classes_of, expected, made, masks
from test_sequences import assert_right, call_of, causal_keys, kernel_of
from torch.nn.functional import scaled_dot_product_attention

import fa4flex
import ptxsim
from fa4flex.runtime.cuda.tables.block_tables import DeviceTables, grid_of
from fa4flex.variants import causal

ARCHS = ("sm_90a", "sm_100a")


def tables(name: str) -> Own:
    """Block tables of both passes, which have to be those of the first time, and right then."""
    made_by, asked, make, arch = [], [], DeviceTables.__call__, random.choice(ARCHS)

    def noted(self: DeviceTables, call: Any, lengths: Any) -> Any:
        asked.append((self, call, lengths))
        return make(self, call, lengths)

    with patch.object(DeviceTables, "__call__", noted):
        found, attn, _ = made(masks()[name], arch)

    def call() -> bool:
        now = [DeviceTables.make(*given) for given in asked]
        made_by.append(now)
        pairs = ((x, y) for old, new in zip(made_by[0], now) for x, y in zip(old, new) if x is not None)
        return all(torch.equal(*pair) for pair in pairs)

    own = Own(arch, "block_tables", call)
    assert own.clean("eager", 0)
    for by_keys, (one, _), first in zip((False, True), found, made_by[0], strict=True):
        grid = grid_of(one.plan, SHAPE)
        classes = classes_of(first, grid.rows, grid.columns)
        assert torch.equal(classes, expected(attn, one.plan.tile, by_keys))
    return own


def sequences() -> Own:
    """Lengths and order of tiles of more sequences than threads, more tiles than a warp takes at once, and
    more classes of work than lanes. Queries are further on than keys, so that no sum looks like another."""
    rng, tile = random.Random(random.random()), (128, 128)
    q_lengths, k_lengths = ([rng.choice(of) for _ in range(600)] for of in ((100, 257, 900), (0, 1, 64, 257)))
    k_lengths[400] = 9000
    given = call_of(
        (cumulative(q_lengths), cumulative(k_lengths), None, None), sum(q_lengths), sum(k_lengths)
    )
    with ptxsim.device("sm_90a"):
        kernel = kernel_of(causal, given, tile)
    anew: Any = kernel.compute
    return Own("sm_90a", "sequences", lambda: holds(lambda: assert_right(given, anew, tile, causal_keys)))


def append(name: str) -> Own:
    given = tokens_of(HOWS[name])
    written = given.k_pool, given.v_pool, *given.scales()
    before = [(x, x.clone()) for x in written if x is not None]

    def call() -> bool:
        for pool, held in before:
            pool.copy_(held)
        return holds(given.check)

    return Own(random.choice(ARCHS), "append", call)


def quantize() -> Own:
    """Codes of more tiles and chunks than one, of which sums of codes are kept, too."""
    how = How(batch=1, heads=(1, 1, 1), q_len=5, kv_len=270, qk=random.choice(["int8", "float8_e4m3"]), dv=16)
    qkv = normal(how)
    return Own(
        random.choice(ARCHS), "quantize", lambda: holds(lambda: check(how, qkv, by_operations(how, qkv)))
    )


def block_lists() -> Own:
    """Valid lists, and lists with faults, which are told."""
    sizes = Sizes(heads=3, full=True, wide=random.random() < 0.5)
    valid, wrong = lists_of(sizes), {name: with_fault(lists_of(sizes), name) for name in FAULTS}

    def call() -> bool:
        right = holds(lambda: assert_classes(valid, sizes))
        told = [
            holds(lambda name=name: assert_told(wrong[name], sizes, FAULTS[name]))  # type: ignore[misc]
            for name in FAULTS
        ]
        return right and all(told)

    return Own(random.choice(ARCHS), "block_lists", call)


def combine() -> Own:
    """A query over keys in parts."""
    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (1, 450, 450))
    attn = fa4flex.compile()
    exact = scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    exact_lse = (q.double() @ k.double().mT / 8).logsumexp(-1)
    bound = 2 * (scaled_dot_product_attention(q, k, v) - exact).abs().max()

    def call() -> bool:
        out, lse = attn(q, k, v, return_lse=True)
        return bool((out - exact).abs().max() <= bound) and torch.allclose(lse.double(), exact_lse, atol=1e-4)

    return Own(random.choice(ARCHS), "combine", call)


def holds(check: Callable[[], None]) -> bool:
    """True unless the check raises for what is not right. Faults that kernels told of are dropped, those of a
    mutant's last call too: they would be raised in whatever test comes next."""
    drop_faults()
    try:
        check()
    except (AssertionError, IndexError):
        return False
    finally:
        drop_faults()
    return True


TABLES = ("documents in no order", "blocks", "a table")
"""Masks all of whose kernels' stores decide something: of documents in order, what is left out would say so
too, and where bounds leave every tile open, it does not matter what they are made of."""

MADE: dict[str, Callable[[], Own]] = {
    "append": lambda: append(random.choice(list(HOWS))),
    "block lists": block_lists,
    "combine": combine,
    "quantize": quantize,
    "sequences": sequences,
    **{f"tables of {name}": lambda name=name: tables(name) for name in TABLES},  # type: ignore[misc]
}


def implied(own: Own, mutant: Mutant) -> bool:
    """True if it lacks one of two barriers of the kernel of lengths that others imply: the one before faults
    are told, as those of a scan come after all have looked for some; and the first of the scan of classes, as
    all have met since they read the sums of the one before."""
    if own.kernel != "sequences" or mutant.instruction.opcode != "bar.sync":
        return False
    body = mutant.program.kernel.body
    barriers = [i for i, x in enumerate(body) if x.opcode == "bar.sync" or i == mutant.index]
    return barriers.index(mutant.index) in (10, 12)


SOME = {
    **{name: made for name, made in MADE.items() if not name.startswith("tables")},
    "tables": lambda: tables(random.choice(TABLES)),
}
LONG = ("combine", "quantize", "tables")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SOME]
)
def test_some(name: str) -> None:
    own = SOME[name]()
    tried = [mutant for mutant in own.that_matter() if not implied(own, mutant)]
    for mutant in random.sample(tried, min(len(tried), 3)):
        assert own.noticed(mutant), mutant


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MADE)
def test_all(name: str) -> None:
    own = MADE[name]()
    tried = own.that_matter()
    left = [mutant for mutant in tried if not own.noticed(mutant)]
    print(len(left), "of", len(tried), *left, sep="\n")
    assert len(tried) >= 3 and all(implied(own, mutant) for mutant in left)
