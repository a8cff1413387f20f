"""Times of primitives over those of the same variant without them, and what is asked of them.

    python benchmarks/primitives.py [--rows gate dropout] [--rounds 9]
    python benchmarks/primitives.py --dry     # tiny shapes, on a CPU

A row is a primitive, a pass and a shape: batch 2, 16 heads, 8,192 tokens, causal, bf16, unless it says more.
Both variants are timed in turns in one process. Beside dropout stands torch's scaled_dot_product_attention,
with dropout over without; beside gates, the gate in PyTorch operations, eager and compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fa4flex
from fa4flex import Dropout, Precision
from fa4flex.bench.measure import clock_for, interleave
from fa4flex.variants import causal, gated, relu_squared, sigmoid_attention, silu_attention, softpick

Calls = dict[str, Callable[[], Any]]
WITH, WITHOUT = "with", "without"


@dataclass(frozen=True)
class Shape:
    """Sizes of a call, and where it runs."""

    batch: int = 2
    heads: int = 16
    kv_heads: int = 16
    q_len: int = 8192
    kv_len: int = 8192
    width: int = 128
    device: str = "cuda"

    def tensors(self, learns: bool) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        sizes = (self.heads, self.q_len), (self.kv_heads, self.kv_len), (self.kv_heads, self.kv_len)
        made = [self.random(self.batch, *size, self.width) for size in (*sizes, sizes[0])]
        return [x.requires_grad_(learns) for x in made[:3]] + made[3:]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def tiny(self) -> Shape:
        few = min(self.q_len, 32)
        return replace(self, batch=1, heads=2, kv_heads=1, q_len=few, kv_len=64, width=32, device="cpu")

    def __str__(self) -> str:
        heads = f"h{self.heads}" + (f":{self.kv_heads}" if self.kv_heads != self.heads else "")
        return f"b{self.batch} {heads} {self.q_len} x {self.kv_len} d{self.width}"


@dataclass(frozen=True)
class Row:
    """A primitive in a pass: "forward", "backward", or "both".

    make: calls by name for a shape, of which WITH and WITHOUT are compared; asked: at most so many times the
    time of WITHOUT
    """

    name: str
    turn: str
    shape: Shape
    make: Callable[[Shape, str], Calls]
    asked: float | None = None


def of_pass(
    attend: Callable[..., Tensor], turn: str, tensors: list[Tensor], more: list[Tensor]
) -> Callable[[], Any]:
    """One pass of a function of q, k and v, with gradients of these and of `more`."""
    *qkv, dout = tensors
    if turn == "forward":
        plain = [x.detach() for x in qkv]
        return lambda: attend(*plain)
    inputs = [*qkv, *more]
    if turn == "both":
        return torch.enable_grad()(lambda: torch.autograd.grad(attend(*qkv), inputs, dout))
    out = attend(*qkv)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def compared(
    options: dict[str, Any], base: dict[str, Any] | None = None, called: dict[str, Any] | None = None
) -> Callable[[Shape, str], Calls]:
    """Calls of a variant with more options, or with arguments of the call, beside the one without."""

    def make(shape: Shape, turn: str) -> Calls:
        common = {"mask": causal} if base is None else base
        tensors = shape.tensors(turn != "forward")
        with_it, without = fa4flex.compile(**{**common, **options}), fa4flex.compile(**common)
        return {
            WITH: of_pass(partial(with_it, **(called or {})), turn, tensors, []),
            WITHOUT: of_pass(without, turn, tensors, []),
        }

    return make


def entropy_backward(shape: Shape, turn: str) -> Calls:
    """A backward pass that the entropy's gradient is part of."""
    *qkv, dout = shape.tensors(True)
    attn = fa4flex.compile(mask=causal)
    out, aux = attn(*qkv, return_aux=("entropy",))
    plain, given = attn(*qkv), torch.randn_like(aux.entropy)
    return {
        WITH: lambda: torch.autograd.grad((out, aux.entropy), qkv, (dout, given), retain_graph=True),
        WITHOUT: lambda: torch.autograd.grad(plain, qkv, dout, retain_graph=True),
    }


def gate(shape: Shape, turn: str) -> Calls:
    """A gate of each element of the output, beside the same by PyTorch operations."""
    mask = causal if shape.q_len > 1 else None
    tensors = shape.tensors(turn != "forward")
    values = shape.random(shape.batch, shape.heads, shape.q_len, shape.width)
    values.requires_grad_(turn != "forward")
    attn, plain = fa4flex.compile(mask=mask, output_mod=gated(values)), fa4flex.compile(mask=mask)

    def after(*qkv: Tensor) -> Tensor:
        out: Tensor = plain(*qkv) * torch.sigmoid(values)
        return out

    more = [values] if turn != "forward" else []
    calls = {
        WITH: of_pass(attn, turn, tensors, more),
        WITHOUT: of_pass(plain, turn, tensors, []),
        "PyTorch": of_pass(after, turn, tensors, more),
    }
    if shape.device != "cpu":
        calls["compiled PyTorch"] = of_pass(torch.compile(after), turn, tensors, more)
    return calls


