"""Calls as arguments of operators, and back.

An operator's arguments are tensors and plain numbers, so a program enters as its text. Captured tensors are
an argument, so that autograd, torch.compile and functionalisation see them. Ints enter as they are and floats
as 0-d float64 tensors on the CPU: torch.compile makes both inputs of its graphs, where a plain float would be
compiled in. A scale that is not a plain number is the last of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex.kernels.plan.problem import STATISTICS
from fa4flex.operators import OPERATORS
from fa4flex.runtime.call import NO_LENGTHS, Call, SequenceLengths, Statistics, more_than_rows
from fa4flex.runtime.key_sources import Contiguous, KeySource, Paged
from fa4flex.runtime.programs import Published, read

NAMES: dict[type[KeySource], str] = {Contiguous: "attention", Paged: "attention_in_pages"}
"""Operators of the sources of keys that some take as they are."""

WITH_MORE = "_with_statistics"
"""End of the names of those that have max_logit and entropy, too."""


def results_by_operator(program: Published, call: Call) -> tuple[Tensor, ...]:
    """Results of a call with heads first, or of pages, by the operator of its source of keys."""
    name = NAMES[type(call.kv)] + WITH_MORE * more_than_rows(call.statistics)
    arguments = OPERATORS[name].packed(named(program, call))
    results: tuple[Tensor, ...] = getattr(torch.ops.fa4flex, name)(*arguments)
    return results


def gradients_by_operator(
    program: Published, call: Call, upstream: Sequence[Tensor], saved: Sequence[Any], needs: list[int]
) -> list[Tensor]:
    """Gradients of a call. saved: results of the forward pass, None where it has none."""
    (dout, *of_lse), (out, lse, *rest) = upstream, saved
    rest = [lse.new_empty(0) if x is None else x for x in rest]
    rest += [lse.new_empty(0)] * (2 - len(rest))
    more = {
        "upstream": [call.turn(dout), *of_lse],
        "saved": [call.turn(out), lse, *rest],
        "needs": needs,
    }
    arguments = OPERATORS["attention_gradients"].packed(named(program, call.turned()) | more)
    results: list[Tensor] = torch.ops.fa4flex.attention_gradients(*arguments)
    return [*map(call.turn, results[:3]), *results[3:]]


def named(program: Published, call: Call) -> dict[str, Any]:
    """All that operators may take of a call, by name."""
    ints, floats = program.numbers(call.scalars)
    scale, tensors = call.scale, [as_tensor(x) for x in floats]
    if isinstance(scale, Tensor):
        tensors.append(scale)
    return {
        "q": call.q,
        **dict(zip(call.kv._fields, call.kv, strict=True)),
        "operands": call.operands,
        "sinks": call.sinks,
        **call.lengths._asdict(),
        "lengths": list(call.lengths),
        "program": program.text,
        "ints": ints,
        "floats": tensors,
        "scale": None if isinstance(scale, Tensor) else scale,
        "heads_first": call.heads_first,
        **{name: name in call.statistics for name in STATISTICS[1:]},
    }


def as_tensor(x: Any) -> Tensor:
    """A float as operators take it; one that is symbolic stays so."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, torch.SymFloat):
        one = torch.ones((), dtype=torch.float64, device="cpu")
        return one * x  # type: ignore[operator]
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def call_of(arguments: Mapping[str, Any], kind: type[KeySource] = Contiguous, data: bool = True) -> Call:
    """The call that an operator's arguments make, by name. data: whether floats are read; they lie on the
    host, which waits for nothing."""
    program, floats, scale = read(arguments["program"]), list(arguments["floats"]), arguments["scale"]
    floats = [float(x) for x in floats] if data else floats
    scale = floats.pop() if scale is None else scale
    lengths = sequence_lengths(arguments)
    return Call(
        arguments["q"],
        kind(*[arguments[name] for name in kind._fields]),
        tuple(arguments["operands"]),
        arguments["sinks"],
        lengths,
        program.scalars(arguments["ints"], floats),
        scale,
        arguments.get("heads_first", True),
        asked_for(arguments),
    )


def asked_for(options: Mapping[str, Any]) -> Statistics:
    """Statistics of a call that has the log-sum-exp, and those that are True by name."""
    return "lse", *[name for name in STATISTICS[1:] if options.get(name, False)]


def sequence_lengths(arguments: Mapping[str, Any]) -> SequenceLengths:
    """Lengths among an operator's arguments."""
    if "lengths" in arguments:
        result = SequenceLengths(*arguments["lengths"])
    else:
        result = SequenceLengths(
            **{name: arguments[name] for name in SequenceLengths._fields if name in arguments}
        )
    return NO_LENGTHS if all(x is None for x in result) else result
