"""Attention composed at random of 3 to 6 primitives, as code that can be pasted and run.

A draw is text: what is printed of a failure is what was run. The same text makes the library's call, the
exact one in float64, and the one in PyTorch at the call's dtype; they differ in `device`, `dtype` and `wide`
alone: tensors are drawn in float64, rounded to `dtype`, and then of dtype `wide`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

PRIMITIVES = ("score", "mask", "blocks", "sinks", "output", "normalizer", "dropout", "skip", "statistics")
"""Primitives of which each draw has 3 to 6."""

PLACEMENTS = ("dense", "bshd", "few", "packed", "padded", "paged")
OFTEN = dict(zip(PLACEMENTS, (40, 10, 16, 14, 12, 8), strict=True))
"""Weights of placements."""

STATISTICS = ("lse", "max_scores", "max_logit", "entropy")
UNSUMMED = ("softpick", "elementwise")

SEEN = 0.08
"""Share of conflicts that are left in a draw, to see them refused."""


@dataclass(frozen=True)
class Sizes:
    """Extents from which draws are made."""

    heads: tuple[tuple[int, int, int], ...]
    """Heads of queries, of keys and of values."""
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    width: int
    widths_v: tuple[int, ...]
    block: int
    page: int
    tiles: bool
    primitives: tuple[str, ...] = PRIMITIVES
    count: tuple[int, int] = (3, 6)
    """Fewest and most primitives of a draw."""
    placements: tuple[str, ...] = PLACEMENTS


OF_CPU = Sizes(
    heads=((2, 2, 2), (4, 1, 1), (7, 1, 1), (4, 2, 1), (4, 1, 2), (7, 7, 1), (8, 2, 2), (6, 3, 2)),
    rows=(3, 7, 16, 17, 33, 40), keys=(5, 16, 31, 32, 48, 50), width=8, widths_v=(8, 6), block=16, page=4,
    tiles=True,
)  # fmt: skip
OF_GPU = Sizes(
    heads=((4, 4, 4), (4, 1, 1), (7, 1, 1), (4, 2, 1)), rows=(65, 130, 200), keys=(64, 130, 260), width=64,
    widths_v=(64,), block=128, page=16, tiles=False,
)  # fmt: skip
"""Few widths, so that few kernels are compiled."""


@dataclass
class Draw:
    """One draw: its lines, its primitives, and what of them should be refused together."""

    name: str
    lines: list[str] = field(default_factory=list)
    has: set[str] = field(default_factory=set)
    conflicts: tuple[str, ...] = ()
    placement: str = "dense"
    skip: float = 0.0

    def source(self, device: str = "cpu", dtype: str = "float64", wide: str | None = None) -> str:
        head = [
            f"# draw {self.name}: {', '.join(x for x in PRIMITIVES if x in self.has)}; {self.placement}",
            "import torch",
            "import fa4flex",
            "from fa4flex.variants import *",
            f"device, dtype, wide = {device!r}, torch.{dtype}, torch.{wide or dtype}",
        ]
        return "\n".join([*head, *self.lines, ""])

    def made(self, **where: Any) -> dict[str, Any]:
        """Names of the draw's code, once it has run."""
        names: dict[str, Any] = {}
        exec(compile(self.source(**where), f"<draw {self.name}>", "exec"), names)
        return names


PRELUDE = """
def leaf(*shape):
    learned.append(torch.randn(shape, dtype=torch.float64).to(dtype).to(device, wide).requires_grad_())
    return learned[-1]
def number(*values):
    return torch.tensor(values, dtype=torch.int32, device=device)
learned, composition, call = [], {}, {}
""".strip().splitlines()


def drawn(seed: int, at: int, sizes: Sizes = OF_CPU, repeat: int = 1) -> Draw:
    """Draw number `at` of a seed; `repeat` draws in succession are of one composition, of other contents."""
    draw = Draw(f"{seed}:{at}")
    dice = random.Random(f"{seed}:{at // repeat}")
    inner = random.Random(f"{seed}:{at}:contents")
    kind = _choose(draw, dice, sizes)
    draw.lines += [f"torch.manual_seed({inner.randrange(2**31)})", *PRELUDE]
    _Writer(draw, dice, inner, sizes, kind).write()
    return draw


