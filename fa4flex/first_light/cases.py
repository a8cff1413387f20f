"""Cases that are checked: one or more for each kernel pipeline, small, their inputs drawn on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex import BlockMap, KVScales, Paging, Schedule, Varlen, variants

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
PAGE = 64

Mod = Callable[..., Any] | None
Sequences = list[tuple[Tensor, Tensor, Tensor]]
"""q [1, H, Sq, D], k and v [1, Hkv, Skv, D] of each sequence in turn."""


@dataclass(frozen=True)
class Trial:
    """A case with its tensors, on one device.

    leaves     what gradients are taken of, in bfloat16
    attend     the call: leaves to output
    sequences  what the call means: leaves to dense sequences, one after the other
    outputs    the output as a list of [H, Sq, D], one for each sequence
    """

    leaves: Sequence[Tensor]
    attend: Callable[..., Tensor]
    sequences: Callable[..., Sequences]
    outputs: Callable[[Tensor], list[Tensor]]
    score_mod: Mod = None
    mask: Any = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A case by its name. `build(draw)` makes its Trial.

    pipeline  the kernels that it launches
    gradients True if the backward pass is checked, too
    recorded  True if it is small enough for the simulator, whose bits are kept
    """

    name: str
    pipeline: str
    build: Callable[[Draw], Trial] = field(repr=False)
    gradients: bool = False
    recorded: bool = False


@dataclass(frozen=True)
class Draw:
    """Source of inputs: the same on every device, as they are drawn on the host."""

    device: torch.device
    generator: torch.Generator

    @staticmethod
    def of(device: torch.device, seed: int) -> Draw:
        return Draw(device, torch.Generator().manual_seed(seed))

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def integers(self, least: int, past: int, *shape: int) -> Tensor:
        drawn = torch.randint(least, past, shape, generator=self.generator, dtype=torch.int32)
        return drawn.to(self.device)

    def qkv(self, batch: int, heads: str, lengths: tuple[int, int], widths: tuple[int, int]) -> list[Tensor]:
        """heads: "query heads:KV heads", or of queries, keys and values; lengths of queries and keys; widths
        of keys and values."""
        query, key, value = [*map(int, heads.split(":")), *[int(heads.rpartition(":")[2])] * 2][:3]
        q = self.normal(batch, query, lengths[0], widths[0])
        return [q, *(self.normal(batch, n, lengths[1], w) for n, w in zip((key, value), widths, strict=True))]


# --- kinds of calls -----------------------------------------------------------------------------------------


def dense(
    heads: str = "2:2",
    lengths: tuple[int, int] = (256, 256),
    width: int | tuple[int, int] = 64,
    batch: int = 1,
    mods: Callable[[Draw], dict[str, Any]] = lambda draw: {},
    schedule: Schedule = Schedule(),
) -> Callable[[Draw], Trial]:
    """A batch of equal lengths. `mods(draw)` gives score_mod, mask, sinks and blocks of the variant."""

    def build(draw: Draw) -> Trial:
        widths = width if isinstance(width, tuple) else (width, width)
        leaves, own = draw.qkv(batch, heads, lengths, widths), mods(draw)
        attn = fa4flex.compile(schedule=schedule, **own)
        mask = own.get("mask") if own.get("blocks") is None else own["blocks"].mask(own.get("mask"))

        def sequences(q: Tensor, k: Tensor, v: Tensor) -> Sequences:
            return [(q[n : n + 1], k[n : n + 1], v[n : n + 1]) for n in range(batch)]

        sinks, score = own.get("sinks"), own.get("score_mod")
        return Trial(leaves, attn, sequences, lambda out: list(out), score, mask, sinks)

    return build


