"""The PTX front: every form of the grammar, and errors by their text. Names are in test_ptx_scopes.py."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_text import HEADER, OUT, RD, H, P, R, assert_round_trip, kernel_text, only, read

from ptxsim.errors import InputError
from ptxsim.ptx import PtxError, parse, show
from ptxsim.ptx.nodes import (
    Address,
    Discard,
    Imm,
    Instruction,
    Kernel,
    Label,
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


# --- instructions and operands ------------------------------------------------------------------------------

OPERANDS: list[tuple[str, tuple[Operand, ...]]] = [
    ("add.s32 %r1, %r2, -5;", (R[1], R[2], Imm(-5))),
    ("ret;", ()),
    ("mov.u32 %r1, %tid.x;", (R[1], Special("%tid.x"))),
    ("mov.u32 %r1, WARP_SZ;", (R[1], Special("WARP_SZ"))),
    ("mov.u32 %r1, %cluster_ctarank;", (R[1], Special("%cluster_ctarank"))),
    ("ld.param.b64 %rd1, [out];", (RD[1], Address(OUT))),
    ("ld.param.b32 %r1, [out+4];", (R[1], Address(OUT, 4))),
    ("mov.b64 %rd1, out;", (RD[1], OUT)),
    ("mov.b64 %rd1, out+8;", (RD[1], Symbol("out", 8))),
    ("mov.b64 %rd1, out+1;", (RD[1], Symbol("out", 1))),
    ("ld.shared.b32 %r1, [%r2+8];", (R[1], Address(R[2], 8))),
    ("ld.shared.b32 %r1, [%r2+-8];", (R[1], Address(R[2], -8))),
    ("ld.shared.b32 %r1, [%r2-8];", (R[1], Address(R[2], -8))),
    ("ld.shared.b32 %r1, [%r2+2*(1+3)];", (R[1], Address(R[2], 8))),
    ("st.local.b32 [0x400], %r1;", (Address(Imm(1024)), R[1])),
    ("ld.global.v2.b32 {%r1, _}, [%rd1];", (Vector((R[1], Discard())), Address(RD[1]))),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::x::bytes [%r1], [%rd1, {%r2, 0}], [%r3];",
        (Address(R[1]), Address(RD[1], 0, (R[2], Imm(0))), Address(R[3])),
    ),
    ("shfl.sync.idx.b32 %r1|%p1, %r2, 0, 31, -1;", (Pair(R[1], P[1]), R[2], Imm(0), Imm(31), Imm(-1))),
    ("elect.sync _|%p1, -1;", (Pair(Discard(), P[1]), Imm(-1))),
    ("setp.eq.and.s32 %p1|_, %r1, 0, !%p2;", (Pair(P[1], Discard()), R[1], Imm(0), Negated(P[2]))),
    ("mbarrier.arrive.shared::cluster.b64 _, [%r1], %r2;", (Discard(), Address(R[1]), R[2])),
    ("mov.b64 %rd1, {%r1, -1};", (RD[1], Vector((R[1], Imm(-1))))),
    ("mov.pred %p1, -1;", (P[1], Imm(-1))),
    ("barrier.cluster.arrive.aligned;", ()),
    ("mul .wide\n\t.u16 %r1, %h0, /* by\ntwo */ 2; // twice", (R[1], H[0], Imm(2))),
]


@pytest.mark.parametrize("text, operands", OPERANDS, ids=[text.split(";")[0] for text, _ in OPERANDS])
def test_operands(text: str, operands: tuple[Operand, ...]) -> None:
    found = only(text)
    assert found.operands == operands
    assert found.line == 7 and found.guard is None and found.source is None
    assert only(show.instruction(found)) == found


LITERALS: list[tuple[str, int | float]] = [
    ("0", 0),
    ("12U", 12),
    ("017", 15),
    ("0x1F", 31),
    ("0Xffffffffffffffff", 2**64 - 1),
    ("0b101", 5),
    ("-9223372036854775808", -(2**63)),
    ("1.", 1.0),
    (".5", 0.5),
    ("-2.5e-3", -0.0025),
    ("1E3", 1000.0),
    ("0f3F800000", 1.0),
    ("0fFF800000", -float("inf")),
    ("0d3FB999999999999A", 0.1),
    ("0F80000000", -0.0),
    ("(1+2)*3", 9),
    ("1|2^3&6", 1 | 2 ^ 3 & 6),
    ("1<<4>>2", 4),
    ("1+1<<2+1", 16),
    ("0f7FFFFFFF", float("nan")),
    ("0dFFF8000000000001", -float("nan")),
    ("10-4-3", 3),
    ("-7/2", -3),
    ("-7 % 4", -3),
    ("7/-2", -3),
    ("~0", -1),
    ("-(-4)", 4),
    ("1.5*2+1", 4.0),
]


@pytest.mark.parametrize("text, value", LITERALS, ids=[text for text, _ in LITERALS])
def test_literals(text: str, value: int | float) -> None:
    found = only(f"mov.b64 %rd1, {text};")
    number = found.operands[1]
    assert isinstance(number, Imm) and type(number.value) is type(value)
    assert repr(number.value) == repr(value), "0.0 and -0.0 differ"
    assert only(show.instruction(found)) == found


@given(st.binary(min_size=8, max_size=8), st.sampled_from(["0f", "0d"]))
@properties
def test_float_bits(bits: bytes, kind: str) -> None:
    bits = bits if kind == "0d" else bits[:4]
    opcode, register = ("mov.f64", "%d1") if kind == "0d" else ("mov.f32", "%f1")
    text = f"{opcode} {register}, {kind}{bits.hex()};"
    if kind == "0f" and bits[0] & 0x7F == 0x7F and 0x80 <= bits[1] < 0xC0 and bits[1:] != b"\x80\0\0":
        with pytest.raises(PtxError, match="is not a number"):
            only(text)
        return
    found = only(text)
    (_, number) = found.operands
    assert isinstance(number, Imm)
    assert struct.pack({"0f": ">f", "0d": ">d"}[kind], number.value) == bits
    assert only(show.instruction(found)) == found, "NaNs included"


def test_guards() -> None:
    body = read("@%p1 add.s32 %r1,%r1,1; @!%p2 ret; @ %p0 ret; L: @! %p0 bra L;").body
    assert [(i.guard, i.unless) for i in body] == [(P[1], False), (P[2], True), (P[0], False), (P[0], True)]
    assert body[3].operands == (Label("L", 3),)


def test_statement_over_lines() -> None:
    first, second = read("\n\n@%p1\nwgmma.x {%r1,\n%r2},\n  %rd1, 1;\nret;").body
    assert (first.line, second.line) == (9, 13), "an instruction's line is where it begins"
    assert first.parts == ("wgmma", "x")


# --- modules and declarations -------------------------------------------------------------------------------

VARIABLES = [
    (".global .u32 v;", Variable("v", "global", 4, 4)),
    (".extern .shared .align 1024 .b8 v[];", Variable("v", "shared", 1024, 0)),
    (".shared .align 16 .b8 v[32];", Variable("v", "shared", 16, 32)),
    (".const .align 8 .v2 .f32 v[3];", Variable("v", "const", 8, 24)),
    (".global .v4 .b16 v;", Variable("v", "global", 8, 8)),
    (".visible .global .b32 v = -2;", Variable("v", "global", 4, 4, b"\xfe\xff\xff\xff")),
    (".weak .const .u8 v[] = {1, 0x2, 300};", Variable("v", "const", 1, 3, b"\1\2\x2c")),
    (".const .b16 v[4] = {1, 2};", Variable("v", "const", 2, 8, b"\1\0\2\0\0\0\0\0")),
    (".const .u8 v[2][2] = {{1}, {2, 3}};", Variable("v", "const", 1, 4, b"\1\0\2\3")),
    (".const .v2 .u8 v[2] = {{1, 2}};", Variable("v", "const", 2, 4, b"\1\2\0\0")),
    (".const .f32 v[2] = {1.5, 0f40000000};", Variable("v", "const", 4, 8, struct.pack("<2f", 1.5, 2))),
    (".const .b32 v[2] = {0fFF800000, 1<<3};", Variable("v", "const", 4, 8, b"\0\0\x80\xff\x08\0\0\0")),
    (".const .f64 v = 0d3FF8000000000000;", Variable("v", "const", 8, 8, struct.pack("<d", 1.5))),
    (".const .u64 v = 0xffffffffffffffff;", Variable("v", "const", 8, 8, b"\xff" * 8)),
]


@pytest.mark.parametrize("text, variable", VARIABLES, ids=[text for text, _ in VARIABLES])
def test_variables(text: str, variable: Variable) -> None:
    module = parse(kernel_text("mov.b64 %rd1, v;", text + "\n"))
    assert module.variables == (variable,)
    assert module.kernels["k"].body[0].operands[1] == Symbol("v")
    assert_round_trip(module)


def test_variables_in_a_kernel() -> None:
    text = """.local .align 16 .b8 d[32]; .shared .b32 a, b[2];
    { .shared .b16 a; mov.b64 %rd1, a; } mov.b64 %rd1, a;"""
    kernel = read(text)
    assert [(v.name, v.space, v.align, v.size) for v in kernel.variables] == [
        ("d", "local", 16, 32),
        ("a", "shared", 4, 4),
        ("b", "shared", 4, 8),
        ("a$2", "shared", 2, 2),
    ]
    assert [i.operands[1] for i in kernel.body] == [Symbol("a$2"), Symbol("a")]
    assert_round_trip(parse(kernel_text(text)))


def test_module() -> None:
    text = """// made by hand
