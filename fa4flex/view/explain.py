"""A program in words: what was composed, what was proved, what is evaluated and why."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fa4flex.codegen.analyze.facts import SCORE
from fa4flex.codegen.analyze.gradient import CapturedGradient
from fa4flex.codegen.analyze.intervals import describe
from fa4flex.codegen.analyze.overflow import overflowing
from fa4flex.codegen.analyze.tiles import Proof, TileMap
from fa4flex.codegen.build import Program
from fa4flex.codegen.expr import TRUE, Expr, apply, brief, const, sym, walk
from fa4flex.codegen.trace import Pinned
from fa4flex.errors import Fa4flexError, InputError, UnsupportedError
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.dropout import ONE
from fa4flex.primitives.lists import Lists
from fa4flex.primitives.normalizer import Normalizer
from fa4flex.primitives.products import GIVEN, MULTIPLIED
from fa4flex.runtime.key_sources import MOST_WIDTH
from fa4flex.variant import Variant
from fa4flex.view import backend
from fa4flex.view.block_map import beside
from fa4flex.view.closed_form import closed_form
from fa4flex.view.listed import without_kernel
from fa4flex.view.mask import tile_counts, tiles_of
from fa4flex.view.names import Names, describe_numbers, describe_operands, name_of
from fa4flex.view.sizes import Setting, setting
from fa4flex.view.sparsity import in_words, reads_a_map

LABEL_WIDTH, TEXT_WIDTH = 12, 98
MOST_LISTED = 4
"""Integers beyond 32 bits that are listed."""

FEW_INTERVALS = 2
"""Up to so many intervals are listed again with lengths and numbers put in."""


class Explanation(str):
    """Text that a notebook or an interpreter shows as lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(
    program: Program,
    q_len: int,
    kv_len: int,
    arch: str | None = None,
    serving: Sequence[str] = (),
    **problem: Any,
) -> Explanation:
    """The program at these lengths, in words; the GPU's part in full where there is one, or for `arch`.

    serving  kernels that serve until better ones are compiled, in words
    problem  sizes, pass and fields of the GPU's problem, as `source` takes them: head_dim, batch, heads, ...
    """
    if problem:
        from fa4flex.view.gpu import check_names

        check_names(problem)
    lists = problem.get("lists")
    if isinstance(lists, Lists):
        (q_len, kv_len), problem = _of_lists(lists, problem)
    chosen = setting(program, q_len, kv_len, problem.get("batch"), problem.get("heads"))
    names = Names.of(program)
    auto = program.variant.backend == "auto"
    sections = (
        ("composed", _composition(program)),
        ("lists", _lists(lists)),
        ("mask", _mask(program, names, chosen, bool(lists))),
        ("score", _score(program, names)),
        ("output", _output(program)),
        ("captured", _captured(program, names)),
        ("indices", _indices(program, names, chosen)),
        ("backend", backend.summary(program, chosen)),
        ("on a CPU", _place(program, chosen, bool(lists)) if auto else []),
        ("on a GPU", _gpu(program, q_len, kv_len, arch, problem) if auto or arch else []),
        ("meanwhile", serving),
    )
    return Explanation("\n\n".join(_section(title, lines) for title, lines in sections if lines))


def _section(title: str, lines: Iterable[str]) -> str:
    pad = " " * LABEL_WIDTH
    body = [piece for line in lines for part in line.splitlines() for piece in _wrapped(part)]
    return f"{title:<{LABEL_WIDTH}}" + f"\n{pad}".join(body)


