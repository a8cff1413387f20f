"""Dropout at every door: composition, words, torch.compile, export, modules, other backends."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import agree, close
from normalizer_cases import NORMALIZERS
from output_cases import KINDS, Sizes, leaves, sizes_of
from torch import Tensor, nn

import fa4flex
from fa4flex import Dropout, Precision, Schedule, reference
from fa4flex.codegen.build import bind
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.runtime.programs import publish, read
from fa4flex.variants import alibi, causal


def qkv(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    batch, heads, q_len, kv_len = sizes or (2, 4, 40, 50)
    return [torch.randn(batch, heads, n, 16, dtype=dtype).requires_grad_() for n in (q_len, kv_len, kv_len)]


def exact(x: list[Tensor], dropout: Dropout | None, **more: Any) -> Tensor:
    return reference.attention(*x, mask=causal, dropout=dropout, **more)[0]


# --- composition --------------------------------------------------------------------------------------------


def test_repr_evaluates_back() -> None:
    for dropout in (Dropout(0.1), Dropout(0.25, -3)):
        assert eval(repr(dropout), {"Dropout": Dropout}) is not None
        assert repr(eval(repr(dropout), {"Dropout": Dropout})) == repr(dropout)
        assert f"dropout={dropout!r}" in repr(fa4flex.compile(dropout=dropout).variant)
    assert "dropout     Dropout(0.1): 26 of 256" in str(fa4flex.compile(dropout=0.1).explain(64))


def test_copies_and_pickles(seed: int) -> None:
    x, dropout = qkv(), Dropout(0.3, torch.tensor(5))
    attn = fa4flex.compile(mask=causal, dropout=dropout)
    for other in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        assert torch.equal(other(*x), attn(*x))


def test_rates_are_numbers_of_a_trace() -> None:
    """Another rate, and another seed, compile nothing."""
    traces = {fa4flex.compile(mask=causal, dropout=Dropout(p, 1)).trace for p in (0.1, 0.2, 0.7)}
    assert len(traces) == 1
    assert traces.isdisjoint({fa4flex.compile(mask=causal).trace})


def test_a_program_as_text() -> None:
    attn = fa4flex.compile(mask=causal, dropout=0.1)
    facts = attn.program.facts
    assert facts.kept is not None
    again = read(publish(facts, attn.variant.schedule, attn.variant.precision).text)
    assert again.facts == facts and again.facts.kept is facts.kept


def test_a_call_that_draws_no_seed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="draws no seed"):
        bind(fa4flex.compile(dropout=0.1).variant)


def test_overrides_of_a_call(seed: int) -> None:
    x, one, other = qkv(), Dropout(0.3, 1), Dropout(0.6, 2)
    attn = fa4flex.compile(mask=causal, dropout=one)
    for given, wanted in ((None, one), (other, other), (0.0, None), (None, one)):
        assert close(attn(*x, dropout=given), exact(x, wanted))
    plain = fa4flex.compile(mask=causal)
    assert close(plain(*x, dropout=other), exact(x, other)) and close(plain(*x), exact(x, None))
    assert close(fa4flex.attention(*x, mask=causal, dropout=one), exact(x, one))
    with pytest.raises(InputError, match="a number from 0 to 1"):
        attn(*x, dropout=2.0)


def test_a_seed_elsewhere_is_refused() -> None:
    seed = torch.zeros((), dtype=torch.int64, device="meta")
    with pytest.raises(InputError, match="dropout seed"):
        fa4flex.compile(dropout=Dropout(0.1, seed))(*qkv())


def test_flex_attention_has_none(seed: int) -> None:
    for given in (lambda: fa4flex.compile(dropout=0.1, backend="flex"),
                  lambda: fa4flex.compile(backend="flex")(*qkv(), dropout=0.1)):  # fmt: skip
        with pytest.raises(UnsupportedError, match="none after it"):
            given()
    facts = fa4flex.compile(dropout=0.1).program.facts
    with pytest.raises(UnsupportedError, match="none after it"):
        _ = publish(facts, fa4flex.Schedule(), fa4flex.Precision(), "flex").flex


def test_parts_of_the_keys_merge(seed: int) -> None:
    """Each part counts keys from 0; log-sum-exps, and so the weights of parts, are of what was before."""
    x = qkv()
    seeds = Dropout(0.4, 1), Dropout(0.4, 2)
    halves = [[x[0], *(y[:, :, part] for y in x[1:])] for part in (slice(0, 24), slice(24, 50))]
    each = list(zip(seeds, halves, strict=True))
    parts = [fa4flex.compile(dropout=d)(*half, return_lse=True) for d, half in each]
    out, lse = fa4flex.merge(*zip(*parts, strict=True))
    _, whole = reference.attention(*x)
    assert close(lse, whole)
    weights = [(part[1].double() - whole).exp().unsqueeze(-1) for part in parts]
    wanted = [reference.attention(*half, dropout=d)[0] for d, half in each]
    assert close(out, weights[0] * wanted[0] + weights[1] * wanted[1])


def test_jagged_batches(seed: int) -> None:
    dropout, lengths = Dropout(0.3, 9), (5, 17, 1)
    parts = [torch.randn(n, 2, 8, dtype=torch.float64) for n in lengths]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = fa4flex.compile(mask=causal, dropout=dropout)(nested, nested, nested)
    for n, (mine, part) in enumerate(zip(out.transpose(1, 2).unbind(), parts, strict=True)):
        one = part.transpose(0, 1)[None]
        assert close(mine.transpose(0, 1)[None], exact([one] * 3, dropout, first=n))


def test_a_batch_of_calls_by_vmap(seed: int) -> None:
    """Each of the calls that are mapped counts its entries from 0."""
    x, dropout = [y.detach() for y in qkv(3, 2, 9, 9)], Dropout(0.3, 4)
    attn = fa4flex.compile(mask=causal, dropout=dropout)
    found = torch.vmap(lambda *one: attn(*[y[None] for y in one])[0])(*x)
    for n in range(3):
        assert close(found[n : n + 1], exact([y[n : n + 1] for y in x], dropout))


# --- torch.compile and export -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_calls(kind: str, seed: int) -> None:
    leaf, sizes = leaves(torch.float64), sizes_of(kind, Sizes())
    dropout = Dropout(0.3, torch.randint(1 << 60, ()))
    made = KINDS[kind](sizes, leaf, {"mask": causal, "dropout": dropout})
    wrap = lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")  # noqa: E731
    agree(made.attend(*made.qkv, wrap=wrap), made.oracle(made.qkv), made.qkv)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softpick", "biased"])
def test_compiled_calls_of_other_weights(name: str, seed: int) -> None:
    leaf = leaves(torch.float64)
    normalizer, learned = NORMALIZERS[name](Sizes(), leaf)
    made = KINDS["dense"](Sizes(), leaf, {"normalizer": normalizer, "dropout": Dropout(0.3, 8)})
    wrap = lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")  # noqa: E731
    agree(made.attend(*made.qkv, wrap=wrap), made.oracle(made.qkv), [*made.qkv, *learned])


@pytest.mark.slow
def test_compiled_calls_have_all_statistics_beside_skipping(seed: int) -> None:
    """The graph's results are those of the call."""
    names = ("lse", "max_scores", "max_logit", "entropy")
    attn = fa4flex.compile(
        alibi(torch.full((4,), 2.0)), causal, dropout=Dropout(0.3, 8),
        precision=Precision(skip=1e-3), schedule=Schedule(tile=(8, 8)),
    )  # fmt: skip
    x = qkv()
    out, aux = attn(*x, return_aux=names)
    mine = torch.compile(lambda *x: attn(*x, return_aux=names), fullgraph=True, backend="aot_eager")(*x)
    assert attn.skipped(*x).any()
    assert torch.equal(mine[0], out) and all(map(torch.equal, mine[1], aux))
    for results in (mine, (out, aux)):
        loss = results[0].sum() + results[1].entropy.sum()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, x))


