"""Attention inside torch.compile: the higher-order operator through which mods enter a graph.

Dynamo captures each mod as a graph of its own and lifts what it closes over into inputs of the model's graph,
as it does for torch's flex_attention. The operator then is made of ordinary parts: it turns the two graphs
into a program and calls `torch.ops.fa4flex.attention`, which is all that later stages see.
"""

from __future__ import annotations

import textwrap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from fa4flex.codegen.analyze.facts import Facts, analyze
from fa4flex.codegen.build import dropped
from fa4flex.codegen.trace import Captures, Operand, trace
from fa4flex.codegen.trace.captures import Recipe
from fa4flex.codegen.trace.graph import GraphFunction, StandIn
from fa4flex.codegen.trace.paths import Path
from fa4flex.codegen.trace.traced import ModKind
from fa4flex.errors import Fa4flexError
from fa4flex.kernels.plan.problem import STATISTICS
from fa4flex.primitives.precision import Precision, refuse_codes
from fa4flex.primitives.schedule import Schedule
from fa4flex.primitives.varlen import Varlen
from fa4flex.primitives.weights import Weights
from fa4flex.runtime import autocast, launch
from fa4flex.runtime.call import Call, Results, SequenceLengths, Statistics, results_of
from fa4flex.runtime.checks import (
    Sizes,
    check_dense,
    check_packed,
    check_tables,
    check_tensors,
    check_variant,
    refuse_map,
)
from fa4flex.runtime.key_sources import Contiguous, KeySource, Paged
from fa4flex.runtime.output import Rows, applied, by_operator, whole_of
from fa4flex.runtime.output_call import OutputCall
from fa4flex.runtime.packing import asked_for, results_by_operator
from fa4flex.runtime.programs import contract, publish
from fa4flex.runtime.second_pass import SecondCall, Tensors, check_lse, checked
from fa4flex.runtime.second_pass import by_operator as pass_by_operator
from fa4flex.runtime.second_pass import eager as eager_second_pass
from fa4flex.torch_internals import (
    HigherOrderOperator,
    capture_mods,
    constant_in_graphs,
    fake_tensors,
    without_modes,
    without_transforms,
)
from fa4flex.variant import Layout, Variant, default_scale

NAME = "fa4flex_flex_attention"
CONTEXT = ("q_len", "kv_len", "num_heads")
_CONTRACT = contract()


@dataclass(frozen=True, eq=False)
class GraphTrace:
    """A program made of two graphs; positions are among the inputs that were lifted.

    `scalars` are numbers, or tensors with the dimension whose extent is the number. `fixed` are tensors and
    dimensions whose extents the program depends on, `pinned` numbers that are part of
    it, with their values.
    """

    facts: Facts
    operands: tuple[Operand, ...]
    bases: tuple[int, ...]
    scalars: tuple[tuple[int, int | None], ...]
    fixed: tuple[tuple[int, int], ...]
    pinned: tuple[tuple[int, int | float], ...]


class _Attention(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__(NAME, cacheable=True)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mod: fx.GraphModule,
        block_mask: tuple[Any, ...],
        scale: Tensor | float | None,
        options: dict[str, Any],
        score_lifted: Sequence[Any] = (),
        mask_lifted: Sequence[Any] = (),
    ) -> Results:
        """Results of q, k, v [B, H, S, D], or packed. `options`: see `attend`; with "rows", q is an output,
        `score_mod` a function of it, and the result the function's, three times; with "chosen", v is a lse,
        and the result three times that of a second pass."""
        if not isinstance(score_mod, fx.GraphModule):
            eager = _eager if "rows" not in options else _eager_output
            eager = _eager_second_pass if "chosen" in options else eager
            return eager(score_mod.__self__.variant, (q, k, v), options)
        if "chosen" in options:
            graphs = (score_mod, score_lifted), (block_mask[-1], mask_lifted)
            out = _of_second_pass((q, k, v), graphs, scale, options)
            return out, out, out
        if "rows" in options:
            out = _of_output(q, (score_mod, score_lifted), (block_mask[-1], mask_lifted), options)
            return out, out, out
        check_tensors(q, k, v)
        lengths, heads_first = SequenceLengths(*options["lengths"]), options["heads_first"]
        kv: KeySource = Contiguous(k, v)
        if "pages" in options:
            kv = Paged(k, v, *options["pages"])
        _check_shapes(*kv.stand_in(q, heads_first), lengths.cu_seqlens_q)
        graphs = (score_mod, score_lifted), (block_mask[-1], mask_lifted)
        result, operands, scalars = _read(graphs, options["context"])
        if not isinstance(scale, Tensor):
            scale = default_scale(int(q.shape[-1])) if scale is None else float(scale)
        schedule = Schedule(**_plain(options["schedule"]))
        precision = _precision(options)
        facts = analyze(result.facts.score, result.facts.mask, weights=Weights(*options["weights"]))
        if options["dropout"] is not None:
            seed, threshold = options["dropout"]
            facts, operands, scalars = dropped(facts, operands, scalars, seed, threshold)
        program = publish(facts, schedule, precision, options["backend"])
        statistics = asked_for(options)
        call = Call(q, kv, operands, options["sinks"], lengths, scalars, scale, heads_first, statistics)  # type: ignore[arg-type]
        return results_of(results_by_operator(program, call), statistics)