def _wrapped(line: str) -> list[str]:
    """`line` in pieces of TEXT_WIDTH; what follows the first is indented below it."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, TEXT_WIDTH, subsequent_indent=indent, break_long_words=False) or [""]


# --- what was composed ----------------------------------------------------------------------------------


def _composition(program: Program) -> list[str]:
    variant = program.variant
    scale = "1 / sqrt(head_dim)" if variant.scale is None else f"{variant.scale:g}"
    lines = [
        f"softmax(score) v, score = score_mod({scale} * q.k)",
        f"score_mod   {name_of(variant.score_mod)}",
        f"mask        {name_of(variant.mask)}",
    ]
    if variant.output_mod is not None:
        lines[0] = f"output_mod(softmax(score) v), score = score_mod({scale} * q.k)"
        lines.append(f"output_mod  {name_of(variant.output_mod)}: once, of the output that all keys gave")
    if variant.dropout is not None:
        lines.append(
            f"dropout     {variant.dropout!r}: {variant.dropout.threshold} of {ONE} pairs, after the "
            "weights are normalised; statistics are of what was before"
        )
    if variant.normalizer is not None:
        lines[0] = lines[0].replace("softmax(score)", "weights(score)")
        lines.append(f"normalizer  {variant.normalizer!r}: {_normalizer(variant.normalizer)}")
    if variant.blocks is not None:
        lines.append(
            f"blocks      {variant.blocks!r}: a full block is allowed whatever the mask says, an empty one "
            "allows nothing"
        )
    if variant.sinks is not None:
        lines.append(
            f"sinks       {variant.sinks.now().shape[0]} logits, one per query head, in the denominator"
        )
    if variant.precision.coded:
        lines += _codes(variant)
    if variant.precision.skip:
        lines += _skip(variant.precision.skip, variant.sinks is not None)
    lines.append(f"layout      {variant.layout}")
    return [*lines, *_alignment(program)]


def _skip(skip: float, sinks: bool) -> list[str]:
    """Lines that say what may be left out, and what that can do to results."""
    zero = ", and 0" * sinks
    return [
        f"skip        key tiles are left out that hold at most {skip:g} of a query's probability together",
        f"  output: off by at most {skip:g} * (max v - min v) of a channel's allowed values{zero}",
        f"  log-sum-exp: lower by at most {-math.log1p(-skip):.3g}",
        "  backward: leaves out nothing; probabilities are exp(score - lse), at most"
        f" 1 / (1 - {skip:g}) of the exact ones",
    ]


def _codes(variant: Variant) -> list[str]:
    """Lines that say what is rounded at each call, and what computes with it."""
    precision = variant.precision
    if precision.tolerance:
        return [
            "products    formats of each head, whose outputs are surely off by at most"
            f" {precision.tolerance:g} of the range of its values:",
            "  int8 q.k with e4m3 values, int8 q.k with values as they are, or 16 bits;",
            "  attn.choose(q, k, v).explain() says which head gets which. Nothing waits for the device",
            "  what codes stand for is computed: on a CPU in float32, on a GPU by kernels of 16 bits;",
            "  attn(choice.settled()) multiplies codes, where all heads take the same ones",
            "  of fa4flex.Planes tiles of keys are left out: attn.reads(q, planes).explain() says which",
        ]
    without = variant.normalizer, variant.dropout, variant.output_mod, precision.skip or None
    kernel = precision.qk in MULTIPLIED and all(x is None for x in without)
    given = precision.pv == GIVEN
    values = "as they are given" if given else f"{precision.pv}, minus the mean of each channel"
    sums = "go to float32 after each tile" if precision.promote else "may stay in accumulators"
    by_kernel = [
        "  on Hopper and Blackwell without gradients a kernel multiplies 8-bit codes"
        + " (int8 not beyond compute capability 10.0)" * (precision.qk == "int8")
        + f"; Hopper's sums of values {sums}" * (not given)
    ] * kernel
    return [
        f"products    q.k of {precision.qk}: keys minus their mean, both rotated;",
        f"  values {values}; rounded at each call, as by quantize",
        "  mean of the keys: a bias of each query, seen by log-sum-exps, sinks and score mods",
        *by_kernel,
        f"  {'elsewhere ' * bool(by_kernel)}what codes stand for is computed: on a CPU in float32, on a GPU"
        " by kernels of 16 bits",
        "  backward: products of 16 bits, of what codes stand for; gradients pass straight through",
    ]


def _normalizer(normalizer: Normalizer) -> str:
    """Formula of a normaliser's weights."""
    if normalizer.kind == "softmax":
        return f"exp(score) / (sum exp(score) + {normalizer.plus:g}), by sinks of log {normalizer.plus:g}"
    if normalizer.kind == "softpick":
        return f"max(exp(score) - 1, 0) / (sum |exp(score) - 1| + {normalizer.eps:g}); no LSE"
    return "score' below is the weight: no maximum, no sum, no LSE; masked pairs weigh 0"


