"""Serving on a GPU: chunked prefill from pages beside the same chunk over contiguous keys, mixed batches, and
appending.

    python benchmarks/serving.py [--pages 16 64 256] [--chunk 2048] [--keys 8192]
    python benchmarks/serving.py --mixed [--pages 16 64]
    python benchmarks/serving.py --long [--keys 65536] [--pages 16 64]

Times are medians of several replays of CUDA graphs, in turns. A chunk of queries attends to all keys of its
sequence, causal at the end of the keys; a ragged batch packs a chunk, and sequences with one query each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from decode import CALLS, graph_of, microseconds
from torch import Tensor

import fa4flex
from fa4flex import Paging, Rotary, Schedule, Varlen
from fa4flex.variants import causal

HEADS, KV_HEADS, WIDTH = 32, 8, 128


@dataclass(frozen=True)
class Prefill:
    """A chunk of each of `batch` sequences, over keys that end with it."""

    batch: int
    chunk: int
    keys: int

    @property
    def flops(self) -> float:
        """Operations of both products, over the pairs that the causal mask leaves."""
        pairs = self.chunk * self.keys - self.chunk * (self.chunk - 1) // 2
        return 4.0 * self.batch * HEADS * WIDTH * pairs

    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        q = _randn(self.batch, HEADS, self.chunk, WIDTH)
        k, v = (_randn(self.batch, KV_HEADS, self.keys, WIDTH) for _ in range(2))
        return q, k, v


def _randn(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def paged(k: Tensor, v: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pools with keys and values [B, H, S, D] in pages in any order, and their table."""
    batch, heads, keys, width = k.shape
    columns = -(-keys // page_size)
    table = torch.randperm(batch * columns, device="cuda").view(batch, columns)
    pools = torch.zeros(2, batch * columns, page_size, heads, width, dtype=k.dtype, device="cuda")
    t = torch.arange(keys, device="cuda")
    for pool, x in zip(pools, (k, v)):
        for b in range(batch):
            pool[table[b, t // page_size], t % page_size] = x[b].transpose(0, 1)
    return pools[0], pools[1], table.to(torch.int32)


def report_prefill(case: Prefill, page_sizes: list[int]) -> None:
    """Pages against contiguous keys: what they must reach is 0.93 of these."""
    q, k, v = case.drawn()
    attn = fa4flex.compile(mask=causal)
    used = torch.full((case.batch,), case.keys, dtype=torch.int32, device="cuda")
    cu = torch.arange(0, (case.batch + 1) * case.chunk, case.chunk, dtype=torch.int32, device="cuda")
    packed = q.transpose(1, 2).flatten(0, 1).contiguous()
    calls: dict[str, Callable[[], Tensor]] = {"contiguous": lambda: attn(q, k, v)}
    exact = attn(q, k, v)
    for size in page_sizes:
        k_pool, v_pool, table = paged(k, v, size)
        paging = Paging(table, used)
        calls[f"pages of {size}"] = lambda a=k_pool, b=v_pool, p=paging: attn(q, a, b, paging=p)  # type: ignore[misc]
        calls[f"pages of {size}, packed"] = lambda a=k_pool, b=v_pool, p=paging: attn(  # type: ignore[misc]
            packed, a, b, paging=p, varlen=Varlen(cu)
        )
    told, graphs = {}, {}
    for name, call in calls.items():
        with torch.no_grad():
            out = call()
            if out.ndim == 3:
                out = out.unflatten(0, (case.batch, case.chunk)).transpose(1, 2)
            wrong = float((out.float() - exact.float()).abs().max() / exact.float().abs().max())
            graphs[name] = graph_of(lambda *_, call=call: call(), [(q, k, v)], CALLS)  # type: ignore[misc]
        told[name] = f" WRONG {wrong:.1e}" * (wrong > 0.02)
    times = microseconds(graphs, CALLS)
    print(f"{case.batch} x chunk {case.chunk} over {case.keys}, {HEADS}:{KV_HEADS} d{WIDTH}", flush=True)
    for name, took in times.items():
        rate, share = case.flops / took / 1e6, times["contiguous"] / took
        print(f"  {name:<24} {took:8.1f} us  {rate:6.0f} TFLOP/s  {share:5.2f}{told[name]}", flush=True)


def report_ragged(case: Prefill, sequences: int, page_size: int) -> None:
    """A packed batch of a chunk and of so many sequences that decode, in one launch."""
    columns = -(-case.keys // page_size)
    pools = [_randn((sequences + 1) * columns, page_size, KV_HEADS, WIDTH) for _ in range(2)]
    table = torch.randperm((sequences + 1) * columns, device="cuda").view(sequences + 1, columns).int()
    lengths = torch.full((sequences + 1,), 2048, dtype=torch.int32, device="cuda")
    lengths[0] = case.keys
    new = torch.tensor([0, case.chunk, *[1] * sequences], device="cuda").cumsum(0)[: sequences + 2].int()
    q, attn = _randn(case.chunk + sequences, HEADS, WIDTH), fa4flex.compile(mask=causal)
    paging, varlen = Paging(table, lengths), Varlen(new)
    with torch.no_grad():
        graph = graph_of(lambda *_: attn(q, *pools, paging=paging, varlen=varlen), [(q, *pools)], CALLS)
    took = microseconds({"packed": graph}, CALLS)["packed"]
    print(f"  one chunk and {sequences} sequences of 2048 keys, packed, pages of {page_size}: {took:.1f} us")


@dataclass(frozen=True)
class Mixed:
    """A packed batch of `chunks` sequences with `chunk` queries each, and then `decoding` ones with one; each
    has `keys` keys, the queries at their end, in pages of a pool."""

    chunks: int = 2
    chunk: int = 2048
    decoding: int = 128
    keys: int = 2048

    @property
    def floor(self) -> tuple[float, float]:
        """Microseconds of the chunks' products at 650 TFLOP/s, and of all keys and values at 4.5 TB/s."""
        read = 4.0 * KV_HEADS * WIDTH * self.keys * (self.chunks + self.decoding)
        return Prefill(self.chunks, self.chunk, self.keys).flops / 650e6, read / 4.5e6

    def calls(self, page_size: int) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        """Ways to compute it, and parts of it, by name: outputs whose tokens follow each other."""
        sequences, columns = self.chunks + self.decoding, -(-self.keys // page_size)
        k, v = (_randn(sequences * columns, page_size, KV_HEADS, WIDTH) for _ in range(2))
        table = torch.randperm(sequences * columns, device="cuda").view(sequences, columns).int()
        used = torch.full((sequences,), self.keys, dtype=torch.int32, device="cuda")
        new = torch.tensor([0, *[self.chunk] * self.chunks, *[1] * self.decoding], device="cuda")
        cu, n, split = new.cumsum(0).int(), self.chunks, self.chunks * self.chunk
        q = _randn(split + self.decoding, HEADS, WIDTH)
        attn, whole = fa4flex.compile(mask=causal), Paging(table, used)
        # The kernel for many rows alone has a choice of how blocks take tiles.
        rows = fa4flex.compile(mask=causal, schedule=fa4flex.Schedule(next_tile="counter"))
        never = fa4flex.compile(mask=causal, schedule=Schedule(split=1 << 24))
        first, rest = Paging(table[:n].contiguous(), used[:n]), Paging(table[n:].contiguous(), used[n:])
        cu_first, all_of, first_of = cu[: n + 1].contiguous(), Varlen(cu), slice(0, split)
        singles = q[split:].unsqueeze(2)

        def prefill(by: fa4flex.Attention = rows) -> Tensor:
            out: Tensor = by(q[first_of], k, v, paging=first, varlen=Varlen(cu_first))
            return out

        def decode() -> Tensor:
            out: Tensor = attn(singles, k, v, paging=rest)
            return out.squeeze(2)

        def peer() -> Tensor:
            from flash_attn.cute import flash_attn_varlen_func

            given = {"cu_seqlens_q": cu, "max_seqlen_q": self.chunk, "seqused_k": used, "page_table": table}
            out: Tensor = flash_attn_varlen_func(q, k, v, causal=True, **given)[0]
            return out

        return {
            "two launches": lambda: (prefill(), decode()),
            "one launch": lambda: (attn(q, k, v, paging=whole, varlen=all_of),),
            "one launch, rows not packed": lambda: (rows(q, k, v, paging=whole, varlen=all_of),),
            "flash-attn-4": lambda: (peer(),),
            "(chunks alone)": lambda: (prefill(),),
            "(chunks alone, mixed kernel)": lambda: (prefill(attn),),
            "(decoding alone)": lambda: (decode(),),
            "(one launch, keys never shared)": lambda: (never(q, k, v, paging=whole, varlen=all_of),),
        }


def report_mixed(case: Mixed, page_size: int) -> None:
    """One launch against two in sequence: it must be 1.25 times as fast, and faster than flash-attn-4's."""
    told, graphs, exact = {}, {}, None
    for name, call in case.calls(page_size).items():
        try:
            with torch.no_grad():
                out = torch.cat(call())
                exact = out if exact is None else exact
                if out.shape == exact.shape:
                    wrong = float((out.float() - exact.float()).abs().max() / exact.float().abs().max())
                    told[name] = f" WRONG {wrong:.1e}" * (wrong > 0.02)
                graphs[name] = graph_of(lambda *_, call=call: call()[0], [(out, out, out)], CALLS)  # type: ignore[misc]
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    times = microseconds(graphs, CALLS)
    compute, memory = case.floor
    print(
        f"{case.chunks} chunks of {case.chunk} and {case.decoding} decoding, {case.keys} keys each, pages of"
        f" {page_size}, {HEADS}:{KV_HEADS} d{WIDTH}; products {compute:.0f} us, memory {memory:.0f} us",
        flush=True,
    )
    for name, took in times.items():
        share = times["two launches"] / took
        print(f"  {name:<30} {took:8.1f} us  {share:5.2f}{told.get(name, '')}", flush=True)


def report_long(decoding: int, keys: int, page_size: int) -> None:
    """Sequences of so many keys that decode beside two chunks of 2,048 queries over 2,048 keys: their keys
    shared by blocks, not shared, and in two launches."""
    columns, sequences = -(-keys // page_size), decoding + 2
    k, v = (_randn(sequences * columns, page_size, KV_HEADS, WIDTH) for _ in range(2))
    table = torch.randperm(sequences * columns, device="cuda").view(sequences, columns).int()
    used = torch.tensor([keys] * decoding + [2048] * 2, dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, *[1] * decoding, 2048, 2048], device="cuda").cumsum(0).int()
    q = _randn(decoding + 4096, HEADS, WIDTH)
    attn = fa4flex.compile(mask=causal)
    whole = fa4flex.compile(mask=causal, schedule=Schedule(split=1 << 24))
    one, chunks = Paging(table[:decoding], used[:decoding]), Paging(table[decoding:], used[decoding:])
    rest, paging, varlen = Varlen((cu[decoding:] - decoding).contiguous()), Paging(table, used), Varlen(cu)

    def two() -> Tensor:
        own = attn(q[:decoding].unsqueeze(2), k, v, paging=one).squeeze(2)
        return torch.cat([own, attn(q[decoding:], k, v, paging=chunks, varlen=rest)])

    calls: dict[str, Callable[[], Tensor]] = {
        "two launches": two,
        "keys shared": lambda: attn(q, k, v, paging=paging, varlen=varlen),
        "keys not shared": lambda: whole(q, k, v, paging=paging, varlen=varlen),
    }
    with torch.no_grad():
        exact, graphs, told = two(), {}, {}
        for name, call in calls.items():
            wrong = float((call().float() - exact.float()).abs().max() / exact.float().abs().max())
            told[name] = f" WRONG {wrong:.1e}" * (wrong > 0.02)
            graphs[name] = graph_of(lambda *_, call=call: call(), [(q, q, q)], CALLS)  # type: ignore[misc]
    print(f"{decoding} of {keys} keys decode beside 2 chunks of 2,048, pages of {page_size}", flush=True)
    for name, took in microseconds(graphs, CALLS).items():
        print(f"  {name:<24} {took:8.1f} us{told[name]}", flush=True)


def report_append(batch: int, tokens: int, page_size: int) -> None:
    """New keys and values, alone and rotated with their queries, beside copies of as many bytes."""
    columns = -(-8192 // page_size)
    pools = [_randn(batch * columns, page_size, KV_HEADS, WIDTH) for _ in range(2)]
    table = torch.randperm(batch * columns, device="cuda").view(batch, columns).int()
    paging = Paging(table, torch.full((batch,), 4096, dtype=torch.int32, device="cuda"))
    k, v = (_randn(batch, KV_HEADS, tokens, WIDTH) for _ in range(2))
    q = _randn(batch, HEADS, tokens, WIDTH)
    angles = torch.rand(8192, WIDTH // 2, device="cuda")
    rotary, copy = Rotary(angles.cos(), angles.sin()), torch.empty_like(k)
    with torch.no_grad():
        graphs = {
            "append": graph_of(lambda *_: fa4flex.append(k, v, *pools, paging)[0], [(q, k, v)], CALLS),
            "append, rotated with q": graph_of(
                lambda *_: fa4flex.append(k, v, *pools, paging, rotary=rotary, q=q)[0], [(q, k, v)], CALLS
            ),
            "copies of k and v": graph_of(lambda *_: (copy.copy_(k), copy.copy_(v))[1], [(q, k, v)], CALLS),
        }
    for name, took in microseconds(graphs, CALLS).items():
        print(f"  {batch} x {tokens} tokens, pages of {page_size}, {name}: {took:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", nargs="*", type=int, default=[16, 64, 256])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--mixed", action="store_true", help="mixed batches alone, at pages of 16 and 64")
    parser.add_argument("--long", action="store_true", help="long sequences that decode, beside chunks")
    given = parser.parse_args()
    if given.mixed:
        for size in given.pages[:2]:
            report_mixed(Mixed(), size)
        return
    if given.long:
        for decoding, size in product((1, 4, 16), given.pages[:2]):
            report_long(decoding, given.keys, size)
        return
    for batch in (1, 4):
        report_prefill(Prefill(batch, given.chunk, given.keys), given.pages)
    report_ragged(Prefill(1, given.chunk, given.keys), 128, given.pages[0])
    for batch, tokens in ((64, 1), (4, 2048)):
        report_append(batch, tokens, given.pages[0])


if __name__ == "__main__":
    main()