def _read(
    graphs: tuple[Graph, Graph], context: Sequence[Tensor], kind: ModKind = "score"
) -> tuple[GraphTrace, tuple[Tensor, ...], tuple[Any, ...]]:
    """The program of two graphs, with the captured tensors and numbers among what they were lifted from."""
    lifted = (*graphs[0][1], *graphs[1][1])
    result = _kept(graphs, context, kind)
    for position, dimension in result.fixed:
        int(lifted[position].shape[dimension])  # torch.compile guards what is looked at
    bases = tuple([lifted[position] for position in result.bases])
    operands = tuple([operand.of(bases).value() for operand in result.operands])
    scalars = tuple([
        lifted[at] if dimension is None else lifted[at].shape[dimension] for at, dimension in result.scalars
    ])  # fmt: skip
    return result, operands, scalars


def _of_output(out: Tensor, function: Graph, mask: Graph, options: dict[str, Any]) -> Tensor:
    """An output function of `out`."""
    result, operands, scalars = _read((function, mask), options["context"], "output")
    precision = _precision(options)
    starts, used = options["rows"]
    lengths, whole = SequenceLengths(starts, None, used), whole_of(out, options["heads_first"])
    call = OutputCall(out, operands, lengths, None, whole, scalars, options["heads_first"])
    return by_operator(publish(result.facts, Schedule(), precision), call)


def _of_second_pass(
    tensors: Tensors, graphs: tuple[Graph, Graph], scale: Tensor | float | None, options: dict[str, Any]
) -> Tensor:
    """A second pass over q, k and lse."""
    q, k, lse = tensors
    found, operands, scalars = _read(graphs, options["context"])
    if not isinstance(scale, Tensor):
        scale = default_scale(int(q.shape[-1])) if scale is None else float(scale)
    schedule = Schedule(**_plain(options["schedule"]))
    precision = _precision(options)
    program = publish(found.facts, schedule, precision, options["backend"])
    lengths = SequenceLengths(*options["lengths"])
    call = SecondCall(q, k, lse, options["chosen"], operands, lengths, scalars, scale)
    return pass_by_operator(program, call)


attention = _Attention()


@constant_in_graphs
def _register() -> None:
    """Tell Dynamo how to capture the mods; called in compiled code, where Dynamo is loaded."""
    capture_mods(NAME, _left_out)


def _ours(error: BaseException | None) -> Fa4flexError | None:
    """The library's own error that led to `error`, if one did."""
    while error is not None and not isinstance(error, Fa4flexError):
        error = error.__cause__ or error.__context__
    return error


def _left_out(error: Exception) -> tuple[str, Exception]:
    """Words for a call that Dynamo leaves out of its graph, if it may leave some out, and their cause."""
    error = _ours(error) or error
    reason = str(getattr(error, "msg", error)).strip()
    reason = reason if isinstance(error, Fa4flexError) else reason.partition("\n\n")[0]
    reason = textwrap.indent(reason, "    ")
    words = (
        "attention of fa4flex that is not captured in a graph\n"
        f"  Explanation: a function of this call, or what it is given, cannot be traced:\n{reason}\n"
        "  Hint: Without fullgraph=True the call runs between two graphs as it does without torch.compile.\n"
        "  Hint: Without torch.compile, an error tells what is expected instead, and where in your code."
    )
    return words, error


