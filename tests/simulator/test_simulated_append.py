"""Appending keys and values to pages by the kernel, on simulated GPUs: as token by token, nothing else is
written, and nothing outside the tensors is touched, whatever they hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from append_cases import HOWS, How, Tokens, drawn
from paged_pools import guarded

import fa4flex
import ptxsim
from fa4flex import InputError, Paging, Rotary, UnsupportedError


def kept_in(given: Tokens) -> Tokens:
    """The same call, whose tensors end where memory ends."""
    paging = Paging(guarded(given.paging.page_table), guarded(given.paging.seqused_k))
    pools = {} if given.how.strided else {x: guarded(getattr(given, x)) for x in ("k_pool", "v_pool")}
    return replace(given, paging=paging, **pools)


@pytest.mark.parametrize("name", HOWS)
def test_append(name: str) -> None:
    timing, arch = random.choice(["eager", "late", "random"]), random.choice(["sm_90a", "sm_100a"])
    given = kept_in(drawn(replace(HOWS[name], dtype=random.choice([torch.bfloat16, torch.float16]))))
    with ptxsim.device(arch, random.randrange(99), timing) as gpu:
        given.check()
    assert not gpu.findings, f"{timing} {arch}: {gpu.report()}"
    assert [result.kernel for result in gpu.results if "append" in result.kernel] and len(gpu.results) == 1


def test_other_lengths_are_the_same_kernel() -> None:
    """Other tokens, pages, and widths."""
    with ptxsim.device("sm_90a") as gpu:
        for d, before, new in ((32, (0, 5), (1, 1)), (64, (9, 2), (1, 40)), (128, (0, 0), (3, 7))):
            kept_in(drawn(replace(HOWS["packed, halves"], d=d), before, new)).check()
    assert len({result.kernel for result in gpu.results}) == 1 and len(gpu.results) == 3
    assert not gpu.findings, gpu.report()


def test_many_sequences() -> None:
    """Lengths of more sequences than a block has threads."""
    with ptxsim.device("sm_90a") as gpu:
        kept_in(drawn(How(packed=True, heads=1, d=8, dv=8), (3,) * 130, (0, 1) * 65)).check()
    assert not gpu.findings, gpu.report()


def plant(given: Tokens, name: str, value: int) -> None:
    if name == "length":
        given.paging.seqused_k[1] = value
    elif name == "page":
        given.paging.page_table[1, 0] = value
    else:
        given.options["varlen"].cu_seqlens_q[int(name)] = value


WRONG = {
    "negative length": (How(), "length", -3, "seqused_k of -3"),
    "past the table": (How(), "length", 22, "seqused_k of 22 and 5 tokens to append"),
    "far past the table": (How(wide=True), "length", 1 << 40, "seqused_k of 1099511627776 and 5 tokens"),
    "no page": (How(), "page", -3, "page -3 in the page table"),
    "page past the pool": (How(), "page", 10**9, "page 1000000000 in the page table"),
    "page with other upper bits": (How(wide=True), "page", 1 << 32, "page 4294967296 in the page table"),
    "ends": (How(packed=True), "3", 10**9, "cu_seqlens_q ends at 1000000000, q has 8 tokens"),
    "decreases": (How(packed=True), "2", 1, "cu_seqlens_q decreases after entry 1: 5 to 1"),
    "starts": (How(packed=True), "0", -7, "cu_seqlens_q starts at -7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_told_by_the_next_call(name: str) -> None:
    """Nothing outside is written, and sequences without a fault are right."""
    how, what, value, message = WRONG[name]
    given = kept_in(drawn(how, (7, 0, 12), (5, 3, 0)))
    exact, table = given.expected(), given.paging.page_table.clone()
    before = given.k_pool.clone()
    plant(given, what, value)
    with ptxsim.device("sm_90a") as gpu:
        found = given()
    assert not gpu.findings, gpu.report()
    with ptxsim.device("sm_90a"), pytest.raises(InputError, match=message):
        given()
    there = ~before.isnan()
    assert torch.equal(given.k_pool[there], before[there]), "keys that were there"
    if not what.isdigit():  # else who has which tokens is not known
        assert torch.equal(given.k_pool[table[0]].nan_to_num(), exact[0][table[0]].nan_to_num())
    mine = set(table.flatten().tolist())
    others = [page for page in range(before.shape[0]) if page not in mine]
    assert torch.equal(given.k_pool[others].nan_to_num(), before[others].nan_to_num())
    assert (found.seqused_k >= 0).all() and (found.seqused_k <= table.shape[1] * how.page_size).all()
    if what in ("length", "page"):
        wrong = table[1]
        changed = not torch.equal(given.k_pool[wrong].nan_to_num(), before[wrong].nan_to_num())
        assert changed == (name == "past the table" or what == "page"), "only what has a place is written"


def test_positions_without_angles_are_told() -> None:
    """One token alone: several would race for what is told."""
    given = drawn(How())
    table = torch.ones(16, 4)
    with ptxsim.device("sm_90a") as gpu:
        replace(given, options={"rotary": Rotary(guarded(table), guarded(table))})()
    assert not gpu.findings
    with pytest.raises(InputError, match="one of the 16 rows of cos"):
        fa4flex.synchronize()


@pytest.mark.parametrize(
    ("axes", "plant", "message"),
    [
        (0, "position", "position 1099511627776"),
        (3, "position", "position -5"),
        (3, "axis", "axis 9 of an angle"),
    ],
)
def test_wrong_positions_are_told(axes: int, plant: str, message: str) -> None:
    """Angles are those of some other position, and nothing outside of the tables is read."""
    given = drawn(How(turning=16, axes=axes, wide=True, queries=True))
    options = {**given.options, "positions": guarded(given.options["positions"])}
    if plant == "position":
        options["positions"][..., 1, 2] = -5 if axes else 1 << 40
    else:
        options["rotary"].axes[3] = 9
    with ptxsim.device("sm_90a") as gpu:
        replace(given, options=options)()
    assert not gpu.findings, gpu.report()
    with pytest.raises(InputError, match=message):
        fa4flex.synchronize()


def test_validation_refuses_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa4flex.contents.VALIDATE", True)
    given = drawn(How())
    given.paging.seqused_k[1] = -3
    with ptxsim.device("sm_90a") as gpu, pytest.raises(InputError, match="seqused_k of -3"):
        given()
    assert not gpu.results


def test_other_dtypes_are_refused() -> None:
    with ptxsim.device("sm_90a"), pytest.raises(UnsupportedError, match="float32 tensors"):
        drawn(How(dtype=torch.float32))()
