"""Arguments of launches, one row each, in the order in which a compiled pass takes them.

From the rows follow the entry point and its stand-ins (compiler/entry.py), the tuples that kernels read
(kernels/common/arguments.py), which arguments a signature has to name, and what a call is told apart by, how
its tensors are converted and how it is launched (runtime/cuda/calls/arguments.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from fa4flex.kernels.plan.keys import COLUMNS, CONTIGUOUS, PAGE_TABLE, Keys, of_lists
from fa4flex.kernels.plan.looks import (
    Array,
    Blocks,
    Captured,
    Given,
    Heads,
    Look,
    Number,
    Parts,
    Rows,
    Scales,
)
from fa4flex.kernels.plan.problem import Problem

TAKEN, COUNTERS = 2, 4096
"""Counters of a launch, int32, zero before and after it: those by which blocks take tiles, and all."""

Source = Literal["call", "call.lengths", "call.kv", "saved", "tangents", "launch"]

# --- rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A compiled pass: what its arguments follow from. given: names of arguments that come as calls please;
    config: of its kernel."""

    problem: Problem
    given: Collection[str]
    config: Any


def always(one: Pass) -> bool:
    return True


def _never(one: Pass) -> bool:
    return False


@dataclass(frozen=True)
class Argument:
    """One argument of a launch.

    name       of the parameter and of the field that kernels read, and unless `field` says another, of the
               field of `source`
    look       what it looks like
    source     where a launch finds it: "call", "call.lengths", "call.kv", the source of keys, "saved" by the
               forward pass, or the "tangents" of a call; "launch": it is made with or for the launch
    when       whether a compiled pass has it, else it is None; None: where the signature says it is given
    read_by    kernels of the pass that get it
    computed   from the arguments before it, by the entry point: it is not passed
    """

    name: str
    look: Look
    source: Source = "call"
    when: Callable[[Pass], bool] | None = always
    read_by: tuple[str, ...] = ("kernel",)
    computed: Callable[[Mapping[str, Any]], Any] | None = None
    field: str = ""

    @property
    def path(self) -> str:
        """Path from the owner of a source: "call.lengths.seqused_q"."""
        return f"{self.source}.{self.field or self.name}"

    def present(self, one: Pass) -> bool:
        return self.name in one.given if self.when is None else self.when(one)


