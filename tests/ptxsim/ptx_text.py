"""Small kernels for tests of the PTX front, with registers that the tests know."""

from __future__ import annotations

from dataclasses import replace

from ptxsim.ptx import parse, show
from ptxsim.ptx.nodes import Instruction, Kernel, Module, Reg, Symbol

HEADER = ".version 9.4\n.target sm_100a\n.address_size 64\n"
REGISTERS = (
    ".reg .pred %p<3>;.reg .b32 %r<4>;.reg .b64 %rd<3>;.reg .f32 %f<3>;.reg .f64 %d<2>;.reg .b16 %h<2>;"
)
"""All in the sixth line of a text from `kernel_text`; the body begins in the seventh."""

P = [Reg(f"%p{i}", "pred", i) for i in range(3)]
R = [Reg(f"%r{i}", "b32", i) for i in range(4)]
RD = [Reg(f"%rd{i}", "b64", i) for i in range(3)]
F = [Reg(f"%f{i}", "f32", 4 + i) for i in range(3)]
D = [Reg(f"%d{i}", "f64", 3 + i) for i in range(2)]
H = [Reg(f"%h{i}", "b16", i) for i in range(2)]
OUT = Symbol("out")


def kernel_text(body: str, before: str = "", tuning: str = "") -> str:
    entry = f".visible .entry k(.param .u64 out, .param .u32 n) {tuning}"
    return f"{HEADER}{before}{entry}\n{{\n{REGISTERS}\n{body}\n}}\n"


def read(body: str, before: str = "", tuning: str = "") -> Kernel:
    return parse(kernel_text(body, before, tuning)).kernels["k"]


def only(statement: str, before: str = "") -> Instruction:
    (found,) = read(statement, before).body
    return found


def without_lines(module: Module) -> Module:
    """The module without its text and the lines of its instructions."""
    kernels = {
        name: replace(k, body=tuple(replace(i, line=0) for i in k.body)) for name, k in module.kernels.items()
    }
    return replace(module, text="", kernels=kernels)


def assert_round_trip(module: Module) -> None:
    text = show.module(module)
    again = parse(text)
    assert without_lines(again) == without_lines(module)
    assert show.module(again) == text
