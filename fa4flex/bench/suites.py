"""Suites to measure: rows of sizes, mods and targets, as data."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fa4flex.errors import InputError

BLOCK = 128
TOKENS, HIDDEN = 32_768, 2_048
"""Tokens (batch * length) and hidden size (heads * head_dim) of the dense suite. Every row then has work for
all of a chip."""
SMOKE = 32
"""Factor by which a smoke run shortens lengths, windows and prefixes."""

Mod = Callable[..., Any]

# --- targets ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """fa4flex's speed over that of `against` ("best" of all peers, or a peer's name) is at least `ratio`."""

    against: str
    ratio: float
    aim: float | None = None


MOST_COST = 0.06
"""Largest cost of a hoistable score mod: time over the time of the same mask without it, less 1."""
MOST_ORDERING = 1 / 0.75 - 1
"""Largest cost of sums in one order: at least 75 % of the speed without."""
MOST_ERROR = 2.0
"""Error against float64 over the error of the same maths by PyTorch in the inputs' dtype."""

# --- rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Native:
    """A row in the arguments of kernels without mods; `window` keys, the query's own among them."""

    causal: bool = False
    window: int | None = None
    softcap: float = 0.0


@dataclass(frozen=True)
class Row:
    """q is [batch, heads, length, head_dim]; `mask` and `score` name entries of MASKS and SCORES.

    `kv_heads`, `kv_length` and `value_dim` are those of k and v where they differ from q's, `value_heads` are
    those of v where they differ from k's; else they are 0.
    `sequences`: so many, of random lengths, lie one after another in `length` tokens; peers that take packed
    sequences get them so, with `cu_seqlens`. Causal masks end with the last query at the last key.
    `mask_size`: keys of the mask's window or prefix, or the number of its documents; 0 for the suites' own.
    `shrink` divides every length that a mod holds (windows, prefixes), as the smoke run has divided `length`.
    `base` names the row whose time this one is compared with; such rows are measured together, and time over
    the base's, less 1, is at most `most_cost`. `backward`: gradients of q, k and v are timed, not the output;
    `deterministic`, with the same bits in every run.
    """

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    mask: str = "full"
    score: str = "plain"
    targets: tuple[Target, ...] = ()
    base: str = ""
    most_cost: float = MOST_COST
    backward: bool = False
    deterministic: bool = False
    shrink: int = 1
    kv_heads: int = 0
    kv_length: int = 0
    value_dim: int = 0
    sequences: int = 0
    mask_size: int = 0
    value_heads: int = 0
    unit: ClassVar[str] = "TFLOP/s"

    @property
    def keys(self) -> int:
        """Length of k and v."""
        return self.kv_length or self.length

    @property
    def values(self) -> int:
        """Width of v and the output."""
        return self.value_dim or self.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def value_group(self) -> int:
        """Query heads per head of values."""
        return self.heads // self.value_heads if self.value_heads else self.group

    def scaled(self, length: int) -> int:
        """A window or prefix at this row's size, of some keys at least: gradients of q vanish with one."""
        return length if self.shrink == 1 else max(8, length // self.shrink)

    @property
    def native(self) -> Native | None:
        """None where only a mod can say it."""
        if self.mask not in ("full", "causal", "sliding", "packed") or self.score not in ("plain", "softcap"):
            return None
        return Native(
            causal=self.mask in ("causal", "packed"),
            window=self.scaled(self.mask_size or WINDOW) if self.mask == "sliding" else None,
            softcap=CAP if self.score == "softcap" else 0.0,
        )

    @property
    def mask_batched(self) -> bool:
        """True if the mask differs between entries of the batch. No mask here differs between heads."""
        return self.mask == "document"

    def about(self) -> dict[str, Any]:
        """The row in a file of numbers."""
        shape = {
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.heads // self.group,
            "value_heads": self.heads // self.value_group,
            "length": self.length,
            "kv_length": self.keys,
            "head_dim": self.head_dim,
            "value_dim": self.values,
            "sequences": self.sequences,
        }
        which = "backward" if self.backward else "forward"
        return {"shape": shape, "mask": self.mask, "score_mod": self.score, "pass": which}

    def small(self) -> Row:
        """The row at a size for a dry run on a CPU."""
        length = max(BLOCK, self.length // SMOKE)
        kv_length = self.kv_length and max(BLOCK, self.kv_length // SMOKE)
        heads = 2 * math.lcm(self.group, self.value_group)
        kv_heads = self.kv_heads and heads // self.group
        value_heads = self.value_heads and heads // self.value_group
        return replace(
            self,
            batch=min(self.batch, 2),
            heads=heads,
            kv_heads=kv_heads,
            value_heads=value_heads,
            length=length,
            kv_length=kv_length,
            sequences=min(self.sequences, 4),
            shrink=SMOKE,
        )


@dataclass(frozen=True)
class Draw:
    """Source of random captured tensors: one seed for all of a row, on the row's device."""

    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.generator.device, dtype=dtype)

    def documents(self, batch: int, length: int, count: int) -> Tensor:
        """int32 [batch, length]: ids of `count` documents with uniformly random borders."""
        device = self.generator.device
        cuts = torch.rand(batch, count - 1, generator=self.generator, device=device) * length
        position = torch.arange(length, device=device)
        return (position >= cuts.unsqueeze(-1)).sum(1).to(torch.int32)

    def cu_seqlens(self, sequences: int, length: int) -> Tensor:
        """int32 [sequences + 1]: where sequences of uniformly random lengths, one at least, begin and end."""
        device = self.generator.device
        inner = torch.randperm(length - 1, generator=self.generator, device=device)[: sequences - 1] + 1
        ends = torch.tensor([0, length], device=device)
        return torch.cat([ends, inner]).sort().values.to(torch.int32)


# --- mods: plain functions, given unchanged to fa4flex and to flex_attention --------------------------------

WINDOW, PREFIX, DOCUMENTS, CAP = 1024, 1024, 8, 30.0


def _causal(row: Row, draw: Draw) -> Mod:
    before = row.keys - row.length
    if before == 0:
        return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    return lambda b, h, q_idx, kv_idx: q_idx + before >= kv_idx


def _packed(row: Row, draw: Draw) -> Mod:
    """Causal masks of packed sequences, as peers without packed sequences say them."""
    starts = draw.cu_seqlens(row.sequences, row.length)
    positions = torch.arange(row.length, dtype=torch.int32, device=starts.device)
    sequence = torch.searchsorted(starts, positions, right=True)

    def packed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (sequence[q_idx] == sequence[kv_idx]) & (q_idx >= kv_idx)

    packed.cu_seqlens = starts  # type: ignore[attr-defined]
    return packed


def _sliding(row: Row, draw: Draw) -> Mod:
    window = row.scaled(row.mask_size or WINDOW)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window)


def _document(row: Row, draw: Draw) -> Mod:
    document = draw.documents(row.batch, row.length, row.mask_size or DOCUMENTS)
    return lambda b, h, q_idx, kv_idx: (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)


def _prefix(row: Row, draw: Draw) -> Mod:
    prefix = row.scaled(row.mask_size or PREFIX)
    return lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (q_idx >= kv_idx)


def _alibi(row: Row, draw: Draw) -> Mod:
    heads = torch.arange(1, row.heads + 1, device=draw.generator.device)
    slopes = torch.exp2(-8.0 * heads / row.heads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def _softcap(row: Row, draw: Draw) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: CAP * torch.tanh(score / CAP)


def _key_bias(row: Row, draw: Draw) -> Mod:
    bias = draw.normal(row.batch, row.length)
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, kv_idx]


def _relative(row: Row, draw: Draw) -> Mod:
    length = row.length
    table = draw.normal(row.heads, 2 * length)
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + length]


