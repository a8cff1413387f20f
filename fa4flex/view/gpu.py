"""GPU views of a program: plan, generated source and PTX. None of it needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fa4flex.codegen.analyze.domain import Ragged, Shape
from fa4flex.codegen.analyze.tiles import TileMap
from fa4flex.codegen.build import Program
from fa4flex.errors import Fa4flexError, InputError, UnsupportedError
from fa4flex.primitives.heads import Shares
from fa4flex.primitives.lists import Lists
from fa4flex.primitives.products import GIVEN, MULTIPLIED, check_products, format_name
from fa4flex.view.listed import Tiling, counted
from fa4flex.view.mask import tiles_of
from fa4flex.view.names import Names, name_of
from fa4flex.view.sizes import Setting, setting
from fa4flex.view.sparsity import in_words, percent, reads_a_map

if TYPE_CHECKING:
    from fa4flex.codegen.emit import Source
    from fa4flex.kernels.plan.bound import Size
    from fa4flex.kernels.plan.inputs import Inputs
    from fa4flex.kernels.plan.keys import Keys
    from fa4flex.kernels.plan.target import Target
    from fa4flex.lower import Lowered

HEAD_DIM = 128
ARCH = "sm_90a"
SIZES = ("q_len", "kv_len", "batch", "heads")
DIRECTIONS = ("forward", "backward", "tangents", "mass")
NONE = 1e-9
"""Share of tiles that stands for none: a bound is that of some."""

_SHOWN = (
    "forward kernel", "backward kernel", "tangents kernel", "mass kernel", "tile:", "products:", "softmax:",
    "order:", "candidates", "bound:",
)  # fmt: skip
_MASKS = {
    "none": "every tile of keys is full: no mask code",
    "spans": "the kernel computes each row's keys itself: no block table, no mask code in full tiles",
    "tables": "block tables are made at the first call; the mask runs in partial tiles only",
    "pairs": "no block table: the mask runs in all tiles of keys, beside their loads",
    "queries": "the kernel computes each key's queries itself: no block table, no mask code in full tiles",
}


@dataclass(frozen=True, eq=False)
class KernelView:
    """A pass of a program for bfloat16 heads of 128, where `problem` (sizes, fields of Problem, `arch` and
    `direction`) agrees. The chip is the GPU at hand, or else a Hopper GPU."""

    program: Program
    problem: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def shape(self) -> Shape:
        return setting(self.program, *(self.problem.get(name) for name in SIZES)).shape

    @cached_property
    def shown(self) -> Program:
        """The program as its kernel computes it: with the output function, where that is applied there."""
        joined = self.program.joined
        if joined is self.program or self.problem.get("direction", "forward") != "forward":
            return self.program
        try:
            self._lowered(joined)
        except UnsupportedError:
            return self.program
        return joined

    @cached_property
    def lowered(self) -> Lowered:
        """The pass, down to its source: by a kernel that multiplies codes, where the precision rounds to such
        as one multiplies."""
        precision = self.program.variant.precision
        if precision.coded and precision.qk in MULTIPLIED and self._asks_for_no_codes:
            codes = {name: getattr(precision, name) for name in _OF_CODES}
            try:
                return replace(self, problem={**self.problem, **codes}).lowered
            except UnsupportedError:
                pass  # the kernels of 16 bits compute what they stand for
        return self._lowered(self.shown)

    @property
    def _asks_for_no_codes(self) -> bool:
        """True for a forward pass of whose keys nothing else is said."""
        forward = self.problem.get("direction", "forward") == "forward"
        return forward and not any(name in self.problem for name in (*_OF_KEYS, *_OF_CODES))

    def _lowered(self, program: Program) -> Lowered:
        from fa4flex.lower import Given, lower_backward, lower_forward, lower_mass, lower_tangents

        changes = {k: x for k, x in self.problem.items() if k not in SIZES}
        target = target_named(changes.pop("arch", None) or arch_here() or ARCH)
        direction = changes.pop("direction", "forward")
        if direction not in DIRECTIONS:
            raise InputError(f"direction={direction!r}", f"one of {', '.join(DIRECTIONS)}", "pick one")
        inputs = inputs_of(program, self.shape, changes)
        captured, schedule = program.captured(), program.variant.schedule
        value = Given(program.facts, schedule, inputs, captured, target, changes=changes)
        if direction == "forward":
            return lower_forward(value)
        if direction == "tangents":
            return lower_tangents(value)
        if direction == "mass":
            return lower_mass(value)
        wanted = enumerate(captured.operands)
        slots = [slot for slot, x in wanted if x.requires_grad]
        return lower_backward(value, slots, "entropy" in inputs.statistics)

    @cached_property
    def source(self) -> Source:
        """The generated module, under the names of the user's code and with the lines that it comes from."""
        from fa4flex.codegen.emit.module import Captions
        from fa4flex.lower import captioned

        program, variant = self.shown, self.program.variant
        names = Names.of(program)
        traced = program.bound.trace.functions
        origins = {node: origin for t in traced for node, origin in t.origins.items()}
        applied = None if program.facts.output is None else variant.output_mod
        mods = [name_of(mod) for mod in (variant.score_mod, variant.mask, applied) if mod is not None]
        captions = Captions(" with ".join(mods) or "attention", names.tensors, names.numbers)
        return captioned(self.lowered, captions, origins)

    @property
    def backward(self) -> KernelView:
        """The backward pass of the same call."""
        return self._of("backward")

    @property
    def tangents(self) -> KernelView:
        """The forward pass of the same call with tangents of q, k and v."""
        return self._of("tangents")

    def _of(self, direction: str) -> KernelView:
        return replace(self, problem={**self.problem, "direction": direction})

    @property
    def mass(self) -> KernelView:
        """The sums of probabilities per key of the same call."""
        return self._of("mass")

    def plan(self) -> str:
        """Tiles, warp roles, registers, memory map, topology and expected bound."""
        return self.lowered.plan.explain(self._size())

    def ptx(self) -> str:
        """The PTX of the kernel, compiled now."""
        from fa4flex.codegen.expr import walk
        from fa4flex.compiler.inspect import inspect
        from fa4flex.compiler.signature import Signature

        program, result = self.shown, self.lowered
        nodes = walk(*program.facts.everything)
        kinds = {node.value: node.kind for node in nodes if node.op == "scalar"}
        scalars = tuple(kinds[slot] for slot in range(len(program.scalars)))
        return inspect(self.source, result.problem, Signature(scalars=scalars), result.plan.target.name).ptx

    def headline(self) -> str:
        """One line: which kernel it would be."""
        text: str = self.lowered.plan.explain()
        return text.splitlines()[0]

    def summary(self) -> list[str]:
        """The plan's headlines, and what was proved for it."""
        problem, lines, shown = self.lowered.problem, [], False
        for line in self.plan().splitlines():  # an indented line goes on with the one above it
            shown = shown if line.startswith(" ") else line.startswith(_SHOWN)
            lines += [line] * shown
        proved = [f"mask: {_MASKS[problem.mask_form]}"]
        if problem.row_ends:
            proved.append(
                "while what it searches is sorted, partial tiles compare keys with ends of intervals"
            )
        if problem.operands:
            proved.append(
                "captured tensors: every index is proved to lie within them"
                if problem.in_range
                else "captured tensors: not every index is proved to lie within them, so indices are wrapped"
            )
        if listed := self._listed():  # the least time is that of what is listed
            lines = [line for line in lines if not line.startswith("bound:")]
        proved += listed or self._sparsity(any(line.startswith("candidates") for line in lines))
        names = Names.of(self.shown)
        if self.problem.get("direction", "forward") == "forward" and self.program.output is not None:
            applied = "in its epilogue" if self.lowered.problem.output else "by a launch of its own after it"
            proved.append(f"output function: {applied}; with gradients, {self._own_launches()}")
        return [names.rename(line) for line in (*lines, *proved)]

    def _own_launches(self) -> str:
        """The way in which the output function is computed where there are gradients."""
        from fa4flex.kernels.output_function.plan import Inputs as OutputInputs
        from fa4flex.runtime.cuda.output import planned, tables_of

        own, problem, shape = self.program.of_output, self.lowered.problem, self.shape
        assert own is not None
        captured, sizes = own.captured(), (shape.batch, shape.heads, shape.q_len)
        inputs = OutputInputs(
            problem.out_dtype,
            str(own.variant.precision.compute_dtype(torch.bfloat16)).removeprefix("torch."),
            problem.head_dim_v,
            sizes,
            problem.lengths,
            self.program.variant.layout == "bshd",
            False,
            shape.q_len,
            tables_of(captured.operands),
        )
        needs = [slot for slot, x in enumerate(captured.operands) if x.requires_grad]
        try:
            for wanted in (None, needs):
                planned(own.facts, inputs, captured, self.lowered.plan.target, wanted, shape.heads)
        except UnsupportedError as error:
            return f"by PyTorch operations: {error.given}"
        return "by a kernel of its own in each pass"

    def _sparsity(self, candidates: bool) -> list[str]:
        """Selected pairs of a block map, beside those in the tiles that this kernel computes for them.
        candidates: their times are told above."""
        forward = self.problem.get("direction", "forward") == "forward"
        tiles = self._tiles() if forward and reads_a_map(self.program.variant) else None
        if tiles is None:
            return []
        least = self.lowered.plan.bound(self._size()).seconds * 1e6
        of_all = (
            "; candidates' times are those of all tiles, as contents of a table are a call's" * candidates
        )
        return [
            f"sparsity: {in_words(self.program, self.shape, tiles)}",
            f"  least time over the tiles that remain {least:.3g} us{of_all}",
        ]

    def _listed(self) -> list[str]:
        """Pairs that Lists select, beside those in the tiles that this kernel gathers for them."""
        lists, problem = self.problem.get("lists"), self.lowered.problem
        forward = self.lowered.direction == "forward"
        if not isinstance(lists, Lists) or problem.lengths != "dense" or not forward:
            return []
        from fa4flex.kernels.lists.plan import ListedPlan
        from fa4flex.kernels.mla_lists_sm90.plan import ListedRowsPlan

        plan, shape = self.lowered.plan, self.shape
        assert isinstance(plan, (ListedPlan, ListedRowsPlan))
        tiling = Tiling(plan.rows, plan.tile_n, plan.united, self.problem.get("kv_heads", shape.heads))
        found = counted(self.program, shape, lists, tiling)
        computed = found.tiles * tiling.rows * tiling.keys
        width = problem.head_dim + problem.head_dim_v
        least = 2 * computed * width / plan.target.peak_flops
        brought, what = width, "keys and values"
        if problem.keys.latent:
            brought, what = problem.head_dim, "latent rows"
        gathered = found.tiles * tiling.keys * brought * problem.itemsize
        some = "" if found.share == 1 else f"about, by {percent(100, round(100 / found.share))} of the rows: "
        whole = shape.batch * shape.heads * shape.q_len * shape.kv_len
        rate = gathered / max(least, 1e-12) / 1e12
        return [
            f"sparsity: {some}{found.selected} pairs selected, {percent(found.selected, whole)} of all; "
            f"tiles of {tiling.rows} x {tiling.keys} compute {computed}, of which "
            f"{percent(found.selected, computed)} are selected",
            f"  least time of their products {least * 1e6:.3g} us, in which L2 has to bring "
            f"{gathered / 1e9:.3g} GB of {what}, {rate:.3g} TB/s",
        ]

    def in_a_line(self) -> str:
        """The kernel of a pass other than forward, or why there is none."""
        try:
            tile = self.lowered.plan.tile
        except UnsupportedError as error:
            return (
                "PyTorch operations, block by block: exact and deterministic, but slow; not built: "
                f"{error.given}"
            )
        return f"a kernel, tile {tile[0]} queries x {tile[1]} keys"

    def _size(self) -> Size:
        """The launch, with the share of tiles that the kernel computes of it."""
        from fa4flex.kernels.plan.bound import Size

        shape = self.shape
        density, keys = self._computed() if self.lowered.direction == "forward" else (None, None)
        kv_heads, v_heads = self.problem.get("kv_heads"), self.problem.get("v_heads")
        if v_heads is not None:
            of_keys = shape.heads if kv_heads is None else kv_heads
            kv_heads = of_keys * Shares.of(of_keys, v_heads).k
        return Size(shape.batch, shape.heads, shape.q_len, shape.kv_len, density, kv_heads, keys)

    def _computed(self) -> tuple[float | None, float | None]:
        """Shares of the kernel's tiles that are computed, and of keys that these read; None where lengths of
        sequences, which are a call's, or tensors of other sizes decide."""
        problem = self.lowered.problem
        if problem.lengths == "dense" and problem.mask_form in ("none", "pairs"):
            return 1.0, 1.0
        tiles = self._tiles()
        return (None, None) if tiles is None else (max(tiles.density, NONE), tiles.used_columns)

    def _tiles(self) -> TileMap | None:
        """Tiles of the kernel; None where a call decides which are computed."""
        plan = self.lowered.plan
        if self.lowered.problem.lengths != "dense":
            return None
        rows, keys = plan.tile
        try:
            return tiles_of(self.program, Setting(self.shape), (max(rows // plan.packed_heads, 1), keys))
        except Fa4flexError:
            return None


def inputs_of(program: Program, shape: Shape, changes: dict[str, Any]) -> Inputs:
    """The inputs at this shape; what `changes` says of them is taken out of it."""
    from fa4flex.kernels.plan.inputs import Inputs
    from fa4flex.kernels.plan.problem import WIDEST
    from fa4flex.runtime.call import name_of as dtype_name

    variant = program.variant
    width, dtype = changes.pop("head_dim", HEAD_DIM), changes.pop("dtype", "bfloat16")
    output, lengths = variant.precision.output, changes.pop("lengths", "dense")
    arguments: dict[str, Any] = {
        "head_dim_v": width,
        "out_dtype": dtype if output is None else dtype_name(output),
        "sinks": variant.has_sinks,
        "positive_scale": variant.scale is None or variant.scale > 0,
        "skip": variant.precision.skip,
    }
    of_keys = changes.pop("kv_heads", shape.heads)
    shares = Shares.of(of_keys, changes.pop("v_heads", of_keys))
    keys = _keys(changes, lengths, (shape.heads, of_keys), width <= WIDEST)
    known = {name: changes.pop(name) for name in (*arguments, "statistics") if name in changes}
    return Inputs(
        extents=shape if lengths == "dense" else Ragged(**vars(shape)),
        kv_heads=of_keys * shares.k,
        shares=shares,
        head_dim=width,
        dtype=dtype if keys.codes is None else keys.codes.qk,
        lengths=lengths,
        keys=keys,
        captured=tuple((dtype_name(o.dtype), tuple(o.shape)) for o in program.operands),
        **arguments | known,
    )


_OF_KEYS = "page_rows", "kv_dtype", "k_scales", "v_scales", "latent", "lists"
_OF_CODES = "qk", "pv", "promote"


def _keys(changes: dict[str, Any], lengths: str, heads: tuple[int, int], narrow: bool) -> Keys:
    """The source of keys that `changes` say, which is taken out of them. qk, pv: formats of quantize. narrow:
    views of latent rows are keys and values like any others."""
    from fa4flex.kernels.plan.keys import CONTIGUOUS, LatentKeys, eight_bit, in_pages

    codes = {name: changes.pop(name) for name in _OF_CODES if name in changes}
    given = {name: changes.pop(name, 0 if name == "page_rows" else "") for name in _OF_KEYS}
    if codes:
        _alone("codes", given)
        return _codes(**codes, lengths=lengths)
    if given["latent"]:
        aside = "page_rows", "latent", "lists"
        _alone("latent rows", {name: x for name, x in given.items() if name not in aside})
        given["latent"] = not narrow
    rows, dtype, *scales, latent, lists = given.values()
    if lists:
        others = {name: x for name, x in given.items() if name not in ("page_rows", "lists")}
        return _listed(lists, rows, others, heads)
    if latent:
        pages = in_pages(rows)
        return LatentKeys(pages.loader, rows, pages.rows) if rows else LatentKeys()
    if dtype:
        return replace(eight_bit(rows, *scales), dtype=dtype, together=rows)
    return replace(in_pages(rows), together=rows) if rows else CONTIGUOUS


def _listed(lists: Any, rows: int, others: dict[str, Any], heads: tuple[int, int]) -> Keys:
    """Keys of Lists, or for True of some that have counts and no keys beside them. others: what is said of
    keys besides."""
    from fa4flex.kernels.lists.config import ROWS
    from fa4flex.kernels.plan.keys import CONTIGUOUS, in_pages, of_lists
    from fa4flex.runtime.listed_keys import tiling_of

    latent = bool(others.get("latent"))
    _alone("listed keys", {name: x for name, x in others.items() if name != "latent"})
    pages = replace(in_pages(rows), together=rows) if rows else CONTIGUOUS
    if lists is True:
        many = not latent and heads[0] // max(heads[1], 1) > ROWS
        return of_lists(pages, counted=True, beside=False, many=many, latent=latent)
    if not isinstance(lists, Lists):
        raise InputError(f"lists={lists!r}", "a fa4flex.Lists, or True", "pass the lists of the call")
    tiling = (False, 1) if latent else tiling_of(lists, *heads)
    return of_lists(pages, lists.counts is not None, lists.beside, *tiling, latent)


def _codes(lengths: str, qk: Any = "int8", pv: Any = "float8_e4m3", promote: Any = True) -> Keys:
    """Keys of codes, in formats of quantize. Raises UnsupportedError for those that no kernel multiplies."""
    from fa4flex.kernels.plan.keys import Codes, of_codes

    qk, pv = format_name(qk), format_name(pv)
    check_products(qk, pv, promote, GIVEN)
    if qk not in MULTIPLIED:
        raise UnsupportedError(
            f"qk={qk!r}: no kernel multiplies such codes", f"one of {MULTIPLIED}", f"qk={MULTIPLIED[0]!r}"
        )
    of_qk, of_pv = (x + "fn" if x == "float8_e4m3" else x for x in (qk, pv))
    return of_codes(Codes(of_qk, of_pv, True, pv != GIVEN, lengths == "packed", promote))


def _alone(keys: str, given: dict[str, Any]) -> None:
    """Raise InputError for what is said of other keys beside these."""
    for name, value in given.items():
        if value:
            raise InputError(f"{name}={value!r} beside {keys}", f"{keys} alone", f"leave {name} out")


def check_names(changes: dict[str, Any]) -> None:
    """Raise InputError unless `changes` names fields of Problem, sizes, arch and direction."""
    from fa4flex.kernels.plan.problem import Problem

    others = ("arch", "direction", "batch", "heads", "kv_heads", "v_heads", "q_len", "kv_len")
    of_problem = (field.name for field in fields(Problem) if field.name not in ("keys", "shares"))
    known = [*others, *of_problem, *_OF_KEYS, *_OF_CODES]
    for name, value in changes.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise InputError(
                f"{name}={value!r}",
                f"some of {', '.join(known)}",
                f"did you mean {near[0]}?" if near else f"leave {name} out",
            )


def target_named(arch: str) -> Target:
    """The chip of this name, as the GPU at hand has it where that is one."""
    from fa4flex.kernels.plan.target import TARGETS
    from fa4flex.runtime.cuda.device.device import target_of

    if arch == arch_here():
        return target_of(torch.device("cuda", torch.cuda.current_device()))
    result = next((target for target in TARGETS if target.name == arch), None)
    if result is None:
        names = ", ".join(target.name for target in TARGETS)
        raise UnsupportedError(f"arch={arch!r}", f"one of {names}", f"pass arch={ARCH!r}")
    return result


def arch_here() -> str | None:
    """The kernels' target of the GPU that this machine has; None without one that kernels are made for."""
    if not torch.cuda.is_available():
        return None
    from fa4flex.runtime.cuda.device.device import target_like

    target = target_like(torch.cuda.get_device_capability())
    return None if target is None else target.name
