"""The model of time on traces made by hand, whose clocks can be told by hand."""

from __future__ import annotations

import dataclasses

import pytest
from traces import instruction, straight, trace

from ptxsim.errors import InputError, UnsupportedError
from ptxsim.model import B200, predict
from ptxsim.model.costs import cost
from ptxsim.model.events import Arrived, Awaited, Committed, Loaded, Made, Met, Multiplied
from ptxsim.model.lower import Lowering
from ptxsim.model.machine import Machine

MMA = (
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
    "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
)
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];"
INIT = "mbarrier.init.shared.b64 [%r3], 1;"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r3];"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p2, [%r3], %r4;"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd5], %r6, [%r3];"
BAR = (0, 1024)
OTHER = (0, 1032)
TILE = 2 * 128 * 128 * 16
"""Flops of an MMA that takes 64 clocks."""


def clocks(made, chip=B200) -> float:
    return Machine(made, chip).run()


def exponentials(count: int) -> list[str]:
    return [f"ex2.approx.ftz.f32 %r{i}, %r{i + 100};" for i in range(count)]


# --- pipes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warps", "expected"), [((0,), 32), ((0, 4), 64), ((0, 1), 32), ((0, 1, 4, 5, 8), 96)]
)
def test_special_functions_are_sixteen_lanes_a_clock(warps: tuple[int, ...], expected: int) -> None:
    """A warp instruction every 8 clocks on each sub-core; warps 0, 4 and 8 share one."""
    made = straight(exponentials(32), *warps)
    assert clocks(made) == pytest.approx((expected - 1) * 8 + 1, abs=2)


def test_a_chain_of_dependent_instructions_takes_its_latencies() -> None:
    chain = [f"fma.rn.f32 %r{i + 1}, %r{i}, %r200, %r201;" for i in range(50)]
    assert clocks(straight(chain, 0)) == 49 * B200.alu_latency + 1
    # The latencies of one warp are the other's time.
    assert clocks(straight(chain, 0, 4)) == pytest.approx(49 * B200.alu_latency + 2, abs=1)


def test_one_instruction_a_clock_and_sub_core() -> None:
    """Three warps' arithmetic keeps two pipes busy for 120 clocks each; it takes 180 to issue it, and some
    more as warps issue in order."""
    mixed = [f"fma.rn.f32 %r{i}, %r100, %r101, %r102;" for i in range(40)]
    mixed += [f"and.b32 %r{i + 40}, %r100, %r101;" for i in range(20)]
    made = straight(["mov.u32 %r100, %tid.x;", *mixed], 0, 4, 8)
    assert 180 <= clocks(made) < 205


def test_packed_arithmetic_has_half_the_rate() -> None:
    single = [f"add.rn.f32 %r{i}, %r100, %r101;" for i in range(60)]
    packed = [f"add.rn.f32x2 %rd{i}, %rd100, %rd101;" for i in range(60)]
    assert clocks(straight(single, 0)) == 60
    assert clocks(straight(packed, 0)) == 59 * 2 + 1


def test_work_is_done_in_the_shadow_of_special_functions() -> None:
    """40 exponentials take 320 clocks, within which 100 additions fit: but for those, in source order
    behind."""
    both = [*exponentials(40), *(f"add.rn.f32 %r{i + 41}, %r200, %r201;" for i in range(50))]
    assert clocks(straight(both, 0)) == pytest.approx(39 * 8 + 1, abs=3)


def test_moves_cost_nothing() -> None:
    plain = ["add.rn.f32x2 %rd1, %rd2, %rd3;", "add.rn.f32x2 %rd4, %rd1, %rd3;"]
    moved = [
        "add.rn.f32x2 %rd1, %rd2, %rd3;",
        "mov.b64 {%r1, %r2}, %rd1;",
        "mov.b64 %rd5, {%r1, %r2};",
        "add.rn.f32x2 %rd4, %rd5, %rd3;",
    ]
    assert clocks(straight(moved, 0)) == clocks(straight(plain, 0))


def test_a_shift_that_feeds_an_addition_is_one_multiplication() -> None:
    lines = ["mov.u32 %r1, %tid.x;", "shl.b32 %r2, %r1, 23;", "mov.b32 %r3, %r2;", "add.s32 %r4, %r3, %r1;"]
    made = straight(lines, 0)
    (stretch,) = {
        id(piece): piece for piece, _ in Lowering(made.kernel, B200, 32).pieces(made.warps[0])
    }.values()
    assert [op.cost.name for op in stretch.ops] == ["IMAD"]


@pytest.mark.parametrize(
    ("text", "unit", "hold"),
    [
        ("ex2.approx.ftz.f32 %r1, %r2;", "xu", 8),
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", "fma", 1),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", "fma", 2),
        ("max.f32 %r1, %r2, %r3, %r4;", "alu", 2),
        ("cvt.rn.bf16x2.f32 %r1, %r2, %r3;", "alu", 2),
        ("cvt.rn.f32.s32 %r1, %r2;", "xu", 8),
        ("mad.lo.s32 %r1, %r2, %r3, %r4;", "fma", 2),
        ("xor.b32 %r1, %r2, %r3;", "alu", 2),
        ("mov.b32 %r1, %r2;", "", 0),
    ],
)
def test_the_table(text: str, unit: str, hold: float) -> None:
    found = cost(instruction(text), B200, uniform=False)
    assert (found.unit, found.hold) == (unit, hold)


