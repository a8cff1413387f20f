"""Decoding on a GPU: fa4flex beside cuDNN and FlashAttention-2 through SDPA, and flash-attn-4; with an e4m3
cache beside FlashAttention-3, where fa3-fwd is installed.

    python benchmarks/decode.py [--heads 32:8 8:8] [--dim 128 64] [--sizes 1x8k 64x8k] [--queries 1]

TB/s of keys and values, and microseconds per call. Calls follow each other in a CUDA graph, so that the
host's time is not measured, and go round among so many caches that the L2 cache holds none of them; a time is
the median of several replays. Bytes are counted as those of 16-bit caches, also where caches are e4m3.
Outputs are compared with float64 in the first and last head. `--splits 8 16`: fa4flex with these numbers of
splits, too."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fa4flex
from fa4flex.kernels.plan import splitting
from fa4flex.variants import causal

os.environ.setdefault("FA4FLEX_BACKGROUND", "0")  # times are those of the best kernels

SIZES = "1x8k", "4x8k", "16x8k", "64x8k", "1x64k", "16x64k", "1x128k"
CACHE_BYTES = 160 << 20
"""Caches of a measurement take at least so much together: three times the L2 cache."""

CALLS, REPLAYS = 24, 5

WRONG = 0.02
"""Relative error above which a result is reported."""

Cache = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """splits: of fa4flex, how many, or by its own rule; swapped: caches are (batch, length, head); small:
    they are e4m3."""

    attend: Attend
    splits: int | None = None
    swapped: bool = False
    small: bool = False


@dataclass(frozen=True)
class Size:
    batch: int
    keys: int

    @staticmethod
    def of(text: str) -> Size:
        batch, keys = text.split("x")
        return Size(int(batch), int(keys[:-1]) * 1024 if keys.endswith("k") else int(keys))


@dataclass(frozen=True)
class Case:
    size: Size
    heads: int
    kv_heads: int
    width: int
    queries: int

    @property
    def bytes(self) -> int:
        return 4 * self.size.batch * self.kv_heads * self.size.keys * self.width

    def drawn(self) -> list[Cache]:
        count = max(2, -(-CACHE_BYTES // self.bytes))
        shape = self.size.batch, self.kv_heads, self.size.keys, self.width
        queries = self.size.batch, self.heads, self.queries, self.width
        made = []
        for _ in range(count):
            q, k, v = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in (queries, shape, shape))
            made.append((q.normal_(), k.normal_(), v.normal_()))
        return made


def sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


def flash_attn_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its layout is (batch, length, head): the caches are made that way."""
    from flash_attn.cute import flash_attn_func

    out: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)[0]
    return out.transpose(1, 2)


def flash_attn_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """It multiplies 8-bit queries, which are rounded here: the error is theirs, too."""
    import fa3_fwd_config

    sys.modules.setdefault("flash_attn_config", fa3_fwd_config)
    import fa3_fwd_interface

    given = (x.transpose(1, 2) for x in (q.to(torch.float8_e4m3fn), k, v))
    out = fa3_fwd_interface.flash_attn_func(*given, causal=True)
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def scaled() -> Attend:
    """fa4flex over an e4m3 cache with a scale of 1 for each sequence and head."""
    attn = fa4flex.compile(mask=causal)
    known: dict[torch.Size, fa4flex.KVScales] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = k.shape[:2]
        if shape not in known:
            known[shape] = fa4flex.KVScales(*(torch.ones(shape, device=k.device) for _ in range(2)))
        out: Tensor = attn(q, k, v, kv_scales=known[shape])
        return out

    return attend


PEERS = {
    "cuDNN": Contender(sdpa(SDPBackend.CUDNN_ATTENTION)),
    "FA2": Contender(sdpa(SDPBackend.FLASH_ATTENTION)),
    "FA4": Contender(flash_attn_4, None, True),
    "FA3 e4m3": Contender(flash_attn_3, None, True, True),
}
BOTTOM_RIGHT = "FA4", "FA3 e4m3"
"""SDPA's masks are no causal ones aligned at the end: its contenders take single queries, which see all."""


def ours(layout: str = "bhsd") -> Attend:
    attn = fa4flex.compile(mask=causal, layout=layout)  # type: ignore[arg-type]
    if layout == "bhsd":
        return attn
    return lambda q, k, v: attn(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)  # type: ignore[no-any-return]


@contextmanager
def split_in(count: int | None) -> Iterator[None]:
    """Within, all calls split keys in so many parts."""
    with (
        nullcontext()
        if count is None
        else patch.object(splitting, "_splits", lambda pairs, tiles, *more: (min(count, tiles),) * 2)
    ):
        yield


