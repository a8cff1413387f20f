"""The operators that torch knows of fa4flex: their schemas, and where the functions are that compute them.

Schemas are declared once torch and fa4flex are both imported, so that exported graphs load; functions are
imported at an operator's first call.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fa4flex.torch_internals import below_autograd, without_functions, without_modes

NAMESPACE = "fa4flex"


class Row(NamedTuple):
    """One argument of an operator: its name, its type and its default, if any, as torch's schemas have it."""

    name: str
    type: str
    default: str = ""

    @property
    def text(self) -> str:
        return f"{self.type} {self.name}" + (f"={self.default}" if self.default else "")


@dataclass(frozen=True)
class Operator:
    """One operator. `module` has its functions: `compute` for `devices`, `fake` for shapes without data, and
    `gradients`, if there is one, above autograd."""

    rows: tuple[Row, ...]
    returns: str
    module: str
    compute: str
    fake: str
    gradients: str | None = None
    devices: tuple[str, ...] = ("CPU", "CUDA", "XPU")

    @property
    def schema(self) -> str:
        return f"({', '.join(row.text for row in self.rows)}) -> {self.returns}"

    @property
    def functions(self) -> dict[str, str]:
        """Names of the functions by dispatch key."""
        found = dict.fromkeys(self.devices, self.compute)
        return found if self.gradients is None else {**found, "Autograd": self.gradients}

    def packed(self, named: Mapping[str, Any]) -> list[Any]:
        """Arguments in order, of those by name."""
        return [named[row.name] for row in self.rows]

    def named(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Arguments by name. torch hands over none of the last ones that equal their defaults."""
        values = [*arguments, *(ast.literal_eval(row.default) for row in self.rows[len(arguments) :])]
        return dict(zip([row.name for row in self.rows], values, strict=True))


def _rows(text: str) -> tuple[Row, ...]:
    rows = []
    for one in text.split(", "):
        kind, _, named = one.rpartition(" ")
        name, _, default = named.partition("=")
        rows.append(Row(name, kind, default))
    return tuple(rows)


# Files of torch.export hold calls by these schemas: what changes must accept the calls of before.
_QKV = _rows("Tensor q, Tensor k, Tensor v")
_PAGES = _rows("Tensor page_table, Tensor paged_keys")
_CAPTURED = _rows("Tensor[] operands, Tensor? sinks")
_LENGTHS = _rows("Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k")
_OF_QUERIES = _LENGTHS[0], _LENGTHS[2]
_PROGRAM = _rows("str program, SymInt[] ints, Tensor[] floats, float? scale")
_ARRIVING = _rows("Tensor[] upstream, Tensor[] saved")
_ALL_LENGTHS, _NEEDS = _rows("Tensor?[] lengths"), _rows("int[] needs")
_BACKWARD = (*_ARRIVING, *_QKV, *_CAPTURED, *_ALL_LENGTHS, *_PROGRAM, *_NEEDS)
_OUTPUT = _rows(
    "Tensor[] operands, Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor? positions,"
    " str program, SymInt[] ints, Tensor[] floats, SymInt[] whole, bool heads_first"
)
_SECOND = (*_rows("Tensor q, Tensor k, Tensor lse, Tensor? rows, Tensor[] operands"), *_LENGTHS, *_PROGRAM)
_HEADS_FIRST, _MAX_SCORES = _rows("bool heads_first"), _rows("bool max_scores")
_STATISTICS = (*_MAX_SCORES, *_rows("bool max_logit, bool entropy"))

OPERATORS = {
    "attention": Operator(
        (*_QKV, *_CAPTURED, *_LENGTHS, *_PROGRAM, *_MAX_SCORES), "(Tensor, Tensor, Tensor, Tensor)",
        "fa4flex.runtime.ops", "attention", "attention_fake", "attention_with_gradients",
    ),
    # Gradients of q, k and v lie in memory as these do.
    "attention_gradients": Operator(
        _BACKWARD, "Tensor[]",
        "fa4flex.runtime.ops", "attention_gradients", "attention_gradients_fake", "gradients_below",
    ),
    # All are contiguous: graphs that were saved or compiled before count on that.
    "attention_backward": Operator(
        _BACKWARD, "Tensor[]",
        "fa4flex.runtime.ops", "attention_backward", "attention_backward_fake", "backward_below",
    ),
    "attention_in_pages": Operator(
        (*_QKV, *_PAGES, *_OF_QUERIES, *_CAPTURED, *_PROGRAM, *_HEADS_FIRST, *_MAX_SCORES),
        "(Tensor, Tensor, Tensor)", "fa4flex.runtime.ops", "attention_in_pages", "attention_in_pages_fake",
    ),
    "attention_with_statistics": Operator(
        (*_QKV, *_CAPTURED, *_LENGTHS, *_PROGRAM, *_STATISTICS),
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", "fa4flex.runtime.ops",
        "attention_with_statistics", "attention_with_statistics_fake",
        "attention_with_statistics_and_gradients",
    ),
    "attention_in_pages_with_statistics": Operator(
        (*_QKV, *_PAGES, *_OF_QUERIES, *_CAPTURED, *_PROGRAM, *_HEADS_FIRST, *_STATISTICS),
        "(Tensor, Tensor, Tensor, Tensor, Tensor)", "fa4flex.runtime.ops",
        "attention_in_pages_with_statistics", "attention_in_pages_with_statistics_fake",
    ),
    "output_function": Operator(
        (*_rows("Tensor out"), *_OUTPUT), "Tensor",
        "fa4flex.runtime.output", "output_function", "output_function_fake", "output_function_with_gradients",
    ),
    "output_function_backward": Operator(
        (*_rows("Tensor dout, Tensor out"), *_OUTPUT, *_NEEDS), "Tensor[]", "fa4flex.runtime.output",
        "output_function_backward", "output_function_backward_fake", "backward_below",
    ),
    "second_pass": Operator(
        _SECOND, "Tensor",
        "fa4flex.runtime.second_pass", "second_pass", "second_pass_fake", "second_pass_with_gradients",
    ),
    "second_pass_backward": Operator(
        (*_rows("Tensor upstream"), *_SECOND, *_NEEDS), "Tensor[]",
        "fa4flex.runtime.second_pass", "second_pass_backward", "second_pass_backward_fake", "backward_below",
    ),
    "append": Operator(
        _rows(
            "Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor page_table, Tensor seqused_k,"
            " Tensor? cu_seqlens, Tensor? seqused, Tensor? cos, Tensor? sin, bool interleaved, Tensor? q,"
            " Tensor? axes=None, Tensor? positions=None, Tensor? q_weight=None, Tensor? k_weight=None,"
            " float eps=0., bool unit_offset=False, Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None"
        ),
        "(Tensor, Tensor)", "fa4flex.runtime.append", "append", "append_fake", devices=("CPU", "CUDA"),
    ),
    "append_latent": Operator(
        _rows(
            "Tensor rows, Tensor(a!) cache, Tensor page_table, Tensor seqused_k, Tensor? cu_seqlens,"
            " Tensor? seqused, Tensor? cos, Tensor? sin, bool interleaved, Tensor? axes, Tensor? q,"
            " Tensor? positions, Tensor? q_weight, Tensor? k_weight, float eps, bool unit_offset,"
            " SymInt value_dim, SymInt rope_dim, str? format, Tensor? scale"
        ),
        "(Tensor, Tensor)", "fa4flex.runtime.latent_append", "append_latent", "append_latent_fake",
        devices=("CPU", "CUDA"),
    ),
    "required": Operator(
        _rows("Tensor x, Tensor condition, str message"),
        "Tensor", "fa4flex.later", "required", "required_fake", devices=("CPU", "CUDA"),
    ),
    "block_classes": Operator(
        _rows(
            "Tensor counts, Tensor indices, Tensor? full_counts, Tensor? full_indices, SymInt columns"
        ),
        "Tensor", "fa4flex.runtime.block_lists", "block_classes", "block_classes_fake",
        devices=("CPU", "CUDA"),
    ),
    "listed_units": Operator(
        _rows("Tensor ids, Tensor? counts, SymInt columns"),
        "Tensor", "fa4flex.runtime.block_lists", "listed_units", "listed_units_fake",
        devices=("CPU", "CUDA"),
    ),
    "pool": Operator(
        _rows("Tensor x, SymInt block, str how"),
        "Tensor", "fa4flex.runtime.pooled_scores", "pool", "pool_fake", devices=("CPU", "CUDA"),
    ),
    "scores": Operator(
        _rows("Tensor q, Tensor k, float scale"),
        "Tensor", "fa4flex.runtime.pooled_scores", "scores", "scores_fake", devices=("CPU", "CUDA"),
    ),
    "topk": Operator(
        _rows("Tensor scores, SymInt k, SymInt[] rule"),
        "(Tensor, Tensor)", "fa4flex.runtime.topk", "topk", "topk_fake", devices=("CPU", "CUDA"),
    ),
}  # fmt: skip

library = torch.library.Library(NAMESPACE, "DEF")


def called(name: str, function: str) -> Callable[..., Any]:
    """The named function of an operator as torch calls it.

    Compiled packages of AOTInductor hand over None for an empty list, which a schema does not allow: where it
    has a list, the function gets one.
    """
    operator = OPERATORS[name]
    lists = [n for n, row in enumerate(operator.rows) if row.type.endswith("[]")]
    found: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal found
        if found is None:
            found = _imported(operator.module, function)
        if any(arguments[n] is None for n in lists):
            arguments = tuple([[] if x is None and n in lists else x for n, x in enumerate(arguments)])
        return found(*arguments)

    return call


def below(name: str) -> Callable[..., Any]:
    """The function above autograd of an operator that has no gradient: the same operator below it."""

    def call(*arguments: Any) -> Any:
        with below_autograd():
            return getattr(getattr(torch.ops, NAMESPACE), name)(*arguments)

    return call


def _imported(module: str, name: str) -> Callable[..., Any]:
    """Modes of the call at hand see nothing of what an import makes."""
    with torch.inference_mode(False), without_modes(), without_functions():
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _declare(name: str, operator: Operator) -> None:
    library.define(name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, function in operator.functions.items():
        library.impl(name, called(name, function), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", called(name, operator.fake), lib=library)


for _name, _operator in OPERATORS.items():
    _declare(_name, _operator)
