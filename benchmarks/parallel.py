"""One attention over the GPUs of a host, beside one GPU with the same total length and torch's own way.

    torchrun --nproc-per-node 2 benchmarks/parallel.py [--rounds 7] [--rows causal,sliding] [--out times.json]
    torchrun --nproc-per-node 2 benchmarks/parallel.py --device cpu --scale 512    # tiny, over gloo

Forward and backward, 32 heads of 128, bf16, 8 key heads, or 32 as torch's context parallelism has them
(elsewhere keys are repeated for it). "one GPU" is the whole problem on each rank by itself. Times are those
of the slowest rank, medians of samples taken in turns, started together. Bytes are what rank 0 receives in
one forward and backward pass, counted from the collectives that run, except for compiled flex_attention,
where they are computed. What fails stands there with the reason.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
from fa4flex import variants as v
from fa4flex.parallel import plan

DIM = 128
Step = Callable[[], list[Tensor]]
"""A forward and backward pass: output and gradients."""


@dataclass(frozen=True)
class Row:
    """A variant at a length. flex: its mask for flex_attention, None where torch can take `is_causal`."""

    name: str
    tokens: int
    variant: dict[str, Any]
    kv_heads: int = 8
    heads: int = 32
    flex: Callable[..., Any] | None = None
    causal: bool = False


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
        Row("ALiBi-causal 64k", n64, {"score_mod": slopes, "mask": v.causal}),
        Row("ALiBi-causal 128k", n128, {"score_mod": slopes, "mask": v.causal}),
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
    cannot be counted; error: why it does not run."""

    step: Step | None
    around: Callable[[], Any] = contextlib.nullcontext
    computed: int | None = None
    error: str = ""


class Bench:
    """Tensors of one row on this rank, and the ways to compute it."""

    def __init__(self, row: Row, mesh: DeviceMesh, device: torch.device, tile: int) -> None:
        self.tile = tile
        self.row, self.mesh, self.device = row, mesh, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        shapes = [(1, h, row.tokens, DIM) for h in (row.heads, row.kv_heads, row.kv_heads, row.heads)]
        # Random numbers of one rank: the whole is then the same on all of them.
        self.whole = [torch.randn(s, dtype=torch.bfloat16, device=device) for s in shapes]
        for x in self.whole:
            dist.broadcast(x, 0)
        self.attn = fa4flex.compile(**row.variant)

    def passes(self, call: Callable[..., Tensor], tensors: list[Tensor]) -> Step:
        *given, above = tensors
        leaves = [x.detach().clone().requires_grad_() for x in given]

        def step() -> list[Tensor]:
            with torch.enable_grad():
                out = call(*leaves)
                return [out.detach(), *torch.autograd.grad(out, leaves, above)]

        return step

    def ours(self, **options: Any) -> Way:
        cp = self.attn.parallel(self.mesh, dim="cp", tile=self.tile, **options)
        at = cp.placement(self.row.tokens)
        own = [at.shard(x, self.rank) for x in self.whole]
        return Way(self.passes(lambda q, k, x: cp(q, k, x, lengths=self.row.tokens), own))

    def head_tail(self) -> list[Tensor]:
        """This rank's tokens as torch's load balancer deals them."""
        causal = fa4flex.compile(mask=v.causal)
        at = plan(causal, self.row.tokens, self.ranks, placement="head-tail", tile=self.tile).placement
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

        return Way(self.passes(attention, self.head_tail()), fresh)

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

    def ways(self) -> dict[str, Way]:
        found: dict[str, Callable[[], Way]] = {"one GPU": lambda: Way(self.passes(self.attn, self.whole))}
        if self.row.causal:
            gqa = self.row.heads != self.row.kv_heads
            found["one GPU, torch's"] = lambda: Way(
                self.passes(lambda q, k, x: sdpa(q, k, x, is_causal=True, enable_gqa=gqa), self.whole)
            )
        found["fa4flex"] = self.ours
        found["fa4flex, keys"] = lambda: self.ours(moves="keys")
        found["fa4flex, keys in 2 stages"] = lambda: self.ours(moves="keys", stages=2)
        found["fa4flex, heads"] = lambda: self.ours(moves="heads")
        if self.row.causal:
            found["torch, all-gather"] = lambda: self.torch_ring("allgather")
            found["torch, ring"] = lambda: self.torch_ring("alltoall")
        if self.row.flex is not None:
            found["torch, flex"] = self.torch_flex
        return {name: self.tried(make) for name, make in found.items()}

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


def measured(bench: Bench, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds, bytes, and the error of the sharded outputs, by way."""
    ways = bench.ways()
    runs = {name: way for name, way in ways.items() if way.step is not None}
    found: dict[str, dict[str, Any]] = {name: {"error": way.error} for name, way in ways.items()}
    for name, way in runs.items():
        found[name]["received"] = bench.bytes_of(way) if "one GPU" not in name else 0
        bench.seconds(way)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds):
        # The same order on every rank, another each round.
        for name in random.Random(at).sample(list(runs), len(runs)):
            samples[name].append(bench.seconds(runs[name]))
    for name, times in samples.items():
        found[name] |= {"ms": 1e3 * statistics.median(times), "least_ms": 1e3 * min(times)}
    whole = runs["one GPU"].step
    assert whole is not None
    found["fa4flex, keys"]["difference"] = difference(bench, whole(), runs)
    return found


def difference(bench: Bench, whole: list[Tensor], runs: dict[str, Way]) -> float | None:
    """Largest difference of this rank's results from one GPU's, as a share of their largest number."""
    way = runs.get("fa4flex, keys")
    if way is None or way.step is None:
        return None
    at = bench.attn.parallel(bench.mesh, dim="cp", tile=bench.tile, moves="keys").placement(bench.row.tokens)
    own = [at.shard(x, bench.rank) for x in whole]
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(way.step(), own, strict=True)
        if b.numel()
    )


def table(row: Row, found: dict[str, dict[str, Any]]) -> str:
    one = found["one GPU"].get("ms")
    lines = [f"\n{row.name}: {row.tokens} tokens, {row.heads}:{row.kv_heads} heads"]
    for name, x in found.items():
        if "ms" not in x:
            lines.append(f"  {name:<28} {x['error']}")
            continue
        over = f"{one / x['ms']:6.2f}x" if one else ""
        lines.append(f"  {name:<28}{x['ms']:10.2f} ms{over}{x['received'] / 2**20:12.1f} MiB received")
    if found["fa4flex, keys"].get("difference") is not None:
        lines.append(f"  largest difference from one GPU: {found['fa4flex, keys']['difference']:.2e}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="", help="parts of names, with commas between them; all by default")
    parser.add_argument("--scale", type=int, default=1, help="what lengths and windows are divided by")
    parser.add_argument("--out", type=Path, help="where to write all numbers, as JSON")
    given = parser.parse_args()
    device = torch.device(given.device, int(os.environ["LOCAL_RANK"]) if given.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    wanted = [part for part in given.rows.split(",") if part]
    every: dict[str, Any] = {}
    for name, row in rows(given.scale, str(device)).items():
        if wanted and not any(part in name for part in wanted):
            continue
        bench = Bench(row, mesh, device, tile=max(128 // given.scale, 8))
        every[name] = measured(bench, given.rounds)
        if dist.get_rank() == 0:
            print(table(row, every[name]), flush=True)
            if given.out is not None:  # after each row: what a run that is cut off has measured is kept
                given.out.write_text(json.dumps(every, indent=1))
        del bench
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
