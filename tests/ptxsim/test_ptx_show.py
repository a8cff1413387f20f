"""The PTX front as a whole: printed modules parse to the same, damaged text is refused, parsing is quick.
Basic blocks, and taking out statements."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_text import HEADER, without_lines

from ptxsim.ptx import PtxError, parse, show
from ptxsim.ptx.flow import Block, blocks
from ptxsim.ptx.lex import Tokens
from ptxsim.ptx.nodes import (
    WIDTHS,
    Address,
    Discard,
    Imm,
    Instruction,
    Kernel,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    Variable,
    Vector,
)

properties = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


CALL = f"""{HEADER}
.extern .func  (.param .b32 func_retval0) vprintf
(
	.param .b64 vprintf_param_0,
	.param .b64 vprintf_param_1
)
;
.global .align 1 .b8 text[3] = {{104, 105, 0}};
.visible .entry k()
{{
	.reg .b64 	%rd<2>;
	.reg .b32 	%r<2>;
	{{ // callseq 0, 0
	.param .b64 	param0;
	.param .b64 	param1;
	.param .b32 	retval0;
	mov.b64 	%rd1, text;
	st.param.b64 	[param0], %rd1;
	call.uni (retval0), vprintf, (param0, param1);
	ld.param.b32 	%r1, [retval0];
	}} // callseq 0
	ret;
}}
"""


def test_calls_of_vprintf() -> None:
    """Arguments of the calls lie in local memory."""
    module = parse(CALL)
    body = module.kernels["k"].body
    assert [i.opcode for i in body] == ["mov.b64", "st.local.b64", "call.uni", "ld.local.b32", "ret"]
    assert body[2].operands == (
        Vector((Symbol("retval0"),)), Symbol("vprintf"), Vector((Symbol("param0"), Symbol("param1"))),
    )  # fmt: skip
    assert {v.name: v.size for v in module.kernels["k"].variables} == {"param0": 8, "param1": 8, "retval0": 4}
    again = parse(show.module(module)).kernels["k"].body
    assert [(i.opcode, i.operands) for i in again] == [(i.opcode, i.operands) for i in body]


# --- random kernels -----------------------------------------------------------------------------------------

NAMES = st.from_regex(r"%r(0|[1-9][0-9]?)|%p[0-3]|[a-b]0?[0-9]|P1(\$2)?", fullmatch=True)
MODULE_VARIABLES = (
    Variable("table", "const", 4, 8, bytes(range(8))),
    Variable("dynamic", "shared", 1024, 0),
    Variable("count", "global", 4, 4),
)
PARAMETERS = (Variable("map", "param", 64, 128), Variable("n", "param", 4, 4))
INNER = (Variable("spill", "local", 16, 64),)
SYMBOLS = st.sampled_from([v.name for v in (*MODULE_VARIABLES, *PARAMETERS, *INNER)])
OPCODES = st.sampled_from(["add.s32", "fma.rn.f64", "cp.async.bulk.tensor.2d.shared::cta.global.tile", "x"])


@st.composite
def registers(draw: st.DrawFn) -> list[Reg]:
    """Registers with names that differ, numbered by file; some files have gaps."""
    found, counts = [], dict.fromkeys((1, 16, 32, 64, 128), 0)
    for name in draw(st.lists(NAMES, min_size=2, max_size=20, unique=True)):
        reg = Reg(name, draw(st.sampled_from(list(WIDTHS))), 0)
        index = counts[reg.file] + draw(st.sampled_from([0, 0, 0, 0, 2]))
        counts[reg.file] = index + 1
        found.append(replace(reg, index=index))
    return [*found, Reg("%guard", "pred", counts[1])]


def operands(regs: list[Reg]) -> st.SearchStrategy[Operand]:
    reg = st.sampled_from(regs)
    pred = st.sampled_from([r for r in regs if r.type == "pred"])
    offset = st.integers(-(2**20), 2**20)
    number = st.builds(Imm, st.integers(-(2**63), 2**64 - 1)) | st.builds(Imm, st.floats(allow_nan=False))
    symbol = st.builds(Symbol, SYMBOLS, st.integers(0, 64))
    simple = (
        reg | number | symbol | st.just(Special("%tid.x")) | st.just(Discard()) | st.builds(Negated, pred)
    )
    base = reg | st.builds(Symbol, SYMBOLS)
    items = st.lists(reg | number | st.just(Discard()), min_size=1, max_size=4).map(tuple)
    return (
        simple
        | st.builds(Address, base, offset, st.just(()) | items)
        | st.builds(Address, st.builds(Imm, st.integers(0, 2**32)))
        | st.builds(Vector, items)
        | st.builds(Pair, reg | st.just(Discard()), reg | st.just(Discard()))
    )


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    regs = draw(registers())
    length = draw(st.integers(1, 8))
    labels = [Label(f"L{n}", draw(st.integers(0, length))) for n in range(3)]
    body = []
    source = None
    for _ in range(length):
        source = draw(st.sampled_from([source, "/a b/c.py:12", "d:e.py:3", "d:e.py:4"]))
        kind = draw(st.sampled_from(["bra", "brx", "", "", ""]))
        if kind == "bra":
            opcode, given_operands = "bra.uni", (draw(st.sampled_from(labels)),)
        elif kind == "brx":
            table = Vector(tuple(draw(st.lists(st.sampled_from(labels), min_size=1))))
            opcode, given_operands = "brx.idx", (draw(st.sampled_from(regs)), table)
        else:
            opcode = draw(OPCODES)
            given_operands = tuple(draw(st.lists(operands(regs), max_size=4)))
        guard = draw(st.sampled_from([None, regs[-1]]))
        unless = guard is not None and draw(st.booleans())
        body.append(Instruction(opcode, given_operands, 0, guard, unless, source))
    counts: dict[int, int] = {}
    for reg in regs:
        counts[reg.file] = max(counts.get(reg.file, 0), reg.index + 1 + draw(st.sampled_from([0, 0, 3])))
    size = st.sampled_from([None, (128, 1, 1), (2, 3, 4)])
    return Kernel("k", PARAMETERS, INNER, counts, tuple(body), draw(size), draw(size))


@given(st.lists(kernels(), min_size=1, max_size=2))
@settings(properties, max_examples=60)
def test_printed_modules_parse_to_the_same(found: list[Kernel]) -> None:
    named = {f"k{n}": replace(kernel, name=f"k{n}") for n, kernel in enumerate(found)}
    module = Module("9.4", "sm_90a", named, MODULE_VARIABLES)
    again = parse(show.module(module))
    assert without_lines(again) == module
    assert [again.text.split("\n")[i.line - 1].strip() for k in again.kernels.values() for i in k.body] == [
        show.instruction(i) for k in found for i in k.body
    ]


def test_names_of_unused_registers_are_free() -> None:
    """x1 is a register of 64 bits, though x0, x1, x2 would be a short way to declare those of 32."""
    regs = (Reg("x0", "b32", 0), Reg("x2", "b32", 2), Reg("x1", "b64", 0))
    kernel = Kernel("k", (), (), {32: 4, 64: 1}, (Instruction("x", regs, 0),))
    module = Module("9.4", "sm_90a", {"k": kernel})
    assert without_lines(parse(show.module(module))) == module


# --- damaged text -------------------------------------------------------------------------------------------

SAMPLE = (
    HEADER
    + """.file 1 "a.py"