def dropout(shape: Shape, turn: str) -> Calls:
    """Dropout of one weight in ten, beside torch's."""
    calls = compared({"dropout": Dropout(0.1, 7)})(shape, turn)
    tensors = shape.tensors(turn != "forward")
    for name, p in (("torch, with", 0.1), ("torch, without", 0.0)):

        def attend(q: Tensor, k: Tensor, v: Tensor, p: float = p) -> Tensor:
            return scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

        calls[name] = of_pass(attend, turn, tensors, [])
    return calls


def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Scores fall by 1/64 a key from the query's own on."""
    return score - (q_idx - kv_idx).abs() * (1 / 64)


def last_near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, kv_len: Any) -> Any:
    """The same of a last query."""
    return score - (kv_len - 1 - kv_idx) * (1 / 64)


def skipping(score: Any) -> Callable[[Shape, str], Calls]:
    def make(shape: Shape, turn: str) -> Calls:
        base = {"score_mod": score, "mask": causal if shape.q_len > 1 else None}
        return compared({"precision": Precision(skip=1e-3)}, base)(shape, turn)

    return make


def tangents(shape: Shape, turn: str) -> Calls:
    """Output and tangent, beside the output alone."""
    q, k, v, _ = shape.tensors(False)
    moved = tuple(torch.randn_like(x) for x in (q, k, v))
    attn = fa4flex.compile(mask=causal)
    return {WITH: lambda: torch.func.jvp(attn, (q, k, v), moved), WITHOUT: lambda: attn(q, k, v)}


def rows() -> list[Row]:
    decode = Shape(16, 32, 8, 1, 8192)
    found = [
        Row("gate, decoding", "forward", decode, gate, 1.03),
        Row("gate", "forward", Shape(1, 32, 8), gate, 1.03),
        Row("gate with its gradient", "both", Shape(1, 32, 8), gate, 1.08),
    ]
    for width in (128, 64):
        shape = Shape(width=width)
        found += [
            Row("LSE", "forward", shape, compared({}, called={"return_lse": True})),
            Row("max_logit", "forward", shape, compared({}, called={"return_aux": ("max_logit",)}), 1.01),
            Row("entropy", "forward", shape, compared({}, called={"return_aux": ("entropy",)}), 1.08),
            Row("entropy", "backward", shape, entropy_backward),
        ]
        for turn in ("forward", "backward"):
            for name, function, asked in (
                ("sigmoid", sigmoid_attention, 1.0),
                ("SiLU", silu_attention, 1.0),
                ("ReLU squared", relu_squared, None),
                ("softpick", softpick, None),
            ):
                found.append(Row(name, turn, shape, compared({"normalizer": function()}), asked))
            found.append(Row("dropout", turn, shape, dropout, 1.2 if turn == "forward" else 1.15))
        found.append(Row("tangents", "forward", shape, tangents, 3.3))
    long = Shape(1, 8, 8, 65536, 65536)
    found += [
        Row("skip, local", "forward", long, skipping(near), 1 / 1.5),
        Row("skip, flat", "forward", Shape(1, 8, 8, 32768, 32768), skipping(None), 1.02),
        Row("skip, local, decoding", "forward", replace(decode, kv_len=65536), skipping(last_near), 1 / 1.4),
        Row("skip, flat, decoding", "forward", replace(decode, kv_len=65536), skipping(None), 1.02),
    ]
    return found


def measure(row: Row, shape: Shape, rounds: int) -> None:
    calls = row.make(shape, row.turn)
    times = interleave(calls, clock_for(torch.device(shape.device)), rounds)
    medians = {name: samples.median for name, samples in times.items()}
    asked = "" if row.asked is None else f"asked {row.asked:.2f}"
    told = [f"{name} {x * 1e3:.3f} ms" for name, x in medians.items()]
    over = medians[WITH] / medians[WITHOUT]
    missed = "  MISSED" if row.asked is not None and over > row.asked else ""
    title = f"{row.name}, {row.turn}, {shape}"
    print(f"{title:<58} {over:6.3f}  {asked:<11} {'; '.join(told)}{missed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on a CPU")
    given = parser.parse_args()
    for row in rows():
        if any(part in row.name for part in given.rows):
            torch.manual_seed(0)
            measure(row, row.shape.tiny() if given.dry else row.shape, 1 if given.dry else given.rounds)


if __name__ == "__main__":
    main()