_LENGTHS = apply("sub", sym("kv_len"), sym("q_len"))
BOTTOM_RIGHT = apply("add", sym("q"), _LENGTHS)
"""The position of a query among the keys, as the named variants compute it."""


def _alignment(program: Program) -> list[str]:
    nodes = list(walk(program.facts.score, program.facts.mask))
    if BOTTOM_RIGHT in nodes:
        return ["alignment   bottom-right: the last query stands at the last key, as in FlashAttention"]
    if any(node is sym("q_len") or node is sym("kv_len") for node in nodes):
        return ["alignment   as written: the mods use q_len and kv_len themselves"]
    if program.variant.mask is None:
        return []
    return ["alignment   as written: query i stands at key i, whatever the two lengths are (top-left)"]


# --- the mask -------------------------------------------------------------------------------------------


def _of_lists(lists: Lists, problem: dict[str, Any]) -> tuple[tuple[int, int], dict[str, Any]]:
    """Lengths of a call with lists, and its problem with the batch and heads that the lists are of, where it
    says none."""
    assert lists.q_len is not None
    batch, heads = lists.ids.shape[:2]
    heads = max(heads, problem.get("kv_heads", 1))
    return (lists.q_len, lists.kv_len), {"batch": batch, "heads": heads, **problem}


def _lists(lists: Any) -> list[str]:
    """Lists of a call in words."""
    if not isinstance(lists, Lists):
        return []
    rows = f"rows of {lists.queries} queries" if lists.queries > 1 else "each query"
    units = f"units of {lists.unit} keys" if lists.unit > 1 else "keys"
    return [
        f"{lists!r}",
        f"up to {lists.capacity} {units} for {rows}, for q_len={lists.q_len}, kv_len={lists.kv_len} alone"
        f"{beside(lists)}",
    ]


def _mask(program: Program, names: Names, chosen: Setting, listed: bool = False) -> list[str]:
    """listed: the mask decides about pairs that lists of a call say, and tiles are theirs."""
    facts, shape = program.facts, chosen.shape
    if facts.mask is TRUE:
        every = "every key that is listed" if listed else "every key"
        return [f"{every} is allowed: nothing to skip, nothing to evaluate"]
    if listed:
        said = "decides about the pairs that lists say; these say which keys are read"
        return [f"allowed where {_text(facts.mask, names, 'trace')}", said]
    tiles = _cpu_tiles(program, chosen)
    tile = tiles.tile
    reasons = () if facts.keys is None else tiles.proof.reasons  # without intervals, the reason stands above
    lines = [f"allowed where {_text(facts.mask, names, 'trace')}"]
    if program.variant.blocks is not None:
        reasons = ()
        lines.append(_block_map(program.variant.blocks))
    elif facts.keys is None:
        lines.append(
            "no closed form as key intervals: tiles are bounded, and evaluated where bounds do not decide"
        )
    else:
        held = "proved in closed form, for all lengths and tile sizes:"
        lines.append("a closed form would hold, but not for these tensors:" if reasons else held)
        lines += [f"  {line}" for line in names.rename(describe(facts.keys)).splitlines()]
    sizes = f"q_len={shape.q_len}, kv_len={shape.kv_len}{_sharing(program, chosen)}"
    lines.append(f"at {sizes}, tile {tile[0]} x {tile[1]}:")
    simple = facts.keys is not None and len(facts.keys.spans) <= FEW_INTERVALS
    if facts.keys is not None and simple and not reasons and program.variant.blocks is None:
        form = closed_form(facts.keys, shape, program.captured(), names.show)
        lines.append(f"  query q attends {', and '.join(form) or 'no key'}")
    below = [
        *(f"({note})" for note in chosen.notes),
        tile_counts(tiles),
        *([in_words(program, shape, tiles)] if reads_a_map(program.variant) else []),
        *_decided(tiles.proof, reasons, names),
    ]
    return [*lines, *(f"  {line}" for line in below)]


