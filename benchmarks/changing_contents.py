"""Cost of contents that are new at each step on a GPU, beside contents that stay.

    python benchmarks/changing_contents.py [--rounds 9]

Forward and backward, bf16: documents (b 2, h 16, 8,192 tokens, d 128), a block map per head of 8 in 64
blocks, as classes and as counts and indices, and 16 packed causal sequences of random lengths in 16k tokens,
at d 128 and 64. New contents are tensors of their own, made beforehand, as a data loader would bring them;
synchronisations of torch raise. Beside them: flex_attention with a BlockMask made at each step, flash-attn-4
with the same lengths, and one captured CUDA graph replayed over new contents, compared with eager calls.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fa4flex
from fa4flex import BlockMap, Varlen
from fa4flex.bench.measure import DeviceClock, interleave
from fa4flex.variants import causal

STEPS = 20
"""Number of contents that follow each other."""
Attend = Callable[[tuple[Tensor, ...], Any], Tensor]
"""The output for q, k and v under some contents."""


@dataclass(frozen=True)
class Case:
    """Attention over `qkv` whose contents change: `attend` under each of `contents`."""

    name: str
    qkv: tuple[Tensor, ...]
    attend: Attend
    contents: list[Any]

    def step(self, contents: Any, dout: Tensor) -> tuple[Tensor, ...]:
        """The output and the gradients of q, k and v."""
        with torch.enable_grad():
            out = self.attend(self.qkv, contents)
        return out.detach(), *torch.autograd.grad(out, self.qkv, dout)

    def upstream(self) -> Tensor:
        return torch.randn_like(self.attend(self.qkv, self.contents[0]).detach())

    def calls(self) -> dict[str, Callable[[], Any]]:
        dout = self.upstream()
        turns = itertools.cycle(self.contents)
        return {
            f"{self.name}, unchanged": lambda: self.step(self.contents[0], dout),
            f"{self.name}, new": lambda: self.step(next(turns), dout),
        }


def leaves(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes)


# --- contents -----------------------------------------------------------------------------------------------


def new_documents(batch: int, length: int, count: int = 8) -> Tensor:
    """int32 [batch, length]: ids of documents with random borders."""
    cuts = torch.rand(batch, count - 1, device="cuda") * length
    return (torch.arange(length, device="cuda") >= cuts.unsqueeze(-1)).sum(1).to(torch.int32)


def new_classes(heads: int, blocks: int, kept: int) -> Tensor:
    """uint8 [1, heads, blocks, blocks]: `kept` full blocks of each row, at random."""
    order = torch.rand(1, heads, blocks, blocks, device="cuda").argsort(-1)
    return torch.where(order < kept, 2, 0).to(torch.uint8)


def new_lengths(sequences: int, tokens: int) -> tuple[Tensor, int]:
    """cu_seqlens, and the longest sequence."""
    inner = torch.randperm(tokens - 1, device="cuda")[: sequences - 1] + 1
    ends = torch.tensor([0, tokens], device="cuda")
    cu_seqlens = torch.cat([ends, inner]).sort().values.to(torch.int32)
    return cu_seqlens, int(cu_seqlens.diff().max())


# --- cases --------------------------------------------------------------------------------------------------


def documents(length: int) -> Case:
    def attend(qkv: tuple[Tensor, ...], ids: Tensor) -> Tensor:
        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)

        return fa4flex.compile(mask=mask)(*qkv)

    shape = 2, 16, length, 128
    return Case(
        "documents", leaves(shape, shape, shape), attend, [new_documents(2, length) for _ in range(STEPS)]
    )


def flex_documents(length: int) -> Case:
    """flex_attention, compiled, with a BlockMask made for each step's documents by its compiled builder."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    call = torch.compile(flex_attention, dynamic=False)
    build = torch.compile(create_block_mask, dynamic=False)
    current = torch.zeros(2, length, device="cuda", dtype=torch.int32)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (current[b, q_idx] == current[b, kv_idx]) & (q_idx >= kv_idx)

    def attend(qkv: tuple[Tensor, ...], ids: Tensor) -> Tensor:
        current.copy_(ids)
        out: Tensor = call(*qkv, block_mask=build(mask, 2, None, length, length, device="cuda"))
        return out

    shape = 2, 16, length, 128
    contents = [new_documents(2, length) for _ in range(STEPS)]
    return Case("flex_attention, documents", leaves(shape, shape, shape), attend, contents)


