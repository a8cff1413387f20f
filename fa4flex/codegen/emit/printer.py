"""One operation as text: what a generated module writes for each kind of node."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fa4flex.codegen.emit.nodes import COLLECT, DEVICE_SYMBOLS, KV, LOADS, OFFSET, RATES, SCALE, Q, rate
from fa4flex.codegen.expr import READS, SYMBOLS, Expr, slot_of, walk
from fa4flex.codegen.ops import INFIX, OPS, PREFIX

DEVICE_FUNCTIONS = {
    "natural_div": "natural_div", "divisor": "divisor", "divided": "divided", "signum": "signum",
    "reciprocal": "reciprocal", "exact_ratio": "exact_ratio", "floor_quotient": "floor_quotient",
    "remainder": "remainder", "saturated": "saturated",
}  # fmt: skip
"""Functions of kernels/common/math.py for operations that no mod can name; rows of ops.py name the others."""
REDUCTIONS = {
    "sum": "sum_of", "prod": "product_of", "max": "largest", "min": "smallest", "any": "any_of",
    "all": "all_of",
}  # fmt: skip
ROUNDED = {"float16": "to_float16", "bfloat16": "to_bfloat16"}
DEVICE_WORDS = {
    "reciprocal": "inverse", "exact_ratio": "quotient", "floor_quotient": "quotient", "remainder": "rest",
    "natural_div": "quotient", "divided": "quotient", "divisor": "by",
    "wrapped": "index", "confined": "index", "search": "position", "difference": "distance",
    "logistic": "logistic", "saturated": "part",
}  # fmt: skip
"""Words that values are named after, unless something better is known; rows of ops.py say the others."""


def function_of(op: str) -> str:
    """The device function that computes an operation, "" where none does."""
    return OPS[op].device if op in OPS else DEVICE_FUNCTIONS.get(op, "")


def word_of(op: str) -> str:
    """Name for values of an operation."""
    word = OPS[op].word if op in OPS else DEVICE_WORDS.get(op, "")
    return word or (function_of(op) or op.rstrip("_")) + "_value"


def functions() -> frozenset[str]:
    """All device functions that generated modules call by the name of an operation."""
    rows = {row.device for row in OPS.values() if row.device}
    return frozenset((*rows, *DEVICE_FUNCTIONS.values(), *REDUCTIONS.values(), *ROUNDED.values()))


def words() -> frozenset[str]:
    return frozenset((*(row.word for row in OPS.values() if row.word), *DEVICE_WORDS.values()))


@dataclass
class Names:
    """Names of captured tensors and numbers by slot, and of values; no two are alike in a module."""

    tensors: Sequence[str]
    numbers: Sequence[str]
    _taken: set[str] = field(default_factory=set)
    _slots: dict[tuple[str, int], str] = field(default_factory=dict)
    _axes: dict[str, str] = field(default_factory=dict)

    def fresh(self, base: str) -> str:
        """`base`, with a number from its second use on."""
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name

    @contextmanager
    def local(self) -> Iterator[None]:
        """Names taken inside are free again afterwards: those of one function's own values."""
        before = set(self._taken)
        yield
        self._taken = before

    def reserve(self, *roots: Expr) -> None:
        """Name all captured values that `roots` read."""
        for node in walk(*roots):
            if node.op == "scalar":
                self.number(node.value)
            elif node.op in READS:
                self.tensor(slot_of(node))

    def tensor(self, slot: int) -> str:
        return self._slot("t", slot, self.tensors)

    def number(self, slot: int) -> str:
        return self._slot("s", slot, self.numbers)

    def axis(self, name: str) -> str:
        """Name of the index of a loop: axes that analysis made have names that Python has not."""
        if name not in self._axes:
            self._axes[name] = self.fresh(re.sub(r"\W", "_", name))
        return self._axes[name]

    def _slot(self, letter: str, slot: int, arguments: Sequence[str]) -> str:
        if (letter, slot) not in self._slots:
            name = arguments[slot] if slot < len(arguments) else ""
            usable = name.isidentifier() and not keyword.iskeyword(name) and name not in _RESERVED
            self._slots[letter, slot] = self.fresh(name if usable else f"{letter}{slot}")
        return self._slots[letter, slot]


_RESERVED = frozenset(
    (
        "at", "range", "tuple", "kernel", "uniform", "start", "score", "mask", "factor", "spans", "queries",
        "term", "terms", "output",
        "Float32", "Int32", "Int64", "Boolean", "INFINITY", "NAN", "wrapped", "confined",
        "load_int", "load_float", "load_wide", "load_bool", "fold_over", "search_left", "search_right",
        *SYMBOLS, *functions(), *words(),
    )
)  # fmt: skip


