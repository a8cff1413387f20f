"""No backward kernel of a variant spills registers in its loops on Blackwell, nor one of wide heads on
Hopper, and shared memory is what the plan lays out. A run compiles some of them; `-m exhaustive` all."""

from __future__ import annotations

import importlib.util
import random
import re
import struct
from itertools import product
from typing import Any

import pytest
from cuda_cases import FEW, VARIANTS, Sizes
from helpers import Width, widths
from kernel_programs import Kind, launched_backward
from pairs import hopper_pairs, in_pairs

from fa4flex.compiler.inspect import Inspection, inspect
from fa4flex.kernels.plan.target import SM90A, SM100A, Target
from fa4flex.primitives.schedule import Schedule

pytestmark = [
    pytest.mark.usefixtures("either_steps"),
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl, which exists for Linux"
    ),
]
DRAWS = {"plain": FEW["dense"], **{name: draws[0] for name, draws in VARIANTS.items()}}
WIDTHS: tuple[Width, ...] = (32, 64, 96, 128, (160, 128), (192, 128))
WIDE: tuple[Width, ...] = (96, (192, 128), 160, 192, 256)
"""Head widths at which all variants are judged on Hopper. At 128 masks from tables spill, and at 64, in steps
of 128 queries, they and most biases do: docs/notes/backward_sm90.md."""
LIGHT = ("plain", "causal", "alibi", "softcap")
HEAVY = tuple(name for name in DRAWS if name not in LIGHT)
ON_HOPPER: tuple[tuple[str, Width], ...] = (
    *product(LIGHT, (128, *WIDE)),
    *product(("plain", "causal", "softcap", "graphormer"), (64,)),
)
"""Variants and head widths that spill no more on Hopper than SPILLED allows."""
FEW_KEYS = tuple((name, width) for name, width in ON_HOPPER if name in LIGHT and width in (64, 96, 128))
"""Ones of which a block with all keys stores dQ."""
FEW_TILES = tuple(product(LIGHT, (64, 96, 128)))
SMALL = Sizes(batch=1, heads=4, kv_heads=2)
"""A call whose tiles of keys are few for Hopper's multiprocessors."""

SPILLED: dict[tuple[Target, Width], int] = {
    **{(SM90A, width): 16 for width in (192, 256)},
    (SM90A, 96): 76,
    (SM90A, (192, 128)): 40,
    **{(SM100A, width): 64 if isinstance(width, tuple) else 36 for width in WIDTHS},
}
"""Most spilled bytes, stores and loads together, where masks or biases are read from tables: Hopper has no
register left for wide heads, and at (192, 128) none in the warp that stores dQ; on Blackwell it is what is
put away once, in no loop, one register that seven places read again at most, but for two registers of a
neighbourhood's mask where heads are wide. LIGHT ones spill none."""
PER_HEAD = {(SM100A, 128): 96}
"""Bytes that any variant may spill: once per head, the reduce warps put away which tiles of queries see their
keys."""


def check(
    name: str,
    width: Width,
    target: Target = SM100A,
    sizes: Sizes = Sizes(),
    lengths: str = "dense",
    **options: Any,
) -> None:
    kind = Kind(DRAWS[name], lengths, sizes, options=options)
    plan, (source, problem, signature) = launched_backward(kind, widths(width), target)
    entry = plan.module.removeprefix("fa4flex.kernels.").replace(".", "") + "kernel"
    source.load()  # imports the compiler
    inspected = inspect(source, problem, signature, target.name, entry=entry)
    found, ptx = inspected.resources, inspected.ptx
    most = 0 if name in LIGHT else SPILLED.get((target, width), 0)
    most = max(most, PER_HEAD.get((target, width), 0))
    assert found.spill_bytes <= most, f"{name}, {width}: {found}"
    assert most or found.stack_bytes == 0, f"{name}, {width}: {found}"
    assert not found.ignored, "the compiler dropped what the kernel asks for"
    assert found.shared_bytes == plan.memory.total <= target.shared_memory
    assert not copies_under_products(ptx), f"{name}, {width}"
    if target is SM90A:
        assert ("cp.async.bulk.prefetch.tensor" in ptx) == plan.persistent, "the next keys are announced"
        assert_products_overlap(f"{name}, {width}", inspected, entry)


def copies_under_products(ptx: str) -> list[str]:
    """Copies of registers between two products of Hopper's tensor core that follow each other: the assembler
    waits for the first one before it makes them."""
    between = re.findall(
        r"wgmma\.commit_group((?:(?!wgmma\.(?:wait|mma)).)*)wgmma\.mma_async", ptx, re.DOTALL
    )
    return [copy for text in between for copy in re.findall(r"mov\.b32\s+%r\d+, %r\d+;", text)]


def assert_products_overlap(where: str, inspected: Inspection, entry: str) -> None:
    groups = inspected.ptx.count("wgmma.commit_group")
    assert products_waited_for(inspected.cubin, entry) == groups, f"{where}: products one after another"


