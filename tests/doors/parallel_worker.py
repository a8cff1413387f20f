"""Scenarios that each process of tests/doors/test_training_parallel.py runs, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from scenarios import main as main  # which each process runs
from scenarios import raises, scenario
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

import fa4flex
from fa4flex import InputError, UnsupportedError, Varlen
from fa4flex.variants import causal, sliding_window

B, H, S, D = 4, 4, 10, 8


# --- DDP and FSDP2 ------------------------------------------------------------------------------------------


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Any) -> Any:
    return score + bias[h, q_idx - kv_idx + S]


class Layer(nn.Module):
    """Self-attention; its bias is read by a method or a closure over self, or owned by its attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D)
        if kind == "owned":
            table = {"bias": torch.randn(H, 2 * S)}
            self.attention = fa4flex.nn.Attention(biased, causal, parameters=table, sinks=torch.randn(H))
            return
        self.bias = nn.Parameter(torch.randn(H, 2 * S))
        self.sinks = nn.Parameter(torch.randn(H))

        def closure(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + self.bias[h, q_idx - kv_idx + S]

        score = self.score if kind == "method" else closure
        self.attention = fa4flex.compile(score, causal, sinks=lambda: self.sinks)

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.bias[h, q_idx - kv_idx + S]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return x + self.attention(q, k, v).transpose(1, 2).flatten(2)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(kind) for kind in ("method", "closure", "owned")))


def whole(x: Tensor | None) -> Tensor:
    assert x is not None, "a parameter without gradient"
    return x.full_tensor() if isinstance(x, DTensor) else x


