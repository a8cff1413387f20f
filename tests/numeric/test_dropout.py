"""Dropout on a CPU: the pairs of the published hash, their statistics, results and gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import agree, close
from output_cases import KINDS, Sizes, dense, leaves, sizes_of
from torch import Tensor

import fa4flex
from fa4flex import Dropout, reference
from fa4flex.codegen.keep import keep
from fa4flex.errors import InputError
from fa4flex.primitives.dropout import drawn
from fa4flex.variants import alibi, causal

CPU = torch.device("cpu")


def fresh(p: float = 0.3) -> Dropout:
    return Dropout(p, int(torch.randint(-(1 << 63), (1 << 63) - 1, ())))


def pairs(dropout: Dropout, shape: tuple[int, int, int, int], first: int = 0) -> Tensor:
    """The pairs that are kept, by the package's own evaluation."""
    at = [torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(shape)]
    seed = drawn(dropout, CPU).seed
    assert isinstance(seed, Tensor)
    return keep(seed, dropout.threshold, at[0] + first, *at[1:])


# --- the hash -----------------------------------------------------------------------------------------------


def test_pairs_are_those_of_the_oracle(seed: int) -> None:
    for p in (0.0001, 0.3, 0.9999):
        dropout, shape = fresh(p), (3, 5, 67, 131)
        assert torch.equal(pairs(dropout, shape, 7), reference.kept_pairs(dropout, shape, 7))


def test_indices_far_out_agree(seed: int) -> None:
    dropout = fresh(0.5)
    value = drawn(dropout, CPU).seed
    assert isinstance(value, Tensor)
    far = (1 << 31) - 70
    q, kv = torch.arange(far, far + 64).view(-1, 1), torch.arange(far, far + 64)
    kept = keep(value, dropout.threshold, (1 << 31) - 1, 12345, q, kv)
    assert 0.4 < kept.double().mean() < 0.6
    assert torch.equal(kept, keep(value.view(1, 1), dropout.threshold, (1 << 31) - 1, 12345, q, kv))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate_within_five_sigma(p: float, seed: int) -> None:
    dropout = fresh(p)
    dropped = ~pairs(dropout, (2, 4, 512, 512))
    sigma = math.sqrt(dropout.rate * (1 - dropout.rate) / dropped.numel())
    assert abs(dropped.double().mean() - dropout.rate) < 5 * sigma
    # Every row and every column has about that many, too: 4096 draws each, of 6 sigma at most.
    for dim in (2, 3):
        counts = dropped.double().mean(dim)
        assert (counts - dropout.rate).abs().max() < 6 * math.sqrt(dropout.rate * (1 - dropout.rate) / 512)


NEIGHBOURS: dict[str, Any] = {
    "q": (0, 0, 1, 0), "k": (0, 0, 0, 1), "k + 2": (0, 0, 0, 2), "the other keys of a hash": (0, 0, 0, 8),
    "the other queries of a hash": (0, 0, 8, 0), "both": (0, 0, 8, 8),
    "k + 16": (0, 0, 0, 16), "q and k": (0, 0, 1, 1), "h": (0, 1, 0, 0), "b": (1, 0, 0, 0),
    "b and h": (1, 1, 0, 0), "q + 64": (0, 0, 64, 0),
}  # fmt: skip


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p: float, seed: int) -> None:
    """Correlation within five sigma, and the four outcomes of a pair of neighbours by chi-square."""
    dropout = fresh(p)
    x = (~pairs(dropout, (2, 2, 640, 656))).double()
    others = {name: (x, step) for name, step in NEIGHBOURS.items()}
    found = {name: _beside(a, step) for name, (a, step) in others.items()}
    value = dropout.seed
    assert isinstance(value, int)
    for name, other in (("seed + 1", value + 1), ("seed, bit 40", value ^ (1 << 40))):
        near = Dropout(p, (other + (1 << 63)) % (1 << 64) - (1 << 63))
        found[name] = x, (~pairs(near, tuple(x.shape))).double()  # type: ignore[arg-type]
    for name, (a, b) in found.items():
        n, rate = a.numel(), dropout.rate
        correlation = ((a - rate) * (b - rate)).mean() / (rate * (1 - rate))
        assert abs(correlation) < 5 / math.sqrt(n), f"{name}: {correlation * math.sqrt(n)} sigma"
        both = [(a * b).sum(), (a * (1 - b)).sum(), ((1 - a) * b).sum(), ((1 - a) * (1 - b)).sum()]
        shares = [rate * rate, rate * (1 - rate), (1 - rate) * rate, (1 - rate) ** 2]
        chi = sum((have - n * share) ** 2 / (n * share) for have, share in zip(both, shares, strict=True))
        assert chi < 40, f"{name}: chi-square {chi} of three degrees"  # 1e-8 of honest draws have more