def _block_map(blocks: BlockMap) -> str:
    """The map itself, about which nothing is proved."""
    (rows, keys), counts = blocks.block_size, blocks.counts
    listed = ", ".join(f"{counts[name]} {name}" for name in ("full", "partial", "empty"))
    lengths = f"q_len={blocks.q_len}, kv_len={blocks.kv_len}"
    return f"a captured table for {lengths} alone, in blocks of {rows} x {keys}: {listed}{beside(blocks)}"


def _sharing(program: Program, chosen: Setting) -> str:
    shape, free = chosen.shape, program.facts.mask.free
    sizes = (("b", f"batch={shape.batch}"), ("h", f"heads={shape.heads}"))
    return "".join(f", {size}" for symbol, size in sizes if symbol in free)


MEANS = (
    ("by_intervals", "decided by the key intervals"),
    ("by_bounds", "decided by interval arithmetic over whole tiles"),
    ("by_witness", "shown partial by one allowed and one masked pair"),
    ("by_evaluation", "evaluated pair by pair"),
)


def _decided(proof: Proof, reasons: tuple[str, ...], names: Names) -> list[str]:
    """Number of tiles that each method decided, and reasons why the others were evaluated."""
    counts = [(getattr(proof, field), means) for field, means in MEANS]
    line = ", ".join(f"{count} {means}" for count, means in counts if count)
    return [line, *(f"because {names.rename(reason)}" for reason in reasons)]


def _cpu_tiles(program: Program, chosen: Setting) -> TileMap:
    """Tiles of a CPU's forward pass: those of a block map that are gathered, or the tiles that are walked."""
    return _gathered(program, chosen) or tiles_of(program, chosen, _walked(program))


def _gathered(program: Program, chosen: Setting) -> TileMap | None:
    from fa4flex.runtime.cpu.scattered import scattered_tiles

    if program.variant.schedule.tile is not None or program.variant.precision.skip:
        return None
    return scattered_tiles(
        program.facts, chosen.shape, program.captured(), torch.float32, program.variant.schedule.contents
    )


def _walked(program: Program) -> tuple[int, int]:
    from fa4flex.runtime.cpu.tiles import KEY_TILE, QUERY_TILE

    return program.variant.schedule.tile or (QUERY_TILE, KEY_TILE)


# --- the score ------------------------------------------------------------------------------------------


def _score(program: Program, names: Names) -> list[str]:
    facts = program.facts
    if facts.score is SCORE:
        return ["the scaled product itself"]
    lines = [
        f"score' = {_text(facts.score, names, 'trace')}",
        f"computed: {names.rename(facts.hoisting.explain())}",
    ]
    by_score = facts.gradient.by_score
    if by_score is const(1.0):
        lines.append("d score'/d score = 1: the gradient of the raw score is that of score'")
    elif by_score is const(0.0):
        lines.append("d score'/d score = 0: q and k receive no gradient")
    else:
        lines.append(f"d score'/d score = {_term(by_score, names)}")
    for term, line in _captured_gradients(program, names, "score'"):
        operand = program.operands[term.slot]
        wanted = "" if operand.differentiable else "; not computed, as it does not require a gradient"
        lines += [line, f"  {REDUCTIONS[term.pattern]}{wanted}"]
    return lines