def _choose(draw: Draw, dice: random.Random, sizes: Sizes) -> str:
    """Primitives, the placement, and the kind of normaliser."""
    draw.placement = dice.choices(sizes.placements, [OFTEN[x] for x in sizes.placements])[0]
    kind = dice.choice(("plus", "softpick", "elementwise", "elementwise"))
    least, most = sizes.count
    draw.has = set(dice.sample(sizes.primitives, dice.randint(least, most)))
    left: set[str] = set()
    while True:
        found = [pair for pair in _conflicts(draw.has, kind) if "+".join(pair) not in left]
        if not found:
            break
        if dice.random() < SEEN:
            left.add("+".join(found[0]))
        else:
            draw.has.discard(dice.choice([x for x in found[0] if x in PRIMITIVES]))
    while len(draw.has) < least:
        more = dice.choice(sizes.primitives)
        if len(_conflicts(draw.has | {more}, kind)) <= len(left):
            draw.has.add(more)
    draw.conflicts = tuple("+".join(pair) for pair in _conflicts(draw.has, kind))
    return kind


def _conflicts(has: set[str], kind: str) -> list[tuple[str, str]]:
    """Pairs that are refused in words."""
    found = []
    if "normalizer" in has and kind in UNSUMMED:
        found += [("normalizer", x) for x in ("sinks", "skip", "statistics") if x in has]
    return found


