"""Nested tensors of layout torch.jagged: their values are packed tokens, their offsets cumulative lengths.

Nothing is copied: a call reads the values by their strides; its output is nested by the queries' offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.primitives.base import kind_of
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime.call import Results, Statistics
from fa4flex.variant import Layout

QKV = tuple[Tensor, Tensor, Tensor]


def is_jagged(x: Any) -> bool:
    """True for a nested tensor of layout torch.jagged. For a plain tensor it costs a look at its type."""
    return type(x) is not Tensor and isinstance(x, Tensor) and x.layout is torch.jagged


class Jagged(NamedTuple):
    """A call of nested tensors as one of packed tokens.

    qkv           values [tokens, heads, channels], views of those of the nested tensors
    varlen        their lengths
    offsets, lengths   those of the queries, by which results are nested; lengths None without holes
    heads_first   whether the nested tensors are [B, heads, ragged, channels]
    """

    qkv: QKV
    varlen: Varlen
    offsets: Tensor
    lengths: Tensor | None
    heads_first: bool

    @classmethod
    def of(cls, qkv: tuple[Any, Any, Any], layout: Layout, others: dict[str, Any]) -> Jagged:
        """The call, of nested q, k, v; `others` are arguments that may not be given with them, by name.

        Raises InputError where shapes, or offsets of k and v, do not fit, UnsupportedError for `others`.
        """
        q, k, v = qkv
        for name, value in others.items():
            if value is not None:
                raise UnsupportedError(
                    f"{name}= with nested tensors",
                    "nested tensors, which say their lengths themselves",
                    f"pass their values() as packed tensors beside {name}=, with fa4flex.Varlen(q.offsets())",
                )
        heads_first = layout == "bhsd"
        packed = _values("q", q, heads_first), _values("k", k, heads_first), _values("v", v, heads_first)
        used_q, used_k = q.lengths(), k.lengths()
        _check_batch(q, k)
        _check_alike(k, v, used_k)
        same = k.offsets() is q.offsets() and used_k is used_q
        cu_q = _covering(q.offsets(), used_q, packed[0])
        cu_k = None if same else _covering(k.offsets(), used_k, packed[1])
        varlen = Varlen(cu_q, cu_k, used_q, used_k)
        return cls(packed, varlen, q.offsets(), used_q, heads_first)

    def nested(self, results: Results, statistics: Statistics) -> Results:
        """Packed results nested as the queries are: out in their layout, statistics as [B, heads, ragged]."""
        out, lse, largest, *more = results
        made = self._by_offsets(out, 1)
        nested = (
            made.transpose(1, 2) if self.heads_first else made,
            self._by_offsets(lse, 2) if lse is not None and "lse" in statistics else None,
            self._by_offsets(largest, 2) if largest is not None and "max_scores" in statistics else None,
        )
        if not more:
            return nested
        of_heads, entropy = more
        return *nested, of_heads, self._by_offsets(entropy, 2) if "entropy" in statistics else None

    def _by_offsets(self, values: Tensor, dim: int) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, self.offsets, self.lengths, jagged_dim=dim)


def _values(name: str, x: Any, heads_first: bool) -> Tensor:
    """Values of a nested tensor as [tokens, heads, channels]."""
    layout = "[B, heads, ragged, channels]" if heads_first else "[B, ragged, heads, channels]"
    if not is_jagged(x):
        what = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {kind_of(x)}"
        raise InputError(
            f"{name} {what} beside nested tensors",
            "q, k and v all nested, of layout torch.jagged, or none of them",
            f"nest it: torch.nested.nested_tensor_from_jagged({name}, offsets)",
        )
    values: Tensor = x.values()
    if x.dim() != 4:
        to_heads = ".transpose(1, 2)" if heads_first else ""
        raise InputError(
            f"{name}, a nested tensor of shape {_shape(x)}",
            f"a nested {layout}",
            f"split its channels into heads: {name}.unflatten(-1, (heads, channels)){to_heads}",
        )
    heads, channels = (1, 3) if heads_first else (2, 3)
    inner = (0, 2) if heads_first else (1, 2)
    fits = x.shape[heads] == values.shape[inner[0]]
    if not fits or x.shape[channels] != values.shape[inner[1]]:
        other = "bshd" if heads_first else "bhsd"
        raise InputError(
            f"{name} of shape {_shape(x)} for layout {'bhsd' if heads_first else 'bshd'}",
            f"a nested {layout}",
            f"turn it: {name}.transpose(1, 2), or compile with layout={other!r}",
        )
    return values.transpose(0, 1) if heads_first else values


def _shape(x: Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"


def _check_batch(q: Any, k: Any) -> None:
    sequences = [int(x.offsets().shape[0]) - 1 for x in (q, k)]
    if sequences[0] != sequences[1]:
        raise InputError(
            f"q nests {sequences[0]} sequences, k nests {sequences[1]}",
            "as many sequences of queries as of keys",
            "nest both of one batch",
        )


def _check_alike(k: Any, v: Any, used_k: Tensor | None) -> None:
    """Keys and values lie in the same sequences: by the same tensors, or by equal contents. On a device these
    are compared there, and a later call raises."""
    used_v = v.lengths()
    pairs = [(k.offsets(), v.offsets())]
    if used_k is not None and used_v is not None:
        pairs.append((used_k, used_v))
    elif (used_k is None) != (used_v is None):
        raise InputError("k or v with holes, the other without", "both alike", "call .contiguous() on both")
    for of_k, of_v in pairs:
        if of_k is of_v:
            continue
        message = "k and v are nested by different offsets"
        fits = of_k.shape == of_v.shape and not torch.compiler.is_compiling()
        if fits and not of_k.is_cpu:
            later.require_at_each_replay(of_k == of_v, message)
        elif not fits or not torch.equal(of_k, of_v):
            raise InputError(
                message,
                "one tensor of offsets for both",
                "nest both by it: torch.nested.nested_tensor_from_jagged(values, k.offsets())",
            )


def _covering(offsets: Tensor, used: Tensor | None, tokens: Tensor) -> Tensor:
    """Cumulative lengths of all tokens; the last of several sequences with holes ends where tokens do."""
    if used is None:
        return offsets
    if offsets.is_cpu and not torch.compiler.is_compiling() and int(offsets[0]) != 0:
        raise UnsupportedError(
            f"a nested tensor whose first sequence starts at token {int(offsets[0])}",
            "one that starts with its first token",
            "call .contiguous() on it, which leaves out its holes",
        )
    return torch.cat((offsets[:-1], offsets.new_full((1,), tokens.shape[0])))