.version 9.4 /* a
comment */ .target sm_100a, debug
.address_size 64
.pragma "one", "two";
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b) ;
.func helper(.reg .b32 x) { .reg .b32 y; { mov.b32 y, x; } ret; }
.global .b32 g;
.weak .entry first { ret; }
.visible .entry second(
  .param .align 64 .b8 map[128], .param .u64 .ptr .global .align 16 p, .param .v2 .f32 v
)
.reqntid 64, 2
.minnctapersm 3 .maxnreg 128
.maxntid 128, 1, 1 .pragma "x"; .explicitcluster .blocksareclusters .maxclusterrank 4
.reqnctapercluster 2
{ .reg .b32 %r<2>; L: mov.u32 %r0, g; .pragma "nounroll"; bra L; }
.section .debug_str { $S: .b8 97, 0 .b32 $S+4 }
"""
    module = parse(text)
    assert (module.version, module.target, module.text) == ("9.4", "sm_100a", text)
    first, second = module.kernels.values()
    assert first == Kernel("first", (), (), {}, (Instruction("ret", (), 9),))
    assert (second.threads, second.cluster) == ((64, 2, 1), (2, 1, 1))
    assert (first.resident, second.resident) == (1, 3)
    assert second.parameters == (
        Variable("map", "param", 64, 128),
        Variable("p", "param", 8, 8),
        Variable("v", "param", 8, 8),
    )
    assert second.body[0].operands == (Reg("%r0", "b32", 0), Symbol("g"))
    assert_round_trip(module)


def test_sources() -> None:
    body = """ret;