def run(variant: Variant, q: Tensor, kv: KeySource, varlen: Varlen | None, statistics: Statistics) -> Results:
    """Counterpart of launch.run in code that torch.compile traces: reads no contents and keeps nothing."""
    refuse_codes(variant.precision, "in a graph", "call the attention itself, which rounds q and k before")
    cast = kv.cast(q)
    q, kv = (q, kv) if cast is None else cast
    kv.check(q, varlen, variant)
    if isinstance(kv, Paged):
        refuse_map(variant, "pages")
        # Gradients, and tensors that are shared out, go by the operator that has rules for them; copies of
        # latent rows by that of contiguous keys, which sees that values lie in them.
        if type(kv) is Paged and not torch.is_grad_enabled() and type(q) is Tensor:
            return _in_pages(variant, q, kv, varlen, statistics)
    copy = kv.copied(q, varlen, variant, kernels=launch.by_kernels(variant, q), eager=False)
    if copy is not None:
        return copy.results(run(variant, copy.q, copy.kv, copy.varlen, statistics))
    packed, k, v = varlen is not None and varlen.packed, kv.k, kv.v
    swap = variant.layout == "bshd" and not packed
    if swap:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if packed and q.ndim == 3:
        check_variant(Sizes(0, q.shape[1], k.shape[1], q.shape[0], k.shape[0]), q, variant)
    elif q.ndim == 4 and k.ndim == 4:  # other ranks are refused by the operator
        check_variant(Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]), q, variant)
    lengths: tuple[Tensor | None, ...] = (None, None, None, None)
    if varlen is not None:
        lengths = varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k
    out, *more = attend((q, k, v), variant, _options(variant, lengths, statistics))
    return out.transpose(1, 2) if swap else out, *more


def _options(variant: Variant, lengths: tuple[Tensor | None, ...], statistics: Statistics) -> dict[str, Any]:
    dropout = variant.dropout
    return {
        "sinks": variant.logits(),
        "lengths": lengths,
        "heads_first": True,
        **{name: name in statistics for name in STATISTICS[1:]},
        "schedule": {name: getattr(variant.schedule, name) for name in _OF_SCHEDULE},
        "precision": _told(variant.precision),
        "backend": variant.backend,
        "dropout": None if dropout is None else (dropout.seed, dropout.threshold),
        "weights": tuple(variant.weights) if variant.weights.kind == "softpick" else variant.weights[:1],
    }


_OF_SCHEDULE = tuple([f.name for f in fields(Schedule)])
_OF_PRECISION = tuple([f.name for f in fields(Precision) if f.name not in ("skip", "tolerance")])
"""Fields that graphs hold as they are; within a tolerance, heads are rounded before."""


def _told(precision: Precision) -> dict[str, Any]:
    """Fields of a precision as options. The number is text: Dynamo takes a float for an input, and compiles
    such a graph twice under dynamic shapes."""
    return {"skip": precision.skip_text, **{name: getattr(precision, name) for name in _OF_PRECISION}}


def _precision(options: Mapping[str, Any]) -> Precision:
    """The precision that `_told` has told of."""
    told = _plain(options["precision"])
    return Precision(**{**told, "skip": float(told["skip"])})


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose sizes are plain numbers: those that are dynamic get a guard."""

    def plain(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return tuple(map(plain, x))
        if isinstance(x, torch.SymFloat):
            return float(x)
        return int(x) if isinstance(x, torch.SymInt) else x

    return {name: plain(x) for name, x in options.items()}


def _in_pages(
    variant: Variant, q: Tensor, kv: Paged, varlen: Varlen | None, statistics: Statistics
) -> Results:
    """Pages are an operator's inputs: what runs it reads them where they lie, if a kernel does."""
    kv.fits(q, varlen)  # the operator looks at contents
    heads_first = varlen is None and variant.layout == "bhsd"
    *batch, q_len, heads = q.shape[:-1] if not heads_first else (q.shape[0], q.shape[2], q.shape[1])
    sizes = Sizes(batch[0] if batch else 0, heads, kv.k.shape[2], q_len, kv.longest(1))
    check_variant(sizes, q, variant)
    lengths = (None,) * 4 if varlen is None else (varlen.cu_seqlens_q, None, varlen.seqused_q, None)
    options = _options(variant, lengths, statistics)
    options |= {"pages": (kv.page_table, kv.paged_keys), "heads_first": heads_first}
    return attend((q, kv.k, kv.v), variant, options)


