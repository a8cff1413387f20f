"""Instructions put together give what they give one by one."""

from __future__ import annotations

import dataclasses
import random
import struct

import pytest
import torch
from planted import EXCHANGE, text

from ptxsim import Shape
from ptxsim.run import program as programs
from ptxsim.run.launch import Result, execute, module_of
from ptxsim.run.program import Program
from ptxsim.state.cta import Warp
from ptxsim.state.registers import Mask

REGISTERS = 12
"""Few, so that instructions depend on each other in every way."""
PATTERNS = (
    "add.s32 %x{a}, %x{b}, %x{c};",
    "add.s32 %x{a}, %x{b}, {i};",
    "xor.b32 %x{a}, %x{b}, %x{c};",
    "shl.b32 %x{a}, %x{b}, 3;",
    "mul.lo.s32 %x{a}, %x{b}, %x{c};",
    "mad.lo.s32 %x{a}, %x{b}, %x{c}, {i};",
    "add.rn.f32 %x{a}, %x{b}, %x{c};",
    "mul.rn.f32 %x{a}, %x{b}, 0f3FC00000;",
    "fma.rn.f32 %x{a}, %x{b}, %x{c}, %x{d};",
    "max.f32 %x{a}, %x{b}, %x{c};",
    "ex2.approx.ftz.f32 %x{a}, %x{b};",
    "cvt.rn.bf16x2.f32 %x{a}, %x{b}, %x{c};",
    "mov.b32 %x{a}, %x{b};",
    "mov.b32 %x{a}, {i};",
    "mov.u32 %x{a}, %laneid;",
    "mov.b64 %w{a}, {{%x{b}, %x{c}}};",
    "mov.b64 %w{a}, {{%x{b}, {i}}};",
    "mov.b64 {{%x{a}, %x{b}}}, %w{c};",
    "mov.b64 {{_, %x{b}}}, %w{c};",
    "fma.rn.f32x2 %w{a}, %w{b}, %w{c}, %w{d};",
    "add.rn.f32x2 %w{a}, %w{b}, %w{c};",
    "setp.lt.s32 %q{p}, %x{b}, %x{c};",
    "setp.gt.f32 %q{p}, %x{b}, %x{c};",
    "selp.b32 %x{a}, %x{b}, %x{c}, %q{p};",
    "@%q{p} add.s32 %x{a}, %x{b}, %x{c};",
    "@!%q{p} mov.b32 %x{a}, %x{b};",
    "cvt.u64.u32 %w{a}, %x{b};",
    "shfl.sync.bfly.b32 %x{a}, %x{b}, 1, 31, 0xffffffff;",
    "st.shared.b32 [%r4], %x{b};",
    "ld.shared.b32 %x{a}, [%r4];",
    "st.shared.v2.b32 [%r5], {{%x{b}, %x{c}}};",
)
HEAD = f"""
    .reg .b32 %x<{REGISTERS}>;
    .reg .b64 %w<{REGISTERS}>;
    .reg .pred %q<3>;
    st.shared.b32 [%r4], %r1;
    shl.b32 %r5, %r1, 3;
    add.s32 %r5, %r5, %r3;
    add.s32 %r5, %r5, 512;
"""


def body(instructions: int) -> str:
    """Random instructions in a row, then every register to global memory, 64 words a lane."""
    lines = []
    for index in range(REGISTERS):
        lines += [
            f"mul.lo.s32 %x{index}, %r1, {random.getrandbits(30) | 1};",
            f"mov.b64 %w{index}, {{%x{index}, %r1}};",
        ]
    lines += [f"setp.lt.u32 %q{index}, %r1, {random.randint(1, 32)};" for index in range(3)]
    for _ in range(instructions):
        a, b = random.sample(range(REGISTERS), 2)  # two results of one instruction must differ
        c, d = random.choices([a, b, *range(REGISTERS)], k=2)
        number = random.choice([0, 1, -1, random.getrandbits(31)])
        pattern = random.choice(PATTERNS)
        lines.append(pattern.format(a=a, b=b, c=c, d=d, i=number, p=random.randrange(3)))
    lines += ["mul.wide.u32 %rd2, %r1, 256;", "add.s64 %rd3, %rd1, %rd2;"]
    for index in range(REGISTERS):
        lines.append(f"st.global.b32 [%rd3+{4 * index}], %x{index};")
        lines.append(f"st.global.b64 [%rd3+{4 * REGISTERS + 8 * index}], %w{index};")
    return HEAD + "\n".join(lines)


def outcome(ptx: str, monkeypatch: pytest.MonkeyPatch, worth: float) -> torch.Tensor:
    """int32 [32 lanes, 64], with blocks put together from the execution after `worth` on."""
    monkeypatch.setattr("ptxsim.run.scheduler.WORTH_PLANNING", worth)
    module = module_of(ptx)
    out = torch.zeros(32, 64, dtype=torch.int32)
    shape, parameters = Shape((1, 1, 1), (32, 1, 1)), struct.pack("<Q", out.data_ptr())
    result = execute(module, Program.of(module.kernels["planted"]), shape, parameters)
    assert result.fault is None and not result.findings
    return out


@pytest.mark.parametrize("instructions", [20, 40, 60, 60, 80, 80, 120, 300])
def test_any_instructions_in_a_row(instructions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = text(body(instructions), "sm_100a")
    one_by_one = outcome(ptx, monkeypatch, float("inf"))
    assert torch.equal(outcome(ptx, monkeypatch, -1), one_by_one)
    assert one_by_one.any()


def test_independent_instructions_are_one() -> None:
    lines = [f"mul.rn.f32 %x{i}, %x{i}, %x{i};" for i in range(REGISTERS)]
    lines += [f"mov.b64 %w{i}, {{%x{i}, %x{i}}};" for i in range(REGISTERS)]
    module = module_of(
        text("setp.eq.u32 %p3, %r1, 99;\n@%p3 bra ON;\nON:\n" + HEAD[: HEAD.index("st.")] + "\n".join(lines))
    )
    program = Program.of(module.kernels["planted"])
    last = program.blocks[max(program.blocks)]
    assert len(last.steps) == 2 * REGISTERS
    assert len(last.planned) == 2


def test_an_observer_sees_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step put in front of a block's own is executed once each time, before them."""
    monkeypatch.setattr("ptxsim.run.scheduler.WORTH_PLANNING", -1)
    module = module_of(text(EXCHANGE))
    program = Program.of(module.kernels["planted"])
    seen: list[int] = []

    def watched(block: programs.Block) -> programs.Block:
        def note(warp: Warp, mask: Mask) -> None:
            seen.append(block.start)

        return dataclasses.replace(block, steps=[(note, None), *block.steps])

    blocks = {start: block if block.act else watched(block) for start, block in program.blocks.items()}
    out = torch.zeros(64, dtype=torch.int32)
    shape, parameters = Shape((1, 1, 1), (64, 1, 1)), struct.pack("<Q", out.data_ptr())
    result: Result = execute(module, dataclasses.replace(program, blocks=blocks), shape, parameters)
    assert not result.findings
    plain = {start: times for (_, _, start), times in result.executed.items() if blocks[start].act is None}
    assert sorted(set(seen)) == sorted(plain)
    assert len(seen) == sum(times for (_, _, start), times in result.executed.items() if start in plain)