def packed(lengths: Sequence[int], heads: str, width: int, mask: Any) -> Callable[[Draw], Trial]:
    """Sequences one after another, without padding."""

    def build(draw: Draw) -> Trial:
        total, cuts = sum(lengths), [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        leaves = [
            x[0].transpose(0, 1).contiguous() for x in draw.qkv(1, heads, (total, total), (width, width))
        ]
        attn = fa4flex.compile(mask=mask)
        starts = torch.tensor(cuts, dtype=torch.int32, device=draw.device)

        def sequences(*leaves: Tensor) -> Sequences:
            parts = [[x[a:b].transpose(0, 1)[None] for x in leaves] for a, b in itertools.pairwise(cuts)]
            return [(q, k, v) for q, k, v in parts]

        def outputs(out: Tensor) -> list[Tensor]:
            return [out[a:b].transpose(0, 1) for a, b in itertools.pairwise(cuts)]

        return Trial(leaves, lambda *x: attn(*x, varlen=Varlen(starts)), sequences, outputs, None, mask)

    return build


def padded(used: Sequence[int], heads: str, width: int, mask: Any) -> Callable[[Draw], Trial]:
    """Sequences in rows of a batch, each used as far as `used` says; gradients behind are zeros."""

    def build(draw: Draw) -> Trial:
        longest = max(used)
        leaves = draw.qkv(len(used), heads, (longest, longest), (width, width))
        attn, lengths = fa4flex.compile(mask=mask), torch.tensor(used, dtype=torch.int32, device=draw.device)

        def sequences(*leaves: Tensor) -> Sequences:
            rows = [[x[n : n + 1, :, :m] for x in leaves] for n, m in enumerate(used)]
            return [(q, k, v) for q, k, v in rows]

        def outputs(out: Tensor) -> list[Tensor]:
            return [out[n, :, :m] for n, m in enumerate(used)]

        varlen = Varlen(seqused_q=lengths, seqused_k=lengths)
        return Trial(leaves, lambda *x: attn(*x, varlen=varlen), sequences, outputs, None, mask)

    return build


def paged(
    used: Sequence[int], queries: int, heads: str, width: int, eight_bit: bool = False
) -> Callable[[Draw], Trial]:
    """A cache in pages in random order, causal from each sequence's end; `eight_bit`, in e4m3 with scales."""

    def build(draw: Draw) -> Trial:
        query, _, key = heads.partition(":")
        most = -(-max(used) // PAGE)
        pages = len(used) * most
        q = draw.normal(len(used), int(query), queries, width)
        pools = [draw.normal(pages, PAGE, int(key), width) for _ in "kv"]
        order = torch.randperm(pages, generator=draw.generator).to(torch.int32).to(draw.device)
        table, lengths = (
            order.view(len(used), most),
            torch.tensor(used, dtype=torch.int32, device=draw.device),
        )
        attn, kv_scales = fa4flex.compile(mask=variants.causal), None
        if eight_bit:
            scales = [draw.normal(int(key), dtype=torch.float32).abs() + 0.5 for _ in "kv"]
            pools = [x.to(E4M3) for x in pools]
            kv_scales = KVScales(*scales)
        wide = [x.float() for x in pools]
        if kv_scales is not None:
            wide = [x * scale.view(1, 1, -1, 1) for x, scale in zip(wide, scales)]

        def sequences(q: Tensor) -> Sequences:
            found = []
            for n, m in enumerate(used):
                rows = [x[table[n].long()].flatten(0, 1)[:m].transpose(0, 1)[None] for x in wide]
                found.append((q[n : n + 1], rows[0].to(q.dtype), rows[1].to(q.dtype)))
            return found

        def attend(q: Tensor) -> Tensor:
            return attn(q, *pools, paging=Paging(table, lengths), kv_scales=kv_scales)

        return Trial([q], attend, sequences, lambda out: list(out), None, variants.causal)

    return build


# --- mods ---------------------------------------------------------------------------------------------------


def causal(draw: Draw) -> dict[str, Any]:
    return {"mask": variants.causal}


def alibi_in_a_window(draw: Draw) -> dict[str, Any]:
    return {"score_mod": variants.alibi, "mask": variants.sliding_window(100)}


def softcap(draw: Draw) -> dict[str, Any]:
    return {"score_mod": variants.softcap(20.0), "mask": variants.causal}


def documents(draw: Draw) -> dict[str, Any]:
    ids = draw.integers(0, 4, 256).sort().values
    return {"mask": lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)}


def bias_of_keys(draw: Draw) -> dict[str, Any]:
    bias = draw.normal(256, dtype=torch.float32)
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]}


def sinks(draw: Draw) -> dict[str, Any]:
    return {"mask": variants.causal, "sinks": draw.normal(2, dtype=torch.float32)}


def block_map(draw: Draw) -> dict[str, Any]:
    classes = draw.integers(0, 3, 1, 2, 2, 2).to(torch.uint8)
    return {"mask": variants.causal, "blocks": BlockMap.from_dense(classes, 128)}


ORDERED = Schedule(deterministic=True)

CASES: tuple[Case, ...] = (
    Case("causal d64", "forward, backward", dense(mods=causal), gradients=True, recorded=True),
    Case("full d128", "forward, backward", dense(width=128), gradients=True, recorded=True),
    Case("alibi in a window d64", "forward", dense(mods=alibi_in_a_window), gradients=True),
    Case("soft cap d64", "forward, backward", dense(mods=softcap), gradients=True),
    Case("documents d64", "forward, backward", dense(mods=documents), gradients=True, recorded=True),
    Case("key bias d64", "forward, backward", dense(mods=bias_of_keys), gradients=True),
    Case("sinks d64", "forward, backward", dense(mods=sinks), gradients=True),
    Case("block map d64", "forward, backward", dense(mods=block_map), gradients=True),
    Case("grouped heads d128", "forward, backward", dense("8:2", (300, 300), 128, 2, causal), gradients=True),
    Case("two maps d64:128", "forward, backward", dense("8:4:2", (300, 300), (64, 128), 2), gradients=True),
    Case("wide heads d256", "forward, backward", dense(width=256, mods=causal), gradients=True),
    Case("packed d256", "forward", packed((99, 3, 257), "4:2", 256, variants.causal)),
    Case("d192:128", "forward, backward", dense(width=(192, 128), mods=causal), gradients=True),
    Case("d96", "forward, backward", dense(width=96, mods=causal), gradients=True),
    Case("ordered sums d64", "backward", dense(mods=causal, schedule=ORDERED), gradients=True),
    Case("ordered sums d128", "backward", dense(width=128, schedule=ORDERED), gradients=True),
    Case("many tiles d128", "forward, backward", dense("2:1", (2100, 2100), 128, 1, causal), gradients=True),
    Case("few queries, many keys d64", "forward", dense("4:4", (64, 1500), 64)),
    Case("packed d64", "forward, backward", packed((99, 3, 257), "4:2", 64, variants.causal), gradients=True),
    Case("padded d128", "forward, backward", padded((70, 200), "4:2", 128, variants.causal), gradients=True),
    Case("decode d128", "few queries", dense("8:2", (1, 700), 128, 2), recorded=True),
    Case("decode, keys split d128", "few queries, combine", dense("8:2", (1, 9000), 128)),
    Case("decode from pages d128", "few queries", paged((500, 64, 129), 1, "8:2", 128), recorded=True),
    Case("decode from 8 bits d128", "few queries", paged((500, 64, 129), 1, "8:2", 128, True)),
    Case("prefill from pages d128", "forward", paged((300, 200), 150, "4:2", 128)),
)  # fmt: skip


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
