"""Forward mode, second derivatives and transforms of torch.func, against the same of the dense formula in
float64."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import fa4flex
from fa4flex.errors import UnsupportedError
from fa4flex.reference import attention as reference
from fa4flex.reference import sequence_ranges, varlen
from fa4flex.runtime.derived import parts, pieces
from fa4flex.runtime.programs import publish
from fa4flex.variants import alibi, causal, natten, sliding_window, softcap

Function = Callable[..., Any]
Q_LEN, KV_LEN = 5, 7


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def qkv(batch: int = 2, heads: int = 4, kv_heads: int = 2, q_len: int = Q_LEN, kv_len: int = KV_LEN) -> Any:
    sizes = ((heads, q_len, 4), (kv_heads, kv_len, 4), (kv_heads, kv_len, 3))
    return tuple([leaf(batch, *size) for size in sizes])


def steep(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """tanh: the branch that no pair under the mask selects has an infinite slope, and so have its slopes."""
    return torch.where(kv_idx > q_idx + KV_LEN - Q_LEN, torch.sqrt(score - score), score.tanh())


def flat(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score.tanh()


def by_entry(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (b + 1) + score.detach() * score


def learned(*, slopes: Tensor | None = None, bias: Tensor | None = None, sinks: Tensor | None = None) -> Any:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if slopes is not None:
            score = score * slopes[h].exp()
        if bias is not None:
            score = score + score.sin() * bias[h, q_idx - kv_idx + KV_LEN]
        return score

    return {"score_mod": mod, "mask": causal, "sinks": sinks}


PLAIN: dict[str, Any] = {
    "plain": {},
    "causal": {"mask": causal},
    "window, of which rows see nothing": {"mask": lambda b, h, i, j: (i > 1) & (i - j < 3) & (i >= j)},
    "alibi and soft cap": {"score_mod": alibi >> softcap(2.0), "mask": sliding_window(4)},
    "steep": {"score_mod": steep, "mask": causal},
    "by entry": {"score_mod": by_entry},
    "masks of entries": {"mask": lambda b, h, i, j: (j + b) % 3 > 0},
    "masks of heads": {"mask": lambda b, h, i, j: (j + i) % (h + 2) > 0},
    "neighbourhood": {"mask": natten((KV_LEN,), (3,))},
}


STAND_IN: dict[Any, dict[str, Any]] = {steep: {"score_mod": flat}}
"""The dense formula's mods, where torch's own derivatives are NaN."""


def pair(composition: dict[str, Any]) -> tuple[Function, Function]:
    """(out, lse) of q, k and v by fa4flex, and by the formula."""
    attn = fa4flex.compile(**composition)
    return (
        lambda *x: attn(*x, return_lse=True),
        lambda *x: reference(*x, **{**composition, **STAND_IN.get(composition.get("score_mod"), {})}),
    )


def scalar(function: Function) -> Function:
    """A number of all results, a row that sees nothing left out: its lse is -inf."""
    return lambda *x: sum((y.masked_fill(y == -torch.inf, 0).sin() * 1.5).sum() for y in function(*x))


def pushed(function: Function, x: Any, t: Any) -> Any:
    return torch.func.jvp(function, x, t)[1]


def dual(function: Function, x: Any, t: Any) -> Any:
    with forward_ad.dual_level():
        results = function(*map(forward_ad.make_dual, x, t))
        return [forward_ad.unpack_dual(y).tangent for y in results]


def twice(function: Function, x: Any, t: Any) -> Any:
    first = torch.autograd.grad(scalar(function)(*x), x, create_graph=True)
    return torch.autograd.grad(first, x, t)


def thrice(function: Function, x: Any, t: Any) -> Any:
    first = torch.autograd.grad(scalar(function)(*x), x, create_graph=True)
    second = torch.autograd.grad(first, x, t, create_graph=True)
    return torch.autograd.grad(second, x, t)


def backward_of_forward(function: Function, x: Any, t: Any) -> Any:
    return torch.func.grad(lambda *x: torch.func.jvp(scalar(function), x, t)[1], (0, 1, 2))(*x)


def forward_of_backward(function: Function, x: Any, t: Any) -> Any:
    return torch.func.jvp(torch.func.grad(scalar(function), (0, 1, 2)), x, t)[1]


def forward_of_forward(function: Function, x: Any, t: Any) -> Any:
    return torch.func.jvp(lambda *x: torch.func.jvp(scalar(function), x, t)[1], x, t)[1]


KINDS = [pushed, dual, twice, thrice, backward_of_forward, forward_of_backward, forward_of_forward]


def same(kind: Function, both: tuple[Function, Function], x: Any) -> None:
    t = tuple([torch.randn_like(y) for y in x])
    found, wanted = (tree_leaves(kind(function, x, t)) for function in both)
    assert len(found) == len(wanted)
    for mine, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, true.nan_to_num(0, neginf=-torch.inf), msg=kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [x for x in PLAIN if "nothing" not in x])
def test_derivatives_of_results(name: str, kind: Function) -> None:
    same(kind, pair(PLAIN[name]), qkv())


@pytest.mark.parametrize("kind", [pushed, dual, twice, forward_of_backward], ids=lambda f: f.__name__)
def test_rows_that_see_nothing(kind: Function) -> None:
    """Derivatives of their results are 0, where the dense formula has NaN."""
    mine, true = pair(PLAIN["window, of which rows see nothing"])
    x = qkv()
    t = tuple([torch.randn_like(y) for y in x])
    found = tree_leaves(kind(lambda *x: mine(*x)[0], x, t) if kind in (pushed,) else kind(mine, x, t))
    assert all(y.isfinite().all() for y in found)
    if kind is pushed:
        assert not found[0][:, :, :2].any() and found[0][:, :, 2:].any()
        seen = true(*x)[0]
        assert seen.isfinite().all()


def test_captured_tensors_and_sinks() -> None:
    """Derivatives of all orders by what functions captured, as by queries and keys."""
    whole = (*qkv(), leaf(4), leaf(4, 2 * KV_LEN), leaf(4))

    def run(of: Any) -> Function:
        return lambda q, k, v, slopes, bias, sinks: of(
            q, k, v, **learned(slopes=slopes, bias=bias, sinks=sinks)
        )

    def mine(q: Tensor, k: Tensor, v: Tensor, **composition: Any) -> Any:
        return fa4flex.compile(**composition)(q, k, v, return_lse=True)

    for kind in (pushed, dual, twice, forward_of_forward):
        same(kind, (run(mine), run(reference)), whole)


@pytest.mark.parametrize("layout", ["packed", "padded", "bshd"])
@pytest.mark.parametrize("kind", [pushed, dual, twice, forward_of_backward], ids=lambda f: f.__name__)
def test_layouts(layout: str, kind: Function) -> None:
    composition = {"score_mod": by_entry, "mask": causal}
    attn = fa4flex.compile(**composition, layout="bshd" if layout == "bshd" else "bhsd")
    if layout == "bshd":
        true = pair(composition)[1]

        def turned(*x: Tensor) -> Any:
            results = true(*(y.transpose(1, 2) for y in x))
            return [y.transpose(1, 2) if y.ndim == 4 else y for y in results]

        x = tuple([y.detach().transpose(1, 2).contiguous().requires_grad_() for y in qkv()])
        return same(kind, (lambda *x: attn(*x, return_lse=True), turned), x)
    if layout == "packed":
        cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
        x, lengths = (leaf(7, 4, 4), leaf(7, 2, 4), leaf(7, 2, 3)), fa4flex.Varlen(cu)
        ranges = sequence_ranges(cu), sequence_ranges(cu)
        return same(
            kind,
            (
                lambda *x: attn(*x, varlen=lengths, return_lse=True),
                lambda *x: varlen(x, ranges, **composition),
            ),
            x,
        )
    x, used = qkv(), torch.tensor([4, 5])
    lengths = fa4flex.Varlen(seqused_q=used, seqused_k=used)

    def own(*x: Tensor) -> Any:
        rows = [pair({**composition, "score_mod": lambda s, b, h, i, j, n=n: by_entry(s, n, h, i, j)})[1](
            *(y[n : n + 1, :, : used[n]] for y in x)) for n in range(2)]  # fmt: skip
        return [part for row in rows for part in row]

    def mine(*x: Tensor) -> Any:
        out, lse = attn(*x, varlen=lengths, return_lse=True)
        return [
            part for n in range(2) for part in (out[n : n + 1, :, : used[n]], lse[n : n + 1, :, : used[n]])
        ]

    same(kind, (mine, own), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_in_half_precision(dtype: torch.dtype) -> None:
    """At most twice those of the same maths in PyTorch at that dtype."""
    mine, true = pair({"score_mod": softcap(5.0), "mask": causal})
    exact = [x.detach() for x in qkv(2, 4, 2, 33, 40)]
    narrow = tuple([x.to(dtype) for x in exact])
    tangents = tuple([torch.randn_like(x) for x in narrow])

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = 5 * torch.tanh(q @ k.transpose(2, 3) * 0.5 / 5)
        hidden = torch.arange(33)[:, None] + 7 < torch.arange(40)
        scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    wide = [tuple([x.double() for x in given]) for given in (narrow, tangents)]
    wanted = pushed(true, *wide)
    for found, same_maths, right in zip(
        pushed(mine, narrow, tangents), pushed(dense, narrow, tangents), wanted, strict=True
    ):
        error, allowed = (float((x.double() - right).norm()) for x in (found, same_maths))
        assert error <= 2 * allowed


def test_gradcheck() -> None:
    attn = fa4flex.compile(steep, causal, sinks=leaf(2))
    x = qkv(1, 2, 1, 3, 4)
    call = lambda *x: attn(*x, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, x, check_forward_ad=True, fast_mode=True, check_batched_grad=True)
    assert torch.autograd.gradcheck(call, x, check_forward_ad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(
        call, x, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
    )


# --- vmap -------------------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of batches that are computed."""
    sizes: list[int] = []
    real = parts.compute.forward
    monkeypatch.setattr(
        parts.compute, "forward", lambda p, call: (sizes.append(len(call.q)), real(p, call))[1]
    )
    return sizes


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 2), (None, None, 0)])
def test_a_mapped_dimension_is_one_with_the_batch(in_dims: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = [
        leaf(*y.shape) if d is None else torch.randn(3, *y.shape, dtype=y.dtype).movedim(0, d)
        for y, d in zip(qkv(), in_dims, strict=True)
    ]
    mine, true = pair({"score_mod": softcap(2.0), "mask": causal})
    sizes = counted(monkeypatch)
    found, wanted = (torch.func.vmap(f, in_dims=in_dims)(*x) for f in (mine, true))
    torch.testing.assert_close(found, wanted)
    assert sizes == [6]
    found, wanted = (
        torch.func.vmap(torch.func.grad(scalar(f), (0, 1, 2)), in_dims=in_dims)(*x) for f in (mine, true)
    )
    torch.testing.assert_close(found, wanted)


def test_functions_that_know_the_entry_are_called_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, true = pair({"score_mod": by_entry})
    x = [torch.stack([y, 2 * y, y.sin()]) for y in qkv()]
    sizes = counted(monkeypatch)
    torch.testing.assert_close(torch.func.vmap(mine)(*x), torch.func.vmap(true)(*x))
    assert sizes == [2, 2, 2]


def test_captured_tensors_may_be_mapped() -> None:
    x = qkv()

    def run(bias: Tensor, of: Function) -> Any:
        return of(**learned(bias=bias))

    mine = lambda bias: run(bias, lambda **c: fa4flex.compile(**c)(*x))  # noqa: E731
    true = lambda bias: run(bias, lambda **c: reference(*x, **c)[0])  # noqa: E731
    biases = torch.randn(3, 4, 2 * KV_LEN, dtype=torch.float64)
    wanted = torch.stack([true(bias) for bias in biases])
    torch.testing.assert_close(torch.func.vmap(mine)(biases), wanted)
    ensembles = torch.func.vmap(torch.func.grad(lambda b: mine(b).sin().sum()))(biases)
    (gradients,) = torch.autograd.grad(true(y := biases[1].clone().requires_grad_()).sin().sum(), y)
    torch.testing.assert_close(ensembles[1], gradients)


# --- memory, and what is refused --------------------------------------------------------------------------


def test_no_piece_has_more_scores_than_it_may() -> None:
    for q_len, kv_len, batch in ((4096, 4096, 1), (64, 1 << 16, 2), (3, 5, 700)):
        attn = fa4flex.compile(mask=causal)
        q, k = torch.empty(batch, 4, q_len, 8), torch.empty(batch, 2, kv_len, 8)
        program = publish(attn.program.facts, fa4flex.Schedule(), fa4flex.Precision())
        recipe = parts.Recipe(program, (), 1.0, False, parts.NO_LENGTHS)
        found = list(recipe.pieces((q, k, k)))
        sizes = [torch.Size(piece.shape).numel() * piece.keys for piece in found]
        assert max(sizes) <= max(pieces.SCORES, 2 * 16 * kv_len)
        rows = sum(torch.Size(piece.shape).numel() for piece in found)
        assert rows == batch * 4 * q_len
        if batch == 700:
            assert len(found) == 1


class Saved:
    """A tensor that a graph keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("order", [2, 3])
def test_what_is_kept_grows_with_tokens(order: int) -> None:
    """Bytes that all derivatives of a call keep, at twice as many tokens: twice as many."""
    kept = []
    for tokens in (256, 512):
        x = qkv(1, 1, 1, tokens, tokens)
        alive: weakref.WeakSet[Saved] = weakref.WeakSet()

        def seen(y: Tensor, alive: weakref.WeakSet[Saved] = alive) -> Saved:
            saved = Saved(y)
            alive.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(seen, lambda saved: saved.tensor):
            result = fa4flex.attention(*x, mask=causal).sin().sum()
            for _ in range(order - 1):
                first = torch.autograd.grad(result, x, create_graph=True)
                result = sum((y.sin().sum() for y in first), torch.zeros(()))
        storages = [saved.tensor.untyped_storage() for saved in alive]
        kept.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
    assert kept[1] < 2.2 * kept[0] and kept[1] < 512 * 512 * 8


PEAK = """
import resource, sys, torch, fa4flex
from fa4flex.variants import causal

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def derived(tokens):
    x = [torch.randn(1, 1, tokens, 16, requires_grad=True) for _ in range(3)]
    attn = fa4flex.compile(mask=causal)
    torch.func.jvp(attn, tuple(x), tuple(x))
    first = torch.autograd.grad(attn(*x).sin().sum(), x, create_graph=True)
    torch.autograd.grad(sum(y.sin().sum() for y in first), x)

derived(64)
before = peak()
derived(4096)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_stays_far_below_that_of_all_scores() -> None:
    """A dense second derivative of 4,096 tokens keeps some ten matrices of 64 MiB."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 64


def test_what_is_refused() -> None:
    x = qkv()
    attn = fa4flex.compile(mask=causal)
    aux = torch.nn.attention.flex_attention.AuxRequest(max_scores=True)
    with pytest.raises(UnsupportedError, match="max_scores inside"):
        torch.func.jvp(lambda q: fa4flex.flex_attention(q, x[0], x[0], return_aux=aux)[0], x[:1], x[:1])
    with pytest.raises(UnsupportedError, match="functionalize"):
        torch.func.functionalize(attn)(*x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: torch.func.jvp(lambda q: attn(q, q, q), (q,), (q,)), backend="eager")
    with pytest.raises(UnsupportedError, match=r"outside of torch\.compile"):
        compiled(x[0].detach())
