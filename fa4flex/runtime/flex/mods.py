"""Functions of torch operations for expressions: score_mods, mask_mods, and what block masks are made of.

A function takes its indices and then buffers: captured tensors, captured numbers and lengths as 0-d tensors.
Every tensor is an argument, so that torch lifts nothing, and a new value of a number compiles nothing.
Integers are those of Python: `//` and `%` floor, a negative index counts from the end. An index that is not
proved to lie within its tensor is clamped, since it may belong to a pair that the mask hides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fa4flex.codegen.expr import Expr, const, folded, nodes, rebuild, rewritten, substitute, sym
from fa4flex.codegen.ops import FOLDS, OPS
from fa4flex.errors import UnsupportedError

MOST_TERMS = 256
"""Terms of a reduction, which are written out one by one."""

INDICES = "b", "h", "q", "kv"
_NAMES = {"q": "q_idx", "kv": "kv_idx"}
_WIDTH = {"torch.int32": 31, "torch.int64": 63}


class Buffer(NamedTuple):
    """Argument of a function besides its indices: the captured tensor in slot `which`, the captured number in
    that slot, or a length by its name.

    copy    torch differentiates a tensor that is read in one place: each further place reads a copy
    spread  torch differentiates reads at indices that vary: an element that is the same for all scores is
            read from a row for each head
    """

    kind: Literal["tensor", "number", "length"]
    which: Any
    copy: int = 0
    spread: bool = False

    @property
    def base(self) -> Buffer:
        """Buffer that a call gives; others are made of it."""
        return Buffer(self.kind, self.which)

    @property
    def name(self) -> str:
        if self.kind == "length":
            return str(self.which)
        letter = "t" if self.kind == "tensor" else "n"
        more = (f"_{self.copy}" if self.copy else "") + ("_by_head" if self.spread else "")
        return f"{letter}{self.which}{more}"


@dataclass(frozen=True)
class Setting:
    """floats  "torch.float32" or "torch.float64"
    ints    "torch.int32" or "torch.int64"
    sizes   of captured tensors by slot, to which indices are clamped; None where all are proved to lie within
    learned slots of tensors that gradients are wanted of
    copied  slots of tensors that get a copy for each place where they are read
    """

    floats: str = "torch.float32"
    ints: str = "torch.int64"
    sizes: tuple[tuple[int, ...], ...] | None = None
    learned: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Function:
    """Text of a function, and the buffers that it takes after its indices."""

    name: str
    text: str
    buffers: tuple[Buffer, ...]


def function(
    name: str, indices: Sequence[str], roots: Sequence[tuple[Expr, str]], setting: Setting
) -> Function:
    """The function of `indices` that returns the values of `roots`, each with the dtype to return it in.

    Raises UnsupportedError for what torch operations on single elements cannot say.
    """
    writer = _Writer(setting)
    results = [writer.returned(unrolled(root), dtype) for root, dtype in roots]
    buffers = tuple(sorted(writer.buffers, key=lambda x: (x.kind, str(x.which), *x[2:])))
    parameters = [_NAMES.get(index, index) for index in indices] + [x.name for x in buffers]
    lines = [
        f"def {name}({', '.join(parameters)}):",
        *(f"    {line}" for line in writer.prologue(indices)),
        *(f"    {line}" for line in writer.lines),
        f"    return {', '.join(results)}",
    ]
    return Function(name, "\n".join(lines) + "\n", buffers)


# --- reductions, term by term -----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def unrolled(root: Expr) -> Expr:
    """The same without reductions. Raises UnsupportedError for those of more than MOST_TERMS terms."""
    return rewritten(root, _unrolled)


def _unrolled(node: Expr, args: tuple[Expr, ...]) -> Expr:
    node = rebuild(node, args)
    if node.op != "reduce":
        return node
    how, axis, extent = node.value
    if extent > MOST_TERMS:
        raise UnsupportedError(
            f"a {how} over {extent} elements in a mod, by torch's flex_attention",
            f"at most {MOST_TERMS}: its mods compute element by element",
            "compute the reduction outside, into a tensor that the mod captures",
        )
    return folded(FOLDS[how], [substitute(node.args[0], {sym(axis): const(i)}) for i in range(extent)])


# --- one function ----------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._names: dict[Expr, str] = {}
        self._reads: dict[int, int] = {}
        self.lines: list[str] = []
        self.buffers: dict[Buffer, None] = {}

    def prologue(self, indices: Sequence[str]) -> list[str]:
        """Indices in the dtype of integers: torch's are int32 in kernels and int64 elsewhere."""
        read = [x.value for x in self._names if x.op == "sym" and x.value in indices and x.value in INDICES]
        return [f"{name} = {_NAMES.get(name, name)}.to({self._setting.ints})" for name in read]

    def returned(self, root: Expr, dtype: str) -> str:
        text = self._tensor(root, dtype) if root.op == "const" else self._value(root)
        return text if root.kind == "bool" or root.op == "const" else f"{text}.to({dtype})"

    def _value(self, root: Expr) -> str:
        for node in nodes(root):
            if node not in self._names:
                self._names[node] = self._node(node)
        return self._names[root]

    def _named(self, text: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _buffer(self, buffer: Buffer) -> str:
        self.buffers[buffer] = None
        return buffer.name

    def _node(self, node: Expr) -> str:
        match node.op:
            case "sym" if node.value in ("score", *INDICES):
                return str(node.value)
            case "sym":
                return self._named(f"{self._buffer(Buffer('length', node.value))}.to({self._setting.ints})")
            case "const":
                return _literal(node.value)
            case "scalar":
                name = self._buffer(Buffer("number", node.value))
                return self._named(f"{name}.to({self._dtype(node)})")
            case "load":
                return self._named(self._load(node))
            case "search":
                raise UnsupportedError(
                    "torch.searchsorted or torch.bucketize in a mod, by torch's flex_attention",
                    "operations on single elements",
                    "look the positions up outside, into a tensor that the mod captures",
                )
        make = _OWN.get(node.op)
        return self._named(make(self, node) if make is not None else self._elementwise(node))

    def _dtype(self, node: Expr) -> str:
        return {"float": self._setting.floats, "int": self._setting.ints, "bool": "torch.bool"}[node.kind]

    def names(self, node: Expr) -> list[str]:
        return [self._names[a] for a in node.args]

    def tensors(self, node: Expr) -> list[str]:
        """The arguments, for functions that take no Python numbers."""
        return [self._tensor(a, self._dtype(a)) if a.op == "const" else self._names[a] for a in node.args]

    def _tensor(self, x: Expr, dtype: str) -> str:
        kind = "torch.bool" if x.kind == "bool" else dtype
        return f"torch.full_like(b, {_literal(x.value)}, dtype={kind})"  # b: on the device

    def _load(self, node: Expr) -> str:
        slot, sizes = node.value, self._setting.sizes
        copy = 0
        if slot in self._setting.copied:
            copy = self._reads.get(slot, 0)
            self._reads[slot] = copy + 1
        spread = slot in self._setting.learned and not node.free & {*INDICES, "score"}
        table = self._buffer(Buffer("tensor", slot, copy, spread))
        index = ["h"] * spread + [
            self._index(a, None if sizes is None else sizes[slot][i]) for i, a in enumerate(node.args)
        ]
        element = f"{table}[{', '.join(index)}]" if index else table
        return f"{element}.to({self._dtype(node)})"

    def _index(self, x: Expr, size: int | None) -> str:
        name = self._tensor(x, self._setting.ints) if x.op == "const" else self._names[x]
        if size is None or (x.op == "const" and 0 <= x.value < size):
            return name
        return self._named(f"torch.where({name} < 0, {name} + {size}, {name}).clamp(0, {size - 1})")

    def _elementwise(self, node: Expr) -> str:
        row = OPS[node.op]
        if row.operator and row.arity == 2:
            a, b = self.names(node) if any(x.op != "const" for x in node.args) else self.tensors(node)
            return f"{a} {row.operator} {b}"
        if row.operator:
            return f"{row.operator}{self.tensors(node)[0]}"
        return f"torch.{row.torch[0]}({', '.join(self.tensors(node))})"

    def shifted(self, node: Expr) -> str:
        """A shift by all bits, or by a negative number of them, loses all of them."""
        (value, by), width = self.tensors(node), _WIDTH[self._setting.ints]
        sign = OPS[node.op].operator
        amount = node.args[1]
        if amount.op == "const" and 0 <= amount.value < width:
            return f"{value} {sign} {amount.value}"
        inside = f"({by} >= 0) & ({by} < {width})"
        beyond = f"{value} >> {width}" if node.op == "shr" else f"torch.zeros_like({value})"
        return f"torch.where({inside}, {value} {sign} {by}.clamp(0, {width - 1}), {beyond})"

    def chosen(self, node: Expr) -> str:
        condition, *values = node.args
        names = self.tensors(node) if all(x.op == "const" for x in values) else self.names(node)
        return f"torch.where({self._names[condition]}, {names[1]}, {names[2]})"

    def converted(self, node: Expr) -> str:
        return f"{self.tensors(node)[0]}.to({self._dtype(node)})"

    def rounded(self, node: Expr) -> str:
        return f"{self.tensors(node)[0]}.to(torch.{node.value}).to({self._setting.floats})"

    def declared(self, node: Expr) -> str:
        """The value, with the derivative that was declared for it: the difference is 0."""
        value, x, slope = self.tensors(node)
        return f"{value}.detach() + {slope}.detach() * ({x} - {x}.detach())"


_OWN: dict[str, Callable[[_Writer, Expr], str]] = {
    "where": _Writer.chosen,
    "shl": _Writer.shifted,
    "shr": _Writer.shifted,
    "to_float": _Writer.converted,
    "to_int": _Writer.converted,
    "to_bool": lambda writer, node: f"{writer.tensors(node)[0]} != 0",
    "detach": lambda writer, node: f"{writer.tensors(node)[0]}.detach()",
    "round_to": _Writer.rounded,
    "with_grad": _Writer.declared,
    "truncdiv": lambda writer, node: (
        f"torch.div({', '.join(writer.tensors(node))}, rounding_mode='trunc').to({writer._setting.ints})"
    ),
}
"""Operations that are written in a way of their own."""


def _literal(value: bool | int | float) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f"float('{value}')"
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)


def score_function(score: Expr, setting: Setting) -> Function:
    """score_mod(score, b, h, q_idx, kv_idx, *buffers)."""
    return function("score_mod", ("score", *INDICES), [(score, setting.floats)], setting)


def mask_function(mask: Expr, setting: Setting) -> Function:
    """mask_mod(b, h, q_idx, kv_idx, *buffers)."""
    return function("mask_mod", INDICES, [(mask, "torch.bool")], setting)
