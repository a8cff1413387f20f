"""Sums of probabilities per key by the Hopper kernel on the simulated GPU: right, and nothing found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from executed import Compared
from helpers import SMS, cumulative, drawn_device, of_passes, poisoned
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import BlockMap, Schedule, Varlen, reference
from fa4flex.codegen.analyze.facts import analyze
from fa4flex.codegen.expr import TRUE, sym
from fa4flex.kernels.dispatch import plan_mass
from fa4flex.kernels.mass_sm90.plan import MassPlan
from fa4flex.kernels.plan.errors import PlanError
from fa4flex.kernels.plan.problem import WIDEST, Problem
from fa4flex.kernels.plan.target import SM90A
from fa4flex.kernels.plan.verify import prove
from fa4flex.runtime.derived.weights import KeyMass

N = 320
IDS = torch.arange(N) // 70
BIAS = torch.linspace(-2, 2, 7 * N).cos().view(7, N)
KINDS = {"mass": "mass_sm90", "tables": "block_tables", "lengths": "sequences"}


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx < 60) & (kv_idx <= q_idx)


def empty_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx % 64 < 40)


def unseen_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= 128) & ((h != 1) | (kv_idx >= 190))


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


def ends(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
    return kv_idx <= q_idx + kv_len - q_len


def distant(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s - (h + 1) * 0.125 * (q_idx - kv_idx).abs()


def capped(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20 * torch.tanh(s / 20) + BIAS[h, kv_idx]


COMPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "distant, ends": {"score_mod": distant, "mask": ends},
    "capped, near": {"score_mod": capped, "mask": near},
    "documents": {"mask": documents},
    "empty rows": {"mask": empty_rows},
    "unseen keys": {"mask": unseen_keys},
    "negative scale": {"mask": near, "scale": -0.125},
}


def true(q: Tensor, k: Tensor, lse: Tensor, composition: dict[str, Any], b: int | None = None) -> Tensor:
    """Sums [B, H, Skv] of dense queries and keys."""
    score, mask = composition.get("score_mod"), composition.get("mask")
    if b is not None:
        score, mask = reference.of_sequence(score, b, 1), reference.of_sequence(mask, b, 0)
    return reference.probabilities(q, k, lse, score, mask, scale=composition.get("scale")).sum(2)


def lse_of(q: Tensor, k: Tensor, composition: dict[str, Any], b: int | None = None) -> Tensor:
    score, mask = composition.get("score_mod"), composition.get("mask")
    if b is not None:
        score, mask = reference.of_sequence(score, b, 1), reference.of_sequence(mask, b, 0)
    return reference.attention(q, k, k, score, mask, scale=composition.get("scale"))[1].float()


def close(found: Tensor, exact: Tensor) -> None:
    """Products of 16 bits are exact, and sums those of float32: the approximate exponential is off by 2^-22,
    and what it is taken of by some 2^-24 of a score."""
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=4e-5, atol=4e-6)


def by_kernel(gpu: Any) -> None:
    """One launch of the kernel, and nothing found."""
    assert not gpu.findings, gpu.report()
    assert [KINDS["mass"] in one.kernel for one in of_passes(gpu)] == [True]


def judged(composition: dict[str, Any], q: Tensor, k: Tensor, device: Any = None, **options: Any) -> None:
    lse = lse_of(q, k, composition)
    with torch.no_grad(), poisoned(), drawn_device() if device is None else device as gpu:
        found = fa4flex.key_mass(q, k, lse, **composition, **options)
    by_kernel(gpu)
    close(found, true(q, k, lse, composition))


def tensors(
    q_len: int, kv_len: int, width: int, heads: int = 4, kv_heads: int = 2, batch: int = 1
) -> tuple[Tensor, Tensor]:
    shapes = (batch, heads, q_len, width), (batch, kv_heads, kv_len, width)
    return tuple(torch.randn(*shape).bfloat16() for shape in shapes)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_compositions(name: str, seed: int, launches: Compared) -> None:
    """Heads of some width; what roles did at barriers is what the graph says."""
    width = random.choice((40, 64, 128))
    judged(COMPOSED[name], *tensors(random.choice((64, 150, 200)), 200, width))
    assert launches.launches >= 1


@pytest.mark.slow
@pytest.mark.parametrize("width", (24, 96, 192, 256))
def test_widths(width: int, seed: int) -> None:
    judged(COMPOSED["distant, ends"], *tensors(130, 150, width))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (7, 1)])
def test_groups(heads: int, kv_heads: int, seed: int) -> None:
    q, k = tensors(90, 140, 64, heads, kv_heads, batch=2)
    judged(COMPOSED["capped, near"], q.half(), k.half())


@pytest.mark.slow
@pytest.mark.parametrize("timing", ["eager", "late", "random"])
@pytest.mark.parametrize("name", ["plain", "distant, ends"])
def test_every_timing(name: str, timing: str, seed: int) -> None:
    """Rings go round: three tiles of queries in flight, and more to come. The same bits each time."""
    q, k = tensors(640, 130, 64, 1, 1)
    lse, results = lse_of(q, k, COMPOSED[name]), []
    for draw in range(3 if timing == "random" else 1):
        with torch.no_grad(), poisoned(), ptxsim.device("sm_90a", draw, timing, sms=SMS) as gpu:
            results.append(fa4flex.key_mass(q, k, lse, **COMPOSED[name]))
        by_kernel(gpu)
    close(results[0], true(q, k, lse, COMPOSED[name]))
    assert all(torch.equal(results[0], x) for x in results[1:])


@pytest.mark.slow
def test_layout_and_strides(seed: int) -> None:
    """Queries before heads, as they are; a head's keys within a larger tensor."""
    q, k = tensors(130, 150, 64)
    lse = lse_of(q, k, {"mask": ends})
    rows = q.transpose(1, 2).contiguous(), torch.cat([k, k], -1)[..., :64].transpose(1, 2)
    with torch.no_grad(), poisoned(), drawn_device() as gpu:
        found = fa4flex.key_mass(*rows, lse, mask=ends, layout="bshd", reduce="kv_heads")
    by_kernel(gpu)
    close(found, true(q, k, lse, {"mask": ends}).unflatten(1, (2, 2)).sum(2))


