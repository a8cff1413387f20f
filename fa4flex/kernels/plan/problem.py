"""Problem: what a kernel is specialised to, besides the variant's expressions and sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from fa4flex.codegen.analyze.facts import MaskForm
from fa4flex.codegen.analyze.intervals import MOST_SPANS
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.plan.keys import CONTIGUOUS, PAGES, TOGETHER, KeyDtype, Keys, QueryCodes
from fa4flex.kernels.plan.lengths import Lengths, Scaling
from fa4flex.primitives.heads import ALIKE, Shares

Half = Literal["bfloat16", "float16"]
OutDtype = Literal["bfloat16", "float16", "float32"]
Adding = Literal["sum", "once", "once in pairs"]
Weights = Literal["softmax", "softpick", "elementwise"]
E4M3 = "float8_e4m3fn"
STATISTICS = ("lse", "max_scores", "max_logit", "entropy")
WIDEST = 256
"""The widest head of most kernels: one matrix instruction makes at most 256 columns of the output."""

WIDEST_SHARED = 576
"""The widest head, or latent row, of any kernel: two warpgroups share out the columns of its values."""

MMA_K = 16
"""Columns of 16 bits of its operands that one instruction of a product takes; of 8 bits, twice as many."""

_FLAGS = (
    "sinks", "wide_index", "in_range", "positive_scale", "sloped", "deterministic", "met_alike",
    "long_scores", "pair_reads", "long_masks", "many_reads", "grouped", "brief",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """head_dim, head_dim_v   widths of q and k, and of v and the output, as the tensors have them
    dtype, out_dtype       of q, k and v, and of the output; where they are codes, that of q and k
    keys                   source of keys and values
    lengths                "dense", "packed" (cu_seqlens) or "used" (dense, with lengths per batch element)
    mask_form              "none": all pairs; "spans": the key intervals of the facts hold, and at most two
                           per row; "queries": of backward passes, the query intervals of the facts hold, and
                           at most two per key; "tables": block tables, and the mask in partial tiles;
                           "pairs": of few rows, all tiles of keys, and the mask in each of them
    row_ends               with "tables": how many key intervals per row hold if the captured tensors that
                           they search are sorted; the intervals' ends, and whether they hold, stand beside
                           block tables; 0 is always right
    blocks                 queries and keys of tiles that no edge of a block cuts, where the mask reads a map
                           of blocks that usual tiles are too large for
    output                 a function of the output is applied before it is written
    skip                   probability that each query may leave out: kernels may leave out tiles of keys that
                           hold less than their share of it, of forward passes
    dropout                normalised weights are dropped
    weights                how they are made of scores: "softmax"; "elementwise": the score is the weight;
                           "softpick", which no kernel computes
    moved                  of forward mode: which of "q", "k" and "v" have tangents
    sinks                  a learnable logit per head joins the denominator
    statistics             which of STATISTICS are written
    wide_index             index arithmetic may pass 2^31
    in_range               every index into a captured tensor is proved to lie within it
    positive_scale         the softmax scale is positive
    operands               (dtype name, rank) of each captured tensor
    deterministic          of backward passes: sums are the same to the last bit, run after run
    met_alike              of backward passes: keys next to each other meet nearly the same queries; either is
                           always right, and may be slower
    sloped                 of backward passes: the modified score's derivative by the scaled one is not 1
    long_scores            of backward passes: a score is long in the making, as captured tensors are read for
                           it by query or key, or its derivative is another one for each score
    pair_reads             of backward passes: scores are long, and read elements that belong to one pair each
    many_reads             a score reads so many elements of captured tensors by pairs that its code is long
    long_masks             of backward passes: query intervals take divisions, or elements of captured tensors
    brief                  of backward passes: weights are elementwise, and they and their derivatives take
                           few instructions, and nothing but the score and what those of a head share
    shares                 KV heads that share a head of k, and of v, where k and v differ in heads
    grouped                of backward passes: query heads share keys, and blocks may take them in parts
    gradients              of backward passes: the slots of captured tensors whose gradients are asked for,
                           and whether elements are a "sum" or written "once", float32 like sums, or 16 bits
                           wide "once in pairs" of keys

    Raises UnsupportedError for dtypes and widths that no kernel has, InputError for what is not a value.
    """

    head_dim: int
    head_dim_v: int
    dtype: Half | QueryCodes = "bfloat16"
    out_dtype: OutDtype = "bfloat16"
    lengths: Lengths = "dense"
    mask_form: MaskForm = "none"
    sinks: bool = False
    statistics: tuple[str, ...] = ("lse",)
    wide_index: bool = False
    in_range: bool = True
    positive_scale: bool = True
    operands: tuple[tuple[str, int], ...] = ()
    keys: Keys = CONTIGUOUS
    sloped: bool = False
    met_alike: bool = False
    long_scores: bool = False
    pair_reads: bool = False
    long_masks: bool = False
    many_reads: bool = False
    grouped: bool = False
    brief: bool = False
    gradients: tuple[tuple[int, Adding], ...] = ()
    deterministic: bool = False
    row_ends: int = 0
    blocks: tuple[int, int] | None = None
    output: bool = False
    shares: Shares = ALIKE
    skip: float = 0.0
    dropout: bool = False
    weights: Weights = "softmax"
    moved: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        codes = self.keys.codes
        _require_dtype("dtype", self.dtype, get_args(Half) if codes is None else (codes.qk,))
        _require_dtype("out_dtype", self.out_dtype, get_args(OutDtype))
        _require_one_of("kv_dtype", self.keys.dtype, get_args(KeyDtype))
        for name in ("k_scales", "v_scales"):
            _require_one_of(name, getattr(self.keys, name), get_args(Scaling))
        for name in ("head_dim", "head_dim_v"):
            _require_width(name, getattr(self, name))
        _require_one_of("lengths", self.lengths, get_args(Lengths))
        _require_one_of("weights", self.weights, get_args(Weights))
        _require_one_of("mask_form", self.mask_form, get_args(MaskForm))
        _require_one_of("row_ends", self.row_ends, tuple(range(MOST_SPANS + 1)))
        for name in _FLAGS:
            _require_one_of(name, getattr(self, name), (True, False))
        _require_one_of("together", self.keys.together, TOGETHER if self.keys.loaded else (0,))
        _require_statistics(self.statistics)
        _require_operands(self.operands)
        for _, adding in self.gradients:
            _require_one_of("gradients", adding, get_args(Adding))

    @property
    def width(self) -> int:
        """Columns of the wider of both heads."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def entropy(self) -> bool:
        """True if entropies of rows are written."""
        return "entropy" in self.statistics

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, and of k and v where they are no 8-bit cache."""
        return 2 if self.keys.codes is None else 1

    @property
    def v_itemsize(self) -> int:
        """Bytes of one element of v."""
        codes = self.keys.codes
        return self.kv_itemsize if codes is None else itemsize(codes.pv)

    @property
    def depths(self) -> tuple[int, int]:
        """Instructions of a product along heads of q and k, and of v. Tiles may be wider: columns behind
        these are zeros, and what multiplies them is left out."""
        columns = MMA_K * 2 // self.itemsize
        return -(-self.head_dim // columns), -(-self.head_dim_v // MMA_K)

    @property
    def out_itemsize(self) -> int:
        """Bytes of one element of the output."""
        return itemsize(self.out_dtype)

    @property
    def wide_output(self) -> bool:
        """True if the output is not rounded to 16 bits."""
        return self.out_dtype == "float32"

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one element of k, and of v where they are no codes."""
        return 1 if self.keys.dtype else self.itemsize

    @property
    def element(self) -> str:
        """Dtype of q as kernels are handed it: e4m3 as bytes."""
        return "uint8" if self.dtype == E4M3 else self.dtype

    @property
    def k_element(self) -> str:
        """Dtype of k likewise."""
        return "uint8" if self.keys.dtype == E4M3 else self.element

    @property
    def v_element(self) -> str:
        """Dtype of v likewise."""
        codes = self.keys.codes
        return self.k_element if codes is None or codes.transposed else codes.pv

    @property
    def weight_dtype(self) -> str:
        """Dtype of probabilities, as values are multiplied by them."""
        return self.dtype if self.keys.codes is None else self.keys.codes.pv

    @property
    def adds_up(self) -> bool:
        """True if dK and dV of parts of groups, or of KV heads that share heads, are added up."""
        return self.grouped or self.shares != ALIKE

    @property
    def uneven(self) -> bool:
        """True if tiles of queries may have different numbers of keys."""
        return self.lengths != "dense" or self.mask_form != "none"

    def explain(self) -> str:
        heads = (
            f"{self.head_dim}"
            if self.head_dim == self.head_dim_v
            else f"{self.head_dim} and {self.head_dim_v} (v)"
        )
        extras = self._of_cache()
        extras += [_number(len(self.operands), "captured tensor")] * bool(self.operands) + [
            "sinks"
        ] * self.sinks
        extras += [f"{self.weights} weights"] * (self.weights != "softmax")
        extras += ["float32 output"] * self.wide_output + ["dropout"] * self.dropout
        extras += ["entropies"] * self.entropy
        extras += [f"gradients of {len(self.gradients)} of them"] * bool(self.gradients)
        extras += [f"tangents of {', '.join(self.moved)}"] * bool(self.moved)
        extras += self._of_loader()
        extras += self._of_heads()
        extras += ["groups of query heads"] * self.grouped + ["deterministic"] * self.deterministic
        extras += [f"blocks of {self.blocks[0]} x {self.blocks[1]}"] if self.blocks else []
        extras += [f"skipping up to {self.skip:g}"] * bool(self.skip)
        extras += ["key intervals where what they search is sorted"] * bool(self.row_ends)
        parts = [f"heads of {heads}", self.dtype, f"{self.lengths} lengths", _MASKS[self.mask_form], *extras]
        return ", ".join(parts)

    def _of_heads(self) -> list[str]:
        if self.shares == ALIKE:
            return []
        told = (f"{n} that share a head of {name}" for name, n in self.shares._asdict().items() if n > 1)
        return [f"KV heads: {', '.join(told)}"]

    def _of_cache(self) -> list[str]:
        codes = self.keys.codes
        if codes is not None:
            return [f"codes, values of {codes.pv}"]
        if not self.keys.dtype:
            return []
        scales = ((name, getattr(self.keys, f"{name}_scales")) for name in ("k", "v"))
        told = [f"{name} scaled by {per}" for name, per in scales if per]
        return [f"e4m3 keys and values, {' and '.join(told) or 'not scaled'}"]

    def _of_loader(self) -> list[str]:
        if self.keys.listed:
            beside = ", and others beside their lists" * self.keys.beside
            where = f" in pages of {self.keys.together} or a multiple" * self.keys.loaded
            what = "latent rows" if self.keys.latent else "keys"
            return [f"listed {what}{where}{beside}"]
        if not self.keys.loaded:
            return ["latent rows"] * self.keys.latent
        if self.keys.loader == PAGES:
            return [f"pages of {self.keys.together} keys or a multiple"]
        return [f"keys found by {self.keys.loader.partition(':')[2]}"]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


