"""A program at one of its stages, as text: one operation per line, with the user's line it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fa4flex.codegen.analyze.facts import SCORE
from fa4flex.codegen.analyze.intervals import describe
from fa4flex.codegen.build import Program
from fa4flex.codegen.emit.writer import with_comments
from fa4flex.codegen.expr import TRUE, Expr, walk
from fa4flex.codegen.ops import INFIX, PREFIX
from fa4flex.codegen.trace.origin import definition_line
from fa4flex.errors import InputError, Origin
from fa4flex.view.backend import flex_stage
from fa4flex.view.names import Names, describe_numbers, describe_operands

if TYPE_CHECKING:
    from fa4flex.view.gpu import KernelView

GPU_STAGES: dict[str, Callable[[KernelView], str]] = {
    "plan": lambda view: view.plan(),
    "forward": lambda view: view.source.text,  # of the pass that `direction` names
    "source": lambda view: view.source.text,
    "backward": lambda view: view.backward.source.text,
    "tangents": lambda view: view.tangents.source.text,
    "mass": lambda view: view.mass.source.text,
    "ptx": lambda view: view.ptx(),
}
CODE_WIDTH = 64


def source(program: Program, stage: str = "trace", **problem: Any) -> str:
    """The program at `stage`: "trace", "facts", "gradient", "flex"; for GPUs "plan", "forward",
    "backward", "tangents", "mass" and "ptx".

    `problem` says for which sizes (batch, heads, q_len, kv_len), chip (arch), pass (direction) and fields of
    Problem (head_dim, dtype, lengths, ...) GPU stages are shown. Raises InputError for other stages, and for
    a problem where none is shown.
    """
    if stage in GPU_STAGES or problem:
        from fa4flex.view import gpu

        gpu.check_names(problem)
    if stage in GPU_STAGES:
        return GPU_STAGES[stage](gpu.KernelView(program, problem))
    if stage not in STAGES:
        known = ", ".join((*STAGES, *GPU_STAGES))
        raise InputError(f"stage={stage!r}", f"one of {known}", "pick a stage")
    if problem:
        raise InputError(
            f"{', '.join(problem)} for stage={stage!r}, which holds for all lengths, widths and dtypes",
            f"these with one of {', '.join(GPU_STAGES)}",
            "leave them out",
        )
    return STAGES[stage](program)


# --- three-address listings -----------------------------------------------------------------------------


@dataclass
class Listing:
    """Lines of a function body, one per operation; shared work is computed once and named once."""

    names: Names
    origins: Mapping[Expr, Origin]
    lines: list[tuple[str, Origin | None]] = field(default_factory=list)
    _text: dict[Expr, str] = field(default_factory=dict)
    _count: int = 0

    def add(self, root: Expr) -> str:
        """Lines that compute `root`; returns the name of its value."""
        axes = {node.value[1] for node in walk(root) if node.op == "reduce"}
        for node in walk(root):
            if node in self._text:
                continue
            text = self._operation(node)
            # What varies with a reduction's axis has no value outside its loop: it is written inline.
            if not node.args or node.op == "to_float" or node.free & axes:
                self._text[node] = f"({text})" if node.free & axes and node.op in INFIX else text
            else:
                self._count += 1
                self._text[node] = f"x{self._count}"
                self.lines.append((f"x{self._count} = {text}", self.origins.get(node)))
        return self._text[root]

    def _operation(self, node: Expr) -> str:
        args = [self._text[a] for a in node.args]
        if node.op in INFIX:
            return f"{args[0]} {INFIX[node.op]} {args[1]}"
        if node.op in PREFIX:
            return f"{PREFIX[node.op]}{args[0]}"
        match node.op:
            case "to_float":
                return f"float({args[0]})" if node.args[0].kind == "bool" else args[0]
            case "load":
                return f"{self.names.tensors[node.value]}[{', '.join(args)}]"
            case "search":
                table = self.names.tensors[node.value[0]] + (f"[{', '.join(args[1:])}]" if args[1:] else "")
                return f"search_{node.value[1]}({table}, {args[0]})"
            case "reduce":
                how, axis, extent = node.value
                return f"{how}({args[0]} for {axis} in range({extent}))"
            case "round_to":
                return f"{node.value}({args[0]})"
            case "sym" | "const" | "scalar":
                return self.names.show(node)
        return f"{node.op.rstrip('_')}({', '.join(args)})"


def _function(head: str, listing: Listing, result: str, defined: Origin | None = None) -> str:
    body = [(f"    {text}", origin) for text, origin in listing.lines]
    return "\n".join([*with_comments([(f"def {head}:", defined), *body], CODE_WIDTH), f"    return {result}"])


def _defined(mod: object) -> Origin | None:
    """Line where the function behind a mask or score mod is defined; None for one that composes others."""
    function = getattr(mod, "mod", None)
    return None if function is None else definition_line(function)


def _header(program: Program, names: Names) -> list[str]:
    captured = [*describe_operands(program, names), *describe_numbers(program, names)]
    return [f"# captured {line}" for line in captured]


def _parameters(root: Expr, first: str = "") -> str:
    wanted = [name for name in ("q_len", "kv_len", "num_heads") if name in root.free]
    return ", ".join([*([first] if first else []), "b", "h", "q", "kv", *wanted])


def _mod(program: Program, kind: str, root: Expr, names: Names) -> str:
    traced = program.score if kind == "score" else program.mask
    listing = Listing(names, {} if traced is None else traced.origins)
    result = listing.add(root)
    first = "score" if kind == "score" else ""
    mod = program.variant.score_mod if kind == "score" else program.variant.mask
    return _function(f"{kind}({_parameters(root, first)})", listing, result, _defined(mod))


def _of_output(program: Program) -> str:
    """The traced output function."""
    names = Names.of(program)
    traced, root = program.bound.trace.output, program.facts.score
    listing = Listing(names, {} if traced is None else traced.origins)
    result = listing.add(root)
    head = names.rename(f"output({_parameters(root, 'score')})")
    text = _function(head, listing, result, _defined(program.variant.output_mod))
    return "\n".join([*_header(program, names), text])


def trace_stage(program: Program) -> str:
    """The traced score and mask, operation by operation."""
    names, facts = Names.of(program), program.facts
    parts = ["\n".join(_header(program, names))] if program.operands or program.scalars else []
    if facts.score is SCORE:
        parts.append("# score: the scaled product itself")
    else:
        parts.append(_mod(program, "score", facts.score, names))
    parts.append("# mask: every key" if facts.mask is TRUE else _mod(program, "mask", facts.mask, names))
    if program.of_output is not None:
        parts.append(_of_output(program.of_output))
    return "\n\n".join(parts)


# --- facts and gradients --------------------------------------------------------------------------------


def facts_stage(program: Program) -> str:
    """Facts that analysis proved, before any length is known."""
    names, facts = Names.of(program), program.facts
    keys = "the mask is not a union of key intervals that can be named: tiles are bounded or evaluated"
    if facts.keys is not None:
        keys = names.rename(describe(facts.keys))
    parts: list[tuple[str, str]] = [
        ("score", names.show(facts.score)),
        ("mask", names.show(facts.mask)),
        ("keys", keys),
        ("hoisting", names.rename(facts.hoisting.explain())),
        ("identity", facts.key),
    ]
    if program.of_output is not None:
        function = program.of_output
        shown = Names.of(function).show(function.facts.score)
        parts += [("output", shown), ("identity", f"{function.facts.key} of the output function")]
    return "\n".join(f"{name:<9} {text.replace(chr(10), chr(10) + ' ' * 10)}" for name, text in parts)


def gradient_stage(program: Program) -> str:
    """d score' / d score and the captured gradients, operation by operation."""
    function = program.of_output
    parts = _gradient(program, "score")
    return "\n\n".join(parts if function is None else [*parts, *_gradient(function, "out")])


def _gradient(program: Program, of: str) -> list[str]:
    names, gradient = Names.of(program), program.facts.gradient
    origins = {} if program.score is None else program.score.origins
    listing = Listing(names, origins)
    by_score = listing.add(gradient.by_score)
    parameters = names.rename(_parameters(program.facts.score, "score"))
    head = f"d_{of}({parameters})"
    parts = [_function(head, listing, by_score)]
    for term in gradient.captured:
        listing = Listing(names, origins)
        value = listing.add(term.value)
        index = ", ".join(names.show(i) for i in term.index)
        loops = "".join(f" for {axis} in range({extent})" for axis, extent in term.axes)
        name = names.tensors[term.slot]
        parts.append(
            f"# adds to the gradient of {name}[{index}]{loops}; the index is {term.pattern}\n"
            + _function(f"d_{name}({parameters})", listing, value)
        )
    return parts


STAGES: dict[str, Callable[[Program], str]] = {
    "trace": trace_stage,
    "facts": facts_stage,
    "gradient": gradient_stage,
    "flex": flex_stage,
}