@dataclass(frozen=True, eq=False)
class Schema:
    """Arguments of a pass."""

    rows: tuple[Argument, ...]

    @property
    def entry(self) -> tuple[Argument, ...]:
        """Arguments of the entry point, without its stream."""
        return tuple(row for row in self.rows if row.computed is None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments of the entry point."""
        return tuple(row.name for row in self.entry)

    def found_in(self, source: Source) -> tuple[Argument, ...]:
        """Arguments of the entry point that launches find there."""
        return tuple(row for row in self.entry if row.source == source)

    def read_by(self, kernel: str) -> tuple[str, ...]:
        """Names of what one kernel gets."""
        return tuple(row.name for row in self.rows if kernel in row.read_by)


# --- the rows -----------------------------------------------------------------------------------------------


def _packed(one: Pass) -> bool:
    return one.problem.lengths == "packed"


def _keys_packed(one: Pass) -> bool:
    return _packed(one) and not _loaded(one)


def _loaded(one: Pass) -> bool:
    """True if a loader finds keys, whose numbers the source knows."""
    return one.problem.keys.loaded


def _adds_up(one: Pass) -> bool:
    return one.problem.adds_up


def _sums_dq(one: Pass) -> bool:
    return not one.config.stores_dq


def _clears(one: Pass) -> bool:
    return bool(one.config.clears)


def _masked(problem: Problem) -> bool:
    return problem.mask_form in ("spans", "tables")


def _has_row_ends(problem: Problem) -> bool:
    return problem.row_ends > 0


POINTERS = Array("int32", ("map batch", "map heads", "map rows", 2))
TABLES = Parts(
    (
        ("partial_ptr", POINTERS),
        ("partial_tiles", Array("int32", ("partial tiles",))),
        ("full_ptr", POINTERS),
        ("full_tiles", Array("int32", ("full tiles",))),
        ("row_ends", Array("int32", ("row ends", "map batch", "map heads", "q_len"))),
        ("in_order", Array("int32", ("map batch", "map heads"), unit=False)),
    ),
    when=(("row_ends", _has_row_ends), ("in_order", _has_row_ends)),
)
_TURN_LISTS = (
    ("pointers", POINTERS),
    ("entries", Array("int32", ("entries",))),
    ("ranks", Array("int32", ("entries",))),
)
TURNS = Parts(
    (("done", Array("int32", ("batch", "q_heads", "turns"))), *_TURN_LISTS),
    when=(("pointers", _masked), ("entries", _masked), ("ranks", _masked)),
)
ORDERED = Parts((*_TURN_LISTS, ("found", Array("int32", ("found",)))))
RANGES = Array("int32", ("range ends", "range batch", "range heads", "range tiles"))
PIECES = Array("int32", ("searched", "piece batch", "piece heads", "pieces"))
STATE = Array("int32", ("state",))
PER_ROW = Array("float32", ("batch", "q_heads", "q_len"))
CUMULATIVE = Array("int32", ("lengths",))  # one more than there are sequences, which no extent can say
USED = Array("int32", ("sequences",))

LENGTHS = (
    Argument("cu_seqlens_q", CUMULATIVE, "call.lengths", when=_packed),
    Argument("cu_seqlens_k", CUMULATIVE, "call.lengths", when=_keys_packed),
    Argument("seqused_q", USED, "call.lengths", when=None),
    Argument("seqused_k", USED, "call.lengths", when=None),
)
OPERANDS = Argument("operands", Captured("tensors"))
SCALARS = Argument("scalars", Captured("numbers"))
SCALE = Argument("scale", Number())

USED_KEYS = Argument(
    "used_keys", Given("used_keys", ("sequences",)), "call.kv", when=_loaded, field="seqused_k"
)
"""Number of keys of each sequence, where a loader finds these."""

FAULTS = Argument("faults", Number("address"), "launch", when=_loaded)


def _splits(one: Pass) -> bool:
    return bool(one.config.splits)


MERGE = "combine"
_FORWARD = (
    Argument("q", Heads("q_len", "q_heads", "head_dim", "element")),
    Argument("k", Heads("kv_len", "k_heads", "head_dim", "k_element", cached=True), "call.kv"),
    Argument("v", Heads("kv_len", "v_heads", "head_dim_v", "v_element", cached=True), "call.kv"),
    Argument(
        "out", Heads("q_len", "q_heads", "head_dim_v", "out_dtype"), "launch", read_by=("kernel", MERGE)
    ),
    Argument(
        "lse", PER_ROW, "launch", lambda one: "lse" in one.problem.statistics, read_by=("kernel", MERGE)
    ),
    Argument("max_scores", PER_ROW, "launch", lambda one: "max_scores" in one.problem.statistics),
    *LENGTHS[:2],
    replace(LENGTHS[2], read_by=("kernel", MERGE)),
    replace(LENGTHS[3], read_by=("kernel", MERGE)),
    Argument("tables", TABLES, "launch", lambda one: one.problem.mask_form == "tables"),
    Argument(
        "sinks",
        Array("float32", ("q_heads",)),
        when=lambda one: one.problem.sinks,
        read_by=("kernel", MERGE),
    ),
    OPERANDS,
    SCALARS,
    SCALE,
    Argument("max_q_len", Number("int"), "launch"),
    Argument("counters", Array("int32", (COUNTERS,)), "launch", lambda one: one.config.dynamic),
    Argument("order", Array("int32", ("tiles", 2)), "launch", None),
    Argument("splits", Number("int"), "launch", _splits, ("kernel", MERGE)),
    Argument("even_splits", Number("int"), "launch", _splits, ("kernel", MERGE)),
    Argument("workspace", Array("float32", ("partial",), together=4), "launch", _splits, ("kernel", MERGE)),
    Argument(
        "max_logit",
        Array("float32", ("q_heads",)),
        "launch",
        lambda one: "max_logit" in one.problem.statistics,
    ),
    Argument("entropy", PER_ROW, "launch", lambda one: one.problem.entropy, read_by=("kernel", MERGE)),
)
_AFTER_KEYS = replace(USED_KEYS, read_by=("kernel", MERGE)), FAULTS


@lru_cache
def forward_schema(keys: Keys) -> Schema:
    """Arguments of a forward pass over keys of such a source."""
    rows = (Argument(row.name, row.look, "call.kv", always if row.held else _never) for row in keys.rows)
    before: tuple[Argument, ...] = _FORWARD
    if keys.codes is not None and keys.codes.transposed:
        before = tuple(_BY_CHANNEL if row.name == "v" else row for row in _FORWARD)
    return Schema((*before, *rows, *_AFTER_KEYS))


_BY_CHANNEL = Argument("v", COLUMNS, "call.kv", field="columns")


FORWARD = forward_schema(CONTIGUOUS)


def _moves(name: str) -> Callable[[Pass], bool]:
    return lambda one: name in one.problem.moved


TANGENTS = Schema(
    (
        *FORWARD.rows,
        Argument("tq", Heads("q_len", "q_heads", "head_dim"), "tangents", _moves("q"), field="q"),
        Argument("tk", Heads("kv_len", "kv_heads", "head_dim"), "tangents", _moves("k"), field="k"),
        Argument("tv", Heads("kv_len", "kv_heads", "head_dim_v"), "tangents", _moves("v"), field="v"),
        Argument("tout", Heads("q_len", "q_heads", "head_dim_v", "out_dtype"), "launch"),
        Argument("tlse", PER_ROW, "launch"),
    )
)
"""Arguments of a forward pass with tangents: of q, k and v, None for what has none, and of out and lse."""

BEFORE, MAIN, AFTER, SUMS = "preprocess", "kernel", "postprocess", "sum_parts"
BACKWARD = Schema(
    (
        Argument("q", Heads("q_len", "q_heads", "head_dim")),
        Argument("k", Heads("kv_len", "k_heads", "head_dim"), "call.kv"),
        Argument("v", Heads("kv_len", "v_heads", "head_dim_v"), "call.kv"),
        Argument("out", Heads("q_len", "q_heads", "head_dim_v", "out_dtype"), "saved", read_by=(BEFORE,)),
        Argument("dout", Heads("q_len", "q_heads", "head_dim_v"), "saved", read_by=(BEFORE, MAIN)),
        Argument("lse", PER_ROW, "saved", read_by=(BEFORE,)),
        Argument("dlse", Array("float32", PER_ROW.dims, unit=False), "saved", None, (BEFORE,)),
        Argument("dentropy", Array("float32", PER_ROW.dims, unit=False), "saved", None, (BEFORE,)),
        Argument("entropy", PER_ROW, "saved", None, (BEFORE,)),
        Argument("pulled", Blocks("rows"), "launch", lambda one: one.problem.entropy, (BEFORE, MAIN)),
        Argument("lse2", Blocks("rows"), "launch", read_by=(BEFORE, MAIN)),
        Argument("delta", Blocks("rows"), "launch", read_by=(BEFORE, MAIN)),
        Argument("dq_sum", Blocks("sums"), "launch", _sums_dq, (BEFORE, MAIN, AFTER)),
        Argument("dq", Heads("q_len", "q_heads", "head_dim"), "launch", read_by=(MAIN, AFTER)),
        Argument("dk", Heads("kv_len", "k_heads", "head_dim"), "launch", read_by=(MAIN, SUMS)),
        Argument("dv", Heads("kv_len", "v_heads", "head_dim_v"), "launch", read_by=(MAIN, SUMS)),
        Argument("dk_parts", Heads("kv_len", "parts", "head_dim"), "launch", _adds_up, (MAIN, SUMS)),
        Argument("dv_parts", Heads("kv_len", "parts", "head_dim_v"), "launch", _adds_up, (MAIN, SUMS)),
        replace(LENGTHS[0], read_by=(BEFORE, MAIN, AFTER)),
        LENGTHS[1],
        replace(LENGTHS[2], read_by=(BEFORE, MAIN)),
        LENGTHS[3],
        Argument(
            "tables", TABLES, "launch", lambda one: _masked(one.problem) and not one.problem.deterministic
        ),
        Argument("turns", TURNS, "launch", lambda one: one.problem.deterministic),
        OPERANDS,
        SCALARS,
        replace(SCALE, read_by=(MAIN, AFTER)),
        Argument("scale_log2", Number(), computed=lambda value: value["scale"] * math.log2(math.e)),
        Argument("gradients", Captured("gradients"), "launch"),
        Argument("cleared", Array("int32", ("batch", "q_heads")), "launch", _clears, (BEFORE, MAIN)),
        Argument("counters", Array("int32", (COUNTERS,)), "launch", lambda one: one.config.persistent),
    )
)

_OF_LISTS: dict[str, tuple[str, ...]] = {"dq": (MAIN,), "dk": (AFTER,), "dv": (AFTER,)}
"""Kernels that read gradients where keys are listed: blocks write dQ, and add to sums of the others."""


@lru_cache
def listed_backward_schema(keys: Keys) -> Schema:
    """Arguments of a backward pass over listed keys of such a source."""
    left_out = "dk_parts", "dv_parts", "tables", "turns", "gradients", "counters"
    rows = (row for row in BACKWARD.rows if row.name not in left_out)
    rows = (replace(row, read_by=_OF_LISTS.get(row.name, row.read_by)) for row in rows)
    sums = (
        Argument(
            f"{name}_sum",
            Array("float32", ("batch", "kv_heads", name), together=4),
            "launch",
            read_by=(MAIN, AFTER),
        )
        for name in ("dk", "dv")
    )
    lists = (Argument(row.name, row.look, "call.kv", always if row.held else _never) for row in keys.rows)
    return Schema((*rows, *sums, *lists))


LISTED_BACKWARD = listed_backward_schema(of_lists(CONTIGUOUS, counted=True, beside=True))
MASS = Schema(
    (
        Argument("q", Heads("q_len", "q_heads", "head_dim")),
        Argument("k", Heads("kv_len", "kv_heads", "head_dim"), "call.kv"),
        Argument("lse2", Blocks("rows"), "launch"),
        Argument("mass", Array("float32", ("batch", "q_heads", "kv_len")), "launch"),
        *LENGTHS,
        Argument("tables", TABLES, "launch", lambda one: _masked(one.problem)),
        OPERANDS,
        SCALARS,
        SCALE,
        Argument("scale_log2", Number(), computed=lambda value: value["scale"] * math.log2(math.e)),
    )
)
"""Arguments of the kernel for sums of probabilities per key."""

BLOCK_TABLES = Schema(
    (
        OPERANDS,
        SCALARS,
        *LENGTHS,
        USED_KEYS,
        Argument("q_len", Number("int"), "launch"),
        Argument("kv_len", Number("int"), "launch"),
        Argument("num_heads", Number("int"), "launch"),
        Argument("ranges", RANGES, "launch", lambda one: bool(one.config.ranges)),
        Argument("pieces", PIECES, "launch", lambda one: bool(one.config.searched)),
        Argument("tables", TABLES, "launch", lambda one: not one.config.ordered),
        Argument("turns", ORDERED, "launch", lambda one: one.config.ordered),
        Argument("state", STATE, "launch"),
        Argument("turn", Number("int"), "launch"),
    )
)


def _where(name: str) -> Callable[[Pass], bool]:
    return lambda one: name in one.given


def _sorts(one: Pass) -> bool:
    return bool(one.config.tile_m)


_GIVEN = tuple(replace(row, look=Given(row.name, row.look.dims), source="launch") for row in LENGTHS)
SEQUENCES = Schema(
    (
        *_GIVEN,
        Argument("cu_q", CUMULATIVE, "launch", _packed),
        Argument("cu_k", CUMULATIVE, "launch", _keys_packed),
        Argument("used_q", USED, "launch", _where("seqused_q")),
        Argument("used_k", USED, "launch", _where("seqused_k")),
        Argument("starts", Array("int32", ("starts",)), "launch", _sorts),
        Argument("order", Array("int32", ("tiles", 2)), "launch", _sorts),
        Argument("known", Array("int64", ("known",)), "launch"),
        Argument("keeps", Number("int"), "launch"),
        replace(SCALARS, source="launch"),
        Argument("q_len", Number("int"), "launch"),
        Argument("kv_len", Number("int"), "launch"),
        Argument("heads", Number("int"), "launch"),
        replace(FAULTS, when=always),
    )
)
"""Arguments of the kernel that corrects lengths and sorts tiles."""

_OF_TOKENS = "batch", "tokens"
_OF_POOL = "pages", "page_size", "kv_heads"
APPEND = Schema(
    (
        Argument("k", Rows((*_OF_TOKENS, "kv_heads", "head_dim")), "launch"),
        Argument("v", Rows((*_OF_TOKENS, "kv_heads", "head_dim_v")), "launch"),
        Argument("k_pool", Rows((*_OF_POOL, "head_dim"), "pool"), "launch"),
        Argument("v_pool", Rows((*_OF_POOL, "head_dim_v"), "pool"), "launch"),
        Argument("page_table", PAGE_TABLE.look, "launch"),
        Argument("paged_keys", Given("paged_keys", ("sequences",)), "launch"),
        _GIVEN[0],
        _GIVEN[2],
        Argument("cos", Rows(("positions", "half"), "angles", False), "launch", None),
        Argument("sin", Rows(("positions", "half"), "angles", False), "launch", None),
        Argument("axes", Array("int32", ("half",), unit=False), "launch", None),
        Argument("positions", Given("positions", ("axes", *_OF_TOKENS)), "launch", None),
        Argument("q_weight", Rows(("head_dim",), "weights", False), "launch", None),
        Argument("k_weight", Rows(("head_dim",), "weights", False), "launch", None),
        Argument("eps", Number(), "launch", None),
        Argument("k_scales", Scales(_OF_POOL), "launch", None),
        Argument("v_scales", Scales(_OF_POOL), "launch", None),
        Argument("q", Rows((*_OF_TOKENS, "q_heads", "head_dim")), "launch", None),
        Argument("rotated", Rows((*_OF_TOKENS, "q_heads", "head_dim")), "launch", None),
        Argument("new_keys", Given("paged_keys", ("sequences",)), "launch"),
        replace(FAULTS, when=always),
    )
)
"""Arguments of the kernel that appends keys and values to pages."""

_KEY_HEADS, _VALUE_HEADS = ("batch", "key heads"), ("batch", "value heads")
_OF_SUMS, _OF_MEANS, _OF_CODES, _OF_OFFSETS = "sums", "means", "codes", "offsets"


def _centred(one: Pass) -> bool:
    return bool(one.config.center_k)


def _coded_values(one: Pass) -> bool:
    return bool(one.config.width_v)


def _offset(one: Pass) -> bool:
    return bool(one.config.offset)


def _floats(*dims: str | int) -> Array:
    """float32 in pieces of 16 bytes."""
    return Array("float32", dims, together=4)


def _bytes(*dims: str) -> Array:
    """Codes in pieces of 16 bytes."""
    return Array("uint8", dims, together=16)


QUANTIZE = Schema(
    (
        Argument("q", Rows(("batch", "q_len", "q_heads", "head_dim")), "launch", read_by=(_OF_CODES,)),
        Argument(
            "k", Rows(("batch", "kv_len", "key heads", "head_dim")), "launch", read_by=(_OF_SUMS, _OF_CODES)
        ),
        Argument(
            "v",
            Rows(("batch", "kv_len", "value heads", "head_dim_v")),
            "launch",
            _coded_values,
            (_OF_SUMS, _OF_CODES),
        ),
        Argument("signs", _floats("head_dim"), "launch", lambda one: one.config.rotate, (_OF_CODES,)),
        Argument("q_codes", _bytes("batch", "q_len", "q_heads", "head_dim"), "launch", read_by=(_OF_CODES,)),
        Argument(
            "k_codes", _bytes("batch", "kv_len", "key heads", "head_dim"), "launch", read_by=(_OF_CODES,)
        ),
        Argument(
            "v_codes", _bytes(*_VALUE_HEADS, "head_dim_v", "columns"), "launch", _coded_values, (_OF_CODES,)
        ),
        Argument("q_scale", PER_ROW, "launch", read_by=(_OF_CODES,)),
        Argument("k_scale", Array("float32", (*_KEY_HEADS, "key tiles")), "launch", read_by=(_OF_CODES,)),
        Argument("q_bias", PER_ROW, "launch", _centred, (_OF_CODES,)),
        Argument("k_mean", _floats(*_KEY_HEADS, "head_dim"), "launch", _centred, (_OF_MEANS, _OF_CODES)),
        Argument(
            "v_mean",
            _floats(*_VALUE_HEADS, "head_dim_v"),
            "launch",
            _offset,
            (_OF_MEANS, _OF_CODES, _OF_OFFSETS),
        ),
        Argument(
            "v_scale",
            _floats(*_VALUE_HEADS, "head_dim_v"),
            "launch",
            _coded_values,
            (_OF_MEANS, _OF_CODES, _OF_OFFSETS),
        ),
        Argument("v_offset", _floats(*_VALUE_HEADS, "head_dim_v"), "launch", _offset, (_OF_OFFSETS,)),
        Argument(
            "k_sums",
            _floats(*_KEY_HEADS, "chunks", 1, "head_dim"),
            "launch",
            _centred,
            (_OF_SUMS, _OF_MEANS),
        ),
        Argument(
            "v_sums",
            _floats(*_VALUE_HEADS, "chunks", 3, "head_dim_v"),
            "launch",
            _coded_values,
            (_OF_SUMS, _OF_MEANS),
        ),
        Argument(
            "code_sums",
            _floats(*_VALUE_HEADS, "key tiles", 1, "head_dim_v"),
            "launch",
            _offset,
            (_OF_CODES, _OF_OFFSETS),
        ),
        Argument("chunk", Number("int"), "launch", read_by=(_OF_SUMS,)),
        Argument("kv_len", Number("int"), "launch", read_by=(_OF_MEANS, _OF_OFFSETS)),
    )
)
"""Arguments of the kernels that round q, k and v to codes."""

_OF_MAP = "map batch", "map heads", "map rows"
BLOCK_LISTS = Schema(
    (
        Argument("counts", Given("counts", _OF_MAP), "launch"),
        Argument("indices", Given("indices", (*_OF_MAP, "entries")), "launch"),
        Argument("full_counts", Given("full_counts", _OF_MAP), "launch", None),
        Argument("full_indices", Given("full_indices", (*_OF_MAP, "full entries")), "launch", None),
        Argument("classes", Array("uint8", (*_OF_MAP, "map columns")), "launch"),
        replace(FAULTS, when=always),
    )
)
"""Arguments of the kernel that makes classes of blocks from lists."""

_OF_HEADS = "batch", "heads"
POOL = Schema(
    (
        Argument("x", Rows((*_OF_HEADS, "tokens", "channels")), "launch"),
        Argument("out", Rows((*_OF_HEADS, "rows", "channels")), "launch"),
        Argument("block", Number("int"), "launch"),
    )
)
"""Arguments of the kernel that pools blocks of tokens."""


def _even(one: Pass) -> bool:
    return bool(one.config.even)


def _odd(one: Pass) -> bool:
    return not one.config.even


_OF_SCORES = "batch", "q_heads", "rows", "units"
SCORES = Schema(
    (
        Argument("q", Rows(("batch", "q_heads", "rows", "channels")), "launch"),
        Argument("k", Rows(("batch", "kv_heads", "units", "channels")), "launch"),
        Argument("out", Array("float32", _OF_SCORES, together=4), "launch", _even),
        Argument("odd", Array("float32", _OF_SCORES), "launch", _odd),
        Argument("chunk", Number("int"), "launch"),
        Argument("scale", Number(), "launch"),
    )
)
"""Arguments of the kernel that multiplies queries and keys."""

LISTED_UNITS = Schema(
    (
        Argument("ids", Given("ids", (*_OF_MAP, "entries")), "launch"),
        Argument("counts", Given("counts", _OF_MAP), "launch", None),
        Argument("classes", Array("uint8", (*_OF_MAP, "map columns")), "launch"),
    )
)
"""Arguments of the kernel that makes classes of the units of lists."""

RULE = (
    "rows", "queries", "keys", "offset", "kv_len", "reach", "more", "first", "own", "last",
)  # fmt: skip
"""Numbers of the rule of a selection: see Numbers in kernels/topk/rows.py."""


def _ruled(one: Pass) -> bool:
    return bool(one.config.ruled)


TOPK = Schema(
    (
        Argument("scores", Rows(("score rows", "units")), "launch"),
        Argument("ids", Array("int32", ("score rows", "entries")), "launch"),
        Argument("counts", Array("int32", ("score rows",)), "launch"),
        *(Argument(name, Number("int"), "launch", _ruled) for name in RULE),
    )
)
"""Arguments of the kernels that select the k largest scores of rows."""

_OUTPUT_ROWS = Heads("q_len", "q_heads", "head_dim_v")
_OF_OUTPUT = (
    _GIVEN[0],
    _GIVEN[2],
    Argument("positions", Given("positions", ("q_len",)), "launch", None),
    Argument("operands", Captured("pieces"), "launch"),
    replace(SCALARS, source="launch"),
    Argument("q_len", Number("int"), "launch"),
    Argument("first_head", Number("int"), "launch"),
    Argument("num_heads", Number("int"), "launch"),
)
OUTPUT = Schema((Argument("x", _OUTPUT_ROWS, "launch"), Argument("y", _OUTPUT_ROWS, "launch"), *_OF_OUTPUT))
"""Arguments of the kernel of an output function."""

OUTPUT_BACKWARD = Schema(
    (
        *(Argument(name, _OUTPUT_ROWS, "launch") for name in ("x", "dout", "dx")),
        *_OF_OUTPUT,
        Argument("gradients", Captured("written"), "launch"),
    )
)
"""Arguments of the kernel of its gradients."""

SCHEMAS: dict[str, Schema] = {
    "append": APPEND,
    "forward": FORWARD,
    "backward": BACKWARD,
    "tangents": TANGENTS,
    "listed_units": LISTED_UNITS,
    "lists": BLOCK_LISTS,
    "mass": MASS,
    "output": OUTPUT,
    "output_backward": OUTPUT_BACKWARD,
    "pool": POOL,
    "quantize": QUANTIZE,
    "scores": SCORES,
    "tables": BLOCK_TABLES,
    "sequences": SEQUENCES,
    "topk": TOPK,
}


def schema_of(direction: str, keys: Keys) -> Schema:
    """Arguments of a pass over keys of such a source."""
    if direction == "listed_backward":
        return listed_backward_schema(keys)
    return forward_schema(keys) if direction == "forward" else SCHEMAS[direction]
