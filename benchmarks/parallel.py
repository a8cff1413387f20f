"""One attention over the GPUs of a host, beside one GPU with the same total length and torch's own way.

    torchrun --nproc-per-node 2 benchmarks/parallel.py [--rounds 7] [--rows causal,sliding] [--out times.json]
    torchrun --nproc-per-node 2 benchmarks/parallel.py --rows "causal 64k" --ways keys --margins 0,4,16
    torchrun --nproc-per-node 2 benchmarks/parallel.py --device cpu --scale 512    # tiny, over gloo

Forward and backward, 32 heads of 128, bf16, 8 KV heads, or 32 as torch's context parallelism has them
(elsewhere keys are repeated for it). "one GPU" is the whole problem on each rank by itself. Times are those
of the slowest rank, medians of samples taken in turns, started together.

Bytes are what rank 0 receives in one forward and backward pass. fa4flex's are counted from the collectives
that run; torch's are computed from shapes, by the calls in its sources (torch 2.13): its collectives are
functional ones, of which nothing outside sees the sizes.

Errors are those of some queries and keys of each rank against float64; "allowed" is twice one GPU's own
error at the same places. "exchange alone" runs the same all-to-alls with nothing else, and "without
exchange" the same kernels on rows that nobody has sent: what is hidden follows. What fails stands there with
the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_parts import Absent, Errors, Recorded
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
from fa4flex import variants as v
from fa4flex.parallel import ContextParallel, Placement, plan
from fa4flex.parallel.plan import SM_MARGIN

os.environ.setdefault("FA4FLEX_BACKGROUND", "0")  # times are those of the best kernels

DIM = 128
APART = "exchange alone", "without exchange"
Step = Callable[[], list[Tensor]]
"""A forward and backward pass: output and gradients."""


@dataclass(frozen=True)
class Row:
    """A variant at a length. flex: its mask for flex_attention, None where it is causal; causal: torch can
    take `is_causal`; tilted: ALiBi."""

    name: str
    tokens: int
    variant: dict[str, Any]
    kv_heads: int = 8
    heads: int = 32
    flex: Callable[..., Any] | None = None
    causal: bool = False
    tilted: bool = False

    def logits(self, q: Tensor, kv: Tensor) -> Tensor:
        """Bias of scores of these queries and keys, float64 [heads or 1, queries, keys]."""
        q, kv = q[:, None], kv[None]
        seen = self.flex(0, 0, q, kv) if self.flex is not None else q >= kv
        added = torch.zeros(seen.shape, dtype=torch.float64, device=q.device).masked_fill(~seen, -torch.inf)
        if not self.tilted:
            return added[None]
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1, device=q.device).double() / self.heads)
        return added - slopes[:, None, None] * (q - kv)


def rows(scale: int, device: str) -> dict[str, Row]:
    n64, n128, window = 65536 // scale, 131072 // scale, max(4096 // scale, 1)
    cuts = sorted(random.Random(8).sample(range(1, n128), 7))
    ids = torch.bucketize(torch.arange(n128), torch.tensor(cuts), right=True).to(torch.int32).to(device)
    slopes = v.alibi

    def in_documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (ids[q] == ids[kv])

    def in_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < window)

    documents, sliding = v.causal & v.document(ids), v.causal & v.sliding_window(window)
    found = [
        Row("causal 64k", n64, {"mask": v.causal}, causal=True),
        Row("causal 64k, equal heads", n64, {"mask": v.causal}, 32, causal=True),
        Row("causal 128k", n128, {"mask": v.causal}, causal=True),
        Row("causal 128k, equal heads", n128, {"mask": v.causal}, 32, causal=True),
        Row("8 documents 128k", n128, {"mask": documents}, flex=in_documents),
        Row("sliding 4k at 128k", n128, {"mask": sliding}, flex=in_window),
        Row("ALiBi-causal 64k", n64, {"score_mod": slopes, "mask": v.causal}, tilted=True),
        Row("ALiBi-causal 128k", n128, {"score_mod": slopes, "mask": v.causal}, tilted=True),
    ]
    return {row.name: row for row in found}


# --- bytes ------------------------------------------------------------------------------------------------


class Received(TorchDispatchMode):
    """Bytes that this rank receives from others by collectives, eager ones and functional ones."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.bytes = rank, ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes += self._of(func.overloadpacket.__name__, args, found)
        return found

    def _of(self, name: str, args: Any, found: Any) -> int:
        size = args[0].nbytes if isinstance(args[0], Tensor) else 0
        if name == "alltoall_base_":
            return self._split(args[0], args[3])
        if name == "all_to_all_single":
            return self._split(found, args[1])
        if name == "_allgather_base_":
            return size * (self.ranks - 1) // self.ranks
        if name == "all_gather_into_tensor":
            return size * (self.ranks - 1)
        if name == "reduce_scatter_tensor":
            return size * (self.ranks - 1) // self.ranks
        if name in ("all_reduce", "allreduce_"):
            size = size or sum(x.nbytes for x in args[0])
            return 2 * size * (self.ranks - 1) // self.ranks
        return 0

    def _split(self, x: Tensor, splits: Any) -> int:
        if not splits:
            return x.nbytes * (self.ranks - 1) // self.ranks
        return x.nbytes - splits[self.rank] * x[:1].nbytes