.global .v2 .f32 g[2] = {{1.0, 2.0}, {0f3F800000}};
.visible .entry k(.param .u64 .ptr .global .align 16 out, .param .align 64 .b8 map[128])
.reqntid 32, 1, 1
{
.reg .pred %p<3>; .reg .b32 %r<5>, x; .reg .b64 %rd<3>;
.loc 1 12 3, function_name $S+2, inlined_at 1 40 2
mov.u32 %r1, %tid.x; ld.param.b64 %rd1, [out+8];
{
.reg .pred P1;
WAIT: mbarrier.try_wait.parity.shared.b64 P1, [%r1+8], %r2, 10000000;
@!P1 bra.uni WAIT;
}
elect.sync _|%p1, -1;
cp.async.bulk.tensor.2d.shared::cta.global [%r1], [%rd1, {%r2, 0}], [%r3+-8];
ts: .branchtargets END, MORE;
@%p1 brx.idx %r1, ts;
MORE: wgmma.x {%r1, %r2, %r3, %r4}, %rd1, (1+2)*3, 0x10, -1, !%p2;
.pragma "nounroll";
END:
ret;
}
"""
)
WORDS = Tokens(SAMPLE).words[:-1]


def test_damaged_text_is_refused_or_read() -> None:
    """Taking out, doubling or exchanging tokens leaves a program or raises PtxError, and no other error."""
    refused = 0
    for _ in range(1500):
        words = list(WORDS)
        at, other = random.randrange(len(words)), random.randrange(len(words))
        damage = random.choice(["drop", "double", "exchange", "cut"])
        if damage == "drop":
            del words[at]
        elif damage == "double":
            words.insert(at, words[at])
        elif damage == "exchange":
            words[at], words[other] = words[other], words[at]
        else:
            del words[at:]
        try:
            parse("\n".join(words))
        except PtxError as problem:
            refused += 1
            assert 1 <= problem.line <= max(len(words), 1) and "expected: " in str(problem)
    assert refused > 750


def test_each_token_counts() -> None:
    """Without any one token the text is refused or means something else, but for four."""
    module = without_lines(parse("\n".join(WORDS)))
    silent = set()
    for at in range(len(WORDS)):
        try:
            again = parse("\n".join(WORDS[:at] + WORDS[at + 1 :]))
        except PtxError:
            continue
        if without_lines(again) == module:
            silent.add(" ".join(WORDS[max(at - 1, 0) : at + 1]))
    assert silent == {
        ".ptr .global",
        "; .visible",
        "[ 2",  # the initial values tell the length too
        "%r3 +",  # [%r3-8] is read as [%r3+-8] is
    }


# --- helpers of later stages --------------------------------------------------------------------------------


def test_without_a_statement() -> None:
    text = show.module(parse(SAMPLE))
    lines = text.split("\n")
    (line,) = [n for n, each in enumerate(lines, 1) if "elect.sync" in each]
    shorter = show.without(text, line)
    assert shorter.split("\n") == [*lines[: line - 1], "", *lines[line:]]
    before, after = (parse(t).kernels["k"].body for t in (text, shorter))
    assert len(after) == len(before) - 1 and [i.line for i in before if i.line != line] == [
        i.line for i in after
    ]
    for refused in ("{", ".reg .b32 x; ret;", "ret", "{ ret; }", ""):
        with pytest.raises(PtxError, match="not one whole statement"):
            show.without(f"\n{refused}\n", 2)


def test_blocks() -> None:
    text = """.entry k() { .reg .pred p; .reg .b32 r;
    mov.b32 r, 0; add.s32 r, r, 1; L: add.s32 r, r, 2; @p bra L; bar.sync 0; add.s32 r, r, 3;
    ts: .branchtargets M, END; brx.idx r, ts; mov.b32 r, 4; M: @p exit; mov.b32 r, 5; END: }"""
    kernel = parse(HEADER + text).kernels["k"]
    assert len(kernel.body) == 10
    found = [(0, 2), (2, 4), (4, 7), (7, 8), (8, 9), (9, 10)]
    assert blocks(kernel) == tuple(Block(*pair) for pair in found)
    ended = blocks(kernel, lambda instruction: instruction.name == "bar")
    assert ended == tuple(Block(*pair) for pair in [(0, 2), (2, 4), (4, 5), (5, 7), (7, 8), (8, 9), (9, 10)])
    assert blocks(replace(kernel, body=())) == ()


def test_parsing_is_quick() -> None:
    """7,000 lines like those of a forward kernel in half a second of this process."""
    try_wait = "mbarrier.try_wait.parity.shared.b64 P1, [%r1+8], %r2, 100;"
    some = f"{{\n.reg .pred P1;\nW:\n{try_wait}\n@P1 bra D;\nbra W;\nD:\n}}\n"
    for n in range(497):
        some += f"fma.rn.f32 %r{n}, %r{n + 1}, %r{n + 2}, 0f3F800000;\n"
        some += f"@%p1 ld.shared.b32 %r{n}, [%r1+{n}];\n"
    some += f"wgmma.x {{{', '.join(f'%r{n}' for n in range(128))}}}, %rd1, 1;\n" * 4
    text = f"{HEADER}.entry k() {{\n.reg .b32 %r<500>; .reg .pred %p<2>; .reg .b64 %rd<2>;\n{some * 7}}}\n"
    assert text.count("\n") > 7000
    seconds = []
    for _ in range(5):
        start = time.process_time()
        parse(text)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5, seconds