@dataclass
class Printer:
    """Text of nodes. `used` collects the names that the module must import."""

    names: Names
    wide: bool
    used: set[str] = field(default_factory=set)

    def call(self, function: str, *args: str) -> str:
        self.used.add(function)
        return f"{function}({', '.join(args)})"

    @property
    def integer(self) -> str:
        self.used.add("Int64" if self.wide else "Int32")
        return "Int64" if self.wide else "Int32"

    def leaf(self, node: Expr) -> str:
        """A node that costs nothing."""
        match node.op:
            case "to_float":
                return {Q: "at.q_float", KV: "at.kv_float", OFFSET: "at.offset_float"}[node.args[0]]
            case "const":
                return self._constant(node)
            case "scalar" if node is SCALE:
                return "at.scale"
            case "scalar":
                name = self.names.number(node.value)
                return f"({name} != 0)" if node.kind == "bool" else name
        if node.value not in DEVICE_SYMBOLS:
            # A loop that is written out runs over Python ints.
            return f"{self.integer}({self.names.axis(node.value)})"
        return f"{self.integer}(at.{node.value})" if self.wide and node.kind == "int" else f"at.{node.value}"

    def typed(self, node: Expr) -> str:
        """A leaf whose type the device knows, where Python numbers would be computed by Python."""
        if node.op != "const":
            return self.leaf(node)
        return self.call(self.type(node), self.leaf(node))

    def type(self, node: Expr) -> str:
        """Name of the type of what a device computes for a node."""
        return {"float": "Float32", "bool": "Boolean", "int": "Int64" if self.wide else "Int32"}[node.kind]

    def fold(self, node: Expr, term: str) -> str:
        """A fold by a loop, `term` being a function of its index."""
        return self.call("fold_over", *self.folded(node, term))

    def folded(self, node: Expr, term: str) -> list[str]:
        """A term's function, how many terms there are, how they are folded, and their type."""
        how, _, extent = node.value
        if node.kind == "bool":
            how = {"max": "any", "min": "all"}.get(how, how)
        self.used.add(self.type(node))
        return [term, str(extent), f'"{how}"', self.type(node)]

    def _constant(self, node: Expr) -> str:
        if node.kind == "float" and not math.isfinite(node.value):
            name = "NAN" if math.isnan(node.value) else "INFINITY"
            self.used.add(name)
            return f"-{name}" if node.value < 0 else name
        return repr(node.value)

    def operation(self, node: Expr, text: Callable[[Expr], str], fast: bool) -> str:
        """A node over the texts of its arguments; `fast`: it runs more often than once per work tile."""
        args = [text(a) for a in node.args]
        if node.args and all(a.op == "const" for a in node.args):
            args[0] = self.typed(node.args[0])
        if node.op == "div" and not fast:
            return f"{args[0]} / {args[1]}"
        function = function_of(node.op)
        if function:
            return self.call(function, *args)
        if node.op in INFIX:
            return f"{args[0]} {INFIX[node.op]} {args[1]}"
        if node.op in PREFIX:
            return f"{PREFIX[node.op]}{args[0]}"
        match node.op:
            case "load":
                return self._load(node.value, node.kind, args, *_order(node.args))
            case "near":
                slot, steps, even = node.value
                places = _tuple([_step(*step) for step in steps])
                return self._load(slot, node.kind, args, places, *["even=True"] * even)
            case "difference":
                return f"{args[0]} - {args[1]}"
            case "logistic":
                return f"at.logistic({', '.join(args)})"
            case "stepped":
                return _stepped(node.args[0].args[0].value, node.args[1:], args[1:])
            case "search":
                return self._search(node, args)
            case "element_of":
                return f"{args[0]}[{node.args[1].value}]"
            case "wrapped" | "confined":
                slot, dimension = node.value
                return self.call(node.op, args[0], self.names.tensor(slot), str(dimension))
            case "to_float":
                return self.call("Float32", args[0])
            case "to_int":
                return f"{self.integer}({args[0]})"
            case "round_to":
                return args[0] if node.value == "float32" else self.call(ROUNDED[node.value], args[0])
        raise NotImplementedError(f"no device code for {node.op}")

    def _load(self, slot: int, kind: str, args: list[str], *more: str) -> str:
        function = "load_wide" if kind == "int" and self.wide else f"load_{kind}"
        return self.call(function, self.names.tensor(slot), _tuple(args or ["0"]), "at.guard", *more)

    def _search(self, node: Expr, args: list[str]) -> str:
        slot, side = node.value
        result = self.call(f"search_{side}", self.names.tensor(slot), _tuple(args[1:]), args[0], "at.guard")
        return f"{self.integer}({result})" if self.wide else result

    def base_name(self, node: Expr) -> str:
        """Base name for the value of a node."""
        if node.op in LOADS:
            return f"{self.names.tensor(slot_of(node))}_at"
        if node.op == "reduce":
            if node.value[0] == COLLECT:
                return self.base_name(node.args[0])
            return {"any": "some", "all": "every", "sum": "total", "prod": "whole"}.get(
                node.value[0], "extreme"
            )
        return word_of(node.op)


def _step(count: int, index: str | None) -> str:
    """Distance of a load from its base in one dimension."""
    if not count:
        return "0"
    return {1: f"at.{index}_step", -1: f"-at.{index}_step"}.get(count, f"{count} * at.{index}_step")


def _order(index: Sequence[Expr]) -> list[str]:
    """The dimensions of a load by how often their index changes, where that is not their order: their part
    of the address is then computed as seldom."""
    often = [min(RATES.index(rate(i)), RATES.index("column")) for i in index]
    order = sorted(range(len(often)), key=often.__getitem__)
    return [] if order == sorted(order) else [f"order={_tuple(list(map(str, order)))}"]


def _stepped(index: str, arguments: Sequence[Expr], texts: Sequence[str]) -> str:
    """index * coefficient + rest: the sum in parentheses is the same for all of a tile."""
    (c, rest), (c_text, rest_text) = arguments, texts
    by = "" if c.op == "const" and c.value == 1.0 else f" * {c_text}"
    base = f"at.{index}_base_float{by}"
    plain = rest.op == "const" and rest.value == 0.0
    return f"at.{index}_step{by} + " + (base if plain else f"({base} + {rest_text})")


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
