"""Scopes of names: nested { } scopes of registers, variables and labels. PTX ISA, sections 4.4, 5.4 and 6.

Inline assembly declares the same names again in each of its scopes. Here every register has an index of its
own, which no other scope reuses, and a name that is already taken in the kernel gets a number: the second
`P1` is `P1$2`. Registers of one file are numbered as they are declared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ptxsim.ptx.lex import Tokens
from ptxsim.ptx.nodes import WIDTHS, Instruction, Label, Operand, Reg, Symbol, Vector

_AXES = "tid ntid ctaid nctaid clusterid nclusterid cluster_ctaid cluster_nctaid"
_SINGLE = """laneid warpid nwarpid smid nsmid gridid is_explicit_cluster cluster_ctarank cluster_nctarank
    lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt clock clock_hi clock64
    globaltimer globaltimer_lo globaltimer_hi total_smem_size aggr_smem_size dynamic_smem_size
    reserved_smem_offset_begin reserved_smem_offset_end reserved_smem_offset_cap current_graph_exec"""
SPECIAL = frozenset(
    ["WARP_SZ", *(f"%{name}" for name in _SINGLE.split())]
    + [f"%{name}.{axis}" for name in _AXES.split() for axis in "xyz"]
)
"""Read-only registers (PTX ISA section 10) and the constant WARP_SZ."""

_FILES = {type: Reg("", type, 0).file for type in WIDTHS}

UNRESOLVED = -1
"""Target of a label whose place is not known yet."""


@dataclass
class Scope:
    parent: Scope | None
    operands: dict[str, Reg | Symbol] = field(default_factory=dict)
    labels: dict[str, Label] = field(default_factory=dict)
    tables: dict[str, Vector] = field(default_factory=dict)
    """.branchtargets"""
    vectors: dict[str, Vector] = field(default_factory=dict)
    """Registers that were declared as vectors; their elements are operands of their own."""
    branches: list[tuple[int, int]] = field(default_factory=list)
    """Index in the body, and index of the token, of branches whose labels are not found yet."""

    def declares(self, name: str) -> bool:
        return any(name in found for found in (self.operands, self.labels, self.tables, self.vectors))


class Names:
    """The names of one kernel, all different from the module's `variables`."""

    def __init__(self, variables: dict[str, Symbol]) -> None:
        self.scope = Scope(None, dict(variables))
        self.registers: dict[int, int] = {}
        """Number of registers in each file, by its width."""
        self._copies = dict.fromkeys(variables, 1)

    # --- scopes ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.scope = Scope(self.scope)

    def close(self, body: list[Instruction], tokens: Tokens) -> None:
        """Leaves the scope: branches to its labels get their targets, others wait for the scope around it."""
        scope, parent = self.scope, self.scope.parent
        assert parent is not None
        for index, at in scope.branches:
            operands = tuple(_resolved(o, scope.labels) for o in body[index].operands)
            body[index] = replace(body[index], operands=operands)
            if missing := [label for o in operands for label in _unresolved(o)]:
                if parent.parent is None:
                    raise tokens.error(
                        f"there is no label `{missing[0]}`", "a label of this scope or one around it", at
                    )
                parent.branches.append((index, at))
        self.scope = parent

    # --- declarations ---------------------------------------------------------------------------------------

    def register(self, name: str, type: str, tokens: Tokens, at: int) -> None:
        self._new(name, tokens, at)
        file = _FILES[type]
        index = self.registers.get(file, 0)
        self.registers[file] = index + 1
        self.scope.operands[name] = Reg(self._unique(name.replace(".", "_")), type, index)

    def vector(self, name: str, type: str, lanes: int, tokens: Tokens, at: int) -> None:
        """Declares a register of 2 or 4 elements: `name` means all of them, `name.x` the first."""
        self._new(name, tokens, at)
        for element, color in zip("xyzw"[:lanes], "rgba"):
            self.register(f"{name}.{element}", type, tokens, at)
            self.scope.operands[f"{name}.{color}"] = self.scope.operands[f"{name}.{element}"]
        elements = (self.scope.operands[f"{name}.{element}"] for element in "xyzw"[:lanes])
        self.scope.vectors[name] = Vector(tuple(elements))

    def variable(self, name: str, tokens: Tokens, at: int) -> str:
        """Declares a variable or parameter; its name within the kernel."""
        self._new(name, tokens, at)
        unique = self._unique(name)
        self.scope.operands[name] = Symbol(unique)
        return unique

    def label(self, name: str, target: int, tokens: Tokens, at: int) -> None:
        self._new(name, tokens, at)
        self.scope.labels[name] = Label(self._unique(name), target)

    def table(self, name: str, labels: list[str], tokens: Tokens, at: int) -> None:
        """Declares the targets of a brx."""
        self._new(name, tokens, at)
        self.scope.tables[name] = Vector(tuple(Label(label, UNRESOLVED) for label in labels))

    # --- uses -----------------------------------------------------------------------------------------------

    def find(self, name: str) -> Reg | Symbol | None:
        """The innermost register or variable of this name."""
        scope: Scope | None = self.scope
        while scope is not None:
            found = scope.operands.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def find_vector(self, name: str) -> Vector | None:
        scope: Scope | None = self.scope
        while scope is not None:
            if name in scope.vectors:
                return scope.vectors[name]
            scope = scope.parent
        return None

    def find_table(self, name: str) -> Vector | None:
        scope: Scope | None = self.scope
        while scope is not None:
            if name in scope.tables:
                return scope.tables[name]
            scope = scope.parent
        return None

    def branches(self, index: int, at: int) -> None:
        """Notes that the instruction `index` has labels. They are found when scopes close, since a label may
        come later, and then hides one of an outer scope."""
        self.scope.branches.append((index, at))

    def _new(self, name: str, tokens: Tokens, at: int) -> None:
        if self.scope.declares(name):
            raise tokens.error(f"`{name}` is already declared in this scope", "each name once per { }", at)

    def _unique(self, name: str) -> str:
        unique, count = name, self._copies.get(name, 0)
        while unique in self._copies:
            count += 1
            unique = f"{name}${count}"
        self._copies[name] = max(count, 1)
        self._copies[unique] = max(self._copies.get(unique, 0), 1)
        return unique


def _resolved(operand: Operand, labels: dict[str, Label]) -> Operand:
    match operand:
        case Label(name, target) if target == UNRESOLVED:
            return labels.get(name, operand)
        case Vector(items):
            return Vector(tuple(_resolved(item, labels) for item in items))
    return operand


def _unresolved(operand: Operand) -> list[str]:
    match operand:
        case Label(name, target) if target == UNRESOLVED:
            return [name]
        case Vector(items):
            return [name for item in items for name in _unresolved(item)]
    return []