@pytest.mark.slow
def test_block_maps(seed: int) -> None:
    classes = torch.randint(0, 3, (1, 4, 2, 2), dtype=torch.uint8)
    blocks = BlockMap.from_dense(classes, 128)
    full = classes.repeat_interleave(128, 2).repeat_interleave(128, 3)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        found = full[b * 0, h, q_idx, kv_idx]
        return (found == 2) | ((found == 1) & (kv_idx <= q_idx))

    q, k = tensors(256, 256, 64)
    lse = lse_of(q, k, {"mask": mask})
    with torch.no_grad(), poisoned(), drawn_device() as gpu:
        found = fa4flex.key_mass(q, k, lse, mask=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, blocks=blocks)
    by_kernel(gpu)
    close(found, true(q, k, lse, {"mask": mask}))


@pytest.mark.parametrize(("maker", "width"), [("device", 64), ("host", 96)])
def test_tables_by_keys(maker: str, width: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a table is a tile of keys, whoever makes it: here tiles of queries and keys differ in number,
    and in what is listed. The width decides that no launch of the other maker is found."""
    if maker == "host":
        monkeypatch.setattr("fa4flex.runtime.cuda.tables.block_tables.MOST_BYTES", 0)
    pairs = torch.rand(N, N) < 0.5
    pairs[:192, 128:] = False
    judged({"mask": lambda b, h, q_idx, kv_idx: pairs[q_idx, kv_idx]}, *tensors(N, N, width))


RAGGED = ([150, 1, 70], [40, 200, 129])
USED = ([130, 0, 61], [40, 177, 3])


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True], ids=["whole", "used"])
@pytest.mark.parametrize("name", ["plain", "distant, ends", "documents"])
def test_packed_sequences(name: str, used: bool, seed: int) -> None:
    """Sequences that end before their room does have sums of 0 there."""
    composition, (queries, keys) = COMPOSED[name], RAGGED
    q, k = torch.randn(sum(queries), 4, 64).bfloat16(), torch.randn(sum(keys), 2, 64).bfloat16()
    cu_q, cu_k = cumulative(queries), cumulative(keys)
    lse, exact = torch.full((4, sum(queries)), -torch.inf), torch.zeros(4, sum(keys), dtype=torch.float64)
    for b, (n, m) in enumerate(zip(*(USED if used else RAGGED), strict=True)):
        if n and m:
            i, j = int(cu_q[b]), int(cu_k[b])
            x, y = (t[at : at + c].transpose(0, 1)[None] for t, at, c in ((q, i, n), (k, j, m)))
            lse[:, i : i + n] = lse_of(x, y, composition, b)[0]
            exact[:, j : j + m] = true(x, y, lse[None, :, i : i + n], composition, b)[0]
    lengths = [torch.tensor(x) for x in USED] if used else [None, None]
    varlen = Varlen(cu_q, cu_k, *lengths)
    with torch.no_grad(), poisoned(), drawn_device() as gpu:
        found = fa4flex.key_mass(q, k, lse, varlen=varlen, **composition)
    by_kernel(gpu)
    close(found, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "distant, ends"])
def test_padded_batches(name: str, seed: int) -> None:
    composition, (n, m) = COMPOSED[name], (150, 200)
    q, k = tensors(n, m, 64, batch=3)
    lse, exact = torch.full((3, 4, n), -torch.inf), torch.zeros(3, 4, m, dtype=torch.float64)
    for b, (i, j) in enumerate(zip(*USED, strict=True)):
        if i and j:
            x, y = q[b : b + 1, :, :i], k[b : b + 1, :, :j]
            lse[b : b + 1, :, :i] = lse_of(x, y, composition, b)
            exact[b] = torch.nn.functional.pad(true(x, y, lse[b : b + 1, :, :i], composition, b), (0, m - j))
    varlen = Varlen(seqused_q=torch.tensor(USED[0]), seqused_k=torch.tensor(USED[1]))
    with torch.no_grad(), poisoned(), drawn_device() as gpu:
        found = fa4flex.key_mass(q, k, lse, varlen=varlen, **composition)
    by_kernel(gpu)
    close(found, exact)


@pytest.mark.slow
def test_contents_change_between_calls(seed: int) -> None:
    """One launch that is kept serves other contents, lengths and numbers."""
    table, slope = torch.zeros(4, 256), 0.5

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + table[h, kv_idx] - slope * (q_idx - kv_idx).abs()

    attn = fa4flex.compile(score_mod=score, mask=near)
    composition = {"score_mod": score, "mask": near}
    with torch.no_grad(), poisoned(), drawn_device() as gpu:
        for length, number in ((140, 0.5), (140, 0.5), (200, 0.25)):
            slope = number
            table.normal_()
            q, k = tensors(length, length, 64)
            lse = lse_of(q, k, composition)
            close(attn.key_mass(q, k, lse), true(q, k, lse, composition))
    assert not gpu.findings, gpu.report()
    assert [KINDS["mass"] in one.kernel for one in of_passes(gpu)] == [True] * 3
    assert len(attn.prepared.engine.mass) == 2, "the second call is like the first one"


@pytest.mark.slow
def test_in_compiled_graphs(seed: int) -> None:
    """The operator of a graph launches the kernel."""
    q, k = tensors(70, 90, 64)
    lse = lse_of(q, k, {"mask": ends})

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        return fa4flex.key_mass(q, k, lse, mask=ends, reduce="heads")

    with torch.no_grad(), poisoned(), drawn_device() as gpu:
        found = function(q, k, lse)
    by_kernel(gpu)
    close(found, true(q, k, lse, {"mask": ends}).sum(1))


@pytest.mark.slow
def test_gradients_beside_the_kernel(seed: int) -> None:
    """The forward pass is the kernel's, gradients are those of PyTorch operations."""
    q, k = tensors(70, 90, 64)
    composition = COMPOSED["capped, near"]
    lse = lse_of(q, k, composition)
    own = [x.clone().requires_grad_() for x in (q, k, lse)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, lse)]
    upstream = torch.randn(1, 4, 90)
    with drawn_device() as gpu:
        found = fa4flex.key_mass(*own, **composition)
        got = torch.autograd.grad(found, own, upstream)
    by_kernel(gpu)
    right = torch.autograd.grad(true(*exact, composition), exact, upstream.double())
    for mine, truth in zip(got, right, strict=True):
        error = (mine.double() - truth).abs().max()
        assert error <= 2 * (truth.to(mine.dtype).double() - truth).abs().max() + 1e-5 * truth.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["Blackwell", "wider heads", "flex"])