def test_what_is_the_same_in_all_lanes_runs_beside_the_lanes() -> None:
    addition = instruction("add.s32 %r1, %r2, 8;")
    assert cost(addition, B200, uniform=True).unit == "" and cost(addition, B200, uniform=False).unit == "alu"


def test_an_instruction_without_a_cost_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"wgmma\.fence"):
        cost(instruction("wgmma.fence.sync.aligned;"), B200, uniform=False)


def test_what_takes_more_registers_than_there_are_comes_later() -> None:
    """Conversions of pairs free registers. Where there are plenty, sums are computed as they come; with 14,
    never more than ten of them are held."""
    lines = ["ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%r255];"]
    lines += [f"add.rn.f32 %r{100 + i}, %r{i % 4}, %r{i % 3};" for i in range(24)]
    lines += [f"cvt.rn.bf16x2.f32 %r{200 + i}, %r{100 + 2 * i}, %r{101 + 2 * i};" for i in range(12)]
    lines += [f"st.shared.b32 [%r255], %r{200 + i};" for i in range(12)]
    lowering = Lowering(straight(lines, 0).kernel, B200, 32)
    held = []
    for registers in (255, 14):
        order = [op.cost.name for op in lowering.stretch(0, len(lines), registers).ops]
        open_now = [order[:i].count("FFMA") - 2 * order[:i].count("F2FP") for i in range(len(order))]
        held.append(max(open_now))
    assert held[0] > held[1] and held[1] <= 10


# --- memories -----------------------------------------------------------------------------------------------


def test_shared_memory_is_128_bytes_a_clock_for_all_sub_cores() -> None:
    lines = [
        f"ld.shared.v4.b32 {{%r{4 * i}, %r{4 * i + 1}, %r{4 * i + 2}, %r{4 * i + 3}}}, [%r255];"
        for i in range(16)
    ]
    lines += ["add.s32 %r200, %r63, %r62;"]
    one, four = clocks(straight(lines, 0)), clocks(straight(lines, 0, 1, 2, 3))
    assert one == pytest.approx(16 * 4 + B200.shared_latency, abs=3)
    assert four == pytest.approx(64 * 4 + B200.shared_latency, abs=3)


def test_tensor_memory_gives_each_sub_core_its_lanes() -> None:
    lines = [
        f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r{2 * i}, %r{2 * i + 1}}}, [%r255];" for i in range(16)
    ]
    lines += ["xor.b32 %r200, %r31, %r30;"]
    data = 16 * 2 * 128 / (B200.tensor_load_bytes / 4)
    for warps in ((0,), (0, 1, 2, 3)):
        assert clocks(straight(lines, *warps)) == pytest.approx(data + B200.tensor_load_latency, abs=3)
    shared = clocks(straight(lines, 0, 4))
    assert shared == pytest.approx(2 * data + B200.tensor_load_latency, abs=4), "warps 0 and 4 share lanes"


# --- barriers -----------------------------------------------------------------------------------------------


def test_a_signal_takes_an_arrival_and_the_end_of_a_wait() -> None:
    """Two warps hand a turn to each other ten times."""
    lines = [INIT, ARRIVE, WAIT, WAIT, ARRIVE]
    made = {0: (Made(BAR, 1), Made(OTHER, 1))}
    first = {1: Arrived(BAR, 1), 2: lambda turn: Awaited(OTHER, turn + 1)}
    second = {3: lambda turn: Awaited(BAR, turn + 1), 4: Arrived(OTHER, 1)}
    both = trace(lines, [(0, 0, [0, *[1, 2] * 10], made | first), (0, 1, [3, 4] * 10, second)])
    assert clocks(both) == pytest.approx(20 * (B200.arrive_latency + B200.wait_latency), rel=0.05)


def test_a_signal_to_the_other_cta_takes_longer() -> None:
    """Warp 0 of CTA 1 waits for an arrival from its own CTA, or from CTA 0."""
    key = (1, 1024)
    waits = (1, 0, [0, 2], {0: Made(key, 1), 2: Awaited(key, 1)})
    near, far = (
        clocks(trace([INIT, ARRIVE, WAIT], [waits, (rank, 1, [1], {1: Arrived(key, 1)})], ctas=2))
        for rank in (1, 0)
    )
    assert far - near == pytest.approx(B200.remote_latency, abs=1)


def test_named_barriers_hold_warps_until_all_have_come() -> None:
    """Warp 1 comes late, after a chain of additions whose result it stores."""
    chain = [f"add.rn.f32 %r{i + 1}, %r{i}, %r200;" for i in range(30)]
    lines = [*chain, "st.shared.b32 [%r201], %r30;", "bar.sync 1, 64;"]
    meets = {31: Met((0, -2), 64, True)}
    machine = Machine(trace(lines, [(0, 0, [31], meets), (0, 1, range(32), meets)]), B200)
    machine.run()
    ends = [walker.end for walker in machine.walkers]
    assert ends == [pytest.approx(30 * B200.alu_latency + 2 + B200.named_latency, abs=3)] * 2


