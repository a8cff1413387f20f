"""Exchange, votes, reductions and elections, against one lane at a time in plain Python."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from machine import at, execute, instruction, kinds, machine, reg, some_lanes, written

from ptxsim.isa.table import Act, Unmodelled, translate
from ptxsim.ptx.nodes import Address, Discard, Imm, Negated, Pair
from ptxsim.state.window import RANK_SHIFT, SHARED_WINDOW
from ptxsim.watch.findings import Fault

D, A, B, C, M = (reg("b32", i) for i in range(5))
P, Q = reg("pred", 0), reg("pred", 1)
ALL = Imm(-1)
LANES = range(32)


def bits_of(lanes: Any) -> int:
    return sum(1 << lane for lane in LANES if lanes[lane])


# --- shfl ---------------------------------------------------------------------------------------------------


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane, in range: the pseudocode of the PTX ISA."""
    bval, cval, segment = b & 31, c & 31, c >> 8 & 31
    high = (lane & segment) | (cval & ~segment & 31)
    low = lane & segment
    if mode == "up":
        source, inside = lane - bval, lane - bval >= high
    elif mode == "down":
        source, inside = lane + bval, lane + bval <= high
    elif mode == "bfly":
        source, inside = lane ^ bval, lane ^ bval <= high
    else:
        source = low | (bval & ~segment & 31)
        inside = source <= high
    return (source, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("registers", [False, True])
def test_shfl(mode: str, registers: bool) -> None:
    warp = machine().warps[0]
    for _ in range(12):
        c = np.random.choice([0, 31, 0x1F, 0x181F, 0x1C03, np.random.randint(2**13)])
        b = np.random.randint(0, 40, 32) if registers else np.full(32, np.random.randint(40))
        warp.u32[1][:] = values = np.random.randint(0, 2**32, 32, np.uint32)
        warp.u32[2][:], warp.u32[3][:] = b, c
        execute(
            warp,
            f"shfl.sync.{mode}.b32",
            Pair(D, P),
            A,
            B if registers else Imm(int(b[0])),
            C if registers else Imm(int(c)),
            ALL,
        )
        for lane in LANES:
            source, inside = shuffled(mode, lane, int(b[lane]), int(c))
            assert warp.u32[0][lane] == values[source % 32], (mode, lane, c, b[lane])
            assert warp.pred[0][lane] == inside


def test_shfl_gives_no_value_of_an_absent_lane() -> None:
    cluster = machine()
    warp = cluster.warps[0]
    lanes = some_lanes()
    warp.u32[0][:], warp.u32[1][:] = 7, np.arange(32)
    execute(warp, "shfl.sync.bfly.b32", D, A, Imm(1), Imm(31), Imm(bits_of(lanes)), mask=lanes)
    for lane in LANES:
        if lanes[lane]:
            assert warp.u32[0][lane] == (lane ^ 1 if lanes[lane ^ 1] else 0xA5A5A5A5)
        else:
            assert warp.u32[0][lane] == 7
    assert kinds(cluster) == []


def test_shfl_may_write_its_source() -> None:
    warp = machine().warps[0]
    warp.f32[1][:] = np.arange(32)
    for distance in (16, 8, 4, 2, 1):
        execute(warp, "shfl.sync.bfly.b32", D, A, Imm(distance), Imm(31), ALL)
        warp.f32[1][:] += warp.f32[0]
    assert (warp.f32[1] == sum(LANES)).all()


def test_two_teams_with_their_own_membermasks() -> None:
    cluster = machine()
    warp = cluster.warps[0]
    warp.u32[1][:], warp.u32[4][:] = np.arange(32), np.where(np.arange(32) < 16, 0xFFFF, 0xFFFF0000)
    execute(warp, "redux.sync.add.u32", D, A, M)
    assert warp.u32[0].tolist() == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16
    execute(warp, "elect.sync", Pair(D, P), M)
    assert warp.u32[0].tolist() == [0] * 16 + [16] * 16
    assert np.flatnonzero(warp.pred[0]).tolist() == [0, 16]
    assert kinds(cluster) == []


# --- membermasks --------------------------------------------------------------------------------------------


def test_misuse_of_membermasks_is_reported() -> None:
    half = np.arange(32) < 16
    for named in (0x00FF, 0x1FFFF, 0xFFFFFFFF):
        cluster = machine()
        execute(cluster.warps[0], "bar.warp.sync", Imm(named), mask=half)
        assert kinds(cluster) == ["misuse"], hex(named)
    cluster = machine(threads=16)
    execute(cluster.warps[0], "bar.warp.sync", ALL)  # lanes that do not exist need not come
    execute(cluster.warps[0], "barrier.warp.sync", Imm(0xFFFF))
    execute(cluster.warps[0], "barrier.warp.sync", Imm(0x1FFFF))
    assert kinds(cluster) == []


# --- votes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_vote(partial: bool) -> None:
    cluster = machine()
    warp = cluster.warps[0]
    for chance in (0.0, 0.1, 0.9, 1.0, 1.0):
        lanes = some_lanes() if partial else np.ones(32, bool)
        mask = lanes if partial else None
        warp.pred[1][:] = votes = np.random.rand(32) < chance
        if chance == 1.0 and np.random.rand() < 0.5:
            votes = warp.pred[1] = votes | ~lanes
        mine = [bool(votes[lane]) for lane in LANES if lanes[lane]]
        for mode, want in (
            ("all", all(mine)),
            ("any", any(mine)),
            ("uni", len(set(mine)) == 1),
        ):
            warp.pred[0][:] = ~np.bool_(want)
            execute(warp, f"vote.sync.{mode}.pred", P, Q, Imm(bits_of(lanes)), mask=mask)
            assert (warp.pred[0][lanes] == want).all(), mode
            assert (warp.pred[0][~lanes] != want).all()
        execute(warp, "vote.sync.ballot.b32", D, Q, Imm(bits_of(lanes)), mask=mask)
        assert (warp.u32[0][lanes] == bits_of(votes & lanes)).all()
        execute(warp, "vote.sync.ballot.b32", D, Negated(Q), Imm(bits_of(lanes)), mask=mask)
        assert (warp.u32[0][lanes] == bits_of(~votes & lanes)).all()
        execute(warp, "activemask.b32", D, mask=mask)
        assert (warp.u32[0][lanes] == bits_of(lanes)).all()
    assert kinds(cluster) == []


@pytest.mark.parametrize("bits", [32, 64])
def test_match(bits: int) -> None:
    warp = machine().warps[0]
    source = reg(f"b{bits}", 1)
    registers = warp.u32 if bits == 32 else warp.u64
    for different in (1, 3, 40):
        lanes = some_lanes()
        registers[1][:] = values = np.random.randint(0, different, 32).astype(np.uint64) << (bits - 8)
        execute(warp, f"match.any.sync.b{bits}", D, source, Imm(bits_of(lanes)), mask=lanes)
        for lane in np.flatnonzero(lanes):
            same = [lanes[other] and values[other] == values[lane] for other in LANES]
            assert warp.u32[0][lane] == bits_of(same)
        execute(warp, f"match.all.sync.b{bits}", Pair(D, P), source, Imm(bits_of(lanes)), mask=lanes)
        agree = len({int(v) for v in values[lanes]}) == 1
        assert (warp.u32[0][lanes] == (bits_of(lanes) if agree else 0)).all()
        assert (warp.pred[0][lanes] == agree).all()


# --- reductions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_redux_of_integers(op: str, kind: str) -> None:
    warp, lanes = machine().warps[0], some_lanes()
    warp.u32[1][:] = np.random.randint(0, 2**32, 32, np.uint32)
    source = [int(v) for v in (warp.u32 if kind == "u32" else warp.s32)[1][lanes]]
    want = {"add": sum, "min": min, "max": max}[op](source) % 2**32
    execute(warp, f"redux.sync.{op}.{kind}", D, A, Imm(bits_of(lanes)), mask=lanes)
    assert (warp.u32[0][lanes] == want).all()
    execute(warp, f"redux.sync.{op}.{kind}", A, A, Imm(bits_of(lanes)), mask=lanes)
    assert (warp.u32[1][lanes] == want).all()


def test_redux_of_bits() -> None:
    warp, lanes = machine().warps[0], some_lanes()
    warp.u32[1][:] = np.random.randint(0, 2**32, 32, np.uint32) | 0x100
    both, either, odd = 0xFFFFFFFF, 0, 0
    for value in warp.u32[1][lanes].tolist():
        both, either, odd = both & value, either | value, odd ^ value
    for op, want in (("and", both), ("or", either), ("xor", odd)):
        execute(warp, f"redux.sync.{op}.b32", D, A, Imm(bits_of(lanes)), mask=lanes)
        assert (warp.u32[0][lanes] == want).all(), op


def float_reduced(op: str, values: list[float], absolute: bool, nan: bool) -> int:
    """The bits of the result."""
    values = [abs(v) for v in values] if absolute else values
    numbers = [v for v in values if not math.isnan(v)]
    if not numbers or (nan and len(numbers) < len(values)):
        return 0x7FFFFFFF
    result = (min if op == "min" else max)(numbers, key=lambda v: (v, math.copysign(1, v)))
    return int(struct.unpack("<I", struct.pack("<f", result))[0])


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("nan", [False, True])
def test_redux_of_floats(op: str, absolute: bool, nan: bool) -> None:
    warp = machine().warps[0]
    pools: list[Any] = [np.random.randn(32), [0.0, -0.0], [-0.0, -1e-42, 1e-42, 0.0], [math.nan]]
    pools += [[math.nan, 1.5, -2.5, -math.inf], [math.inf, -math.inf, 3.0]]
    opcode = f"redux.sync.{op}{'.abs' if absolute else ''}{'.NaN' if nan else ''}.f32"
    for pool in pools:
        for _ in range(4):
            warp.f32[1][:] = np.random.choice(pool, 32)
            execute(warp, opcode, reg("f32", 0), reg("f32", 1), ALL)
            want = float_reduced(op, warp.f32[1].tolist(), absolute, nan)
            assert (warp.u32[0] == want).all(), (pool, hex(int(warp.u32[0][0])), hex(want))


# --- election, system ---------------------------------------------------------------------------------------


def test_elect() -> None:
    warp = machine().warps[0]
    for _ in range(5):
        lanes = some_lanes()
        leader = int(np.flatnonzero(lanes)[0])
        warp.pred[0][:] = True
        execute(warp, "elect.sync", Pair(D, P), Imm(bits_of(lanes)), mask=lanes)
        assert (warp.u32[0][lanes] == leader).all()
        assert (warp.pred[0] == (~lanes | (np.arange(32) == leader))).all()
    execute(warp, "elect.sync", Pair(Discard(), P), ALL)
    assert np.flatnonzero(warp.pred[0]).tolist() == [0]


@pytest.mark.parametrize("kind", ["u32", "u64"])
def test_mapa_and_getctarank(kind: str) -> None:
    cluster = machine(ctas=4)
    warp = cluster.ctas[2].warps[0]
    registers = warp.u32 if kind == "u32" else warp.u64
    offsets, ranks = np.random.randint(0, 2**18, 32), np.random.randint(0, 4, 32)
    registers[5][:], warp.u32[1][:] = (2 << RANK_SHIFT) + offsets, ranks
    execute(warp, f"mapa.shared::cluster.{kind}", reg(kind, 6), reg(kind, 5), A)
    execute(warp, f"getctarank.shared::cluster.{kind}", D, reg(kind, 6))
    for lane in LANES:
        assert registers[6][lane] == int(ranks[lane]) * 2**24 + int(offsets[lane])
    assert warp.u32[0].tolist() == ranks.tolist()
    if kind == "u64":
        registers[5][:] += np.uint64(SHARED_WINDOW)
        execute(warp, "mapa.u64", reg(kind, 6), reg(kind, 5), Imm(3))
        execute(warp, "getctarank.u64", D, reg(kind, 6))
        assert registers[6].tolist() == [SHARED_WINDOW + 3 * 2**24 + int(o) for o in offsets]
        assert (warp.u32[0] == 3).all()


def test_a_mapped_address_reaches_the_other_cta() -> None:
    cluster = machine(ctas=2)
    written(cluster, 1)
    cluster.ctas[1].shared.data[:128] = np.arange(128)
    warp = cluster.ctas[0].warps[0]
    warp.u32[1][:] = np.arange(32) * 4
    execute(warp, "mapa.shared::cluster.u32", A, A, Imm(1))
    execute(warp, "ld.shared::cluster.b32", D, at(A))
    assert warp.u32[0].view(np.uint8).tolist() == list(range(128))


def test_instructions_without_effect() -> None:
    warp = machine().warps[0]
    execute(warp, "setmaxnreg.dec.sync.aligned.u32", Imm(24))
    execute(warp, "griddepcontrol.wait")
    execute(warp, "prefetch.tensormap", at(reg("b64", 1)))
    execute(warp, "prefetch.global.L2::evict_last", at(reg("b64", 1)))
    execute(warp, "discard.global.L2", at(reg("b64", 1)), Imm(128))
    execute(warp, "applypriority.global.L2::evict_normal", at(reg("b64", 1)), Imm(128))
    execute(warp, "cp.async.bulk.prefetch.L2.global", at(reg("b64", 1)), Imm(128))
    tile = Address(reg("b64", 1), 0, (Imm(0), Imm(0)))
    execute(warp, "cp.async.bulk.prefetch.tensor.2d.L2.global.tile", tile)
    execute(warp, "createpolicy.fractional.L2::evict_first.b64", reg("b64", 2), Imm(1.0))
    assert (warp.u64[2] == 0).all()
    assert isinstance(translate(instruction("nanosleep.u32", Imm(40))), Act)


def test_trap_ends_the_launch() -> None:
    with pytest.raises(Fault, match="executes trap") as caught:
        execute(machine().warps[0], "trap", line=12)
    assert caught.value.finding.kind == "trap"
    assert caught.value.finding.place[1] == 12


@pytest.mark.parametrize(
    ("opcode", "operands"),
    [
        ("shfl.bfly.b32", (D, A, Imm(1), Imm(31))),
        ("shfl.sync.rot.b32", (D, A, Imm(1), Imm(31), ALL)),
        ("vote.any.pred", (P, Q)),
        ("vote.sync.most.pred", (P, Q, ALL)),
        ("match.any.sync.b32", (Pair(D, P), A, ALL)),
        ("redux.sync.add.f32", (D, A, ALL)),
        ("redux.sync.and.s32", (D, A, ALL)),
        ("elect", (Pair(D, P), ALL)),
        ("setmaxnreg.inc.sync.aligned.u32", (Imm(100),)),
        ("setmaxnreg.inc.sync.aligned.u32", (Imm(264),)),
        ("setmaxnreg.inc.sync.aligned.u32", (Imm(16),)),
        ("mapa.u32", (D, A, B)),
        ("prefetch.global.L3", (at(A),)),
        ("createpolicy.fractional.L1::evict_first.b64", (reg("b64", 0),)),
        ("griddepcontrol.linger", ()),
    ],
)
def test_what_is_not_modelled_raises(opcode: str, operands: Any) -> None:
    with pytest.raises(Unmodelled):
        translate(instruction(opcode, *operands))
