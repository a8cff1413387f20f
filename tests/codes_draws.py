"""Calls over codes composed at random: what algebra_draws.py draws, with q, k and v of 8 and 4 bits.

Codes are those of `quantize`, of a precision that rounds at each call, of others with scales of all kinds
(`Descales`), or an 8-bit cache. Rows, blocks and channels may be zeros, far from the others, or NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from algebra_draws import PRIMITIVES, Draw, Sizes, drawn

OF_CPU = Sizes(
    heads=((2, 2, 2), (4, 1, 1), (7, 1, 1), (4, 2, 1), (4, 1, 2), (8, 2, 2)),
    rows=(3, 17, 40), keys=(1, 16, 50, 127, 128, 129, 140), width=32, widths_v=(32, 8), block=32, page=16,
    tiles=True, primitives=PRIMITIVES, count=(1, 4),
)  # fmt: skip
OF_KERNELS = Sizes(
    heads=((4, 4, 4), (4, 1, 1), (4, 2, 2)), rows=(65, 130, 200), keys=(64, 130, 260), width=64,
    widths_v=(64,), block=128, page=16, tiles=False, primitives=("score", "mask", "sinks"), count=(0, 2),
    placements=("dense", "bshd", "few", "packed", "padded"),
)  # fmt: skip
"""Choices that kernels of codes take, of few widths."""

BESIDE = 0.06
"""Share of draws in which what is refused beside codes is left in."""

KINDS = {"quantize": 5, "precision": 2, "descales": 4, "cache": 2}
FORMATS = ("int8", "float8_e4m3", "mxfp8", "nvfp4")
BY_KERNELS = FORMATS[:2]
SPECIAL = ("nan", "zero", "outlier", "offset", "one sign")


@dataclass
class CodesDraw(Draw):
    """kind: how q, k and v become codes; learns: gradients reach them; smooth: weights have derivatives at
    the scores that are drawn; formats: qk and pv."""

    kind: str = ""
    learns: bool = True
    smooth: bool = True
    formats: tuple[str, str] = ("", "")


def drawn_codes(seed: int, at: int, kernels: bool = False) -> CodesDraw:
    """Draw number `at` of a seed."""
    base = drawn(seed, at, OF_KERNELS if kernels else OF_CPU)
    dice = random.Random(f"{seed}:{at}:codes")
    draw = CodesDraw(**vars(base))
    _Codes(draw, dice, kernels).write()
    return draw


class _Codes:
    """Writes lines that make codes of q, k and v."""

    def __init__(self, draw: CodesDraw, dice: random.Random, kernels: bool) -> None:
        self.draw, self.dice, self.lines, self.kernels = draw, dice, draw.lines, kernels

    def write(self) -> None:
        draw, dice = self.draw, self.dice
        kinds = {name: n for name, n in KINDS.items() if not (self.kernels and name == "cache")}
        draw.kind = dice.choices(list(kinds), list(kinds.values()))[0]
        if draw.placement == "paged" and draw.kind != "cache":
            if dice.random() < BESIDE and draw.kind in ("quantize", "precision"):
                draw.conflicts = (*draw.conflicts, f"paging+{draw.kind}")
            else:
                draw.kind = "cache"
        for _ in range(dice.choice((0, 0, 1, 1, 2))):
            self._special(dice.choice(SPECIAL))
        getattr(self, "_" + draw.kind)()

    # --- contents -------------------------------------------------------------------------------------------

    def _special(self, what: str) -> None:
        dice, x = self.dice, self.dice.choice("qkv")
        rows, row = f"{x}.view(-1, {x}.shape[-1])", dice.randrange(10**6)
        if what == "nan":
            self.draw.learns = False
            number = dice.choice(("nan", "nan", "inf")) if x != "v" else "nan"
            self._changed(f"{rows}[{row} % max(1, len({rows})), 3:4] = float('{number}')")
        elif what == "zero":
            if "normalizer" in self.draw.has:
                self.draw.smooth = False
            count = dice.choice((1, 1, 16, 130, 10**6))
            self._changed(
                f"{x}[..., {row % 8}] = 0"
                if dice.random() < 0.3
                else f"{rows}[{row} % max(1, len({rows})) :][:{count}] = 0"
            )
        elif what == "outlier":
            self._changed(f"{rows}[{row} % max(1, len({rows})) :][:1] *= 20")
        elif what == "offset":
            self._changed(f"{x} += (2 * torch.randn({x}.shape[-1], dtype=torch.float64)).to({x})")
        else:
            self._changed("v.abs_()")

    def _changed(self, line: str) -> None:
        self.lines.append(f"with torch.no_grad(): {line}")

    # --- codes ----------------------------------------------------------------------------------------------

    @property
    def placed(self) -> str:
        """Arguments that say where tokens lie."""
        layout = ', layout="bshd"' if self.draw.placement == "bshd" else ""
        ragged = self.draw.placement in ("packed", "padded")
        return (', varlen=call["varlen"]' if ragged else "") + layout

    def _formats(self) -> tuple[str, str]:
        qk = self.dice.choice(BY_KERNELS if self.kernels else FORMATS)
        self.draw.formats = qk, self.dice.choice(("float8_e4m3", "float8_e4m3", "bfloat16"))
        return self.draw.formats

    def _quantize(self) -> None:
        qk, pv = self._formats()
        flags = "".join(f", {name}={self.dice.random() < 0.7}" for name in ("rotate", "center_k", "center_v"))
        self.lines.append(
            f"codes = fa4flex.quantize(q.to(dtype), k.to(dtype), v.to(dtype), qk={qk!r}, pv={pv!r}{flags}, "
            f"seed={self.dice.randrange(100)}{self.placed})"
        )

    def _precision(self) -> None:
        qk, pv = self._formats()
        skip = f", skip={self.draw.skip}" if self.draw.skip else ""
        self.lines += [
            f'composition["precision"] = fa4flex.Precision(qk={qk!r}, pv={pv!r}{skip})',
            f"codes = fa4flex.quantize(q.to(dtype), k.to(dtype), v.to(dtype), qk={qk!r}, pv={pv!r}"
            f"{self.placed})",
        ]

    def _descales(self) -> None:
        """Codes that are drawn, with scales of random granularity."""
        self.draw.learns = False
        dice, (qk, pv) = self.dice, self._formats()
        qk = qk if qk in BY_KERNELS else "int8"
        self.draw.formats = qk, pv
        block = dice.choice((None, None, 16, 64, 128, 256))
        rounded = "(x * 40).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)"
        one = {"int8": rounded, "float8_e4m3": "(x * 20).clamp(-448, 448).to(torch.float8_e4m3fn)"}
        self.lines += [
            f"q8, k8 = ({one[qk]} for x in (q.detach(), k.detach()))",
            "v8 = (v.detach() * 16).clamp(-448, 448).to(torch.float8_e4m3fn)"
            if pv != "bfloat16"
            else "v8 = v.detach().to(dtype)",
        ]
        scales = [f"{x}={self._scale(x, block)}" for x in ("qk" if pv == "bfloat16" else "qkv")]
        self.lines.append(
            f"codes = fa4flex.Descales({', '.join(scales)}, block={block}).quantized("
            f"q8, k8, v8{self.placed}, dtype=dtype)"
        )

    def _scale(self, x: str, block: int | None) -> str:
        """A scale of queries, keys or values; now and then 0, or NaN."""
        packed = self.draw.placement == "packed"
        heads = f"{x}.shape[1]" if packed or self.draw.placement != "bshd" else f"{x}.shape[2]"
        length = f"{x}.shape[0]" if packed else f"{x}.shape[{1 if self.draw.placement == 'bshd' else 2}]"
        shapes = ["", heads]
        ends = f'call["varlen"].cu_seqlens_{"q" if x == "q" else "k"}'
        if packed:
            blocks = f"int(((({ends}.diff()) + {block or 1} - 1) // {block or 1}).sum()) + 1"
            # [N, H] and [H, T] might be told apart by no one
            shapes += [f"{heads}, {blocks}"] if block else [f"{heads}, {length}"]
        else:
            last = f"-(-{length} // {block})" if block else length
            shapes += [f"{x}.shape[0], {heads}", f"{x}.shape[0], {heads}, {last}"]
        at = self.dice.randrange(-1, len(shapes))
        size = 0.02 if x != "v" else 0.1
        if at < 0:
            return str(size)
        made = f"{size} * torch.randn(({shapes[at]}{',' * bool(shapes[at])})).exp()"
        if self.dice.random() < 0.12:
            number = self.dice.choice(("0.0", "float('nan')"))
            made += f".flatten().index_fill(0, torch.tensor([0]), {number})"
            made += f".view(({shapes[at]}{',' * bool(shapes[at])}))"
        return f"({made}).to(device)"

    def _cache(self) -> None:
        self.draw.learns = False
        dice, placement = self.dice, self.draw.placement
        heads = 1 if placement in ("dense", "few", "padded", "packed") else 2
        scales = []
        for x in "kv":
            each = f"{x}.shape[:-1]"
            shapes = [f"({x}.shape[{heads}],)", each]
            if placement != "packed":
                shapes.append(f"({x}.shape[0], {x}.shape[{heads}])")
            if dice.random() < 0.85:
                scales.append(f"{x}=(0.1 * torch.randn({dice.choice(shapes)}).exp()).to(device)")
        self.lines += [
            "k8, v8 = ((x.detach() * 10).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (k, v))",
            f"scales = fa4flex.KVScales({', '.join(scales)})",
        ]