def test_a_trace_whose_barrier_is_never_reached_is_told() -> None:
    alone = trace([INIT, WAIT], [(0, 0, [0, 1], {0: Made(BAR, 1), 1: Awaited(BAR, 1)})])
    with pytest.raises(AssertionError, match="waits for ever"):
        clocks(alone)


# --- tensor cores and copies --------------------------------------------------------------------------------


def loop(job: Multiplied, mma: str, ctas: int = 1) -> float:
    """Clocks of 80 MMAs that are waited for once, at the end."""
    does = {0: Made(BAR, 1), 1: job, 2: Committed((BAR,)), 3: Awaited(BAR, 1)}
    ways = [(0, 0, [0, *[1] * 80, 2, 3], does), *((rank, 0, [], {}) for rank in range(1, ctas))]
    return clocks(trace([INIT, mma, COMMIT, WAIT], ways, ctas))


AROUND = B200.mma_latency + B200.commit_latency + B200.wait_latency


@pytest.mark.parametrize(
    ("job", "each"),
    [
        (Multiplied(1, TILE, 4096, False), 64),
        (Multiplied(1, TILE, 16384, False), 128),
        (Multiplied(1, TILE, 4096, True), 32),
    ],
    ids=["16 bits", "bound by shared memory", "8 bits"],
)
def test_mmas_one_after_another(job: Multiplied, each: int) -> None:
    assert loop(job, MMA[0]) == pytest.approx(80 * (each + B200.mma_gap) + AROUND, rel=0.01)


def test_a_pair_of_ctas_multiplies_twice_as_much_in_the_same_time() -> None:
    expected = 80 * (64 + B200.mma_gap) + AROUND
    assert loop(Multiplied(2, 2 * TILE, 4096, False), MMA[1], ctas=2) == pytest.approx(expected, rel=0.01)


def test_a_copy_takes_its_latency_and_its_bytes() -> None:
    lines = [INIT, "mbarrier.arrive.expect_tx.shared.b64 _, [%r3], %r6;", LOAD, WAIT]
    found = []
    for size in (1024, 65536):
        does = {0: Made(BAR, 1), 1: Arrived(BAR, 1, size), 2: Loaded(((0, size, BAR),)), 3: Awaited(BAR, 1)}
        found.append(clocks(trace(lines, [(0, 0, range(4), does)])))
    first = B200.tma_latency + 1024 / B200.tma_bytes + 1024 / B200.shared_bytes
    assert found[0] == pytest.approx(12 + first + B200.wait_latency, abs=3)
    assert found[1] - found[0] == pytest.approx((65536 - 1024) / B200.tma_bytes, rel=0.01)


# --- predictions --------------------------------------------------------------------------------------------


def test_a_loop_bound_by_mmas_reaches_the_peak() -> None:
    """Without gaps; what the steady state leaves out is in the overhead."""
    chip = dataclasses.replace(B200, mma_gap=0.0)
    does = {0: Made(BAR, 1), **dict.fromkeys(range(1, 5), Multiplied(1, TILE, 1024, False))}
    does |= {5: Committed((BAR,)), 6: lambda turn: Awaited(BAR, turn + 1)}
    order = [0, *[1, 2, 3, 4, 5] * 2, *[1, 2, 3, 4, 5, 6] * 38]
    found = predict(trace([INIT, *[MMA[0]] * 4, COMMIT, WAIT], [(0, 0, order, does)]), chip)
    assert found.cycles_per_step == pytest.approx(256, rel=0.01) and found.step_flops == 4 * TILE
    assert found.bound == "tensor core" and found.utilisation["tensor core"] == pytest.approx(1, abs=0.02)
    assert found.steady_tflops == pytest.approx(chip.peak_tflops, rel=0.01)
    assert found.cycles == pytest.approx(found.overhead + 40 * found.cycles_per_step)


def test_a_loop_of_mmas_and_exponentials_is_bound_by_the_slower() -> None:
    """One MMA of 64 clocks a turn, or 20 exponentials of 8 in the same warp, that do not wait for each
    other."""
    lines = [INIT, MMA[0], *exponentials(20)]
    does = {0: Made(BAR, 1), 1: Multiplied(1, TILE, 1024, False)}
    found = predict(trace(lines, [(0, 0, [0, *list(range(1, 22)) * 30], does)]))
    assert found.cycles_per_step == pytest.approx(160, rel=0.02)
    assert found.utilisation["tensor core"] == pytest.approx(64 / 160, abs=0.03)
    (role,) = found.roles
    assert role.name == "mma" and role.waiting["xu"] > 0.5


def test_a_kernel_without_a_loop_is_refused() -> None:
    with pytest.raises(InputError, match=r"without tcgen05\.mma"):
        predict(straight(exponentials(4), 0))
    once = trace([MMA[0]], [(0, 0, [0] * 3, {0: Multiplied(1, TILE, 0, False)})])
    with pytest.raises(InputError, match="3 iterations"):
        predict(once)