def _dense_bias(row: Row, draw: Draw) -> Mod:
    bias = draw.normal(row.batch, row.heads, row.length, row.length)
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx]


Builder = Callable[[Row, Draw], Mod]
MASKS: dict[str, Builder | None] = {
    "full": None,
    "causal": _causal,
    "sliding": _sliding,
    "document": _document,
    "prefix": _prefix,
    "packed": _packed,
}
SCORES: dict[str, Builder | None] = {
    "plain": None,
    "alibi": _alibi,
    "softcap": _softcap,
    "key_bias": _key_bias,
    "relative": _relative,
    "dense_bias": _dense_bias,
}


@dataclass(frozen=True)
class Mods:
    """Mods that a row's names stand for: a score_mod and a mask_mod, or None."""

    score_mod: Mod | None
    mask_mod: Mod | None


def build_mods(row: Row, draw: Draw) -> Mods:
    score, mask = SCORES[row.score], MASKS[row.mask]
    return Mods(score and score(row, draw), mask and mask(row, draw))


# --- suites -------------------------------------------------------------------------------------------------

_DENSE = (Target("best", 1.0, aim=1.05),)
_VARIANT = Target("flex", 1.45)
_FA4 = Target("FA4", 1.0)


def _dense_rows() -> list[Row]:
    return [
        Row(
            f"d{dim} {mask} {length // 1024}k",
            batch=TOKENS // length,
            heads=HIDDEN // dim,
            length=length,
            head_dim=dim,
            mask=mask,
            targets=_DENSE,
        )
        for dim in (64, 128)
        for mask in ("full", "causal")
        for length in (4096, 16384)
    ]