# --- what is compared -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to compute a row. around: entered before each pass, outside its time. computed: bytes, where they
    cannot be counted; error: why it does not run; placement: where its results lie, if errors are wanted."""

    step: Step | None
    around: Callable[[], Any] = contextlib.nullcontext
    computed: int | None = None
    error: str = ""
    placement: Placement | None = None


class Bench:
    """Tensors of one row on this rank, and the ways to compute it. alone: what one GPU computes, with the
    first of these tokens; by default the same."""

    def __init__(
        self,
        row: Row,
        mesh: DeviceMesh,
        device: torch.device,
        options: dict[str, int],
        alone: Row | None = None,
    ) -> None:
        self.options = options
        self.row, self.mesh, self.device = row, mesh, device
        self.alone = alone or row
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        shapes = [(1, h, row.tokens, DIM) for h in (row.heads, row.kv_heads, row.kv_heads, row.heads)]
        # Random numbers of one rank: the whole is then the same on all of them.
        self.whole = [torch.randn(s, dtype=torch.bfloat16, device=device) for s in shapes]
        for x in self.whole:
            dist.broadcast(x, 0)
        self.attn = fa4flex.compile(**row.variant)

    def by_one(self, call: Callable[..., Tensor] | None = None) -> Way:
        """The way of one GPU; by fa4flex, or by another call."""
        attn = self.attn if self.alone is self.row else fa4flex.compile(**self.alone.variant)
        return Way(self.passes(call or attn, [x[:, :, : self.alone.tokens] for x in self.whole]))

    def passes(self, call: Callable[..., Tensor], tensors: list[Tensor]) -> Step:
        *given, above = tensors
        leaves = [x.detach().clone().requires_grad_() for x in given]

        def step() -> list[Tensor]:
            with torch.enable_grad():
                out = call(*leaves)
                return [out.detach(), *torch.autograd.grad(out, leaves, above)]

        return step

    def ours(self, **options: Any) -> Way:
        cp = self.attn.parallel(self.mesh, dim="cp", **{**self.options, **options})
        return replace(self._of(cp), placement=cp.placement(self.row.tokens))

    def _of(self, cp: ContextParallel) -> Way:
        own = [cp.placement(self.row.tokens).shard(x, self.rank) for x in self.whole]
        return Way(self.passes(lambda q, k, x: cp(q, k, x, lengths=self.row.tokens), own))

    def apart(self) -> tuple[Way, Way]:
        """The exchanges of keys alone, and the rest without them."""
        cp = self.attn.parallel(self.mesh, dim="cp", moves="keys", **self.options)
        recorded = Recorded(cp.links)
        step = self._of(replace(cp, links=recorded)).step
        assert step is not None
        step()
        return Way(recorded.again), self._of(replace(cp, links=Absent(cp.links)))

    def head_tail(self) -> list[Tensor]:
        """This rank's tokens as torch's load balancer deals them."""
        causal = fa4flex.compile(mask=v.causal)
        at = plan(
            causal, self.row.tokens, self.ranks, placement="head-tail", tile=self.options["tile"]
        ).placement
        assert all(sum(b - a for a, b in x) * self.ranks == self.row.tokens for x in at.queries)
        return [at.shard(x, self.rank) for x in self.whole]

    def torch_ring(self, rotation: str) -> Way:
        """torch's context parallelism of scaled_dot_product_attention; keys are repeated for all heads."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        if self.device.type != "cuda":
            raise NotImplementedError("torch has it for GPUs only")
        buffer = torch.empty(self.row.tokens, device=self.device)
        group = self.row.heads // self.row.kv_heads

        def attention(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
            if group > 1:
                k, x = (y.repeat_interleave(group, 1) for y in (k, x))
            return torch.nn.functional.scaled_dot_product_attention(q, k, x, is_causal=True)

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            set_rotate_method(rotation)
            with context_parallel(
                self.mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}
            ):
                yield

        # A buffer shrinks in the context, and the length says how to deal: a new one for each pass.
        def fresh() -> Any:
            nonlocal buffer
            buffer = torch.empty(self.row.tokens, device=self.device)
            return around()

        own = self.head_tail()
        # Keys go round in both passes, whichever way; float32 gradients at each step, of which the last
        # brings them home.
        local = 2 * own[1].nbytes * group
        moved = 2 * (self.ranks - 1) * local + 2 * self.ranks * local
        return Way(self.passes(attention, own), fresh, moved)

    def torch_flex(self) -> Way:
        """torch's context parallelism of flex_attention: all keys are gathered."""
        from torch.distributed.tensor.experimental import _context_parallel
        from torch.distributed.tensor.experimental._context_parallel import _attention as its

        if self.device.type != "cuda":
            raise NotImplementedError("torch has it for GPUs only")
        balancer = _context_parallel._HeadTailLoadBalancer(self.row.tokens, self.ranks, self.device)
        try:
            # In order of documents and windows nothing needs balancing but what head-tail balances.
            mask = its._create_cp_block_mask(
                self.row.flex, 1, 1, self.row.tokens, self.row.tokens, self.mesh, balancer
            )
        except TypeError:
            raise NotImplementedError("another interface of torch's") from None
        indices = balancer._generate_indices()
        order = indices if isinstance(indices, Tensor) else torch.tensor(indices)
        mine = order.reshape(-1).to(self.device).chunk(self.ranks)[self.rank]
        own = [x[:, :, mine] for x in self.whole]
        hook = its._ContextParallel(2, its._ContextParallel.AttentionType.FLEX)
        compiled = torch.compile(flex_attention, dynamic=False)
        gqa = self.row.heads != self.row.kv_heads

        def attention(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
            (q, k, x), _ = hook.flex_input_fn(None, (q, k, x), {}, self.mesh)
            found: Tensor = compiled(q, k, x, block_mask=mask, enable_gqa=gqa)
            return found

        # Keys and values there; gradients back by a sum of which each rank keeps its part.
        others = 2 * 2 * own[1].nbytes * (self.ranks - 1)
        return Way(self.passes(attention, own), computed=others)

    def ways(self, wanted: list[str], margins: list[int]) -> dict[str, Way]:
        """The ways of these names, or whose names have one of these parts, or all; one GPU always."""
        found: dict[str, Callable[[], Way]] = {"one GPU": self.by_one}
        if self.row.causal:
            gqa = self.row.heads != self.row.kv_heads
            found["one GPU, torch's"] = lambda: self.by_one(partial(sdpa, is_causal=True, enable_gqa=gqa))
        found["fa4flex"] = self.ours
        found["fa4flex, keys"] = lambda: self.ours(moves="keys")
        found["fa4flex, keys in 2 stages"] = lambda: self.ours(moves="keys", stages=2)
        found["fa4flex, heads"] = lambda: self.ours(moves="heads")
        for margin in margins:
            found[f"fa4flex, keys, margin {margin}"] = partial(self.ours, moves="keys", sm_margin=margin)
        for at, name in enumerate(APART):
            found[name] = lambda at=at: self.apart()[at]
        if self.row.causal:
            found["torch, all-gather"] = lambda: self.torch_ring("allgather")
            found["torch, ring"] = lambda: self.torch_ring("alltoall")
        if self.row.flex is not None:
            found["torch, flex"] = self.torch_flex
        parts = [x for x in wanted if x not in found]
        names = [n for n in found if not wanted or n in wanted or any(part in n for part in parts)]
        names = [n for n in found if n in {"one GPU", *names}]
        return {name: self.tried(found[name]) for name in names}

    def tried(self, make: Callable[[], Way]) -> Way:
        """The way, if one pass of it succeeds on every rank."""
        error, way = "", Way(None)
        try:
            way = make()
            assert way.step is not None
            with way.around():
                way.step()
        except Exception as caught:
            error = f"{type(caught).__name__}: {(str(caught).splitlines() or [''])[0][:90]}"
        errors: list[str] = [""] * self.ranks
        dist.all_gather_object(errors, error)
        return way if not any(errors) else Way(None, error=next(filter(None, errors)))

    def bytes_of(self, way: Way) -> int:
        if way.computed is not None:
            return way.computed
        assert way.step is not None
        with way.around(), Received(self.rank, self.ranks) as counted:
            way.step()
        return counted.bytes

    def seconds(self, way: Way) -> float:
        """Seconds of one pass, all ranks having started together, on the slowest."""
        assert way.step is not None
        with way.around():
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1, device=self.device))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            way.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - start
        slowest = torch.tensor([took], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


def measured(
    bench: Bench, rounds: int, seconds: float, wanted: list[str], margins: list[int]
) -> dict[str, dict[str, Any]]:
    """Times, bytes, and errors, by way. No round begins after so many seconds of them but the first."""
    ways = bench.ways(wanted, margins)
    runs = {name: way for name, way in ways.items() if way.step is not None}
    found: dict[str, dict[str, Any]] = {name: {"error": way.error} for name, way in ways.items()}
    for name, way in runs.items():
        counted = "one GPU" not in name and name != APART[1]
        found[name]["received"] = bench.bytes_of(way) if counted else 0
        found[name]["computed"] = way.computed is not None
        bench.seconds(way)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    for at in range(rounds):
        # The same order on every rank, another each round.
        for name in random.Random(at).sample(list(runs), len(runs)):
            samples[name].append(bench.seconds(runs[name]))
        spent = torch.tensor([time.perf_counter() - start], device=bench.device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # ranks stop alike
        if float(spent) > seconds:
            break
    for name, times in samples.items():
        found[name] |= {"ms": 1e3 * statistics.median(times), "least_ms": 1e3 * min(times)}
        found[name]["rounds"] = len(times)
    spread = {name: way for name, way in runs.items() if way.placement is not None}
    if spread and bench.alone is bench.row:
        errors = Errors(bench.row, bench.whole, bench.attn)
        for name, way in spread.items():
            assert way.step is not None and way.placement is not None
            found[name]["errors"] = errors.shares(way.step(), way.placement, bench.rank)
    return found


def table(row: Row, found: dict[str, dict[str, Any]], seconds: float) -> str:
    one = found["one GPU"].get("ms")
    lines = [f"\n{row.name}: {row.tokens} tokens, {row.heads}:{row.kv_heads} heads"]
    for name, x in found.items():
        if "ms" not in x:
            lines.append(f"  {name:<28} {x['error']}")
            continue
        over = f"{one / x['ms']:6.2f}x" if one and name not in APART else ""
        over = f"{x['efficiency']:7.1%}" if "efficiency" in x else over
        line = f"  {name:<28}{x['ms']:10.2f} ms{over:>8}{x['received'] / 2**20:12.1f} MiB received"
        line += ", as computed" if x["computed"] else ""
        if "errors" in x:
            worst = max(x["errors"], key=x["errors"].get)
            line += f"; errors at most {x['errors'][worst]:.2f} of what is allowed ({worst})"
        lines.append(line)
    times = [found.get(name, {}).get("ms") for name in ("fa4flex, keys", *APART)]
    if all(times):
        total, alone, rest = times
        lines.append(f"  of the {alone:.2f} ms of an exchange alone, {total - rest:.2f} ms are not hidden")
    return "\n".join([*lines, f"  the row took {seconds:.1f} s"])


def begin(kind: str) -> tuple[torch.device, DeviceMesh]:
    """This rank's device, "cuda" or "cpu", and the mesh of all ranks."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device, init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("cp",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="", help="parts of names, with commas between them; all by default")
    parser.add_argument("--ways", default="", help="names of ways, or parts of them; all by default")
    parser.add_argument("--sm-margin", type=int, default=SM_MARGIN, help="SMs left to an exchange in flight")
    parser.add_argument("--margins", default="", help="further such numbers, each a way of its own")
    parser.add_argument(
        "--row-seconds", type=float, default=1e9, help="no further round after rounds of so long"
    )
    parser.add_argument("--scale", type=int, default=1, help="what lengths and windows are divided by")
    parser.add_argument("--out", type=Path, help="where to write all numbers, as JSON")
    given = parser.parse_args()
    device, mesh = begin(given.device)
    wanted, ways, margins = ([x for x in y.split(",") if x] for y in (given.rows, given.ways, given.margins))
    every: dict[str, Any] = {}
    for name, row in rows(given.scale, str(device)).items():
        if wanted and not any(part in name for part in wanted):
            continue
        start = time.perf_counter()
        options = {"tile": max(128 // given.scale, 8), "sm_margin": given.sm_margin}
        bench = Bench(row, mesh, device, options)
        every[name] = measured(bench, given.rounds, given.row_seconds, ways, list(map(int, margins)))
        if dist.get_rank() == 0:
            print(table(row, every[name], time.perf_counter() - start), flush=True)
            if given.out is not None:  # after each row: what a run that is cut off has measured is kept
                given.out.write_text(json.dumps(every, indent=1))
        del bench
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
