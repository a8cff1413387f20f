"""Steps that a GPU alone takes: streams, CUDA graphs, weights that FSDP2 gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fa4flex

from . import calls, changes
from .calls import Given
from .oracle import Failure, units, words_of
from .pool import Skip, World
from .steps import any_change, ask, call, lengths_of, step


@step(0)
def streams(world: World) -> str:
    """Calls and changes on two streams in turn, each of which waits for the one before."""
    need_a_gpu(world)
    before = torch.cuda.current_stream()
    others = [torch.cuda.Stream(), torch.cuda.Stream()]
    words = []
    for stream in (*others, others[0]):
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            words.append(call(world))
            torch.cuda._sleep(1_000_000)
            if world.rng.random() < 0.6:
                with contextlib.suppress(Skip):
                    words.append(any_change(world))
        before = stream
    torch.cuda.current_stream().wait_stream(before)
    return " | ".join(words)


@step(0)
def unordered_streams(world: World) -> str:
    """After a change, the same call on a stream that is late, and then on one that does not wait for it."""
    need_a_gpu(world)
    subject = world.pick()
    if subject.compiled:
        raise Skip
    given = calls.draw_call(world, subject)
    if given.problem.q.is_inference():
        raise Skip
    words = ""
    for _ in range(2):
        first = ask(world, given)
        pair = [first, first.again()]
        torch.cuda.synchronize()
        for n, one in enumerate(pair):
            with torch.cuda.stream(torch.cuda.Stream()):
                if n == 0:
                    torch.cuda._sleep(20_000_000)
                one.run()
        torch.cuda.synchronize()
        for one in pair:
            one.check()
        words = first.where
        if not _write_in_place(world, given):
            break
    return words


@step(0)
def captured(world: World) -> str:
    """A call in a CUDA graph, whose replays read what tensors hold by then."""
    need_a_gpu(world)
    subject = world.pick()
    given = calls.draw_call(world, subject)
    if subject.compiled or "paging" in given.brought or given.problem.q.is_inference():
        raise Skip
    given.mode = "no_grad"
    asked = ask(world, given)
    asked.run()
    asked.check()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            given()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            found = given()
    except Exception as error:
        raise Failure("raw error", f"{asked.where}, captured", words_of(error)) from error
    for n in range(3):
        again = ask(world, given)
        graph.replay()
        again.found = found
        try:
            again.check()
        except Failure as failure:
            raise Failure(failure.kind, f"{failure.where}, replay {n + 1}", failure.words) from failure
        if not _write_in_place(world, given):
            break
    return f"{asked.where}, captured"


@step(0)
def sharded(world: World) -> str:
    """A module under FSDP2 in a group of one process, whose weights change between evaluations."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    net = _Sloped(world.sizes.length, world.device)
    fully_shard(net, reshard_after_forward=True)
    length = world.rng.randint(8, world.sizes.length)
    q, k, v = _qkv(world, length)
    for n in range(4):
        weight: Any = net.slope
        held = weight.to_local().detach().clone()
        mode = world.rng.choice((torch.no_grad, torch.enable_grad))
        with mode():
            out = net(q, k, v)
        exact = _sloped(q, k, v, held)
        floor = units(q.dtype, held.dtype) * max(1.0, float(exact.abs().max()))
        error = float((out.detach().double() - exact).abs().max())
        if not error <= 2 * floor:
            raise Failure("wrong", f"sharded, evaluation {n + 1}", f"off by {error:.2e}")
        if out.requires_grad:
            out.float().sum().backward()
        with torch.no_grad():
            weight.to_local().copy_(torch.randn_like(held) * 2)
    world.calls += 4
    return "sharded"


class _Sloped(torch.nn.Module):
    def __init__(self, length: int, device: torch.device) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.randn(length, device=device))

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + torch.nn.functional.softplus(self.slope)[kv]

        self.attention = fa4flex.compile(score)

    def forward(self, *qkv: Tensor) -> Tensor:
        out: Tensor = self.attention(*qkv)
        return out


def _qkv(world: World, length: int) -> list[Tensor]:
    dtype = world.rng.choice(world.choices.dtypes)
    return [torch.randn(1, 2, length, 64, device=world.device).to(dtype) for _ in range(3)]


def _sloped(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    s = (q.double() @ k.double().mT) / 8 + torch.nn.functional.softplus(slope.double())[: k.shape[2]]
    return s.softmax(-1) @ v.double()


def need_a_gpu(world: World) -> None:
    if world.device.type != "cuda":
        raise Skip


def _write_in_place(world: World, given: Given) -> bool:
    """Write other contents into one tensor, or the tensors of one thing, that a call read; False if none."""
    things: list[Callable[[], Any]] = []
    for x in (given.problem.q, given.problem.k):
        things += [partial(changes.write_some_way, world, x, torch.randn_like(x))]
    for value in given.subject.values:
        if isinstance(x := value.read(), Tensor):
            things += [partial(changes.write_some_way, world, x, value.drawn(world.rng))] * 3
    maps = [x for x in world.maps if x.given is given.brought.get("blocks") and not x.copied]
    things += [partial(changes.write_map, world, x) for x in maps] * 3
    things += [partial(changes.change_lengths, world, x) for x in lengths_of(world, given)] * 3
    if not things:
        return False
    with contextlib.suppress(Skip):
        world.rng.choice(things)()
    if maps:
        given.problem.blocks = maps[0].blocks()
    return True