.loc 1 37 0
ret; ret;
.loc 2 5 3, function_name $S+14, inlined_at 1 37 2
ret;
{ .loc 1 40 9
L: .loc 1 41 9
bra L; }
.loc 2 6 3, function_name $S, inlined_at 1 37 2
ret;"""
    debug = '.file 2 "lib.py"\n.section .debug_str\n{\n$S:\n.b8 95,0\n}\n'
    module = parse(kernel_text(body) + '.file 1 "/a b/kernel.py", 1700000000, 99\n' + debug)
    assert [i.source for i in module.kernels["k"].body] == [
        None,
        *["/a b/kernel.py:37"] * 2,
        "lib.py:5",
        "/a b/kernel.py:41",
        "lib.py:6",
    ]
    assert_round_trip(module)


# --- errors -------------------------------------------------------------------------------------------------

ERRORS = [
    ("add.s32 %r1, %r9;", "PTX line 7: add.s32 %r1, %r9;", "`%r9` is not declared"),
    ("add.s32 %r1 %r2;", "PTX line 7: add", "`%r2` after an operand"),
    ("mov.b32 %r1, %r2\nmov.b32 %r2, %r3;", "PTX line 8: mov.b32 %r2, %r3;", "`mov.b32` after an operand"),
    ("ret;\n mov.u32 %r1, %tid;", "PTX line 8: mov.u32 %r1, %tid;", "`%tid` is not declared"),
    ("mov.u32 %r1, %r1.x;", "", "`%r1.x` is not declared"),
    ("mov.u32 %r1, -%r2;", "", "`%r2` is not a number"),
    ("@%r1 ret;", "", "`%r1` is not a predicate"),
    ("mov.pred %p1, !%r1;", "", "`%r1` is not a predicate"),
    ("bra L;", "PTX line 7: bra L;", "there is no label `L`"),
    ("ret;\n@%p1\nbra L; { L: }", "PTX line 8: @%p1", "there is no label `L`"),
    ("bra %r1;", "", "there is no label `%r1`"),
    ("L: L: ret;", "", "`L` is already declared"),
    (".reg .b32 %r1;", "", "`%r1` is already declared"),
    ("{ .reg .b32 a; } mov.b32 %r1, a;", "", "`a` is not declared"),
    ("mov.b32 a, 1; .reg .b32 a;", "", "`a` is not declared"),
    ("brx.idx %r1, t; A: t: .branchtargets A;", "", "a label of .branchtargets declared before"),
    ("call (%r1), f, (%r2);", "", "functions cannot be called"),
    ("ld.global.b32 %r1, [%rd1;", "", "`;` in an address"),
    ("ld.global.b32 %r1, [nothing];", "", "`nothing` is not declared"),
    ("ld.global.b32 %r1, [%rd1+%r2];", "", "`%r2` is not a number"),
    ("mov.b64 {%r1, %r2, %rd1;", "", "`;` in a vector"),
    ("mov.b64 {}, %rd1;", "", "`}` is not an operand"),
    ("mov.b32 %r1, 08;", "", "`08` is not a number"),
    ("mov.b32 %r1, 0f3F80;", "", "0f and 8 hexadecimal digits"),
    ("mov.f32 %f1, 0f7F800001;", "", "`0f7F800001` is not a number"),
    ("mov.b32 %r1, 12ab;", "", "`ab` after an operand"),
    ("mov.f32 %f1, -0f3F800000;", "", "a 0f constant to stand alone"),
    ("mov.b64 %rd1, 0x10000000000000000;", "", "does not fit 64 bits"),
    ("mov.b32 %r1, 1/0;", "", "division"),
    ("mov.b32 %r1, 1<<64;", "", "shifts by more than 63"),
    ("mov.b32 %r1, 1.5|1;", "", "not an operator of floats"),
    ("mov.b32 %r1, #;", "PTX line 7: mov.b32 %r1, #;", "the character '#'"),
    ("mov.b32 %r1, /* ;", "", "`/` is not an operand"),
    ("ret;;", "", "`;` is not an opcode"),
    (".reg .v8 .f32 a;", "", "`.v8` is not a type"),
    (".reg .b32 8;", "", "the name of a register"),
    (".shared .pred a;", "", "predicates do not lie in memory"),
    (".shared .b32 a = 3;", "", "an initial value in .shared memory"),
    (".shared .b32 a[];", "", "`a` has no size"),
    (".shared .align 3 .b32 a;", "", "a power of two"),
    (".loc 7 1 1\n", "", "the place 7 1"),
    ("{ ret;", "PTX line 5: {", "the text ends within a kernel"),
]


@pytest.mark.parametrize("body, line, problem", ERRORS, ids=[body for body, _, _ in ERRORS])
def test_errors_in_a_kernel(body: str, line: str, problem: str) -> None:
    with pytest.raises(PtxError) as caught:
        read(body)
    message = str(caught.value)
    assert line in message and problem in message
    assert "expected: " in message and "to fix: " in message
    assert f"PTX line {caught.value.line}:" in message
    assert isinstance(caught.value, InputError) and isinstance(caught.value, ValueError)


MODULE_ERRORS = [
    ("", "the end of the text at the beginning"),
    (".target sm_90a\n", "`.target` at the beginning"),
    (".version 9.4\n.target sm_90a\n.address_size 32\n", "`32` as .address_size"),
    (".version 9.4\n.target sm_90a, odd\n.address_size 64\n", "`odd` in .target"),
    (HEADER + ".alias a, b;", "`.alias` is not known here"),
    (HEADER + ".section .nv.info { }", "debug data"),
    (HEADER + ".extern .global .b32 a;", "defined in another module"),
    (HEADER + ".global .b32 a; .const .b32 a;", "`a` is already declared"),
    (HEADER + ".global .b32 a = {1};", "`{` is not a number"),
    (HEADER + ".global .b32 a[1] = {1, 2};", "more than 1 initial values"),
    (HEADER + ".global .u64 a; .global .u64 b = a;", "`a` is not a number"),
    (HEADER + ".global .f32 a = 1;", "`1` for a .f32"),
    (HEADER + ".global .u32 a = 1.0;", "`1.0` for a .u32"),
    (HEADER + ".global .f64 a = 0f3F800000;", "`0f3F800000` for a .f64"),
    (HEADER + ".entry k() .odd { ret; }", "`.odd` before the body"),
    (HEADER + ".entry k() .reqntid 1,1,1,1 { ret; }", "the size [1, 1, 1, 1]"),
    (HEADER + ".entry k() .reqntid 0 { ret; }", "the size [0]"),
    (HEADER + ".entry k(.param .b8 a[]) { ret; }", "`a` has no size"),
    (HEADER + ".entry k(.param .b8 a, .param .b8 a) { ret; }", "`a` is already declared"),
    (HEADER + ".entry k();", "`;` before the body"),
    (HEADER + ".entry k() { ret; } .entry k() { ret; }", "`k` is already defined"),
    (HEADER + ".func f() { ", "the text ends here"),
    (HEADER + '.file 1 "a', "the character"),
    (HEADER + '.pragma "a\nb";', "the character"),
    (HEADER + ".file", "the number of a file"),
]


@pytest.mark.parametrize("text, problem", MODULE_ERRORS, ids=[text[-40:] for text, _ in MODULE_ERRORS])
def test_errors_in_a_module(text: str, problem: str) -> None:
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert problem in str(caught.value)