def attend(qkv: tuple[Tensor, Tensor, Tensor], variant: Variant, options: dict[str, Any]) -> Results:
    """Results of q, k, v [B, H, S, D], or packed.

    options: sinks [Hq] or None; lengths (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k); heads_first;
    statistics besides lse by name, whether they are wanted; schedule and precision as their fields by name;
    backend; and pages (table, numbers of keys), where keys lie in some.
    """
    _register()
    # 0-d tensors that stand for the lengths of a sequence: the graphs' inputs are recognised by them.
    asked = [name for mod in (variant.scored, variant.allowed) if mod is not None for name in mod.context]
    context = {name: torch.zeros((), dtype=torch.int64) for name in CONTEXT if name in asked}
    mods, scale = _Mods(variant, context), variant.scale
    if scale is not None:
        scale = torch.ones((), dtype=torch.float64) * scale  # type: ignore[assignment]
    options = {**options, "context": tuple([context.get(name) for name in CONTEXT]), "contract": _CONTRACT}
    return attention(*qkv, mods.score, (mods.mask,), scale, options)  # type: ignore[arg-type]


def second_pass(variant: Variant, tensors: Tensors, varlen: Varlen | None, rows: Tensor | None) -> Tensor:
    """Counterpart of `runtime.second_pass.eager`, of tensors with heads first, or packed."""
    q, k, _ = autocast.cast(*tensors)
    check_lse(q, tensors[2], varlen)
    lengths: tuple[Tensor | None, ...] = (None, None, None, None)
    if varlen is not None:
        lengths = varlen.cu_seqlens_q, varlen.cu_k, varlen.seqused_q, varlen.seqused_k
    _check_shapes(q, k, k, lengths[0])
    at = 0 if lengths[0] is not None else 2
    batch = 0 if lengths[0] is not None else q.shape[0]
    check_variant(Sizes(batch, q.shape[1], k.shape[1], q.shape[at], k.shape[at]), q, variant)
    options = {**_options(variant, lengths, ()), "chosen": rows}
    return attend((q, k, tensors[2]), variant, options)[0]


def output(variant: Variant, out: Tensor, varlen: Varlen | None) -> Tensor:
    """Counterpart of `runtime.output.applied`: the variant's output function of an output in its layout. The
    function enters the graph as a score mod does, of which it has the form."""
    _register()
    assert variant.output_mod is not None
    heads_first = variant.layout == "bhsd" and out.ndim == 4
    check_tables((variant.output_mod,), out.shape[1 if heads_first or out.ndim == 3 else 2])
    asked = variant.output_mod.context
    context = {name: torch.zeros((), dtype=torch.int64) for name in CONTEXT if name in asked}
    mods = _Mods(variant, context)
    options = {
        "rows": (None, None) if varlen is None else (varlen.cu_seqlens_q, varlen.seqused_q),
        "heads_first": heads_first,
        "precision": _told(variant.precision),
        "context": tuple([context.get(name) for name in CONTEXT]),
        "contract": _CONTRACT,
    }
    return attention(out, out, out, mods.output, (mods.every,), None, options)[0]  # type: ignore[arg-type]


