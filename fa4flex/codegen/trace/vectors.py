"""Indexing, shapes and reductions of the small vectors that a partly indexed captured tensor leaves.

A vector is an expression with one free axis symbol per dimension, so indexing is substitution, a reshape is
substitution of each old axis by arithmetic on the new ones, and a reduction binds an axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.codegen.expr import Expr, apply, const, search, substitute, sym, to_int, walk
from fa4flex.codegen.trace.build import (
    broadcast,
    coerce,
    elements_of,
    elementwise,
    from_tensor,
    made,
    normalised,
    promoted,
    static_int,
)
from fa4flex.codegen.trace.elementwise import Builder, add, div, mul, square
from fa4flex.codegen.trace.state import current
from fa4flex.codegen.trace.value import Dim, Dims, Value, is_number, is_real

MAX_EXTENT = 1024
"""Longest axis a reduction runs over, per (query, key) pair."""


# --- indexing ---------------------------------------------------------------------------------------


def getitem(input: Any, index: Any) -> Value:
    """`input[index]` with ints, slices, None, `...`, and traced or captured integer indices."""
    value = index if isinstance(index, tuple) else (index,)
    rank = input.ndim if is_real(input) else len(coerce(input).dims)
    entries = _expand_ellipsis(value, rank)
    vectors = [_as_index(e) for e in entries if _is_advanced(e)]
    indices, shared = broadcast(vectors) if vectors else ([], ())
    whole = shared or any(entry is None or isinstance(entry, slice) for entry in entries)
    return _pick(_source(input, not whole), entries, iter(indices), shared)


def _source(input: Any, one: bool) -> Value:
    """Value that is indexed. Of a tensor that the mod computed, one element is computed where it is read, if
    it can be; a vector of them would be computed again and again."""
    if not is_real(input):
        return coerce(input)
    elements = elements_of(input) if one else None
    return from_tensor(input) if elements is None else elements


def _pick(source: Value, entries: list[Any], indices: Any, shared: Dims) -> Value:
    replaced: dict[Expr, Expr] = {}
    dims: list[Dim] = []
    advanced = [i for i, e in enumerate(entries) if _is_advanced(e)]
    together = not advanced or advanced[-1] - advanced[0] + 1 == len(advanced)
    if not together:
        dims.extend(shared)  # as in numpy: separated advanced indices put their dimensions first
    remaining = iter(source.dims)
    for position, entry in enumerate(entries):
        if entry is None:
            dims.append(Dim(None, 1))
            continue
        dim = next(remaining)
        if isinstance(entry, slice):
            dims.append(_slice(dim, entry, replaced))
            continue
        if together and advanced and position == advanced[0]:
            dims.extend(shared)
        chosen = next(indices) if _is_advanced(entry) else const(_static_index(entry, dim.extent))
        if dim.axis:
            replaced[sym(dim.axis)] = _wrapped(source.expr, dim, chosen)
    node = substitute(source.expr, replaced) if replaced else source.expr
    picked = normalised(Value(node, tuple(dims), source.dtype_or_none))
    return made(picked.expr, picked.dims, source.dtype_or_none)


def _is_advanced(entry: Any) -> bool:
    return isinstance(entry, (Value, Tensor, list)) or is_number(entry)


def _expand_ellipsis(index: tuple[Any, ...], rank: int) -> list[Any]:
    value = sum(entry is not None and entry is not Ellipsis for entry in index)
    if value > rank:
        raise current().error(
            given=f"{value} indices into a tensor of {rank} dimensions",
            expected=f"at most {rank} indices",
            fix="check the tensor's shape",
        )
    fill = [slice(None)] * (rank - value)
    if not any(entry is Ellipsis for entry in index):
        return [*index, *fill]
    at = next(i for i, entry in enumerate(index) if entry is Ellipsis)
    return [*index[:at], *fill, *index[at + 1 :]]


def _as_index(entry: Any) -> Value:
    if isinstance(entry, list):
        raise current().error(
            "a Python list as an index", "ints, slices or tensors", "use torch.tensor([...])"
        )
    value = coerce(entry)
    if value.expr.kind == "int":
        return value
    if value.expr.kind == "bool":
        raise current().error(
            given=f"the bool `{value.expr}` as an index, which selects as many elements as the data says",
            expected="an integer index",
            fix="choose with torch.where, or index with .int()",
        )
    raise current().error(f"the float `{value.expr}` as an index", "an integer index", "use // or .int()")


def _static_index(entry: Any, extent: int) -> int:
    index = static_int(entry, "an index")
    if not -extent <= index < extent:
        raise current().error(
            f"index {index} into a dimension of {extent}", f"{-extent}..{extent - 1}", "check it"
        )
    return index % extent if extent else index


def _wrapped(node: Expr, dim: Dim, index: Expr) -> Expr:
    """`index`, with negative values counted from the end where the load itself will not do that."""
    assert dim.axis is not None
    axis = sym(dim.axis)
    direct = all(user.op == "load" for user in walk(node) if axis in user.args)
    if index.op == "const" and index.value < 0:
        return const(index.value + dim.extent)
    if (direct and dim.axis not in current().cut_axes) or index.op in ("const", "sym"):
        return index
    return apply("where", apply("lt", index, const(0)), apply("add", index, const(dim.extent)), index)


def _slice(dim: Dim, entry: slice, replaced: dict[Expr, Expr]) -> Dim:
    if entry == slice(None):
        return dim
    start, stop, step = slice(*(_bound(x) for x in (entry.start, entry.stop, entry.step))).indices(dim.extent)
    if step < 0:
        raise current().error(
            "a slice with a negative step",
            "a positive step",
            "index from the end: x[n - 1 - i]; or flip the tensor outside the mod",
        )
    extent = len(range(start, stop, step))
    if dim.axis is None or extent == dim.extent:
        return Dim(dim.axis if extent == dim.extent else None, extent)
    axis = current().fresh_axis()
    current().cut_axes.add(axis)
    replaced[sym(dim.axis)] = apply("add", apply("mul", sym(axis), const(step)), const(start))
    return Dim(axis, extent)


def _bound(x: Any) -> int | None:
    return None if x is None else static_int(x, "a slice bound")


def select(input: Any, dim: Any, index: Any) -> Value:
    source = from_tensor(input) if is_real(input) else coerce(input)
    at = _dim(source, dim)
    return getitem(input, (slice(None),) * at + (index,))


def index_select(input: Any, dim: Any, index: Any) -> Value:
    """Keeps the dimension, also for a 0-d index."""
    chosen = coerce(index)
    return select(input, dim, chosen if chosen.dims else unsqueeze(chosen, 0))


def narrow(input: Any, dim: Any, start: Any, length: Any) -> Value:
    at, first = _dim(coerce(input), dim), static_int(start, "a slice bound")
    return getitem(input, (slice(None),) * at + (slice(first, first + static_int(length, "a length")),))


def take(input: Any, index: Any) -> Value:
    return getitem(reshape(input, -1), index)


def searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Value:
    """Position of a value in a sorted captured vector."""
    sequence, needle = coerce(sorted_sequence), coerce(input)
    axis = sym(sequence.dims[-1].axis or "") if sequence.dims else None
    direct = len(sequence.dims) == 1 and sequence.expr.op == "load" and axis is sequence.expr.args[-1]
    if sorter is not None or not direct:
        raise current().error(
            "searchsorted in something other than a row of a captured tensor", "a captured, sorted vector",
            "index the tensor down to one dimension first",
        )  # fmt: skip
    which = "right" if right or side == "right" else "left"
    node = search(sequence.expr.value, which, needle.expr, sequence.expr.args[:-1])  # type: ignore[arg-type]
    return made(node, needle.dims, torch.int32 if out_int32 else torch.int64)


def bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Value:
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


# --- shapes -----------------------------------------------------------------------------------------


def _dim(x: Value, dim: Any, extra: int = 0) -> int:
    rank = len(x.dims) + extra
    d = static_int(dim, "a dimension")
    if not -max(rank, 1) <= d < max(rank, 1):
        raise current().error(
            f"dimension {d} of a value with {rank} dimensions", f"{-rank}..{rank - 1}", "check dim"
        )
    return d % max(rank, 1)


def _with_dims(x: Value, dims: Sequence[Dim]) -> Value:
    return Value(x.expr, tuple(dims), x.dtype_or_none)


def unsqueeze(input: Any, dim: Any) -> Value:
    x = coerce(input)
    at = _dim(x, dim, extra=1)
    return _with_dims(x, (*x.dims[:at], Dim(None, 1), *x.dims[at:]))


def squeeze(input: Any, dim: Any = None) -> Value:
    x = coerce(input)
    gone = (
        range(len(x.dims))
        if dim is None
        else [_dim(x, d) for d in (dim if isinstance(dim, tuple) else (dim,))]
    )
    return _with_dims(x, [d for i, d in enumerate(x.dims) if d.extent != 1 or i not in gone])


def permute(input: Any, *dims: Any) -> Value:
    x = coerce(input)
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return _with_dims(x, [x.dims[_dim(x, d)] for d in order])


def transpose(input: Any, dim0: Any, dim1: Any) -> Value:
    x = coerce(input)
    dims = list(x.dims)
    if dims:
        a, b = _dim(x, dim0), _dim(x, dim1)
        dims[a], dims[b] = dims[b], dims[a]
    return _with_dims(x, dims)


def reverse_dims(input: Any) -> Value:
    x = coerce(input)
    return _with_dims(x, x.dims[::-1])


def _sizes(sizes: tuple[Any, ...]) -> list[int]:
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return [static_int(s, "a shape") for s in flat]


def reshape(input: Any, *shape: Any) -> Value:
    """Any reshape: each old index is read off the row-major position of the new ones."""
    x = coerce(input)
    sizes = _sizes(shape)
    total = math.prod(d.extent for d in x.dims)
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes[sizes.index(-1)] = total // known if known else 0
    if math.prod(sizes) != total:
        raise current().error(
            f"a reshape of {total} elements to {sizes}", "as many elements", "check the shape"
        )
    wide = [d for d in x.dims if d.extent != 1]
    if [s for s in sizes if s != 1] == [d.extent for d in wide]:
        kept = iter(wide)
        return _with_dims(x, [Dim(None, 1) if s == 1 else next(kept) for s in sizes])
    dims = tuple(Dim(current().fresh_axis(), s) if s != 1 else Dim(None, 1) for s in sizes)
    current().cut_axes.update(d.axis for d in dims if d.axis)
    position: Expr = const(0)
    for d in dims:
        position = apply("add", apply("mul", position, const(d.extent)), sym(d.axis) if d.axis else const(0))
    replaced: dict[Expr, Expr] = {}
    for d in reversed(x.dims):
        if d.axis:
            replaced[sym(d.axis)] = apply("mod", position, const(d.extent))
        position = apply("floordiv", position, const(d.extent))
    return made(substitute(x.expr, replaced), dims, x.dtype_or_none)


def flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Value:
    x = coerce(input)
    if not x.dims:
        return _with_dims(x, [Dim(None, 1)])
    first, last = _dim(x, start_dim), _dim(x, end_dim)
    extents = [d.extent for d in x.dims]
    return reshape(x, *extents[:first], math.prod(extents[first : last + 1]), *extents[last + 1 :])


def expand(input: Any, *sizes: Any) -> Value:
    x = coerce(input)
    wanted = _sizes(sizes)
    offset = len(wanted) - len(x.dims)
    dims = [x.dims[i - offset] if i >= offset else Dim(None, 1) for i in range(len(wanted))]
    for i, size in enumerate(wanted):
        if size in (-1, dims[i].extent):
            continue
        if dims[i].extent != 1:
            raise current().error(
                f"expand of {dims[i].extent} elements to {size}", "extent 1 to expand", "check sizes"
            )
        dims[i] = Dim(current().fresh_axis(), size)
    return _with_dims(x, dims)


def stack(tensors: Any, dim: Any = 0) -> Value:
    """A vector from up to 16 values, chosen by its new axis."""
    values = [coerce(t) for t in tensors]
    if not 0 < len(values) <= 16:
        raise current().error(
            f"stack of {len(values)} values", "1 to 16 values", "put a table in a tensor instead"
        )
    exprs, dims = broadcast(values)
    node = exprs[-1]
    axis = current().fresh_axis()
    for i in reversed(range(len(exprs) - 1)):
        node = apply("where", apply("eq", sym(axis), const(i)), exprs[i], node)
    result = Value(node, dims, promoted(node.kind, values))
    at = _dim(result, dim, extra=1)
    current().cut_axes.add(axis)
    return normalised(_with_dims(result, (*dims[:at], Dim(axis, len(exprs)), *dims[at:])))


def unbind(input: Any, dim: Any = 0) -> tuple[Value, ...]:
    x = coerce(input)
    at = _dim(x, dim)
    return tuple(getitem(x, (slice(None),) * at + (i,)) for i in range(x.dims[at].extent))


# --- reductions -------------------------------------------------------------------------------------


class Extreme(NamedTuple):
    """Result of torch.max(x, dim)."""

    values: Value
    indices: Value


def _reduction(how: str) -> Builder:
    def build(
        input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Value:
        x = coerce(input)
        if dtype is not None and dtype.is_floating_point:
            x = elementwise("to_float", x)
        return _fold(how, x, dim, keepdim)

    return build


def _fold(how: str, x: Value, dim: Any, keepdim: bool) -> Value:
    everything = dim is None or dim == ()
    chosen = (
        range(len(x.dims))
        if everything
        else [_dim(x, d) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    )
    node, dims = x.expr, list(x.dims)
    for at in sorted(set(chosen), reverse=True):
        if at < len(dims):
            node = _fold_one(how, node, dims[at])
            dims[at : at + 1] = [Dim(None, 1)] if keepdim else []
    if how in ("any", "all"):
        node = apply("to_bool", node)
    elif how in ("sum", "prod"):
        node = to_int(node) if node.kind == "bool" else node
    dtype = promoted(node.kind, [x])
    if node.kind == "int" and how in ("sum", "prod"):
        dtype = torch.int64  # as in torch, integer sums are int64
    return made(node, tuple(dims), dtype)


def _fold_one(how: str, node: Expr, dim: Dim) -> Expr:
    state = current()
    if dim.extent > MAX_EXTENT:
        raise state.error(
            given=f"{how} over {dim.extent} elements, for every (query, key) pair",
            expected=f"at most {MAX_EXTENT} elements",
            fix="compute it outside the mod, once per query or per key, and index the result",
        )
    if dim.extent == 1:
        return node
    return state.fold(how, dim.axis or state.fresh_axis(), dim.extent, node)


_sum, _amax, _amin = _reduction("sum"), _reduction("max"), _reduction("min")


def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    x = elementwise("to_float", input)
    total = _fold("sum", x, dim, keepdim)
    count = math.prod(d.extent for d in x.dims) // max(1, math.prod(d.extent for d in total.dims))
    return div(total, count)


def _extreme(how: str, pairwise: str) -> Builder:
    def build(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        second = other if other is not None else dim
        if isinstance(second, (Value, Tensor)):
            return elementwise(pairwise, input, second)
        if dim is None:
            return _fold(how, coerce(input), None, keepdim)
        return Extreme(_fold(how, coerce(input), dim, keepdim), _arg(how, input, dim, keepdim))

    return build


def _arg(how: str, input: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """The first position of the extreme value along a dimension."""
    x = coerce(input)
    if dim is None:
        x, dim = reshape(x, -1), 0
    if not x.dims:
        return made(const(0), (), torch.int64)
    at = _dim(x, dim)
    extent = x.dims[at].extent
    best = _fold(how, x, at, keepdim=True)
    trailing = len(x.dims) - at - 1
    position = Value(
        sym(axis := current().fresh_axis()), (Dim(axis, extent), *[Dim(None, 1)] * trailing), torch.int64
    )
    return _fold("min", elementwise("where", elementwise("eq", x, best), position, extent), at, keepdim)


def dot(input: Any, tensor: Any = None, *, other: Any = None, dim: int = -1) -> Value:
    return _fold("sum", mul(input, tensor if other is None else other), dim, False)


def matmul(input: Any, other: Any) -> Value:
    a, b = coerce(input), coerce(other)
    if not a.dims or not b.dims:
        raise current().error("matmul with a 0-d value", "vectors or matrices", "multiply with *")
    if len(b.dims) == 1:
        return dot(a, b)
    product = mul(unsqueeze(a, -1), b)
    return _fold("sum", product, -2, False)


def norm(input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    if p not in (2, "fro", None) or dtype is not None:
        value = f"norm of order {p}" if dtype is None else f"norm with dtype={dtype}"
        raise current().error(value, "the 2-norm", "write the sum out")
    return elementwise("sqrt", _fold("sum", elementwise("to_float", square(input)), dim, keepdim))


def softmax(input: Any, dim: Any, dtype: Any = None) -> Value:
    weights = elementwise("exp", elementwise("sub", input, _fold("max", coerce(input), dim, True)))
    return div(weights, _fold("sum", weights, dim, True))


def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Value:
    top = _fold("max", elementwise("to_float", input), dim, True)
    total = _fold("sum", elementwise("exp", elementwise("sub", input, top)), dim, keepdim)
    return add(elementwise("log", total), top if keepdim else squeeze(top, dim))


def count_nonzero(input: Any, dim: Any = None) -> Value:
    return _fold("sum", elementwise("ne", input, 0), dim, False)


def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Value:
    result = _fold("any", elementwise("eq", unsqueeze(elements, -1), reshape(test_elements, -1)), -1, False)
    return elementwise("not_", result) if invert else result


def _refused(what: str, fix: str) -> Builder:
    def build(*args: Any, **kwargs: Any) -> Any:
        raise current().error(
            f"{what} of traced values", "operations on single values and small vectors", fix
        )

    return build


def _same(input: Any, *args: Any, **kwargs: Any) -> Value:
    return coerce(input)


VECTORS: dict[str, Builder] = {
    "getitem": getitem, "select": select, "index_select": index_select, "narrow": narrow, "take": take,
    "index": lambda input, indices: getitem(input, tuple(slice(None) if i is None else i for i in indices)),
    "embedding": lambda input, weight, *unused, **options: getitem(weight, input),
    "isin": isin, "searchsorted": searchsorted, "bucketize": bucketize,
    "unsqueeze": unsqueeze, "squeeze": squeeze, "permute": permute, "transpose": transpose,
    "t": reverse_dims, "view": reshape, "reshape": reshape, "flatten": flatten, "expand": expand,
    "broadcast_to": expand, "stack": stack, "unbind": unbind,
    "expand_as": lambda input, other: expand(input, [d.extent for d in coerce(other).dims]),
    "view_as": lambda input, other: reshape(input, [d.extent for d in coerce(other).dims]),
    "contiguous": _same, "clone": _same, "alias": _same, "lift_fresh_copy": _same, "requires_grad_": _same,
    "sum": _sum, "prod": _reduction("prod"), "any": _reduction("any"), "all": _reduction("all"),
    "amax": _amax, "amin": _amin, "max": _extreme("max", "maximum"), "min": _extreme("min", "minimum"),
    "argmax": lambda input, dim=None, keepdim=False: _arg("max", input, dim, keepdim),
    "argmin": lambda input, dim=None, keepdim=False: _arg("min", input, dim, keepdim),
    "mean": mean, "dot": dot, "inner": dot, "vdot": dot, "vecdot": dot, "matmul": matmul, "norm": norm,
    "vector_norm": norm, "softmax": softmax, "logsumexp": logsumexp, "count_nonzero": count_nonzero,
    "cat": _refused("torch.cat", "torch.stack up to 16 single values, or index one captured table"),
    "repeat_interleave": _refused("repeat_interleave", "build the table outside the mod"),
}  # fmt: skip