class _Writer:
    """Writes the lines of a draw. dice: of the composition; inner: of what changes without compiling."""

    def __init__(
        self, draw: Draw, dice: random.Random, inner: random.Random, sizes: Sizes, kind: str
    ) -> None:
        self.draw, self.dice, self.inner, self.sizes, self.kind = draw, dice, inner, sizes, kind
        self.lines = draw.lines
        self.heads, self.k_heads, self.v_heads = dice.choice(sizes.heads)
        self.longest = (max(sizes.rows), max(sizes.keys))
        self.numbers = itertools.count()
        self.at_call = dice.random() < 0.3

    def name(self, what: str) -> str:
        return f"{what}_{next(self.numbers)}"

    def write(self) -> None:
        getattr(self, "_" + {"bshd": "dense", "few": "dense"}.get(self.draw.placement, self.draw.placement))()
        for primitive in PRIMITIVES:
            if primitive in self.draw.has:
                getattr(self, f"_{primitive}")()
        if self.dice.random() < 0.3:
            self._option("scale", str(self.dice.choice((0.2, 1.0, -0.4))))
        if self.draw.placement == "bshd":
            self.lines.append('composition["layout"] = "bshd"')
        if self.sizes.tiles and "blocks" not in self.draw.has and self.dice.random() < 0.6:
            tile = self.dice.choice(((16, 16), (8, 16), (16, 8)))
            self.lines.append(f'composition["schedule"] = fa4flex.Schedule(tile={tile})')

    def _option(self, name: str, value: str) -> None:
        """An argument of `compile`, or one of the call that overrides it."""
        target = "call" if self.at_call and self.dice.random() < 0.7 else "composition"
        self.lines.append(f'{target}["{name}"] = {value}')

    # --- placements -----------------------------------------------------------------------------------------

    def _qkv(self, *shapes: str) -> None:
        self.lines.append("q, k, v = " + ", ".join(f"leaf({shape})" for shape in shapes))
        self.lines.append("del learned[:]  # what the functions below capture")

    @property
    def widths(self) -> tuple[int, int]:
        return self.sizes.width, self.dice.choice(self.sizes.widths_v)

    def _dense(self) -> None:
        (wide, of_v), few = self.widths, self.draw.placement == "few"
        rows = self.dice.choice((1, 2)) if few else self.inner.choice(self.sizes.rows)
        keys = self.inner.choice(self.sizes.keys)
        extents = (rows, self.heads, wide), (keys, self.k_heads, wide), (keys, self.v_heads, of_v)
        swapped = self.draw.placement == "bshd"
        shapes = ((n, h, d) if swapped else (h, n, d) for n, h, d in extents)
        self._qkv(*(", ".join(map(str, (2, *shape))) for shape in shapes))
        self.extents = rows, keys

    def _lengths(self, most: tuple[int, ...]) -> list[int]:
        return [self.inner.choice((*most, 0, 1)) for _ in range(3)]

    def _packed(self) -> None:
        of_q, of_k = self._lengths(self.sizes.rows), self._lengths(self.sizes.keys)
        of_q[0], of_k[0] = of_q[0] or 1, of_k[0] or 1
        self.extents = max(of_q), max(of_k)
        (wide, of_v), (total_q, total_k) = self.widths, (sum(of_q), sum(of_k))
        self._qkv(
            f"{total_q}, {self.heads}, {wide}", f"{total_k}, {self.k_heads}, {wide}",
            f"{total_k}, {self.v_heads}, {of_v}",
        )  # fmt: skip
        ends = (", ".join(map(str, itertools.accumulate(x, initial=0))) for x in (of_q, of_k))
        self.lines.append(
            'call["varlen"] = fa4flex.Varlen({})'.format(", ".join(f"number({x})" for x in ends))
        )

    def _padded(self) -> None:
        rows, keys = self.inner.choice(self.sizes.rows), self.inner.choice(self.sizes.keys)
        (wide, of_v), both = self.widths, self.dice.random() < 0.5
        self._qkv(
            f"3, {self.heads}, {rows}, {wide}", f"3, {self.k_heads}, {keys}, {wide}",
            f"3, {self.v_heads}, {keys}, {of_v}",
        )  # fmt: skip
        used = [
            ", ".join(str(self.inner.choice((most, 1, 0, most // 2))) for _ in range(3))
            for most in (rows, keys)
        ]
        of_q = f"seqused_q=number({used[0]}), " if both else ""
        self.lines.append(f'call["varlen"] = fa4flex.Varlen({of_q}seqused_k=number({used[1]}))')
        self.extents = rows, keys

    def _paged(self) -> None:
        (wide, of_v), page = self.widths, self.sizes.page
        keys = [self.inner.choice(self.sizes.keys) for _ in range(2)]
        per = -(-max(self.sizes.keys) // page)
        rows = self.dice.choice((1, self.inner.choice(self.sizes.rows)))
        self.extents = rows, max(keys)
        self._qkv(
            f"2, {self.heads}, {rows}, {wide}", f"{2 * per + 1}, {page}, {self.k_heads}, {wide}",
            f"{2 * per + 1}, {page}, {self.v_heads}, {of_v}",
        )  # fmt: skip
        places = list(range(2 * per))
        self.inner.shuffle(places)
        self.lines += [
            f"table = number({', '.join(map(str, places))}).view(2, {per})",
            f'call["paging"] = fa4flex.Paging(table, number({keys[0]}, {keys[1]}))',
        ]

    # --- primitives -----------------------------------------------------------------------------------------

    def _score(self) -> None:
        names = self.dice.sample(sorted(SCORES), self.dice.choice((1, 1, 2)))
        if "skip" in self.draw.has and self.dice.random() < 0.8:
            names[-1] = "near"
        self.lines.append(f'composition["score_mod"] = {self._chain("as_score", SCORES, names)}')

    def _output(self) -> None:
        of_all = sorted(x for x in OUTPUTS if x != "square" or "skip" not in self.draw.has)
        names = self.dice.sample(of_all, self.dice.choice((1, 1, 2)))
        self.lines.append(f'composition["output_mod"] = {self._chain("as_output", OUTPUTS, names)}')

    def _chain(self, wrap: str, known: dict[str, str], names: list[str]) -> str:
        made = [self._function(known[name]) for name in names]
        return made[0] if len(made) == 1 else " >> ".join(f"fa4flex.{wrap}({x})" for x in made)

    def _function(self, text: str) -> str:
        """Lines of a template, whose names get numbers; its last line is an expression, which is returned."""
        own = {x: self.name(x) for x in ("f", "x", "y")}
        *before, last = (
            text.strip()
            .format(h=self.heads, c=self._number(), n=self.dice.randint(1, 20), **own)
            .splitlines()
        )
        self.lines += before
        return last

    def _number(self) -> float:
        return round(self.inner.uniform(0.5, 4.0), 3)

    def _mask(self) -> None:
        names = self.dice.sample(sorted(MASKS), self.dice.choice((1, 1, 2, 3)))
        text = ""
        for name in names:
            one = f"fa4flex.as_mask({self._function(MASKS[name].replace('LONGEST', str(max(self.longest))))})"
            one = f"~{one}" if self.dice.random() < 0.15 else one
            text = one if not text else f"({text} {self.dice.choice('&|')} {one})"
        self.lines.append(f'composition["mask"] = {text}')

    def _blocks(self) -> None:
        (rows, keys), size = self.extents, self.sizes.block
        shape = -(-rows // size), -(-keys // size)
        whole = self.draw.placement in ("dense", "bshd", "few")
        per_head = f"2, {self.heads}, " if whole and self.dice.random() < 0.3 else ""
        self.lines += [
            f"classes = torch.randint(0, 3, ({per_head}{shape[0]}, {shape[1]})).byte().to(device)",
            f"blocks = fa4flex.BlockMap.from_dense(classes, {size}, q_len={rows}, kv_len={keys})",
        ]
        self._option("blocks", "blocks")

    def _sinks(self) -> None:
        self.lines.append(f"sinks = leaf({self.heads})")
        self._option("sinks", "sinks")

    def _normalizer(self) -> None:
        if self.kind == "plus":
            made = f"softmax_plus({self._number()})"
        elif self.kind == "softpick":
            made = self.dice.choice(("softpick()", "softpick(0.5)"))
        else:
            made = self._function(WEIGHTS[self.dice.choice(sorted(WEIGHTS))])
        self.lines.append(f'composition["normalizer"] = {made}')

    def _dropout(self) -> None:
        p = self.dice.choices((0.1, 0.5, 0.8, 1.0), (10, 10, 5, 1))[0]
        self._option("dropout", f"fa4flex.Dropout({p}, seed={self.inner.randrange(2**63)})")

    def _skip(self) -> None:
        self.draw.skip = self.dice.choice((1e-8, 1e-6, 1e-4, 1e-2))
        self.lines.append(f'composition["precision"] = fa4flex.Precision(skip={self.draw.skip})')

    def _statistics(self) -> None:
        names = [x for x in STATISTICS if self.dice.random() < 0.6] or ["entropy"]
        self.lines.append(f'call["return_aux"] = {tuple(names)}')


SCORES = {
    "table": """
{x} = leaf({h}, 5)
def {f}(s, b, h, q_idx, kv_idx): return s + {x}[h, (q_idx - kv_idx) % 5]
{f}""",
    "gain": """
{x}, {y} = leaf({h}), leaf(3, 7)
def {f}(s, b, h, q_idx, kv_idx): return s * {x}[h] + {y}[b % 3, kv_idx % 7]
{f}""",
    "near": """
{x} = leaf({h})
def {f}(s, b, h, q_idx, kv_idx): return s - (1.0 + {x}[h] * {x}[h]) * (q_idx - kv_idx).abs()
{f}""",
    "parity": """
def {f}(s, b, h, q_idx, kv_idx): return torch.where((q_idx + kv_idx) % 3 == 0, s * {c}, s)
{f}""",
    "tanh": """
{x}, {y} = leaf(2, 11), leaf(13)
def {f}(s, b, h, q_idx, kv_idx): return s + torch.tanh({x}[b % 2, q_idx % 11] * {y}[kv_idx % 13])
{f}""",
    "lengths": """
def {f}(s, b, h, q_idx, kv_idx, q_len, kv_len, num_heads):
    return s + ({c} * h / num_heads - kv_idx / (q_len + kv_len))
{f}""",
    "alibi": "alibi",
    "softcap": "softcap({c})",
}  # fmt: skip
"""Score mods, of which the last line is the expression."""

MASKS = {
    "causal": "causal",
    "window": "sliding_window({n})",
    "prefix": "prefix_lm({n})",
    "streaming": "streaming_llm(sinks=2, window={n})",
    "symmetric": "symmetric_window({n})",
    "documents": """
{x} = torch.randint(0, 3, (LONGEST,), dtype=torch.int32).sort().values.to(device)
document({x})""",
    "looked_up": """
{x} = (torch.rand(37, 41) < 0.7).to(device)
def {f}(b, h, q_idx, kv_idx): return {x}[q_idx % 37, kv_idx % 41]
{f}""",
    "modulo": """
def {f}(b, h, q_idx, kv_idx): return (q_idx + 2 * kv_idx) % 5 != 0
{f}""",
    "widths": """
{x} = torch.randint(1, 30, ({h},), dtype=torch.int32).to(device)
def {f}(b, h, q_idx, kv_idx): return (q_idx - kv_idx).abs() < {x}[h]
{f}""",
}  # fmt: skip

OUTPUTS = {
    "gate": """
{x} = leaf(2, {h}, 17, 6)
def {f}(out, b, h, q_idx, d_idx): return out * torch.sigmoid({x}[b % 2, h, q_idx % 17, d_idx % 6])
{f}""",
    "heads": """
{x}, {y} = leaf({h}), leaf(5)
def {f}(out, b, h, q_idx, d_idx): return torch.tanh(out * {x}[h] + {y}[d_idx % 5])
{f}""",
    "added": """
{x} = leaf(7)
def {f}(out, b, h, q_idx, d_idx, q_len, num_heads):
    return out + {x}[(3 * q_idx + d_idx) % 7] * q_len / (q_len + num_heads)
{f}""",
    "square": """
{x} = leaf({h})
def {f}(out, b, h, q_idx, d_idx): return out + {x}[h] * out * out
{f}""",
    "head_scale": """
{x} = leaf({h})
head_scale({x})""",
}  # fmt: skip
"""Output functions; all but "square" are monotone in the output: bounds of skipping are carried through."""

WEIGHTS = {
    "sigmoid": "sigmoid_attention",
    "silu": "silu_attention",
    "relu": "relu_squared({c})",
    "own": """
{x}, {y} = leaf({h}), leaf(7)
def {f}(s, b, h, q_idx, kv_idx, num_heads):
    return torch.sigmoid(s + {x}[h]) * {y}[(q_idx + 2 * kv_idx) % 7] + (b + 1) / num_heads
fa4flex.Normalizer.elementwise({f})""",
}  # fmt: skip
"""Elementwise weights."""