def _long(
    name: str, mask: str, score: str = "plain", targets: tuple[Target, ...] = (_VARIANT,), base: str = ""
) -> Row:
    return Row(name, 2, 16, 8192, 128, mask, score, targets, base)


def _short(name: str, score: str, target: Target) -> Row:
    return Row(name, 2, 16, 4096, 128, "causal", score, (target,))


_VARIANT_ROWS = [
    _long("full", "full"),
    _long("causal", "causal"),
    _long("alibi+causal", "causal", "alibi"),
    _long("softcap+causal", "causal", "softcap", (Target("flex", 2.2), _FA4)),
    _long("sliding", "sliding", targets=(_VARIANT, _FA4)),
    _long("document", "document"),
    _long("prefix-lm", "prefix"),
    _long("alibi+sliding", "sliding", "alibi"),
    _short("relative", "relative", Target("flex", 1.8)),
    _short("dense-bias", "dense_bias", _VARIANT),
]


def _cost_rows() -> list[Row]:
    rows = []
    for mask, scores in (
        ("full", ("alibi",)), ("causal", ("alibi", "key_bias")),
        ("sliding", ("alibi",)), ("document", ("alibi",)), ("prefix", ("alibi",)),
    ):  # fmt: skip
        rows.append(_long(mask, mask, targets=()))
        rows += [_long(f"{score}+{mask}", mask, score, (), base=mask) for score in scores]
    return rows


def _backward_rows() -> list[Row]:
    """Dense rows, and the same with ordered sums."""
    rows = []
    for row in _dense_rows():
        plain = replace(row, backward=True, targets=(Target("best", 1.0),))
        ordered = replace(plain, name=f"{row.name} ordered", targets=(), base=row.name, deterministic=True)
        rows += [plain, replace(ordered, most_cost=MOST_ORDERING)]
    return rows


def _backward_variants() -> list[Row]:
    capped = (Target("flex", 1.8),)
    long = [row for row in _VARIANT_ROWS if row.score in ("plain", "alibi", "softcap")]
    return [
        replace(row, backward=True, targets=capped if row.score == "softcap" else (Target("flex", 1.35),))
        for row in long
    ]