class _Mods:
    """The functions of a variant as graphs take them, of positional arguments."""

    def __init__(self, variant: Variant, context: dict[str, Tensor]) -> None:
        self.variant, self.context = variant, context

    def score(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        mod = self.variant.scored
        return s if mod is None else self._value(mod, s, b, h, q, kv)

    def output(self, out: Any, b: Any, h: Any, q: Any, d: Any) -> Any:
        return self._value(self.variant.output_mod, out, b, h, q, d)

    def _value(self, mod: Any, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        result = _one(mod(s, b, h, q, kv, **{name: self.context[name] for name in mod.context}))
        # Dynamo takes no float for the result of a function.
        return (
            torch.where(torch.ones_like(b, dtype=torch.bool), result, s)
            if isinstance(result, float)
            else result
        )

    def every(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.ones_like(b, dtype=torch.bool)

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        mod = self.variant.allowed
        if mod is None:
            return torch.ones_like(b, dtype=torch.bool)
        return _one(mod(b, h, q, kv, **{name: self.context[name] for name in mod.context}))


def _one(result: Any) -> Any:
    """The result of a mod. Dynamo would pass tuples on; what else is not one value, tracing refuses."""
    if isinstance(result, tuple):
        raise TypeError("a mod that returns a tuple")
    return result


_LAYOUTS: dict[bool, Layout] = {True: "bhsd", False: "bshd"}


@torch.compiler.disable
def _eager(variant: Variant, qkv: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Results:
    """Results of eager mode: where Dynamo cannot trace a mod, it leaves the call out of its graphs."""
    q, k, v = qkv
    lengths, layout = options["lengths"], _LAYOUTS[options["heads_first"]]
    kv: KeySource = Paged(k, v, *options["pages"]) if "pages" in options else Contiguous(k, v)
    varlen = None if all(x is None for x in lengths) else Varlen(*lengths)
    return launch.attend(replace(variant, layout=layout), q, kv, varlen, asked_for(options))


@torch.compiler.disable
def _eager_output(variant: Variant, outs: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Results:
    """An output function of eager mode."""
    starts, used = options["rows"]
    rows = Rows(SequenceLengths(starts, None, used))
    layout = _LAYOUTS[options["heads_first"]] if outs[0].ndim == 4 else variant.layout
    result = applied(replace(variant, layout=layout), launch.bound_for(variant), outs[0], rows)
    return result, None, None


@torch.compiler.disable
def _eager_second_pass(variant: Variant, tensors: Tensors, options: dict[str, Any]) -> Results:
    """A second pass of eager mode."""
    lengths = options["lengths"]
    varlen = None if all(x is None for x in lengths) else Varlen(*lengths)
    bare = checked(variant, tensors, varlen)
    return eager_second_pass(bare, None, tensors, varlen, options["chosen"]), None, None


# --- from graphs to a program -------------------------------------------------------------------------------

Graph = tuple[fx.GraphModule, Sequence[Any]]

Known = dict[Any, tuple[fx.GraphModule, GraphTrace]]
_traces: weakref.WeakKeyDictionary[fx.GraphModule, Known] = weakref.WeakKeyDictionary()
"""Programs by the score's graph, then by the mask's graph (kept beside) and the look of the lifted inputs."""


def _kept(graphs: tuple[Graph, Graph], context: Sequence[Tensor], kind: ModKind) -> GraphTrace:
    (score, score_lifted), (mask, mask_lifted) = graphs
    lifted = (*score_lifted, *mask_lifted)
    key = kind, id(mask), tuple([_look(x, lifted, context) for x in lifted])
    known = _traces.setdefault(score, {})
    # Numbers that are part of a program are guarded by torch.compile, too, once they were looked at.
    if key not in known or any(_value(lifted[at]) != value for at, value in known[key][1].pinned):
        known[key] = mask, _traced(graphs, context, kind)
    return known[key][1]


def _look(x: Any, lifted: Sequence[Any], context: Sequence[Tensor]) -> Any:
    """Key of all that the program may depend on of a lifted input."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    first = next(i for i, other in enumerate(lifted) if other is x)
    role = next((i for i, other in enumerate(context) if other is x), None)
    return first, role, x.dtype, x.device, tuple([str(n) for n in x.shape])


def _traced(graphs: tuple[Graph, Graph], context: Sequence[Tensor], kind: ModKind) -> GraphTrace:
    (score, score_lifted), (mask, mask_lifted) = graphs
    lifted = (*score_lifted, *mask_lifted)
    carriers = _carriers(score, len(score_lifted)) + _carriers(mask, len(mask_lifted))
    with without_modes(), without_transforms(), torch.enable_grad():
        stand_ins = _stand_ins(lifted, carriers, context)
        count, captures = len(score_lifted), Captures()
        functions = (
            GraphFunction(score, kind, stand_ins[:count]),
            GraphFunction(mask, "mask", stand_ins[count:]),
        )
        kinds: tuple[ModKind, ...] = kind, "mask"
        traced = [trace(function, each, captures) for function, each in zip(functions, kinds, strict=True)]
        traced_score, traced_mask = captures.finish(*traced)
    pinned = [
        (function.positions[number.name], number.value)
        for function, one in zip(functions, (traced_score, traced_mask), strict=True)
        for number in one.pinned
        if number.name in function.positions  # extents are among those that are fixed
    ]
    places = {id(x.tensor): x.position for x in reversed(stand_ins) if x.tensor is not None}
    bases = tuple([x for x in captures.bases() if id(x) in places])
    operands = [_made_in_the_graph(operand, places) for operand in captures.operands]
    return GraphTrace(
        analyze(traced_score.root, traced_mask.root),
        tuple([operand.at(bases) for operand in operands]),
        tuple(places[id(x)] for x in bases),
        tuple([_place(x.path) for x in captures.numbers]),
        tuple({(g.path.key, g.constant[0]): None for g in captures.guards if g.kind == "extent"}),
        tuple(pinned),
    )


def _place(path: Path) -> tuple[int, int | None]:
    """The position of a lifted number; of a tensor, and a dimension, where the number is that extent."""
    return (path.key, None) if path.parent is None else (path.parent.key, path.key)


def _made_in_the_graph(operand: Operand, places: Mapping[int, int]) -> Operand:
    """The operand without tensors that a mod made of nothing captured: the model's graph makes them anew."""

    def made(x: Tensor) -> Any:
        if id(x) in places:
            return x
        return Recipe(torch.tensor, (x.tolist(),), {"dtype": x.dtype, "device": x.device}, 0, False)

    if operand.recipe is not None:
        return replace(operand, recipe=operand.recipe.exchanged(Tensor, made))
    if not isinstance(operand.base, Tensor) or id(operand.base) in places:
        return operand
    return replace(operand, base=None, recipe=made(operand.base))


def _carriers(graph: fx.GraphModule, count: int) -> list[Any]:
    """Value now of the float that each lifted input carries; None for other inputs."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [_carried(node) for node in placeholders[len(placeholders) - count :]]


def _carried(node: fx.Node) -> Any:
    items = [user for user in node.users if user.op == "call_method" and user.target == "item"]
    if not items or len(items) < len(node.users):
        return None
    value = items[0].meta.get("example_value")
    return 1.0 if value is None else _hint(value)


def _hint(value: Any) -> Any:
    """The value of a number for now, without a guard."""
    node = getattr(value, "node", None)
    return value if node is None else node.hint if node.has_hint() else 1


def _stand_ins(lifted: Sequence[Any], carriers: Sequence[Any], context: Sequence[Tensor]) -> list[StandIn]:
    mode, made = fake_tensors(), dict[int, Tensor]()
    symbols = {id(x): name for x, name in zip(context, CONTEXT, strict=True)}
    results = []
    for position, (x, carried) in enumerate(zip(lifted, carriers, strict=True)):
        if not isinstance(x, Tensor):
            results.append(StandIn(position, number=_hint(x)))
        elif id(x) in symbols:
            results.append(StandIn(position, symbol=symbols[id(x)]))
        else:
            if id(x) not in made:
                with mode:
                    sizes = [_hint(n) for n in x.shape]
                    made[id(x)] = torch.empty(sizes, dtype=x.dtype, device=x.device)
            number = float(carried) if carried is not None and x.dtype == torch.float64 else None
            results.append(StandIn(position, made[id(x)], number))
    return results


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None) -> None:
    if cu_seqlens_q is None:
        check_dense(q, k, v)
    else:
        check_packed(q, k, v, None, cu_seqlens_q.shape[0] - 1)


def _value(x: Any) -> Any:
    """The value of a lifted number, which torch.compile guards."""
    if isinstance(x, Tensor):
        return float(x.item())
    return float(x) if isinstance(x, (float, torch.SymFloat)) else int(x)
