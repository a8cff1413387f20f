"""Scenarios that each process of tests/parallel/test_processes.py runs, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers import close, gradients
from scenarios import main as main  # which each process runs
from scenarios import raises, scenario
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fa4flex
from fa4flex import variants as v
from fa4flex.parallel import ContextParallel
from fa4flex.parallel.traffic import Model, by_heads, by_keys

B, H, HKV, S, D = 2, 4, 2, 53, 8


def over(attn: fa4flex.Attention, **options: Any) -> ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return attn.parallel(mesh, dim="cp", **{"tile": 4, **options})


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same tensors in every process."""
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def qkv(q_len: int = S, kv_len: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return drawn((B, H, q_len, D), (B, HKV, kv_len, D), (B, HKV, kv_len, D + 2), dtype=dtype)


def copies(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


Make = Callable[..., fa4flex.Attention]


def results(
    make: Make, tensors: list[Tensor], learned: list[Tensor], **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Own and one process's output, log-sum-exp and gradients, all of this rank's tokens."""
    lengths = tensors[0].shape[2], tensors[1].shape[2]
    rank, given = dist.get_rank(), options.pop("lengths", None)
    whole, learned_here = copies(*tensors, *learned), copies(*learned)
    one = make(*whole[3:])(*whole[:3], return_lse=True)
    torch.manual_seed(4)
    upstream = [torch.randn_like(x) for x in one]
    wanted = [*one, *gradients(one, whole, upstream)]
    cp = over(make(*learned_here), **options)
    at = cp.placement(lengths, B, H)
    own = copies(*(at.shard(x, rank, 2, of) for x, of in zip(tensors, OF[2:])))
    found = cp(*own, lengths=given, return_lse=True)
    above = [at.shard(x, rank) for x in upstream]
    got = [*found, *gradients(found, [*own, *learned_here], above)]
    here = [at.shard(x, rank, 2, of) for x, of in zip(wanted, OF)]
    return got, [*here, *wanted[5:]]


OF: Any = ("queries", "queries", "queries", "keys", "keys")


def same(make: Make, tensors: list[Tensor], learned: list[Tensor] | None = None, **options: Any) -> None:
    for number, (got, want) in enumerate(zip(*results(make, tensors, learned or [], **options), strict=True)):
        assert close(got, want), f"result {number} with {options}"


def biased(bias: Tensor, sinks: Tensor) -> fa4flex.Attention:
    return fa4flex.compile(lambda s, b, h, i, j: s + bias[h, i - j + 80], v.causal, sinks=lambda: sinks)


@scenario
def learned_bias_and_sinks() -> None:
    learned = drawn((H, 160), (H,))
    for kind in ("contiguous", "head-tail", "min-heap"):
        same(biased, qkv(), learned, placement=kind, stages=2, moves="keys")
    same(biased, qkv(), learned, lengths=S)


@scenario
def queries_that_visit() -> None:
    """Keys of queries that see very many are divided among ranks; with sinks and a bias that learn."""
    learned = drawn((H, 160), (H,))

    def few_see_all(bias: Tensor, sinks: Tensor) -> fa4flex.Attention:
        return fa4flex.compile(
            lambda s, b, h, i, j: s + bias[h, i - j + 80], v.global_window(3, 2), sinks=lambda: sinks
        )

    for make, lengths in ((few_see_all, (S, S)), (biased, (2, 50))):
        at = over(make(*learned), guests="always").placement(lengths, B, H)
        assert at.splits or dist.get_world_size() == 2
        same(make, qkv(*lengths), learned, guests="always", stages=2, moves="keys")


@scenario
def bytes_are_as_planned() -> None:
    """Bytes that torch.distributed's all-to-alls bring are those that traffic.py says, in both passes."""
    count, send = [0], dist.all_to_all_single

    def counted(found: Tensor, rows: Tensor, receives: list[int], sends: list[int], **more: Any) -> Any:
        others = sum(receives) - receives[dist.get_rank()]
        count[0] += others * rows.element_size() * rows.shape[1:].numel()
        return send(found, rows, receives, sends, **more)

    for moves, of_rank in (("keys", by_keys), ("heads", by_heads)):
        heads = 2 * dist.get_world_size()
        cp = over(fa4flex.compile(mask=v.global_window(5, 3)), guests="always", moves=moves)
        shapes = [(B, heads, S, D), (B, heads // 2, S, D), (B, heads // 2, S, D + 2)]
        own = copies(*(cp.shard(x, 2) for x in drawn(*shapes, dtype=torch.bfloat16)))
        model = Model(heads, heads // 2, D, D + 2, 2, 4, B)
        wanted = of_rank(cp.plan(S), dist.get_rank(), model)
        with patch.object(dist, "all_to_all_single", counted):
            count[0] = 0
            out = cp(*own, lengths=S)
            forward = count[0]
            out.sum().backward()
        found = forward, count[0] - forward
        assert found == wanted, f"{moves}: {found} bytes, planned {wanted}"


@scenario
def heads_that_move() -> None:
    """Each rank computes some heads over all tokens; with GQA, sinks and a bias by head."""
    world = dist.get_world_size()

    def many(q_len: int = S, kv_len: int = S) -> list[Tensor]:
        return drawn((B, 2 * world, q_len, D), (B, world, kv_len, D), (B, world, kv_len, D + 2))

    learned = drawn((2 * world, 160), (2 * world,))
    same(biased, many(), learned, moves="heads")
    same(biased, many(2, 30), learned, moves="heads")
    same(lambda: fa4flex.compile(v.alibi, v.causal), many(), moves="auto")
    tensors = drawn((B, 1, S, D), (B, 1, S, D), (B, 1, S, D))
    cp = over(fa4flex.compile(mask=v.causal), moves="heads")
    raises(["1 query heads"], lambda: cp(*(cp.shard(x, 2) for x in tensors)))


@scenario
def dtensors() -> None:
    """Sharded along the sequence, in order; results come as DTensors placed alike."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    (sinks,) = drawn((H,))
    for options, (q_len, kv_len) in (
        ({}, (S, S)),
        ({"moves": "keys"}, (7, 50)),
        ({"moves": "keys", "guests": "always"}, (7, 50)),
        ({"placement": "min-heap"}, (S, S)),
    ):
        tensors = qkv(q_len, kv_len)
        attn = fa4flex.compile(v.alibi, v.causal, sinks=lambda: sinks)
        whole = copies(*tensors)
        wanted = attn(*whole, return_lse=True)
        ours = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in tensors]
        found = attn.parallel(mesh, tile=4, **options)(*ours, return_lse=True)
        for a, b in zip(found, wanted, strict=True):
            assert list(a.placements) == [Shard(2)] and close(a.full_tensor(), b)
        above = drawn(*(x.shape for x in wanted))
        torch.autograd.backward(wanted, above)
        torch.autograd.backward(found, [distribute_tensor(x, mesh, [Shard(2)]) for x in above])
        for a, b in zip(ours, whole, strict=True):
            assert close(a.grad.full_tensor(), b.grad)
    wrong = [distribute_tensor(x, mesh, [Shard(1)]) for x in tensors]
    raises(["Shard(2), the sequence"], lambda: attn.parallel(mesh)(*wrong))
    raises(["plain tensors among"], lambda: attn.parallel(mesh)(ours[0], tensors[1], tensors[2]))


@scenario
def captured_dtensors() -> None:
    """A bias and documents that are sharded by sequence: read at places in the whole, gradients by their
    owners, whether sums of gradients of whole tensors are left to others or not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    (bias,), ids = drawn((H, S)), torch.arange(S) // 19

    def make(bias: Tensor, ids: Tensor) -> fa4flex.Attention:
        return fa4flex.compile(lambda s, b, h, i, j: s + bias[h, j], v.causal & v.document(ids))

    whole = copies(*qkv(), bias)
    wanted = make(whole[3], ids)(*whole[:3])
    (above,) = drawn(wanted.shape)
    wanted.backward(above)
    for gradients_of, placed in (("summed", Shard(1)), ("own", Shard(1)), ("summed", Replicate())):
        ours = distribute_tensor(bias, mesh, [placed]).requires_grad_()
        spread = distribute_tensor(ids, mesh, [Shard(0)])
        cp = make(ours, spread).parallel(mesh, tile=4, captured_gradients=gradients_of)
        at, rank = cp.placement(S), dist.get_rank()
        assert cp.plan(S) is cp.plan(S), "contents that are the same are planned once"
        own = copies(*(at.shard(x, rank) for x in whole[:3]))
        out = cp(*own, lengths=S)
        assert close(out, at.shard(wanted, rank))
        out.backward(at.shard(above, rank))
        assert list(ours.grad.placements) == [placed] and close(ours.grad.full_tensor(), whole[3].grad)
        for a, b in zip(own, whole, strict=False):
            assert close(a.grad, at.shard(b.grad, rank))
    before = cp.plan(S)
    if rank == 0:
        spread.to_local()[:5] += 99  # the others learn of it by gathering
    assert cp.plan(S) is not before
    at, changed = cp.placement(S), spread.full_tensor()
    found = cp(*(at.shard(x.detach(), rank) for x in whole[:3]), lengths=S)
    assert close(found, at.shard(make(whole[3], changed)(*whole[:3]), rank))
    partial = DTensor.from_local(bias, mesh, [Partial()])
    raises(["captured tensor 0 placed as", "Shard(...)"], lambda: make(partial, ids).parallel(mesh)(*own))
    sinks = distribute_tensor(drawn((H,))[0], mesh, [Replicate()])
    sunk = fa4flex.compile(mask=v.causal, sinks=lambda: sinks).parallel(mesh)
    raises(["sinks that are a DTensor"], lambda: sunk(*own))
    other = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    elsewhere = distribute_tensor(bias, other, [Shard(1), Replicate()])
    raises(["captured tensor 0 placed as"], lambda: make(elsewhere, ids).parallel(other, "b")(*own))


@scenario
def other_lengths() -> None:
    """More keys than queries, fewer, and so few of both that some ranks have nothing to do."""
    for q_len, kv_len in ((29, 53), (53, 29), (3, 3), (1, 40)):
        same(lambda: fa4flex.compile(mask=v.causal & v.sliding_window(9)), qkv(q_len, kv_len))
        same(lambda: fa4flex.compile(v.alibi), qkv(q_len, kv_len), lengths=(q_len, kv_len))


@scenario
def documents_that_change() -> None:
    """One object, other documents at each call, written into the same tensor: another placement each time."""
    ids = torch.zeros(S, dtype=torch.int32)
    attn = fa4flex.compile(mask=v.causal & v.document(ids))
    cp, rank, tensors = over(attn), dist.get_rank(), qkv()
    plans = set()
    for cuts in ([7, 20, 41], [30], [3, 4, 5]):
        ids.copy_(sum((torch.arange(S) >= cut).int() for cut in cuts))  # type: ignore[arg-type]
        at = cp.placement(S)
        plans.add(cp.plan(S).digest)
        out = cp(*(at.shard(x, rank) for x in tensors))
        assert close(out, at.shard(attn(*tensors), rank))
    assert len(plans) == 3


@scenario
def half_precision() -> None:
    """Errors are at most twice one process's own, from the same inputs in float64."""
    tensors = qkv(dtype=torch.bfloat16)
    for make in (lambda: fa4flex.compile(mask=v.causal), lambda: fa4flex.compile(v.softcap(5.0))):
        got, one = results(make, tensors, [])
        exact, _ = results(make, [x.double() for x in tensors], [])
        for number, (a, b, x) in enumerate(zip(got, one, exact, strict=True)):
            assert a.dtype == b.dtype
            errors = torch.tensor(
                [float((y.detach().double() - x.detach()).abs().max()) if y.numel() else 0.0 for y in (a, b)]
            )
            dist.all_reduce(errors, dist.ReduceOp.MAX)
            assert errors[0] <= 2 * errors[1] + 1e-6, f"result {number}: {errors.tolist()}"


@scenario
def compiled_and_checkpointed() -> None:
    """A model compiled around it breaks its graph there; activation checkpointing exchanges once more."""
    attn = fa4flex.compile(v.alibi, v.causal)
    cp, rank = over(attn), dist.get_rank()
    at, whole = cp.placement(S), copies(*qkv())
    wanted = attn(*(2 * x for x in whole))
    gradient = torch.autograd.grad(wanted.sin().sum(), whole)

    def model(*own: Tensor) -> Tensor:
        out: Tensor = cp(*(2 * x for x in own))
        return out.sin()

    compiled = torch.compile(model, backend="eager")
    for run in (compiled, lambda *own: checkpoint(model, *own, use_reentrant=False)):
        own = copies(*(at.shard(x, rank) for x in whole))
        out = run(*own)
        assert close(out, at.shard(wanted.sin(), rank))
        for got, want in zip(torch.autograd.grad(out.sum(), own), gradient, strict=True):
            assert close(got, at.shard(want, rank))


@scenario
def helpers_round_trip() -> None:
    cp = over(fa4flex.compile(mask=v.causal, layout="bshd"))
    x = drawn((B, S, H, D))[0]
    part = cp.shard(x, 1)
    assert torch.equal(part, x[:, cp.positions(S)])
    assert torch.equal(cp.unshard(part, 1, S), x)
    assert torch.equal(cp.unshard(cp(part, part, part), 1, S), cp.unshard(cp(part, part, part), 1, S))
    assert close(
        cp.unshard(cp(part, part, part), 1, S), fa4flex.compile(mask=v.causal, layout="bshd")(x, x, x)
    )


class Layer(nn.Module):
    """Self-attention with a learned bias and sinks; over the mesh's dimension "cp", if there is a mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D)
        self.bias, self.sinks = nn.Parameter(torch.randn(H, 2 * TOKENS)), nn.Parameter(torch.randn(H))
        attn = fa4flex.compile(self.score, v.causal & v.sliding_window(20), sinks=lambda: self.sinks)
        self.attention: Any = attn
        if mesh is not None:
            self.attention = attn.parallel(mesh, tile=4, captured_gradients="own")

    def score(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.bias[h, q_idx - kv_idx + TOKENS]

    def forward(self, x: Tensor) -> Tensor:
        q, k, values = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        whole = {} if isinstance(self.attention, fa4flex.Attention) else {"lengths": TOKENS}
        return x + self.attention(q, k, values, **whole).transpose(1, 2).flatten(2)


TOKENS = 48


def model(mesh: DeviceMesh | None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(mesh), Layer(mesh))


@scenario
def training_under_fsdp() -> None:
    """Batch over one dimension of the mesh, sequence over the other, parameters over both: losses of steps of
    training are those of one process."""
    world = dist.get_world_size()
    parts = (2, world // 2) if world % 2 == 0 else (1, world)
    mesh = init_device_mesh("cpu", parts, mesh_dim_names=("dp", "cp"))
    one, ours = model(None), model(mesh)
    everyone = init_device_mesh("cpu", (world,))
    for layer in ours:
        fully_shard(layer, mesh=everyone)
    fully_shard(ours, mesh=everyone)
    steps = [torch.optim.SGD(x.parameters(), 0.05) for x in (one, ours)]
    at = ours[0].attention.placement(TOKENS)
    rank = mesh.get_local_rank("cp")
    torch.manual_seed(5)
    for _ in range(100 if world == 4 else 5):
        batch, target = torch.randn(2, 4, TOKENS, H * D)
        mine = [at.shard(x.chunk(parts[0])[mesh.get_local_rank("dp")], rank, 1) for x in (batch, target)]
        losses = []
        for module, step, (x, y) in zip((one, ours), steps, ((batch, target), mine), strict=True):
            step.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            step.step()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1] / world, losses[0], rtol=2e-6, atol=0)
    for a, b in zip(one.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.detach().full_tensor(), a.detach(), rtol=1e-4, atol=1e-5)


@scenario
def ranks_that_disagree_raise_everywhere() -> None:
    last, here = dist.get_world_size() - 1, dist.get_rank()
    odd = here == last
    cp, tensors = over(fa4flex.compile(mask=v.causal)), qkv()
    q, k, values = (cp.shard(x, 2) for x in tensors)
    raises([f"rank {last} of", "batch"], lambda: cp(*(x[:1] if odd else x for x in (q, k, values))))
    raises([f"rank {last} of", "dtype"], lambda: cp(*(x.float() if odd else x for x in (q, k, values))))
    raises([f"rank {last} of", "heads"], lambda: cp(q, k[:, :1] if odd else k, values))
    raises(
        [f"rank {last} holds" if odd else f"rank {last} of", "tokens of q"],
        lambda: cp(q[:, :, 1:] if odd else q, k, values, lengths=S),
    )
    window = v.sliding_window(5 if odd else 6)
    raises(["captured numbers"], lambda: over(fa4flex.compile(mask=window))(q, k, values, lengths=S))
    ids = torch.arange(S) // (7 if odd else 30)
    other = over(fa4flex.compile(mask=v.document(ids)), placement="contiguous")
    x, y, z = (other.shard(x, 2) for x in tensors)
    raises(["placement"], lambda: other(x, y, z))
    assert close(cp(q, k, values), cp.placement(S).shard(fa4flex.compile(mask=v.causal)(*tensors), here))


@scenario
def options_are_checked() -> None:
    attn = fa4flex.compile(mask=v.causal)
    raises(["placement='ring'", "head-tail"], lambda: over(attn, placement="ring"))
    raises(["stages=0"], lambda: over(attn, stages=0))
    raises(["guests='some'", "never"], lambda: over(attn, guests="some"))
    raises(["sm_margin=-1"], lambda: over(attn, sm_margin=-1))
    raises(["captured_gradients='mean'"], lambda: over(attn, captured_gradients="mean"))
    raises(
        ["dim='tp'", "cp"],
        lambda: attn.parallel(
            init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), "tp"
        ),
    )