def _causal_row(name: str, batch: int, heads: str, length: int, head_dim: int, **others: Any) -> Row:
    """heads: "query heads:KV heads", or one number for both."""
    query, _, key = heads.partition(":")
    row = Row(name, batch, int(query), length, head_dim, mask="causal", kv_heads=int(key or query))
    return replace(row, targets=(Target("best", 1.0),), **others)


_SHAPES = (
    _causal_row("short d64 full", 64, "16", 256, 64, mask="full"),
    _causal_row("short d128", 256, "16", 128, 128),
    _causal_row("b32 s512 d128", 32, "16", 512, 128),
    _causal_row("b16 s1k d128", 16, "16", 1024, 128),
    _causal_row("b16 s2k d64 full", 16, "32", 2048, 64, mask="full"),
    _causal_row("one prompt 1k", 1, "8", 1024, 128),
    _causal_row("one prompt 2k 32:8", 1, "32:8", 2048, 128),
    _causal_row("32:8 s2k d128", 8, "32:8", 2048, 128),
    _causal_row("28:4 s4k d128", 2, "28:4", 4096, 128),
    _causal_row("64:8 s8k d64", 1, "64:8", 8192, 64),
    _causal_row("64:8 s8k d128", 1, "64:8", 8192, 128),
    _causal_row("32:2 s4k d128", 2, "32:2", 4096, 128),
    _causal_row("16:1 s8k d128", 1, "16:1", 8192, 128),
    _causal_row("32k d128", 1, "8", 32768, 128),
    _causal_row("64k d128", 1, "4", 65536, 128),
    _causal_row("64k d64", 1, "4", 65536, 64),
    _causal_row("odd 4097 d128 full", 1, "12", 4097, 128, mask="full"),
    _causal_row("odd 3001 d128", 2, "16", 3001, 128),
    _causal_row("odd 1000 d64", 8, "16", 1000, 64),
    _causal_row("odd 1537 d128 16:4 full", 4, "16:4", 1537, 128, mask="full"),
    _causal_row("cross 1k:8k d128 full", 4, "16", 1024, 128, kv_length=8192, mask="full"),
    _causal_row("cross 8k:1k d64 full", 4, "16", 8192, 64, kv_length=1024, mask="full"),
    _causal_row("chunk 512:8k 32:8 d128", 4, "32:8", 512, 128, kv_length=8192),
    _causal_row("d80", 4, "16", 4096, 80),
    _causal_row("d96", 4, "16", 4096, 96),
    _causal_row("d96 full", 4, "16", 4096, 96, mask="full"),
    _causal_row("d160", 4, "8", 4096, 160),
    _causal_row("d192", 4, "8", 4096, 192),
    _causal_row("d192:128", 2, "16", 4096, 192, value_dim=128),
    _causal_row("two maps d64:128", 2, "32", 4096, 64, value_dim=128, value_heads=16),
    _causal_row("d256 4k", 4, "8", 4096, 256),
    _causal_row("d256 16k", 1, "8", 16384, 256),
    _causal_row("d256 4k full", 4, "8", 4096, 256, mask="full"),
    _causal_row("sliding 32:8 s8k", 2, "32:8", 8192, 128, mask="sliding"),
    _causal_row("packed 16 in 16k d128", 1, "16", 16384, 128, mask="packed", sequences=16),
    _causal_row("packed 16 in 16k d64", 1, "32", 16384, 64, mask="packed", sequences=16),
    _causal_row("packed 64 in 32k 32:8", 1, "32:8", 32768, 128, mask="packed", sequences=64),
)
"""Shapes of training and prefill; causal unless said."""


def _backward_shapes() -> list[Row]:
    rows = [replace(row, backward=True) for row in _SHAPES]
    wide = next(row for row in rows if row.name == "d192")
    ordered = replace(wide, name="d192 ordered", targets=(), base=wide.name, deterministic=True)
    return [*rows, replace(ordered, most_cost=MOST_ORDERING)]


SPARSE = "sparse"
"""The suite whose rows are in sparse_rows.py: maps, lists and selections."""