def _captured_gradients(program: Program, names: Names, of: str) -> list[tuple[CapturedGradient, str]]:
    """Gradients of what a function captured, each with its line."""
    results = []
    for term in program.facts.gradient.captured:
        index = ", ".join(names.show(i) for i in term.index)
        line = f"d {of}/d {names.tensors[term.slot]}[{index}] = {_term(term.value, names)}"
        results.append((term, line))
    return results


# --- the output -----------------------------------------------------------------------------------------


def _output(program: Program) -> list[str]:
    """The output function, its derivatives, and what it captured."""
    function = program.of_output
    if function is None:
        return []
    names, facts = Names.of(function), function.facts
    return [
        f"out' = {_text(facts.score, names, 'trace')}",
        f"d out'/d out = {_term(facts.gradient.by_score, names)}",
        *(line for _, line in _captured_gradients(function, names, "out'")),
        *_captured(function, names),
        "of a query without allowed keys: of out = 0",
        "kept for the backward pass: the output before it, in the output's dtype",
    ]


def _term(node: Expr, names: Names) -> str:
    return _text(node, names, "gradient", 24)


def _text(node: Expr, names: Names, stage: str, most: int = 120) -> str:
    """`node` in the user's names; a long one as the number of its operations, which `stage` lists."""
    text = brief(node, most)
    return f'{text}, listed by source("{stage}")' if text.startswith("an expression") else names.rename(text)


REDUCTIONS = {
    "constant in q and kv": "one element per head: summed over all queries and keys",
    "constant in kv": "one element per query: summed over its keys",
    "constant in q": "one element per key: summed over its queries",
    "diagonal": "one element per distance q - kv: summed along diagonals",
    "general": "elements found by index: summed where indices meet",
}


# --- captures, indices, place ---------------------------------------------------------------------------


def _captured(program: Program, names: Names) -> list[str]:
    lines = describe_operands(program, names)
    numbers = describe_numbers(program, names)
    lines += [f"{line}: a run-time number, no constant of the program" for line in numbers]
    for traced in program.bound.trace.functions:
        lines += [_pinned(pin) for pin in traced.pinned]
    return lines


def _pinned(pin: Pinned) -> str:
    where = "" if pin.where is None else f" at {pin.where}"
    return f"{pin.name} = {pin.value}: a constant of this program, because its value was looked at{where}"


def _indices(program: Program, names: Names, chosen: Setting) -> list[str]:
    roots = (program.facts.score, program.facts.mask)
    result = overflowing(roots, chosen.shape, program.captured(), bits=32)
    beyond = [(node, ends) for node, ends in result if node.op != "const"]
    if not beyond:
        return ["all index arithmetic fits 32 bits at these lengths"]
    shown = beyond[:MOST_LISTED]
    listed = [
        f"beyond 32 bits: {names.rename(brief(node, 24))}, from {lo} to {hi}" for node, (lo, hi) in shown
    ]
    listed += [f"and {len(beyond) - len(shown)} more"] * (len(beyond) > len(shown))
    return [*listed, "a CPU computes indices in 64 bits, so these do not wrap"]


def _place(program: Program, chosen: Setting, listed: bool = False) -> list[str]:
    precision, tile, gathered = program.variant.precision, _walked(program), _gathered(program, chosen)
    compute = "float32 (float64 for float64 inputs)" if precision.compute == "auto" else precision.compute
    tiles = f"tile {tile[0]} x {tile[1]}"
    if gathered is not None:
        rows, keys = gathered.tile
        tiles = (
            f"blocks of {rows} x {keys} gathered; where gradients of captured tensors are asked for, {tiles}"
        )
    if listed:
        tiles = "the map of what is listed, as blocks=lists.map() is: tiles of it that are not empty"
    return [
        f"forward and backward, {tiles}",
        *_fused(program),
        *["a tile is left out for a head where its scores tell; the last keys come first"]
        * bool(precision.skip),
        f"scores, softmax and sums in {compute}",
        "empty tiles are not loaded, full tiles do not evaluate the mask; the same bits at every run",
    ]


