"""Gradients over listed keys by the Hopper kernel on the simulated GPU: right against the oracle, and nothing
found, whatever lists hold and however heads are grouped."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import captured_cases
import pytest
import torch
from executed import comparing
from helpers import cumulative, poisoned
from listed import MODS, TIMINGS, Size, allowed_pairs, drawn_lists, drawn_size, tensors
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Lists, UnsupportedError, Varlen, reference
from fa4flex.primitives.mask import as_mask
from fa4flex.primitives.sinks import Sinks
from fa4flex.runtime.listed_keys import tiling_of
from fa4flex.variants import alibi, causal


def of_lists(names: list[str]) -> bool:
    return any("bwd_lists_sm90" in name for name in names)


def gradients(
    attn: Any, inputs: list[Tensor], leaves: list[Tensor], upstream: tuple[Tensor, Tensor], **more: Any
) -> list[Tensor]:
    return captured_cases.gradients(lambda *x: attn(*x, return_lse=True, **more), inputs, leaves, upstream)


def check(
    name: str,
    size: Size,
    lists: Lists,
    timing: tuple[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: Any = "bhsd",
    sinks: bool = False,
) -> Any:
    """Gradients of a call are made by the kernel, at most twice as wrong as PyTorch's in this dtype; nothing
    is found. Returns the simulated GPU."""
    score_mod, mask = MODS[name]
    qkv = tensors(size, dtype)
    shape = size.batch, size.heads, size.q_len
    upstream = torch.randn(*shape, size.dv).to(dtype), torch.randn(shape)
    logits = [torch.randn(size.heads).requires_grad_()] * sinks
    attn = fa4flex.compile(score_mod, mask, sinks=Sinks(logits[0]) if sinks else None, layout=layout)
    how, seed = timing or random.choice((*TIMINGS, ("random", random.randrange(99))))
    where = f"{name}, {size}, {lists!r}, {how} {seed}"
    turned = (lambda x: x.transpose(1, 2)) if layout == "bshd" else (lambda x: x)
    given = [turned(x).contiguous() for x in qkv]
    with poisoned(), ptxsim.device("sm_90a", seed, how, sms=2) as gpu:
        made = gradients(attn, given, logits, (turned(upstream[0]), upstream[1]), blocks=lists)
    assert not gpu.findings, f"{where}: {gpu.report()}"
    assert of_lists([result.kernel for result in gpu.results]), where
    got = [*map(turned, made[:3]), *made[3:]]
    exact, budgets = expected(name, qkv, logits, upstream, allowed_pairs(lists, size))
    captured_cases.judge(where, got, exact, budgets)
    return gpu


def expected(
    name: str, qkv: list[Tensor], logits: list[Tensor], upstream: tuple[Tensor, Tensor], allowed: Tensor
) -> tuple[list[Tensor], list[float]]:
    """Gradients by the oracle, and PyTorch's worst errors."""
    score_mod, mask = MODS[name]

    def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return allowed[b, h, q_idx, kv_idx]

    whole = {"mask": listed if mask is None else as_mask(listed) & mask}
    whole |= {} if score_mod is None else {"score_mod": score_mod}
    plain = {**whole, **({"sinks": Sinks(logits[0])} if logits else {})}

    def once(*given: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        *inputs, dout, dlse = given
        wide = [x.double() for x in inputs]
        sinks = logits[0] if logits else None
        exact = captured_cases.gradients(
            lambda *x: reference.attention(*x, **whole, sinks=sinks), wide, logits, (dout, dlse)
        )
        same = captured_cases.gradients(
            lambda *x: captured_cases.plain(plain, *x), inputs, logits, (dout, dlse)
        )
        return exact, same

    return captured_cases.over_draws(once, (*qkv, *upstream))


@pytest.mark.slow
@pytest.mark.parametrize("beside", (False, True), ids=("lists alone", "keys beside"))
@pytest.mark.parametrize("name", MODS)
def test_variant(name: str, beside: bool, seed: int) -> None:
    """Masks and mods see the index of each key, and derivatives are those of the score there."""
    rng = random.Random(seed)
    size = drawn_size(rng)
    check(name, size, drawn_lists(rng, size, beside, counted=rng.random() < 0.3))


SHAPES = {
    "16:1": (16, 1, 1, 5, {"unit": 1, "capacity": 40}),
    "64:4": (64, 4, 4, 4, {"unit": 64, "capacity": 3}),
    "8:8": (8, 8, 8, 3, {"unit": 16, "capacity": 7}),
    "128:1": (128, 1, 1, 2, {"unit": 1, "capacity": 90}),
    "70:1, rows of 2": (70, 1, 1, 3, {"unit": 4, "capacity": 20, "queries": 2}),
    "1:1, rows of 40": (1, 1, 1, 50, {"unit": 16, "capacity": 5, "queries": 40}),
}
"""Heads of queries, of keys and of lists, queries, and what lists are like."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("timing", TIMINGS, ids=lambda timing: timing[0])
def test_shape(name: str, timing: tuple[str, int], seed: int) -> None:
    heads, kv_heads, list_heads, q_len, more = SHAPES[name]
    rng = random.Random(seed)
    size = Size(heads, kv_heads, list_heads, q_len, 220)
    check("causal", size, drawn_lists(rng, size, rng.random() < 0.5, **more), timing)


WIDTHS = {"128": (128, 128), "96 and 40": (96, 40), "64 and 128": (64, 128), "40": (40, 40)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDTHS)
def test_widths(name: str, seed: int) -> None:
    rng = random.Random(seed)
    size = drawn_size(rng, *WIDTHS[name])
    check(rng.choice(("plain", "alibi, causal")), size, drawn_lists(rng, size, True))


@pytest.mark.slow
def test_batches_of_united_lists(seed: int) -> None:
    """Tiles have the queries of several rows of the lists, of each of which some are the same."""
    rng = random.Random(seed)
    size = Size(32, 2, rng.choice((1, 2)), 5, rng.choice((63, 150)), batch=2, lists=rng.choice((1, 2)))
    lists = drawn_lists(rng, size, rng.random() < 0.5, capacity=8, queries=1, counted=True)
    assert tiling_of(lists, 32, 2).united > 1
    check("causal", size, lists)


@pytest.mark.slow
def test_sinks_layouts_and_dtypes(seed: int) -> None:
    rng = random.Random(seed)
    size = Size(8, 2, rng.choice((1, 2)), 3, 150, batch=2)
    for layout, dtype in (("bhsd", torch.float16), ("bshd", torch.bfloat16)):
        lists = drawn_lists(rng, size, True, dtype=torch.int64)
        check("causal", size, lists, dtype=dtype, layout=layout, sinks=True)


@pytest.mark.slow
def test_what_changes_between_calls_is_seen(seed: int) -> None:
    """A captured number, ids in place, lengths, and the dtype; one attention, whose launches are kept."""
    factor = SimpleNamespace(value=1.0)

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * factor.value

    attn, ids = fa4flex.compile(scaled, causal), torch.arange(40, dtype=torch.int32).view(1, 1, 1, -1)
    changes = (
        (1.0, 0, 3, 200, torch.bfloat16),
        (0.2, 7, 3, 200, torch.bfloat16),
        (3.0, 20, 2, 150, torch.float16),
    )
    for factor.value, first, q_len, kv_len, dtype in changes:
        ids.copy_(torch.arange(first, first + 40).view_as(ids))
        lists = Lists(ids, kv_len=kv_len, unit=3, q_len=q_len, queries=4)
        qkv = tensors(Size(16, 1, 1, q_len, kv_len), dtype)
        upstream = torch.randn(1, 16, q_len, 64), torch.randn(1, 16, q_len)
        with ptxsim.device("sm_90a", seed, "eager", sms=2) as gpu:
            got = gradients(attn, qkv, [], upstream, blocks=lists)
        assert not gpu.findings and of_lists([result.kernel for result in gpu.results])
        fresh = fa4flex.compile(lambda score, *i, by=factor.value: score * by, causal & lists.mask())
        exact = gradients(fresh, [x.double() for x in qkv], [], upstream)
        for x, y in zip(got, exact, strict=True):
            assert (x.double() - y).abs().max() <= 3 * torch.finfo(dtype).eps * y.abs().max()


@pytest.mark.slow
def test_repeated_ids_count_once() -> None:
    """Ids in no order, of which most stand twice or more."""
    size = Size(40, 1, 1, 1, 150)
    ids = torch.randint(-2, 160, (1, 1, 1, 400), dtype=torch.int32)
    check("plain", size, Lists(ids, kv_len=150))


@pytest.mark.slow
def test_packed_sequences(seed: int) -> None:
    """Some have no query or key."""
    rng, lengths, keys = random.Random(seed), [3, 0, 5, 1], [90, 20, 64, 0]
    q, k, v = (torch.randn(sum(n), h, 64).bfloat16() for n, h in ((lengths, 8), (keys, 2), (keys, 2)))
    size = Size(8, 2, 2, 6, 100, batch=4, lists=rng.choice((1, 4)))
    lists = drawn_lists(rng, size, True, counted=True)
    attn, varlen = fa4flex.compile(alibi, causal), Varlen(cumulative(lengths), cumulative(keys))
    upstream = torch.randn(sum(lengths), 8, 64).bfloat16(), torch.randn(8, sum(lengths))
    with poisoned(), ptxsim.device("sm_90a", seed % 99, "random", sms=2) as gpu:
        got = gradients(attn, [q, k, v], [], upstream, blocks=lists, varlen=varlen)
    assert not gpu.findings and of_lists([result.kernel for result in gpu.results]), gpu.report()
    starts = [sum(lengths[:b]) for b in range(4)], [sum(keys[:b]) for b in range(4)]
    for b, (n, m) in enumerate(zip(lengths, keys, strict=True)):
        rows, columns = (slice(s[b], s[b] + x) for s, x in zip(starts, (n, m), strict=True))
        mine = [got[0][rows], got[1][columns], got[2][columns]]
        if n and m:
            allowed = allowed_pairs(of_sequence(lists, b, n, m), replace(size, batch=1, q_len=n, kv_len=m))
            one = [x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns])]
            above = upstream[0][rows].transpose(0, 1)[None], upstream[1][None, :, rows]
            exact, budgets = expected("alibi, causal", one, [], above, allowed)
            captured_cases.judge(f"sequence {b}", [x.transpose(0, 1)[None] for x in mine], exact, budgets)
        else:
            assert not any(x.any() for x in mine)


def of_sequence(lists: Lists, b: int, q_len: int, kv_len: int) -> Lists:
    """The lists of one sequence, over its own lengths."""
    row = b if lists.ids.shape[0] > 1 else 0
    rows = -(-q_len // lists.queries)
    counts = None if lists.counts is None else lists.counts[row, None, :, :rows]
    return replace(lists, ids=lists.ids[row, None, :, :rows], counts=counts, q_len=q_len, kv_len=kv_len)


@pytest.mark.slow
def test_used_lengths(seed: int) -> None:
    """Queries, keys and values past an end are NaN, and their gradients are zeros."""
    rng, size = random.Random(seed), Size(6, 2, 1, 3, 200, batch=3)
    used, queries = (200, 65, 0), (3, 2, 3)
    q, k, v = tensors(size)
    upstream = torch.randn(3, 6, 3, 64).bfloat16(), torch.randn(3, 6, 3)
    for b, (n, m) in enumerate(zip(queries, used, strict=True)):
        k[b, :, m:], v[b, :, m:], q[b, :, n:] = torch.nan, torch.nan, torch.nan
        upstream[0][b, :, n:], upstream[1][b, :, n:] = 0, 0
    varlen = Varlen(*(None, None), *(torch.tensor(x, dtype=torch.int32) for x in (queries, used)))
    lists, attn = drawn_lists(rng, size, True), fa4flex.compile(mask=causal)
    with poisoned(), ptxsim.device("sm_90a", 1, "late", sms=2) as gpu:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attn(*inputs, return_lse=True, blocks=lists, varlen=varlen)
        there = torch.arange(3) < torch.tensor(queries)[:, None, None]
        seen = torch.where(there & (lse > -torch.inf), lse, 0.0)
        total = (torch.where(there[..., None], out, 0) * upstream[0]).sum() + (seen * upstream[1]).sum()
        got = torch.autograd.grad(total, inputs)
    assert not gpu.findings and of_lists([result.kernel for result in gpu.results]), gpu.report()
    for b, (n, m) in enumerate(zip(queries, used, strict=True)):
        dq, dk, dv = (x[b : b + 1] for x in got)
        assert not any(x.any() for x in (dq[:, :, n:], dk[:, :, m:], dv[:, :, m:]))
        if m:
            allowed = allowed_pairs(of_sequence(lists, b, n, m), replace(size, batch=1, q_len=n, kv_len=m))
            one = [q[b : b + 1, :, :n], *(x[b : b + 1, :, :m] for x in (k, v))]
            above = tuple(x[b : b + 1, :, :n] for x in upstream)
            exact, budgets = expected("causal", one, [], above, allowed)  # type: ignore[arg-type]
            captured_cases.judge(f"entry {b}", [dq[:, :, :n], dk[:, :, :m], dv[:, :, :m]], exact, budgets)


def call_of(unit: int = 64, **composition: Any) -> tuple[Any, list[Tensor], Lists]:
    size = Size(2, 1, 1, 70, 128)
    ids = torch.zeros(1, 1, -(-70 // (64 if unit == 64 else 1)), 1, dtype=torch.int32)
    lists = Lists(ids, kv_len=128, q_len=70, unit=unit, queries=64 if unit == 64 else 1)
    return fa4flex.compile(**composition), [x.requires_grad_() for x in tensors(size)], lists


@pytest.mark.slow
def test_others_are_not_gathered() -> None:
    """Ordered sums, and gradients of captured tensors, have no kernel for short units; blocks of whole tiles
    have the one for maps."""
    weight = torch.ones(2).requires_grad_()
    learned = {"score_mod": lambda score, b, h, q_idx, kv_idx: score * weight[h]}
    ordered = {"schedule": fa4flex.Schedule(deterministic=True)}
    for composition in (learned, ordered):
        attn, qkv, lists = call_of(unit=4, **composition)
        with ptxsim.device("sm_90a", sms=2), pytest.raises(UnsupportedError, match="units of 4 keys"):
            attn(*qkv, blocks=lists)
    attn, qkv, lists = call_of()
    with ptxsim.device("sm_90a", sms=2) as gpu:
        attn(*qkv, blocks=lists).sum().backward()
    names = [result.kernel for result in gpu.results]
    assert any("bwd_sm90" in name for name in names) and not of_lists(names)


def test_what_comes_too_late_is_told() -> None:
    """Second derivatives, and the wish for ordered sums after the forward pass."""
    attn, qkv, lists = call_of(unit=4)
    with ptxsim.device("sm_90a", sms=2):
        out = attn(*qkv, blocks=lists)
        (dq,) = torch.autograd.grad(out.float().sum(), qkv[:1], create_graph=True)
        with pytest.raises(UnsupportedError, match=r"second derivative.*\n.*\n.*lists\.map"):
            dq.sum().backward()
        out = attn(*qkv, blocks=lists)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(UnsupportedError, match="in one order of sums"):
                out.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)


def test_batches_of_upstream_gradients() -> None:
    attn, qkv, lists = call_of(unit=4)
    with ptxsim.device("sm_90a", sms=2):
        out = attn(*qkv, blocks=lists)
        above = torch.randn(2, *out.shape).bfloat16()
        found = torch.autograd.grad(out, qkv, above, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(out, qkv, dout, retain_graph=True) for dout in above]
    for x, *rows in zip(found, *each, strict=True):
        torch.testing.assert_close(x, torch.stack(rows), atol=2e-2, rtol=1e-2)


def test_explained() -> None:
    attn, _, lists = call_of(unit=4)
    sizes = {"q_len": 70, "kv_len": 128, "heads": 2, "kv_heads": 1, "lists": lists}
    assert "backward kernel for listed keys" in str(attn.explain(arch="sm_90a", **sizes))
    assert "backward kernel" not in str(attn.explain(arch="sm_90a", head_dim=256, **sizes))
    told = str(attn.explain(arch="sm_90a", direction="backward", **sizes))
    assert "backward kernel for listed keys" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", ("16:1", "70:1, rows of 2"))
def test_it_does_what_its_graph_says(name: str, seed: int) -> None:
    heads, kv_heads, list_heads, q_len, more = SHAPES[name]
    size = Size(heads, kv_heads, list_heads, q_len, 220)
    with comparing(keep=True) as compared:
        check("causal", size, drawn_lists(random.Random(seed), size, True, **more))
    assert compared.launches == 2 and not compared.differences, "\n".join(compared.differences)
    assert (
        min(len(compared.kept[-1].trace.signals(compared.kept[-1].topology, (0, 0, w))) for w in (0, 4)) > 2
    )