SUITES: dict[str, tuple[Row, ...]] = {
    "dense": tuple(_dense_rows()),
    "variants": tuple(_VARIANT_ROWS),
    "cost": tuple(_cost_rows()),
    "backward": tuple(_backward_rows()),
    "backward-variants": tuple(_backward_variants()),
    "shapes": _SHAPES,
    "backward-shapes": tuple(_backward_shapes()),
}


class _Named(Protocol):
    """Fields by which rows are selected and gathered."""

    @property
    def name(self) -> str: ...

    @property
    def base(self) -> str: ...


Named = TypeVar("Named", bound=_Named)


def select_all(suites: Sequence[str], patterns: Sequence[str]) -> dict[str, list[Any]]:
    """Rows of each suite by name, by a pattern such as `d128*`, or else by a part of the name; with the bases
    they need. No patterns means all. Raises InputError for a pattern that fits no row of these suites."""
    rows: dict[str, Sequence[Any]] = {name: SUITES[name] for name in suites if name in SUITES}
    if SPARSE in suites:
        from fa4flex.bench.sparse_rows import ROWS

        rows[SPARSE] = ROWS
    known = [row.name for name in rows for row in rows[name]]
    unknown = [pattern for pattern in patterns if rows and not _matching(known, pattern)]
    if unknown:
        expected = f"rows of the suites asked for: {', '.join(known)}"
        raise InputError(f"--rows {unknown[0]!r}", expected, "name some of them")
    return {name: _selected(rows[name], patterns) for name in rows}


def _selected(rows: Sequence[Named], patterns: Sequence[str]) -> list[Named]:
    if not patterns:
        return list(rows)
    wanted = {name for pattern in patterns for name in _matching([row.name for row in rows], pattern)}
    wanted |= {row.base for row in rows if row.name in wanted}
    return [row for row in rows if row.name in wanted]


def _matching(names: list[str], pattern: str) -> list[str]:
    return [n for n in names if fnmatch.fnmatchcase(n, pattern)] or [n for n in names if pattern in n]


def groups(rows: Sequence[Named]) -> list[list[Named]]:
    """Rows to be measured together: those compared with one base, and every other alone."""
    gathered: dict[str, list[Named]] = {}
    for row in rows:
        gathered.setdefault(row.base or row.name, []).append(row)
    return list(gathered.values())


# --- FLOPs --------------------------------------------------------------------------------------------------


def blocks_with_work(row: Row, mask_mod: Mod | None, device: torch.device) -> int:
    """Number of BLOCK x BLOCK squares of (query, key) with an allowed pair, over the batch, for one head."""
    if mask_mod is None:
        return row.batch * -(-row.length // BLOCK) * -(-row.keys // BLOCK)
    entries = range(row.batch) if row.mask_batched else range(1)
    total = sum(_blocks_of_entry(row, mask_mod, b, device) for b in entries)
    return total if row.mask_batched else row.batch * total


def _blocks_of_entry(row: Row, mask_mod: Mod, entry: int, device: torch.device) -> int:
    """One strip of BLOCK queries at a time: O(BLOCK * length) memory."""
    b, h = (torch.tensor(i, device=device) for i in (entry, 0))
    keys = torch.arange(row.keys, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for queries in torch.arange(row.length, device=device).split(BLOCK):
        allowed = mask_mod(b, h, queries[:, None], keys[None, :]).any(0)
        padded = torch.nn.functional.pad(allowed, (0, -row.keys % BLOCK))
        total += padded.view(-1, BLOCK).any(1).sum()
    return int(total)


def flops(row: Row, blocks: int) -> int:
    """FLOPs of both matrix products, or of the five of a backward pass, in `blocks` squares for every head: 2
    per multiply-add."""
    widths = (3, 2) if row.backward else (1, 1)
    columns = widths[0] * row.head_dim + widths[1] * row.values
    return 2 * columns * BLOCK**2 * blocks * row.heads