def _fused(program: Program) -> list[str]:
    """Calls that PyTorch's fused kernel computes, if there are any."""
    from fa4flex.runtime.cpu.fused import LEAST_PRODUCTS
    from fa4flex.torch_internals import fused_kernel

    variant = program.variant
    exact = variant.precision.compute == "float64" or variant.schedule.tile is not None
    exact = exact or bool(variant.precision.skip) or not program.facts.softmax
    if fused_kernel is None or exact or program.facts.score is not SCORE:
        return []
    power = LEAST_PRODUCTS.bit_length() - 1
    return [
        f"from 2^{power} multiplications on, without gradients and in at most float32: PyTorch's fused kernel"
    ]


_LISTED = (
    "with dropout, an output function, a normalizer, an 8-bit cache or torch.compile, for lists given to"
    " compile(), of more entries, or of whole tiles of 128 queries and keys; and with gradients{others}:"
    " units of 64 keys or more are a map of blocks, as blocks=lists.map() is; shorter ones are refused"
)

_UNLISTED = (
    " of captured tensors or the entropy, with ordered sums, or of whole blocks of 64 queries and keys alone"
)
"""Gradients over lists that have no kernel, where others have one."""


def _listed(view: Any) -> list[str]:
    """The kernel of gradients over lists, and calls that have none."""
    try:
        backward = view.backward.headline()
    except UnsupportedError:
        return [_LISTED.format(others="")]
    return [f"gradients of q, k, v and sinks: {backward}", _LISTED.format(others=_UNLISTED)]


def _by_views(view: Any) -> list[str]:
    """The kernel for keys and values that are views of latent rows, gathered where they lie in pages; nothing
    where there is none."""
    apart = {name: x for name, x in view.problem.items() if name not in ("latent", "page_rows")}
    try:
        lines = replace(view, problem=apart).summary()
    except Fa4flexError:
        return []
    gathered = ", gathered from their pages first" * bool(view.problem.get("page_rows"))
    return [*lines, f"latent rows are read as keys, and again as values{gathered}"]


def _gpu(program: Program, q_len: int, kv_len: int, arch: str | None, problem: dict[str, Any]) -> list[str]:
    """The kernel of this machine's GPU, or of `arch`, or why there is none; the name alone without both."""
    from fa4flex.view import gpu

    arch = arch or gpu.arch_here()
    view = gpu.KernelView(program, {**problem, "q_len": q_len, "kv_len": kv_len, "arch": arch})
    try:
        if arch is None:
            return [view.headline(), f'explain(arch="{gpu.ARCH}") says how it runs']
        lines = view.summary()
    except Fa4flexError as error:
        if problem and isinstance(error, InputError):
            raise
        if arch is not None:
            gpu.target_named(arch)
        if problem.get("latent") and (by_views := _by_views(view)):
            return by_views
        blockwise = ["computed tile by tile in PyTorch operations on the device: exact, and slow"]
        said = ["no kernel: " + line.strip() for line in str(error).splitlines()[:1]]
        widths = (problem.get(name, 0) for name in ("head_dim", "head_dim_v"))
        others = not program.facts.softmax or problem.get("latent") or max(widths) > MOST_WIDTH
        lists = problem.get("lists")
        return said + blockwise * bool(others) + ([without_kernel(lists)] if lists else [])
    if "direction" in problem:
        return lines
    if problem.get("lists"):
        return [*lines, *_listed(view)]
    passes = {"backward": view.backward, "tangents": view.tangents, "key_mass": view.mass}
    return [*lines, *(f"{name}: {one.in_a_line()}" for name, one in passes.items())]
