"""The PTX front: what names mean in nested scopes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_text import HEADER, R, assert_round_trip, kernel_text, read

from ptxsim.ptx import parse
from ptxsim.ptx.lex import PtxError
from ptxsim.ptx.nodes import Label, Reg, Vector

properties = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_registers() -> None:
    kernel = read(
        ".reg .b32 x, y<2>, z;\n mov.b32 x, y1;\n .reg .b8 q; .reg .b128 w;\n cvt.u8.u32 q, z; mov.b128 w, w;"
    )
    x, y1 = kernel.body[0].operands
    assert (x, y1) == (Reg("x", "b32", 7), Reg("y1", "b32", 9))
    assert kernel.body[1].operands == (Reg("q", "b8", 2), Reg("z", "b32", 10)), (
        "8 bits live in the file of 16"
    )
    assert kernel.registers == {1: 3, 32: 11, 64: 5, 16: 3, 128: 1}


WAIT = """
{
.reg .pred P1;
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [%r1], 0, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
"""


def test_nested_scopes() -> None:
    kernel = read(WAIT + "DONE: bra DONE;" + WAIT)
    names = [[getattr(o, "name", None) for o in i.operands] for i in kernel.body]
    assert names[0][0] == "P1" and names[4][0] == "P1$2"
    targets = [o.target for i in kernel.body for o in i.operands if isinstance(o, Label)]
    assert targets == [3, 0, 3, 7, 4], "the last is the end of the body"
    assert [i.guard.index for i in kernel.body if i.guard] == [3, 4]
    assert kernel.registers[1] == 5
    assert_round_trip(parse(kernel_text(WAIT + "DONE: bra DONE;" + WAIT)))


def test_inner_names_hide_outer_ones() -> None:
    kernel = read(
        "L: { bra L; .reg .b64 %r1; mov.b64 %r1, 0; { mov.b64 %r1, 1; } L: } mov.b32 %r1, 2; bra L;"
    )
    assert kernel.body[0].operands[0].target == 3, "of its own scope, though it comes later"  # type: ignore[union-attr]
    assert [i.operands[0].file for i in kernel.body[1:4]] == [64, 64, 32]  # type: ignore[union-attr]
    assert kernel.body[4].operands == (Label("L", 0),)


def test_branch_table() -> None:
    text = "{ ts: .branchtargets A, B, A;\n @%p1 brx.idx.uni %r1, ts; } A: ret; B:"
    kernel = read(text)
    assert kernel.body[0].operands == (R[1], Vector((Label("A", 1), Label("B", 2), Label("A", 1))))
    assert_round_trip(parse(kernel_text(text)))


NAMES = "abc"
Tree = list[tuple[str, Any]]
trees = st.recursive(
    st.lists(st.tuples(st.sampled_from(["reg", "label", "use", "bra"]), st.sampled_from(NAMES)), max_size=6),
    lambda inner: st.lists(
        st.tuples(st.just("scope"), inner)
        | st.tuples(st.sampled_from(["reg", "label", "use", "bra"]), st.sampled_from(NAMES)),
        max_size=6,
    ),
    max_leaves=12,
)


class _Resolved:
    """Meanings of names in a tree, found by looking outwards from each use; uses without a meaning are nops.
    Registers are numbered as they are declared, and labels hold the number of statements before them."""

    def __init__(self, tree: Tree) -> None:
        self.text: list[str] = []
        self.expected: list[int] = []
        self.registers = 0
        labels: list[dict[str, int]] = []
        self._count(tree, [0], labels)
        self._scope(tree, [], [], iter(labels))

    def _count(self, tree: Tree, count: list[int], found: list[dict[str, int]]) -> None:
        """Labels of each scope, in the order of opening, with how many statements come before."""
        mine: dict[str, int] = {}
        found.append(mine)
        for kind, value in tree:
            if kind == "scope":
                self._count(value, count, found)
            elif kind == "label":
                mine.setdefault(f"{value}_", count[0])
            else:
                count[0] += kind in ("bra", "use")

    def _scope(
        self, tree: Tree, regs: list[dict[str, int]], outer: list[dict[str, int]], labels: Any
    ) -> None:
        mine: dict[str, int] = {}
        regs, at = [mine, *regs], [next(labels), *outer]
        placed = set()
        self.text.append("{")
        for kind, value in tree:
            if kind == "scope":
                self._scope(value, regs, at, labels)
            elif kind == "reg" and value not in mine:
                mine[value] = self.registers
                self.registers += 1
                self.text.append(f".reg .b32 {value};")
            elif kind == "label" and value not in placed:
                placed.add(value)
                self.text.append(f"{value}_:")
            elif kind in ("use", "bra"):
                name = f"{value}_" if kind == "bra" else value
                meaning = next((s[name] for s in (at if kind == "bra" else regs) if name in s), None)
                known = meaning is not None
                self.text.append(f"{kind if kind == 'bra' else 'neg.s32'} {name};" if known else "nop;")
                self.expected.append(-1 if meaning is None else meaning)
        self.text.append("}")


@given(trees)
@properties
def test_scopes_against_looking_outwards(tree: Tree) -> None:
    resolved = _Resolved(tree)
    text = f"{HEADER}.entry k()\n" + "\n".join(resolved.text)
    kernel = parse(text).kernels["k"]
    found = [
        getattr(o, "target", getattr(o, "index", -1)) for i in kernel.body for o in i.operands or (None,)
    ]
    assert found == resolved.expected
    assert kernel.registers.get(32, 0) == resolved.registers
    used = {(o.name, type(o), getattr(o, "index", None)) for i in kernel.body for o in i.operands}  # type: ignore[union-attr]
    assert len({name for name, _, _ in used}) == len(used), "names are unique in a kernel"
    assert_round_trip(parse(text))


def test_registers_that_are_vectors() -> None:
    """A register of four elements is their vector, and each of them by its letter or color."""
    body = "{.reg .v4 .s32 abcd;\nmov.s32 abcd.x, 1;\nmov.s32 abcd.a, abcd.r;\nst.shared.v4.s32 [%r0], abcd;}"
    first, last, store = read(body).body
    assert isinstance(store.operands[1], Vector)
    x, y, z, w = store.operands[1].items
    assert (first.operands[0], last.operands) == (x, (w, x))
    assert len({element.index for element in (x, y, z, w)}) == 4  # type: ignore[union-attr]
    with pytest.raises(PtxError, match="abcd"):
        read("{.reg .v2 .b32 abcd;\nmov.b32 %r0, abcd.z;}")