_MASKS = {
    "none": "no mask",
    "spans": "a mask of key intervals",
    "queries": "a mask of query intervals",
    "tables": "a mask by block tables",
    "pairs": "a mask that is asked of every pair",
}


def itemsize(dtype: str) -> int:
    """Bytes of one element of the dtype of this name: "bfloat16" has 2, "bool" 1."""
    digits = re.search(r"\d+", dtype)
    return max(int(digits.group()) // 8, 1) if digits else 1


def _require_dtype(name: str, dtype: object, allowed: tuple[str, ...]) -> None:
    if dtype not in allowed:
        raise UnsupportedError(
            f"{name}={dtype!r}: the tensor cores of this kernel multiply 16-bit floats",
            f"one of {allowed}",
            "pass bfloat16 or float16 tensors, or run on a CPU, which computes other dtypes exactly",
        )


def _require_width(name: str, width: object) -> None:
    if not isinstance(width, int) or isinstance(width, bool) or width <= 0:
        raise InputError(f"{name}={width!r}", "a positive int", "pass the last dimension of the tensor")
    scale = f", and keep the scale: scale={width} ** -0.5" if name == "head_dim" else ", and cut the output"
    padding = "q and k with zeros" if name == "head_dim" else "v with zeros"
    if width > WIDEST_SHARED:
        raise UnsupportedError(
            f"{name}={width}: two warpgroups, which share a head's columns, have no room for so many",
            f"at most {WIDEST_SHARED}",
            "use narrower heads, or run this one on a CPU or with torch's flex_attention",
        )
    if width % 8:
        raise UnsupportedError(
            f"{name}={width}: rows are copied in pieces of 16 bytes, which are 8 elements",
            "a multiple of 8",
            f"pad {padding} to {-(-width // 8) * 8}{scale}",
        )


def _require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name}={value!r}", f"one of {allowed}", f"pass {name}={allowed[0]!r}")


def _require_statistics(names: tuple[str, ...]) -> None:
    if not isinstance(names, tuple) or set(names) - set(STATISTICS) or len(set(names)) < len(names):
        raise InputError(
            f"statistics={names!r}", f"a tuple of different names out of {STATISTICS}", 'e.g. ("lse",)'
        )


def _require_operands(arguments: tuple[tuple[str, int], ...]) -> None:
    for operand in arguments:
        if len(operand) != 2 or not isinstance(operand[0], str) or not isinstance(operand[1], int):
            raise InputError(
                f"operand {operand!r}", "(dtype name, rank) per captured tensor", 'e.g. ("float32", 2)'
            )