def graph_of(attend: Attend, caches: list[Cache], calls: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            attend(*caches[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            attend(*caches[i % len(caches)])
    return graph


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, float]:
    """Time of one call of each graph, all of them in turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(times) for name, times in found.items()}


def error(attend: Attend, cache: Cache) -> float:
    """The largest difference from float64 in the first and last sequence and head of keys, relative to the
    largest output. Causal, queries at the end of the keys."""
    q, k, v = cache
    out, worst = attend(q, k, v), 0.0
    group = q.shape[1] // k.shape[1]
    for b, h in {(0, 0), (q.shape[0] - 1, k.shape[1] - 1)}:
        heads = slice(h * group, (h + 1) * group)
        scores = q[b, heads].double() @ k[b, h].double().mT * q.shape[-1] ** -0.5
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[b, h].double()
        worst = max(worst, float((out[b, heads].double() - exact).abs().max() / exact.abs().max()))
    return worst


def host_microseconds() -> tuple[float, float]:
    """Host time of a repeated call, and of calls whose keys grow."""
    attn = fa4flex.compile(mask=causal)
    q = torch.randn(1, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, 8, 2048, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def timed(lengths: list[int]) -> float:
        for n in lengths[:5]:
            attn(q, k[:, :, :n], v[:, :, :n])
        pieces = [(k[:, :, :n], v[:, :, :n]) for n in lengths]
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        for one in pieces:
            attn(q, *one)
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        return took / len(lengths) * 1e6

    return timed([1024] * 200), timed(list(range(1024, 1224)))


def report_ragged(spread: bool) -> None:
    """64 sequences of 128 to 32k keys, log-uniform, in one padded cache; or as many keys, evenly."""
    torch.manual_seed(0)
    lengths = (128 * 256 ** torch.rand(64)).int()
    if not spread:
        lengths = torch.full_like(lengths, int(lengths.float().mean()))
    padded = int(lengths.max()) if spread else int(lengths[0])
    q = torch.randn(64, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(64, 8, padded, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    varlen, attn = fa4flex.Varlen(seqused_k=lengths.cuda()), fa4flex.compile(mask=causal)
    with torch.no_grad():
        graph = graph_of(lambda *qkv: attn(*qkv, varlen=varlen), [(q, k, v)], CALLS)
    took = microseconds({"fa4flex": graph}, CALLS)["fa4flex"]
    moved = 4 * 8 * 128 * int(lengths.sum())
    print(
        f"64 sequences, {'ragged' if spread else 'even'}: {moved / took / 1e6:.2f} {took:.1f}us", flush=True
    )


def report(case: Case, contenders: dict[str, Contender]) -> None:
    caches = case.drawn()
    swapped = [tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in one) for one in caches]
    calls = max(CALLS // len(caches), 1) * len(caches)
    graphs, told = {}, {}
    kept: list[list[Cache]] = []  # a capture gives back memory that nobody holds, also what graphs read
    for name, one in contenders.items():
        mine: list[Cache] = swapped if one.swapped else caches  # type: ignore[assignment]
        if one.small:
            mine = [(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for q, k, v in mine]
        kept.append(mine)
        try:
            with split_in(one.splits), torch.no_grad():
                wrong = error(one.attend, mine[0])
                graphs[name] = graph_of(one.attend, mine, calls)
            told[name] = f" WRONG {wrong:.1e}" * (wrong > WRONG)
        except Exception as problem:
            told[name] = f" {type(problem).__name__}: {str(problem)[:60]}"
    times = microseconds(graphs, calls)
    cells = []
    for name, more in told.items():
        took = times.get(name)
        cells.append(name + (f" {case.bytes / took / 1e6:.2f} {took:.1f}us" if took else "") + more)
    keys = case.size.keys
    size = f"{case.size.batch}x{keys // 1024}k" if keys % 1024 == 0 else f"{case.size.batch}x{keys}"
    heads = f"{case.heads}:{case.kv_heads}"
    print(f"{size:>7} {heads} d{case.width} q{case.queries} | " + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", nargs="*", default=["32:8"])
    parser.add_argument("--dim", nargs="*", type=int, default=[128])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--queries", nargs="*", type=int, default=[1])
    parser.add_argument("--splits", nargs="*", type=int, default=[])
    parser.add_argument("--ragged", action="store_true", help="sequences of different lengths, too")
    parser.add_argument("--peers", nargs="*", choices=[*PEERS], default=[*PEERS])
    given = parser.parse_args()
    repeated, growing = host_microseconds()
    print(f"host: {repeated:.1f} us for a repeated call, {growing:.1f} us where keys grow", flush=True)
    for spread in (True, False) if given.ragged else ():
        report_ragged(spread)
    for pair in given.heads:
        heads, kv_heads = map(int, pair.split(":"))
        for width in given.dim:
            for queries in given.queries:
                contenders = {"fa4flex": Contender(ours()), "bshd": Contender(ours("bshd"), None, True)}
                contenders["e4m3"] = Contender(scaled(), small=True)
                contenders |= {f"/{n}": Contender(ours(), n) for n in given.splits}
                contenders |= {
                    name: PEERS[name] for name in given.peers if name in BOTTOM_RIGHT or queries == 1
                }
                for text in given.sizes:
                    report(Case(Size.of(text), heads, kv_heads, width, queries), contenders)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
