"""Estimated cost of a plan: bytes moved, work per rank and time, from the rates of a link and of a kernel,
beside a ring, a gather of all keys, and heads. Bytes are those that a run moves (traffic.py); times are
estimates: nothing here was run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4flex.errors import InputError
from fa4flex.parallel.plan import Plan, plan
from fa4flex.parallel.traffic import Model, busiest

PASSES = 3.5
"""Products of a forward and a backward pass, in those of a forward pass: 2 and 5 of two."""


@dataclass(frozen=True)
class Machine:
    """Rates of a machine. flops: a kernel's, forward and backward, in 1 / s; link: bytes that a rank receives
    per second."""

    flops: float = 570e12
    link: float = 281e9


@dataclass(frozen=True)
class Estimate:
    """One way to spread attention. moved: bytes that the busiest rank receives, forward and backward;
    compute, link: seconds of the busiest rank; balance: its work relative to the mean."""

    name: str
    moved: float
    compute: float
    link: float
    balance: float

    @property
    def seconds(self) -> tuple[float, float]:
        """Times with all transfers hidden behind computation, and with none hidden."""
        return max(self.compute, self.link), self.compute + self.link


def estimates(result: Plan, machine: Machine, model: Model, in_order: Plan, paired: Plan) -> list[Estimate]:
    """Ways to spread the attention of `found`; in_order and paired are plans of the same, contiguous and
    head-tail."""
    at, ranks = result.placement, result.placement.ranks
    pair = 2 * PASSES * model.batch * model.heads * (model.dim + model.dim_v) / machine.flops
    mean = sum(at.loads) / ranks

    def estimate(name: str, moved: float, load: float) -> Estimate:
        return Estimate(name, moved, load * pair, moved / machine.link, load / mean if mean else 1.0)

    # Keys and values there, their gradients back.
    others = 2 * model.key * at.kv_len * (ranks - 1) / ranks
    balanced = max(paired.placement.loads)
    rows = [
        estimate(f"fa4flex, {at.kind}", busiest(result, model), max(at.loads)),
        estimate("all-gather, head-tail", others, balanced),
        estimate("all-gather, contiguous", others, max(in_order.placement.loads)),
        # Every step of a ring takes as long as its busiest rank: at best as all-gather's.
        estimate("ring, head-tail (at best)", others, balanced),
    ]
    if not any(n % ranks for n in (model.heads, model.kv_heads, model.heads_of_values)):
        rows.append(estimate("heads (Ulysses)", busiest(result, model, "heads"), mean))
    return rows


def report(attn: Any, tokens: int, ranks: list[int], machine: Machine, model: Model) -> str:
    """Estimates for each number of ranks, as a table."""
    lines = [
        f"{tokens} tokens, {model.heads}:{model.kv_heads} heads of {model.dim}, forward and backward, "
        f"estimated for {machine.flops / 1e12:.0f} TFLOP/s and {machine.link / 1e9:.0f} GB/s per rank"
    ]
    for count in ranks:
        result, in_order, paired = (
            plan(attn, tokens, count, heads=model.heads, placement=kind)
            for kind in (None, "contiguous", "head-tail")
        )
        lines.append(f"\n{count} ranks{'':20}{'moved':>12}{'busiest':>10}{'time':>24}")
        for x in estimates(result, machine, model, in_order, paired):
            low, high = (1e3 * s for s in x.seconds)
            moved = f"{x.moved / 2**20:.1f} MiB"
            lines.append(f"  {x.name:<26}{moved:>14}{x.balance:>9.3f}x{f'{low:.2f} to {high:.2f} ms':>24}")
    return "\n".join(lines)


def count_of(text: str) -> int:
    """Number of tokens as people write it: 65536, 64k, 1M."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdigit() or not int(digits):
        raise InputError(f"--tokens {text}", "a number above 0", "e.g. 65536, 64k or 1M")
    return int(digits) * factor


def ranks_of(text: str) -> list[int]:
    """Numbers of ranks: "8", "8,64", or "8..1024", which doubles."""
    first, dots, last = text.partition("..")
    parts = text.split(",") if not dots else [first, last]
    known = all(part.isdigit() and int(part) for part in parts)
    if not known or (dots and int(first) > int(last)):
        value = "numbers above 0, one, several or a range that rises"
        raise InputError(f"--ranks {text}", value, "e.g. 8, 8,64 or 8..1024")
    if not dots:
        return [int(part) for part in parts]
    result, most = [int(first)], int(last)
    while result[-1] * 2 <= most:
        result.append(result[-1] * 2)
    return result