HGMMA = (0x9F0, 0xDF0)
"""Opcodes of Hopper's products, in the lowest 12 bits of an instruction: the first operand from shared
memory, and from registers."""


def products_waited_for(cubin: bytes, entry: str) -> int:
    """Products in a kernel's machine code whose end is signalled. One in each group should be; where
    registers do not suffice, the assembler silently makes every product wait for the one before."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    found = 0
    for name, _, _, _, start, length in sections:
        at = sections[names][4] + name
        title = cubin[at : cubin.index(b"\0", at)].decode()
        if title.startswith(".text.") and entry in title:
            for low, high in struct.iter_unpack("<QQ", cubin[start : start + length]):
                found += low & 0xFFF in HGMMA and high >> 20 & 7 == 0
    return found


PAIRED = ("plain", "alibi", "causal", "prefix_lm")
"""Variants whose key tiles see nearly the same queries as their neighbours: CTA pairs are chosen for them."""


def check_pair(name: str) -> None:
    """Checks the kernel of a CTA pair, at the head width for which pairs are chosen."""
    with in_pairs():
        check(name, 128)


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_kernels(draw: int) -> None:
    check(*random.sample(sorted(product(DRAWS, WIDTHS), key=str), 2)[draw])


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_kernels_on_hopper(draw: int) -> None:
    check(*random.sample(ON_HOPPER, 2)[draw], SM90A)


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_kernels_of_few_keys(draw: int) -> None:
    """One tile holds all keys: what stores dQ spills no more than what adds it up."""
    check(*random.sample(FEW_KEYS, 2)[draw], SM90A, Sizes(kv_len=100))


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(2))
def test_some_kernels_of_few_tiles(draw: int) -> None:
    """A lone consumer warpgroup spills no more than two."""
    check(*random.sample(FEW_TILES, 2)[draw], SM90A, SMALL)


@pytest.mark.slow
def test_some_kernel_of_packed_sequences() -> None:
    """A search for a sequence, and for where it ends, spills nothing."""
    name, width = random.choice([x for x in ON_HOPPER if x[0] in LIGHT and x[1] in (64, 128, 160, 192)])
    check(name, width, SM90A, lengths="packed")


def check_ordered(name: str, width: Width) -> None:
    """Checks a kernel whose writer and consumers read tables a step ahead."""
    check(name, width, SM90A, schedule=Schedule(deterministic=True))


def test_some_kernel_with_ordered_sums() -> None:
    check_ordered(random.choice(LIGHT), random.choice((64, 128, *WIDE)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "width"), list(product(LIGHT, (64, 128, *WIDE))), ids=str)
def test_kernel_with_ordered_sums(name: str, width: Width) -> None:
    check_ordered(name, width)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "width"), FEW_TILES, ids=str)
def test_kernel_of_few_tiles(name: str, width: Width) -> None:
    check(name, width, SM90A, SMALL)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "width"), FEW_KEYS, ids=str)
def test_kernel_of_few_keys(name: str, width: Width) -> None:
    check(name, width, SM90A, Sizes(kv_len=100))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "width"), [*ON_HOPPER, *product(HEAVY, WIDE)], ids=str)
def test_kernel_on_hopper(name: str, width: Width) -> None:
    check(name, width, SM90A)


def check_order(name: str, width: Width) -> None:
    """Checks that products overlap on Hopper, whatever registers spill."""
    _, (source, problem, signature) = launched_backward(Kind(DRAWS[name]), widths(width), SM90A)
    source.load()
    inspected = inspect(source, problem, signature, SM90A.name, entry="bwd_sm90kernel")
    assert_products_overlap(f"{name}, {width}", inspected, "bwd_sm90kernel")


def test_products_overlap_on_hopper() -> None:
    check_order(random.choice(HEAVY), random.choice((64, 128)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "width"), list(product(HEAVY, (64, 128))))
def test_all_products_overlap_on_hopper(name: str, width: Width) -> None:
    check_order(name, width)


PRODUCTS: tuple[Width, ...] = (160, 192)
"""Head widths at which warpgroups share out products on Hopper, in pairs of CTAs or not."""


def check_products(name: str, width: Width, pair: bool) -> None:
    with hopper_pairs(pair):
        check(name, width, SM90A)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
def test_some_kernel_that_shares_out_products(pair: bool) -> None:
    check_products(random.choice(LIGHT), random.choice(PRODUCTS), pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize(("name", "width"), list(product(DRAWS, PRODUCTS)), ids=str)
def test_kernels_that_share_out_products(name: str, width: Width, pair: bool) -> None:
    check_products(name, width, pair)


def test_some_kernel_of_a_pair() -> None:
    check_pair(random.choice(PAIRED))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAIRED)
def test_kernel_of_a_pair(name: str) -> None:
    check_pair(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_kernel(name: str, width: Width) -> None:
    check(name, width)