def _beside(x: Tensor, step: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    first = x[tuple([slice(None, -n or None) for n in step])]
    return first, x[tuple([slice(n, None) for n in step])]


def test_bytes_of_hashes_are_uniform(seed: int) -> None:
    """Thresholds split what is kept: 16 classes of a hash's bytes are equally full, and independent."""
    value = drawn(fresh(), CPU).seed
    assert isinstance(value, Tensor)
    q, kv = torch.arange(1024).view(-1, 1), torch.arange(1024)
    classes = sum(keep(value, t << 4, 0, 0, q, kv).long() for t in range(1, 16))
    assert isinstance(classes, Tensor)
    four = classes.view(64, 2, 8, 64, 2, 8).permute(1, 4, 0, 2, 3, 5).flatten(0, 1).flatten(1)
    for i, j in itertools.combinations(range(4), 2):
        table = torch.bincount(four[i] * 16 + four[j], minlength=256).double()
        expected = four[i].numel() / 256
        chi = float(((table - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 6 * math.sqrt(2 * 255), f"{i}, {j}: {chi}"


def test_corners_of_rectangles_are_independent(seed: int) -> None:
    """The fourth corner would follow from three if hashes were sums of numbers of rows and of columns."""
    x = 2 * pairs(fresh(0.5), (1, 2, 1024, 1024)).double() - 1
    for down in (1, 3, 8, 16, 64, 200):
        beside = x[..., down:, :] * x[..., :-down, :]
        for right in (1, 2, 8, 16, 24, 128, 333):
            found = beside[..., right:] * beside[..., :-right]
            assert abs(found.mean()) < 6 / math.sqrt(found.numel()), (down, right)


def test_masks_have_no_direction(seed: int) -> None:
    """The largest singular value is that of independent numbers, 2 sqrt(n), within a twentieth."""
    dropout = fresh(0.1)
    x = (~pairs(dropout, (1, 1, 1024, 1024))[0, 0]).double() - dropout.rate
    largest = torch.linalg.matrix_norm(x, 2) / math.sqrt(dropout.rate * (1 - dropout.rate))
    assert abs(largest / (2 * math.sqrt(1024)) - 1) < 0.05


@pytest.mark.parametrize(("p", "rate"), [(0.1, 26), (1e-5, 1), (0.5, 128), (0.9999, 255), (1, 256)])
def test_rates_are_counted_in_256(p: float, rate: int) -> None:
    """A rate that is neither 0 nor 1 drops some pairs and keeps some."""
    assert Dropout(p).rate == rate / 256 and fa4flex.compile(dropout=p).variant.dropout is not None
    exact = reference.kept_pairs(Dropout(p, 5), (1, 1, 256, 256))
    assert torch.equal(pairs(Dropout(p, 5), (1, 1, 256, 256)), exact)
    assert bool(exact.all()) is False and bool(exact.any()) is (p < 1)


# --- results and gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_kind(kind: str, seed: int) -> None:
    leaf, sizes = leaves(torch.float64), sizes_of(kind, Sizes(q_len=70, kv_len=90))
    made = KINDS[kind](sizes, leaf, {"mask": causal, "dropout": fresh()})
    exact = made.oracle(made.qkv)
    agree(made.attend(*made.qkv), exact, made.qkv)
    with torch.no_grad():
        assert close(made.attend(*made.qkv)[0], exact[0])


@pytest.mark.parametrize("kv_heads", [1, 4, 7])
def test_groups_count_query_heads(kv_heads: int, seed: int) -> None:
    heads = 4 if kv_heads == 4 else 7
    leaf = leaves(torch.float64)
    made = dense(Sizes(heads=heads, kv_heads=kv_heads), leaf, {"dropout": fresh()})
    agree(made.attend(*made.qkv), made.oracle(made.qkv), made.qkv)


def test_sinks_score_mods_and_output_functions(seed: int) -> None:
    leaf, sizes = leaves(torch.float64), Sizes(q_len=150, kv_len=170)
    sinks, gate = leaf(sizes.heads), leaf(sizes.heads)
    mod = lambda out, b, h, q_idx, d_idx: out * torch.sigmoid(gate[h])  # noqa: E731
    composition = {"score_mod": alibi, "mask": causal, "sinks": sinks, "output_mod": mod, "dropout": fresh()}
    made = dense(sizes, leaf, composition)
    agree(made.attend(*made.qkv), made.oracle(made.qkv), [*made.qkv, sinks, gate])


def test_large_calls_walk_tiles(seed: int) -> None:
    """Sizes at which PyTorch's fused kernel serves calls without dropout."""
    q, k, v = (torch.randn(1, 4, 512, 64) for _ in range(3))
    dropout = fresh(0.2)
    with torch.no_grad():
        out = fa4flex.compile(mask=causal, dropout=dropout)(q, k, v)
    exact, _ = reference.attention(q, k, v, mask=causal, dropout=dropout)
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_at_half_precision(dtype: torch.dtype, seed: int) -> None:
    """At most twice that of PyTorch, output and gradients."""
    leaf, dropout = leaves(dtype), fresh(0.25)
    made = dense(Sizes(q_len=64, kv_len=80), leaf, {"dropout": dropout})
    q, k, v = made.qkv
    scale = q.shape[-1] ** -0.5
    factors = reference.kept_pairs(dropout, (2, 4, 64, 80)).to(dtype) / (1 - dropout.rate)
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    weights = torch.softmax((q @ wide[0].mT).float() * scale, -1).to(dtype)
    plain, exact = (weights * factors) @ wide[1], made.oracle(made.qkv)[0]
    found = made.attend(*made.qkv)[0]
    upstream = torch.randn(exact.shape, dtype=torch.float64)
    results = [
        [out, *torch.autograd.grad((out * upstream.to(out.dtype)).sum(), made.qkv)]
        for out in (found, plain, exact)
    ]
    for mine, theirs, true in zip(*results, strict=True):
        errors = [(x.double() - true.double()).abs().max() for x in (mine, theirs)]
        assert errors[0] <= 2 * errors[1]


def test_everything_and_nothing(seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    plain = fa4flex.compile(mask=causal)(q, k, v, return_lse=True)
    none = fa4flex.compile(mask=causal, dropout=0.0)
    assert none.variant.dropout is None
    assert torch.equal(none(q, k, v), plain[0])
    out, lse = fa4flex.compile(mask=causal, dropout=1.0)(q, k, v, return_lse=True)
    assert not out.any() and torch.equal(lse, plain[1])
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(x.any() for x in gradients)


def test_second_derivatives_and_forward_mode(seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 7, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    dropout = fresh()
    attn = fa4flex.compile(mask=causal, dropout=dropout)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, mask=causal, dropout=dropout)[0]

    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    for mine, true in zip(
        torch.func.jvp(attn, (q, k, v), tangents), torch.func.jvp(exact, (q, k, v), tangents), strict=True
    ):
        assert close(mine, true)
    second = []
    for f in (attn, exact):
        first = torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v), create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v)))  # type: ignore[arg-type]
    for mine, true in zip(*second, strict=True):
        assert close(mine, true)


# --- seeds --------------------------------------------------------------------------------------------------


def test_a_seed_that_is_a_tensor_is_read_at_each_call(seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    value = torch.zeros(1, dtype=torch.int64)
    attn = fa4flex.compile(dropout=Dropout(0.5, value))
    for number in (3, -(1 << 63), (1 << 63) - 1):
        value.fill_(number)
        exact, _ = reference.attention(q, k, v, dropout=Dropout(0.5, number))
        assert close(attn(q, k, v), exact)


def test_drawn_seeds_follow_the_generator(seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    attn, state = fa4flex.compile(dropout=0.4), torch.get_rng_state()
    first, second = attn(q, k, v), attn(q, k, v)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(attn(q, k, v), first) and torch.equal(attn(q, k, v), second)
    before = torch.get_rng_state()
    fa4flex.compile(dropout=0.4).explain(64)
    fa4flex.compile(dropout=Dropout(0.4, 1))(q, k, v)
    assert torch.equal(torch.get_rng_state(), before), "only calls draw, and only those without a seed"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_the_same_pairs(reentrant: bool, seed: int) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    attn, state, found = fa4flex.compile(dropout=0.4), torch.get_rng_state(), []
    for run in (attn, lambda *x: checkpoint(attn, *x, use_reentrant=reentrant)):
        torch.set_rng_state(state)
        out = run(q, k, v)
        torch.rand(3)  # the generator is elsewhere when the backward pass runs the call again
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))] if not reentrant else [out])
        if reentrant:
            for x in (q, k, v):
                x.grad = None
            out.square().sum().backward()
            found[-1] += [x.grad for x in (q, k, v)]
    for mine, true in zip(*found, strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dropout(-0.1), lambda: Dropout(1.5), lambda: Dropout(math.nan), lambda: Dropout(True),
        lambda: Dropout("0.1"), lambda: Dropout(0.1, 0.5), lambda: Dropout(0.1, 1 << 64),  # type: ignore[arg-type]
        lambda: Dropout(0.1, torch.zeros(2, dtype=torch.int64)), lambda: Dropout(0.1, torch.zeros(())),
        lambda: fa4flex.compile(dropout="much"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_is_no_dropout_is_refused(make: Any) -> None:
    with pytest.raises(InputError):
        make()