@pytest.mark.slow
def test_compiled_calls_draw_each_time(seed: int) -> None:
    """The draw is an operation of the graph: it follows the generator, and backward passes keep its seed."""
    x, attn = qkv(), fa4flex.compile(mask=causal, dropout=0.5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(*x: Tensor) -> Tensor:
        return attn(*x)

    state = torch.get_rng_state()
    first, second = step(*x), step(*x)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(step(*x), first)
    torch.set_rng_state(state)
    eager = attn(*x)
    torch.testing.assert_close(eager, first)
    upstream = torch.randn_like(eager)
    for mine, true in zip(
        torch.autograd.grad(first, x, upstream), torch.autograd.grad(eager, x, upstream), strict=True
    ):
        torch.testing.assert_close(mine, true)


@pytest.mark.slow
def test_inductor_keeps_the_draw(seed: int) -> None:
    x, attn = qkv(), fa4flex.compile(mask=causal, dropout=0.5)
    step = torch.compile(lambda *x: attn(*x), fullgraph=True)
    torch.manual_seed(3)
    first, second = step(*x), step(*x)
    torch.manual_seed(3)
    assert torch.equal(step(*x), first) and not torch.equal(first, second)
    (gradient,) = torch.autograd.grad(first.sum(), x[2])
    weights = gradient.mean(-1)  # of each key: the sum of its column of weights
    assert abs(weights.mean() / (40 / 50) - 1) < 0.2


@pytest.mark.slow
def test_exported_modules(seed: int) -> None:
    module = fa4flex.nn.Attention(mask=causal, dropout=Dropout(0.3, 6)).train()
    x = [y.detach() for y in qkv()]
    program = torch.export.export(module, tuple(x))
    assert close(program.module()(*x), exact(x, Dropout(0.3, 6)))


# --- modules ------------------------------------------------------------------------------------------------


def test_modules_drop_in_training_alone(seed: int) -> None:
    x, dropout = qkv(), Dropout(0.3, 6)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bias = {"bias": torch.randn(4, dtype=torch.float64)}
            self.attention = fa4flex.nn.Attention(
                lambda s, b, h, q, k, bias: s + bias[h], causal, parameters=bias, dropout=dropout
            )

        def forward(self, *x: Tensor) -> Tensor:
            out: Tensor = self.attention(*x)
            return out

    layer = Layer()
    assert close(layer(*x), exact(x, dropout))
    assert close(layer.eval()(*x), exact(x, None))
    assert close(layer.train()(*x), exact(x, dropout))
    assert (
        layer.eval().attention.variant.dropout is None and layer.train().attention.variant.dropout is dropout
    )
    assert "dropout=Dropout(0.3, 6)" in repr(layer)


def test_seeds_that_change_from_step_to_step() -> None:
    """An int of a compiled step becomes a symbol when it changes: two graphs do for all seeds."""
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def step(seed: int) -> torch.Tensor:
        return fa4flex.attention(q, k, v, mask=causal, dropout=Dropout(0.3, seed))

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed in (5, 3, 8, -4, 2**63 - 1, -(2**63), 0, 77):
        assert torch.equal(compiled(seed), step(seed)), seed
    assert counter.frame_count <= 2