def maps(length: int) -> Iterator[Case]:
    """One map per head, 8 of 64 blocks of each row full: as classes, and as counts and indices."""
    shape, size = (2, 16, length, 128), length // 64
    qkv = leaves(shape, shape, shape)
    classes = [new_classes(16, 64, 8) for _ in range(STEPS)]

    def dense(qkv: tuple[Tensor, ...], classes: Tensor) -> Tensor:
        return fa4flex.compile(blocks=BlockMap(classes, (size, size), length, length))(*qkv)

    yield Case("block map, classes", qkv, dense, classes)

    def listed(qkv: tuple[Tensor, ...], lists: tuple[Tensor, ...]) -> Tensor:
        empty, no_blocks, counts, indices = lists
        blocks = BlockMap.from_counts(empty, no_blocks, size, length, length, counts, indices)
        return fa4flex.compile(blocks=blocks)(*qkv)

    contents = []
    for one in classes:
        full = one == 2
        counts, indices = full.sum(-1).to(torch.int32), full.to(torch.int8).argsort(-1, descending=True)
        contents.append((torch.zeros_like(counts), torch.zeros_like(indices), counts, indices))
    yield Case("block map, counts", qkv, listed, contents)


def packed(tokens: int, heads: int, dim: int) -> Iterator[Case]:
    """16 causal sequences: fa4flex, and flash-attn-4 where it is installed."""
    shape = tokens, heads, dim
    qkv = leaves(shape, shape, shape)
    contents = [new_lengths(16, tokens) for _ in range(STEPS)]
    attn = fa4flex.compile(mask=causal)

    def attend(qkv: tuple[Tensor, ...], lengths: tuple[Tensor, int]) -> Tensor:
        out: Tensor = attn(*qkv, varlen=Varlen(lengths[0], max_seqlen_q=lengths[1]))
        return out

    yield Case(f"packed d{dim}", qkv, attend, contents)
    try:
        theirs = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except ImportError:
        return

    def other(qkv: tuple[Tensor, ...], lengths: tuple[Tensor, int]) -> Tensor:
        cu, longest = lengths
        found = theirs(
            *qkv, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )
        out: Tensor = found[0]
        return out

    yield Case(f"flash-attn-4, packed d{dim}", qkv, other, contents)


# --- replays ------------------------------------------------------------------------------------------------


def held(contents: list[Any]) -> Any:
    """Copy of the first contents, with room for all: of numbers, which graphs keep, the largest."""
    first = contents[0]
    if isinstance(first, Tensor):
        return first.clone()
    return tuple(
        x.clone() if isinstance(x, Tensor) else max(c[i] for c in contents) for i, x in enumerate(first)
    )


def fill(target: Any, contents: Any) -> None:
    """Copy the tensors of `contents` into those of `target`."""
    pairs = [(target, contents)] if isinstance(target, Tensor) else zip(target, contents, strict=True)
    for into, one in pairs:
        if isinstance(into, Tensor):
            into.copy_(one)


def replays(case: Case) -> str:
    """One graph of forward and backward, replayed under each contents: worst difference from eager calls."""
    dout, static = case.upstream(), held(case.contents)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            case.step(static, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.step(static, dout)
    worst = 0.0
    for contents in case.contents:
        fill(static, contents)
        graph.replay()
        eager = case.step(contents, dout)
        worst = max(worst, *((x - y).abs().max().item() for x, y in zip(results, eager, strict=True)))
    return f"{case.name}: {len(case.contents)} replays, worst difference from eager {worst:.1e}"


# --- the command --------------------------------------------------------------------------------------------


def without_waiting(case: Case) -> None:
    """Steps under some of the contents, in which torch's synchronisations raise."""
    dout = case.upstream()
    for contents in case.contents[:4]:
        case.step(contents, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for contents in case.contents[4:8]:
            case.step(contents, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def report(title: str, judge: Callable[[Case], Any], cases: list[Case]) -> None:
    for case in cases:
        try:
            print(judge(case) or f"{case.name}: {title}", flush=True)
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def forward_calls(case: Case) -> dict[str, Callable[[], Any]]:
    turns, qkv = itertools.cycle(case.contents), tuple(x.detach() for x in case.qkv)
    return {f"{case.name}, new, forward": lambda: case.attend(qkv, next(turns))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--no-flex", action="store_true", help="leave flex_attention out")
    arguments = parser.parse_args()
    length = arguments.length
    pieces = [documents(length), *maps(length)]
    lengths = [*packed(2 * length, 16, 128), *packed(2 * length, 32, 64)]
    ours = [case for case in (*pieces, *lengths) if "flash" not in case.name]
    report("no synchronisation", without_waiting, ours)
    report("", replays, ours)
    groups = [[pieces[0], *([] if arguments.no_flex else [flex_documents(length)])], pieces[1:], lengths]
    for group in groups:
        calls = {name: call for case in group for name, call in case.calls().items()}
        if group is lengths:
            calls |= {name: call for case in group for name, call in forward_calls(case).items()}
        for name, samples in interleave(calls, DeviceClock(), arguments.rounds).items():
            low, high = (1e3 * x for x in samples.quartiles)
            print(f"{name:44} {1e3 * samples.median:8.4f} ms ({low:.4f} to {high:.4f})", flush=True)


if __name__ == "__main__":
    main()