def training(parallel: Callable[[nn.Module], nn.Module]) -> None:
    """Two steps: losses, gradients and parameters are those of one process with the whole batch."""
    torch.manual_seed(1)
    batches = torch.randn(2, B, S, H * D)
    one, other = model(), model()
    names = [name for name, _ in one.named_parameters()]
    ours = parallel(other)
    first = {name: x.detach().clone() for name, x in one.named_parameters()}
    steps = [torch.optim.SGD(x.parameters(), 0.1) for x in (one, other)]
    for batch in batches:
        losses = []
        for module, step, x in zip(
            (one, ours), steps, (batch, batch.chunk(dist.get_world_size())[dist.get_rank()])
        ):
            step.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1] / dist.get_world_size(), losses[0])
        for name, a, b in zip(names, one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(
                whole(b.grad), a.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        for step in steps:
            step.step()
    for name, a, b in zip(names, one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(b.detach()), a.detach(), rtol=1e-4, atol=1e-6)
        assert not torch.equal(a, first[name]), f"{name} does not learn"


def sharded(module: nn.Module) -> nn.Module:
    on = mesh()  # of CPUs, also where there are GPUs
    for layer in module:
        if isinstance(layer.attention, nn.Module):
            fully_shard(layer.attention, mesh=on)
        fully_shard(layer, mesh=on)
    return fully_shard(module, mesh=on)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


@scenario
def ddp() -> None:
    training(DistributedDataParallel)


@scenario
def fsdp() -> None:
    training(sharded)


@scenario
def ddp_compiled() -> None:
    training(lambda module: compiled(DistributedDataParallel(module)))


@scenario
def fsdp_compiled() -> None:
    training(lambda module: compiled(sharded(module)))


# --- DTensor ------------------------------------------------------------------------------------------------


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def squares() -> DeviceMesh:
    """Two dimensions, of which the first has one process where there are only two."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2))


def agree(
    make: Callable[..., Any],
    tensors: dict[str, Tensor],
    placements: dict[str, Any],
    expected: list[Any],
    on: DeviceMesh | None = None,
) -> None:
    """make(**tensors) gives the results and gradients of plain tensors, the output placed as `expected`."""
    on = mesh() if on is None else on
    shared = [Replicate()] * on.ndim
    plain = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    ours = {
        name: distribute_tensor(x, on, placements.get(name, shared)).requires_grad_(x.is_floating_point())
        for name, x in tensors.items()
    }
    wanted, found = make(**plain), make(**ours)
    assert list(found[0].placements) == expected, f"{found[0].placements}, expected {expected}"
    upstream = [torch.randn_like(x) for x in wanted]
    for x in upstream:
        dist.broadcast(x, 0)
    sum((a * b).sum() for a, b in zip(wanted, upstream)).backward()
    sum((a * distribute_tensor(b, on, shared)).sum() for a, b in zip(found, upstream)).backward()
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b.full_tensor(), a, rtol=1e-4, atol=1e-5)
    for name, x in plain.items():
        if x.is_floating_point():
            gradient = ours[name].grad
            assert tuple(gradient.placements) == tuple(ours[name].placements), name
            torch.testing.assert_close(
                gradient.full_tensor(), x.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def inputs(kv_heads: int = H, **more: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)
    shapes = {"q": H, "k": kv_heads, "v": kv_heads}
    return {**{name: torch.randn(B, heads, S, D) for name, heads in shapes.items()}, **more}


def placed(*placements: Any, **more: Any) -> dict[str, Any]:
    return {"q": list(placements), "k": list(placements), "v": list(placements), **more}


def windowed(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, sinks: Tensor) -> Any:
    """A program that reads neither b nor h."""
    attn = fa4flex.compile(lambda s, b, h, i, j: s * gain[0], sliding_window(4))
    return attn(q, k, v, sinks=sinks, return_lse=True)


@scenario
def batch_and_heads() -> None:
    given = inputs(gain=torch.ones(1) * 0.7, sinks=torch.randn(H))
    for dim in (0, 1):
        agree(windowed, given, placed(Shard(dim)), [Shard(dim)])
        agree(windowed, given, placed(Shard(dim), sinks=[Shard(0)]), [Shard(dim)])
    agree(windowed, given, placed(Replicate()), [Replicate()])
    agree(windowed, given, {"k": [Shard(0)], "v": [Replicate()]}, [Shard(0)])
    agree(windowed, given, placed(Shard(0), Shard(1)), [Shard(0), Shard(1)], squares())


@scenario
def grouped_heads() -> None:
    """Heads stay sharded where each process gets whole groups; else they are gathered."""
    world = dist.get_world_size()
    given = inputs(2, gain=torch.ones(1), sinks=torch.randn(H))
    agree(windowed, given, {"q": [Shard(1)]}, [Shard(1) if world == 2 else Replicate()])
    agree(windowed, {**given, **inputs(1)}, {"q": [Shard(1)]}, [Replicate()])


def by_head(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Any:
    attn = fa4flex.compile(lambda s, b, h, i, j: s + bias[h, i - j + S] - slopes[h] * (i - j))
    return attn(q, k, v, return_lse=True)


@scenario
def tables_by_head_are_sharded_along() -> None:
    given = inputs(bias=torch.randn(H, 2 * S), slopes=torch.rand(H))
    agree(by_head, given, placed(Shard(1)), [Shard(1)])
    agree(by_head, given, placed(Shard(1), bias=[Shard(0)], slopes=[Shard(0)]), [Shard(1)])
    agree(by_head, given, placed(Shard(0)), [Shard(0)])
    # A table of more heads than there are: its halves are not those of the heads.
    longer = inputs(bias=torch.randn(H + 2, 2 * S), slopes=torch.rand(H))
    agree(by_head, longer, placed(Shard(1)), [Replicate()])


@scenario
def arithmetic_with_heads_gathers() -> None:
    def slopes(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Any:
        return fa4flex.compile(lambda s, b, h, i, j: s - gain[0] * h * (i - j))(q, k, v, return_lse=True)

    def shares(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Any:
        return fa4flex.compile(lambda s, b, h, i, j, num_heads: s * gain[0] / num_heads)(
            q, k, v, return_lse=True
        )

    def halves(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Any:
        return fa4flex.compile(lambda s, b, h, i, j: s + gain[h // 2])(q, k, v, return_lse=True)

    for mod in (slopes, shares, halves):
        given = inputs(gain=torch.rand(2))
        agree(mod, given, placed(Shard(1)), [Replicate()])
        agree(mod, given, placed(Shard(0)), [Shard(0)])


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
    return fa4flex.compile(mask=lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (j <= i))(
        q, k, v, return_lse=True
    )


@scenario
def tables_by_batch_are_sharded_along() -> None:
    given = inputs(ids=torch.arange(B * S).view(B, S) // 3)
    agree(documents, given, placed(Shard(0)), [Shard(0)])
    agree(documents, given, placed(Shard(0), ids=[Shard(0)]), [Shard(0)])
    agree(documents, given, placed(Shard(1)), [Shard(1)])

    def steep(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fa4flex.compile(lambda s, b, h, i, j: s * (b + 1))(q, k, v, return_lse=True)

    agree(steep, inputs(), placed(Shard(0)), [Replicate()])


@scenario
def lengths_and_packed_sequences() -> None:
    used = torch.tensor([3, 10, 1, 7], dtype=torch.int32)
    starts = torch.tensor([0, 4, 9, B * S], dtype=torch.int32)

    def padded(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Any:
        return fa4flex.compile(mask=causal)(q, k, v, varlen=Varlen(seqused_k=used), return_lse=True)

    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
        return fa4flex.compile(mask=causal)(q, k, v, varlen=Varlen(starts), return_lse=True)

    agree(padded, inputs(used=used), placed(Shard(0)), [Shard(0)])
    agree(padded, inputs(used=used), placed(Shard(1)), [Shard(1)])
    rows = {name: x.transpose(1, 2).flatten(0, 1) for name, x in inputs().items()}
    agree(packed, {**rows, "starts": starts}, placed(Shard(1)), [Shard(1)])
    tokens = [distribute_tensor(x, mesh(), [Shard(0)]) for x in rows.values()]
    whole_starts = distribute_tensor(starts, mesh(), [Replicate()])
    raises(["along tokens"], lambda: packed(*tokens, whole_starts), UnsupportedError)


@scenario
def layouts_and_no_gradients() -> None:
    given = [x.transpose(1, 2) for x in inputs().values()]
    swapped = fa4flex.compile(mask=causal, layout="bshd")
    with torch.no_grad():
        found = swapped(*[distribute_tensor(x, mesh(), [Shard(2)]) for x in given])
    assert list(found.placements) == [Shard(2)]
    torch.testing.assert_close(found.full_tensor(), swapped(*given))
    plain = fa4flex.compile(mask=causal)
    with torch.inference_mode():
        found = plain(*[distribute_tensor(x.clone(), mesh(), [Shard(1)]) for x in inputs().values()])
        assert list(found.placements) == [Shard(1)]
        torch.testing.assert_close(found.full_tensor(), plain(*inputs().values()))


@scenario
def what_cannot_be_right_raises() -> None:
    plain = inputs()
    spread = {name: distribute_tensor(x, mesh(), [Shard(0)]) for name, x in plain.items()}
    attn = fa4flex.compile(mask=causal)
    for dim, said in ((2, "the sequence"), (3, "head_dim")):
        wrong = [distribute_tensor(x, mesh(), [Shard(dim)]) for x in plain.values()]
        raises([said], lambda wrong=wrong: attn(*wrong), UnsupportedError)
    raises(["plain tensor among DTensors"], lambda: attn(spread["q"], plain["k"], plain["v"]), InputError)
    raises(["plain tensor among DTensors"], lambda: attn(plain["q"], spread["k"], plain["v"]), InputError)
    ids = torch.arange(B * S).view(B, S) // 3
    raises(["captured tensor 0 is a plain"], lambda: documents(*spread.values(), ids), InputError)
    with implicit_replication():
        found, _ = documents(*spread.values(), ids)
    torch.testing.assert_close(found.full_tensor(), documents(*plain.values(), ids)[0])
    shared = distribute_tensor(ids, mesh(), [Replicate()])
    raises(["q is a plain"], lambda: documents(*plain.values(), shared), InputError)
    sinks = distribute_tensor(torch.zeros(H), mesh(), [Replicate()])
    raises(["q is a plain"], lambda: attn(*plain.values(), sinks=sinks), InputError)


@scenario
def partial_inputs_are_summed() -> None:
    plain = inputs()
    share = {name: x / dist.get_world_size() for name, x in plain.items()}
    ours = [DTensor.from_local(x, mesh(), [Partial()]) for x in share.values()]
    attn = fa4flex.compile(mask=causal)
    torch.testing.assert_close(attn(*ours).full_tensor(), attn(*plain.values()))


@scenario
def compiled_graphs_of_dtensors() -> None:
    given = inputs(bias=torch.randn(H, 2 * S), slopes=torch.rand(H))

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Any:
        return fa4flex.flex_attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: s + bias[h, i - j + S] - slopes[h] * (i - j),
            return_lse=True,
        )

    agree(torch.compile(attend, backend="aot_eager", fullgraph=True), given, placed(Shard(1)), [Shard(1)])