def test_other_calls_are_computed_by_pytorch(why: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    part: Callable[..., Any] = KeyMass.part

    def counted(self: KeyMass, *arguments: Any) -> Any:
        pieces.append(1)
        return part(self, *arguments)

    monkeypatch.setattr(KeyMass, "part", counted)
    q, k = tensors(20, 30, WIDEST + 8 if why == "wider heads" else 64)
    lse = lse_of(q, k, {"mask": near})
    options = {"backend": "flex"} if why == "flex" else {}
    with torch.no_grad(), drawn_device("sm_100a" if why == "Blackwell" else "sm_90a") as gpu:
        found = fa4flex.key_mass(q, k, lse, mask=near, **options)
    assert pieces and not gpu.results
    torch.testing.assert_close(found.double(), true(q, k, lse, {"mask": near}), rtol=1e-4, atol=1e-5)


# --- plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(8, WIDEST + 1, 8))
@pytest.mark.parametrize("lengths", ["dense", "packed", "used"])
def test_plans_hold(width: int, lengths: Any) -> None:
    """Memory, barriers, and the order of roles, whatever comes first."""
    facts = analyze(sym("score"), TRUE)
    for problem in (
        Problem(width, width, lengths=lengths),
        Problem(width, width, lengths=lengths, mask_form="tables", long_scores=True),
        Problem(width, width, lengths=lengths, mask_form="tables", many_reads=True),
    ):
        plan = plan_mass(facts, problem, SM90A, Schedule())
        plan.check()
        assert str(plan.tile[1]) in plan.explain()


def test_a_queries_stage_that_is_not_awaited_is_noticed() -> None:
    """The graph's proof is of this pipeline: without the consumers' release, it does not hold."""
    plan = plan_mass(analyze(sym("score"), TRUE), Problem(64, 64), SM90A, Schedule())
    assert isinstance(plan, MassPlan)
    producer, *consumers = plan.topology.roles

    def early(events: Any) -> Any:
        """Events in which Q's stage is given back before its product is done."""
        release = [x for x in events if x.action == "release"]
        kept = [x for x in events if x.action != "release"]
        at = next(i for i, x in enumerate(kept) if x.action == "finish")
        return (*kept[:at], *release, *kept[at:])

    broken = [replace(x, first=early(x.first), body=early(x.body)) for x in consumers]
    prove(plan.topology)
    with pytest.raises(PlanError):
        prove(replace(plan.topology, roles=(producer, *broken)))
