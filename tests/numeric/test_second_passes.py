"""Probabilities of chosen queries, and their sums per key, from a log-sum-exp: values and gradients are the
oracle's in every kind of call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import agree, close, cumulative, leaf, no_worse, worst
from torch import Tensor

import fa4flex
from fa4flex import BlockMap, Varlen, reference
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.runtime.derived import pieces
from fa4flex.variants import causal, softcap

LONGEST = 24


@dataclass
class Case:
    """Functions of an attention, the floating tensors that they read, and its other arguments."""

    options: dict[str, Any] = field(default_factory=dict)
    learned: list[Tensor] = field(default_factory=list)
    mask: Any = None
    """The mask as the oracle takes it."""
    sinks: Tensor | None = None


def plain(heads: int) -> Case:
    return Case()


def biased(heads: int) -> Case:
    """A bias by head and distance, of an entry's slope, and a captured table."""
    table, slope = leaf(heads, 2 * LONGEST), leaf(4)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(s + table[h, q_idx - kv_idx + LONGEST]) * slope[b]

    return Case({"score_mod": score}, [table, slope])


def windowed(heads: int) -> Case:
    """A window that leaves the first queries of each sequence nothing."""

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < 5 + h) & (kv_idx - q_idx < 2) & (q_idx > 2)

    return Case({"mask": near}, mask=near)


def sinking(heads: int) -> Case:
    """Sinks, and a bound of the last key that depends on the lengths."""
    sinks = leaf(heads)

    def kept(b: Any, h: Any, q_idx: Any, kv_idx: Any, kv_len: Any) -> Any:
        return (kv_idx < kv_len - 1) & (kv_idx + b != 2)

    return Case({"sinks": sinks, "mask": kept}, mask=kept, sinks=sinks)


CASES: dict[str, Callable[[int], Case]] = {
    "plain": plain, "biased": biased, "windowed": windowed, "sinking": sinking,
}  # fmt: skip
KINDS = ("dense", "bshd", "packed", "padded")
LENGTHS = ([9, 1, 6], [4, 7, 13])
"""Numbers of queries and keys of each sequence."""


@dataclass
class Made:
    """A call, and the oracle's probabilities of all its pairs: [B, H, Sq, Skv], packed [H, Tq, Tk]."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    oracle: Callable[[], Tensor]
    inputs: list[Tensor]

    @property
    def truth(self) -> Tensor:
        """Made anew, with a graph of its own."""
        return self.oracle()


def made(kind: str, case: Case, heads: int = 4, kv_heads: int = 2, width: int = 8) -> Made:
    if kind == "packed":
        return packed(case, heads, kv_heads, width)
    batch, q_len, kv_len = 3, 11, 17
    q, k = leaf(batch, heads, q_len, width), leaf(batch, kv_heads, kv_len, width)
    used = [torch.tensor(x) for x in ([11, 3, 0], [17, 5, 9])] if kind == "padded" else None
    lse, truth = [], []
    for b in range(batch):
        n, m = (q_len, kv_len) if used is None else (int(used[0][b]), int(used[1][b]))
        mine, p = one(q[b : b + 1, :, :n], k[b : b + 1, :, :m], case, b)
        lse.append(torch.nn.functional.pad(mine, (0, q_len - n), value=-torch.inf))
        truth.append((p, (0, kv_len - m, 0, q_len - n)))
    sums = torch.cat(lse).requires_grad_()

    def oracle() -> Tensor:
        each = enumerate(truth)
        return torch.cat(
            [torch.nn.functional.pad(p(sums[b : b + 1, :, : q_len - pad[3]]), pad) for b, (p, pad) in each]
        )

    options = {**case.options}
    if used is not None:
        options["varlen"] = Varlen(seqused_q=used[0], seqused_k=used[1])
    tensors = q, k, sums
    if kind == "bshd":
        options["layout"] = "bshd"
        tensors = q.transpose(1, 2), k.transpose(1, 2), sums
    return Made(tensors, options, oracle, [q, k, sums, *case.learned])


def one(q: Tensor, k: Tensor, case: Case, b: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """lse of one entry, and the function of a lse that gives its probabilities."""
    score = reference.of_sequence(case.options.get("score_mod"), b, 1)
    mask = reference.of_sequence(case.mask, b, 0)
    if 0 in q.shape:
        return q.new_zeros(q.shape[:3]), lambda lse: q.new_zeros(*q.shape[:3], k.shape[2])
    with torch.no_grad():
        _, lse = reference.attention(q, k, k, score, mask, sinks=case.sinks)
    return lse, lambda sums: reference.probabilities(q, k, sums, score, mask)


def packed(case: Case, heads: int, kv_heads: int, width: int) -> Made:
    queries, keys = LENGTHS
    q, k = leaf(sum(queries), heads, width), leaf(sum(keys), kv_heads, width)
    cu_q, cu_k = cumulative(queries), cumulative(keys)
    ends = list(zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:]))
    parts = [
        one(q[i:j].transpose(0, 1)[None], k[m:n].transpose(0, 1)[None], case, b)
        for b, (i, j, m, n) in enumerate(ends)
    ]
    sums = torch.cat([lse[0] for lse, _ in parts], 1).requires_grad_()

    def oracle() -> Tensor:
        pad = torch.nn.functional.pad
        each = zip(parts, ends, strict=True)
        return torch.cat(
            [pad(p(sums[None, :, i:j])[0], (m, sum(keys) - n)) for (_, p), (i, j, m, n) in each], 1
        )

    options = {**case.options, "varlen": Varlen(cu_q, cu_k)}
    return Made((q, k, sums), options, oracle, [q, k, sums, *case.learned])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_per_key(kind: str, case: str, seed: int) -> None:
    of = made(kind, CASES[case](4))
    found = fa4flex.key_mass(*of.tensors, **of.options)
    agree([found], [of.truth.sum(-2)], of.inputs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_rows(kind: str, case: str, seed: int) -> None:
    """Out of order, one twice, one counted from the end."""
    of = made(kind, CASES[case](4))
    rows = torch.tensor([5, 0, 5, -1, 3])
    found = fa4flex.probabilities(*of.tensors, rows, **of.options)
    agree([found], [of.truth[..., rows, :]], of.inputs)
    assert ((found == 0) == (of.truth[..., rows, :] == 0)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_slices_and_all_rows(kind: str, seed: int) -> None:
    of = made(kind, windowed(4))
    for rows in (slice(-4, None), slice(1, 9, 3), slice(2, 2), None):
        picked = slice(None) if rows is None else rows
        assert close(fa4flex.probabilities(*of.tensors, rows, **of.options), of.truth[..., picked, :])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (7, 1), (8, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_sums_over_heads(kind: str, heads: int, kv_heads: int, seed: int) -> None:
    of = made(kind, biased(heads), heads, kv_heads)
    dim, rows = of.truth.ndim - 3, slice(-3, None)
    sums: dict[Any, Callable[[Tensor], Tensor]] = {
        "kv_heads": lambda p: p.unflatten(dim, (kv_heads, -1)).sum(dim + 1),
        "heads": lambda p: p.sum(dim),
        None: lambda p: p,
    }
    for reduce, summed in sums.items():
        how: Any = {**of.options, "reduce": reduce}
        agree([fa4flex.key_mass(*of.tensors, **how)], [summed(of.truth).sum(-2)], of.inputs)
        found = fa4flex.probabilities(*of.tensors, rows, **how)
        agree([found], [summed(of.truth)[..., rows, :]], of.inputs)


def test_many_pieces(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few scores, as long sequences have."""
    for kind in KINDS:
        of = made(kind, biased(4))
        monkeypatch.setattr(pieces, "SCORES", 40)
        monkeypatch.setattr("fa4flex.runtime.derived.weights.SCORES", 40)
        agree([fa4flex.key_mass(*of.tensors, **of.options)], [of.truth.sum(-2)], of.inputs)
        agree([fa4flex.probabilities(*of.tensors, **of.options)], [of.truth], of.inputs)


def test_block_maps(seed: int) -> None:
    """Full blocks do not ask the mask; blocks of a call take the place of those of the variant."""
    classes = torch.randint(0, 3, (1, 4, 3, 2), dtype=torch.uint8)
    first, second = (BlockMap.from_dense(x, 8) for x in (classes, classes.flip(-1)))
    q, k, v = leaf(1, 4, 24, 8), leaf(1, 2, 16, 8), leaf(1, 2, 16, 8)
    attn = fa4flex.compile(mask=causal, blocks=first)
    for blocks in (None, second):
        lse = attn(q, k, v, blocks=blocks, return_lse=True)[1].detach().requires_grad_()
        shown = classes.flip(-1) if blocks is second else classes
        full = shown.repeat_interleave(8, 2).repeat_interleave(8, 3)
        i, j = torch.arange(24).view(-1, 1), torch.arange(16)
        allowed = (full == 2) | ((full == 1) & (j <= i - 8))

        def mask(b: Any, h: Any, i: Any, j: Any, allowed: Tensor = allowed) -> Any:
            return allowed[b * 0, h, i, j]

        truth = reference.probabilities(q, k, lse, mask=mask)
        found = attn.key_mass(q, k, lse, blocks=blocks), attn.probabilities(q, k, lse, blocks=blocks)
        agree(found, [truth.sum(2), truth], [q, k])


def test_a_compiled_variant(seed: int) -> None:
    """With what it captured as it is at each call; its output function and its sinks have no part in it."""
    slope = torch.ones(4, dtype=torch.float64)

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s - slope[h] * (q_idx - kv_idx).abs()

    q, k, v, sinks = leaf(2, 4, 9, 8), leaf(2, 2, 12, 8), leaf(2, 2, 12, 8), leaf(4)
    attn = fa4flex.compile(
        score_mod=score, mask=causal, sinks=sinks, output_mod=lambda o, b, h, i, d: o * 2, scale=0.5
    )
    ends = lambda b, h, i, j: j <= i + 3  # noqa: E731
    for scale in (None, 0.25):
        slope.uniform_()
        lse = attn(q, k, v, scale=scale, return_lse=True)[1].detach()
        truth = reference.probabilities(q, k, lse, score, ends, scale=scale or 0.5)
        found = attn.key_mass(q, k, lse, scale=scale), attn.probabilities(q, k, lse, slice(2), scale=scale)
        agree(found, [truth.sum(2), truth[:, :, :2]], [q, k])
        rest = 1 - torch.exp(sinks.view(4, 1) - lse)
        assert close(attn.probabilities(q, k, lse, scale=scale).sum(-1), rest)


def test_through_the_lse_gradients_are_those_of_softmax(seed: int) -> None:
    q, k, v = leaf(1, 2, 6, 4), leaf(1, 2, 9, 4), leaf(1, 2, 9, 4)
    attn = fa4flex.compile(score_mod=softcap(2.0))
    _, lse = attn(q, k, v, return_lse=True)
    truth = torch.softmax(2.0 * torch.tanh(q @ k.mT / 4.0), -1)
    agree([attn.probabilities(q, k, lse), attn.key_mass(q, k, lse)], [truth, truth.sum(2)], [q, k])


def test_derivatives_of_other_kinds(seed: int) -> None:
    q, k, lse = leaf(1, 2, 3, 4), leaf(1, 1, 5, 4), torch.full((1, 2, 3), 2.0, dtype=torch.float64)
    lse.requires_grad_()
    attn = fa4flex.compile(score_mod=softcap(2.0), mask=causal)
    for of in (attn.key_mass, lambda *x: attn.probabilities(*x, slice(1, 3))):
        torch.autograd.gradcheck(of, (q, k, lse), check_forward_ad=True)
        torch.autograd.gradgradcheck(of, (q, k, lse))
        many = torch.func.vmap(of)(*(torch.stack([x, 2 * x]) for x in (q, k, lse)))
        assert close(many[1], of(2 * q, 2 * k, 2 * lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_at_other_dtypes(dtype: torch.dtype, seed: int) -> None:
    """At most twice those of the same maths in PyTorch, from the same lse."""
    ours, theirs = [], []
    attn = fa4flex.compile(mask=causal)
    for _ in range(7):
        q, k, v = (torch.randn(1, n, 64, 32).to(dtype).requires_grad_() for n in (4, 2, 2))
        keys, hidden = k.repeat_interleave(2, 1), torch.ones(64, 64).triu(1).bool()
        lse = attn(q, k, v, return_lse=True)[1].detach().requires_grad_()
        usual, exact = (
            torch.exp((x @ y.mT * 32**-0.5).masked_fill(hidden, -torch.inf) - lse[..., None].to(x.dtype))
            for x, y in ((q, keys), (q.double(), keys.double()))
        )
        found, upstream = attn.key_mass(q, k, lse), torch.randn(1, 4, 64)
        assert found.dtype == torch.float32
        got, plain_ones, true = (
            [x, *torch.autograd.grad((x * upstream.to(x.dtype)).sum(), (q, k, lse))]
            for x in (found, usual.sum(2), exact.sum(2))
        )
        ours.append([worst(a, t)[0] for a, t in zip(got, true, strict=True)])
        theirs.append([worst(a, t)[0] for a, t in zip(plain_ones, true, strict=True)])
    no_worse(ours, theirs)


def test_scores_that_overflow_where_they_are_hidden(seed: int) -> None:
    """Rows without keys, and masked pairs, whose exponential would be infinite: no NaN in a gradient."""
    q, k = leaf(1, 1, 4, 4), leaf(1, 1, 6, 4)
    lse = torch.tensor([[[-torch.inf, 900.0, 901.0, -torch.inf]]], dtype=torch.float64, requires_grad=True)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(j > 3, 2000 + torch.sqrt((j - 4.0).abs()) * s, s + 900)

    mask = lambda b, h, i, j: j <= 3  # noqa: E731
    truth = reference.probabilities(q, k, lse, score, mask)
    found = [
        function(q, k, lse, score_mod=score, mask=mask)
        for function in (fa4flex.key_mass, fa4flex.probabilities)
    ]
    agree(found, [truth.sum(2), truth], [q, k, lse])


def test_extents_of_nothing(seed: int) -> None:
    for shape in ((0, 2, 3, 5), (1, 2, 0, 5), (1, 2, 3, 0)):
        batch, heads, q_len, kv_len = shape
        q, k = torch.randn(batch, heads, q_len, 4), torch.randn(batch, heads, kv_len, 4)
        lse = torch.full((batch, heads, q_len), -torch.inf)
        assert torch.equal(fa4flex.key_mass(q, k, lse), torch.zeros(batch, heads, kv_len))
        assert torch.equal(fa4flex.probabilities(q, k, lse), torch.zeros(shape))


def test_autocast(seed: int) -> None:
    """Queries and keys are cast as attention casts them."""
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    attn = fa4flex.compile(mask=causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, lse = attn(q, k, v, return_lse=True)
        mass, rows = attn.key_mass(q, k, lse), attn.probabilities(q, k, lse)
    half = q.bfloat16(), k.bfloat16(), lse
    assert torch.equal(mass, attn.key_mass(*half)) and torch.equal(rows, attn.probabilities(*half))
    assert mass.dtype == rows.dtype == torch.float32
    torch.testing.assert_close(mass.sum(-1), torch.full((1, 2), 9.0))


# --- refusals -----------------------------------------------------------------------------------------------


def call(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = {"q": torch.randn(1, 4, 6, 8), "k": torch.randn(1, 2, 7, 8), "lse": torch.zeros(1, 4, 6)}
    given = {name: changes.pop(name, x) for name, x in tensors.items()}
    return tuple(given.values()), changes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an lse of other rows": ({"lse": torch.zeros(1, 4, 5)}, InputError, r"lse \[1, 4, 5\] for q"),
    "no lse": ({"lse": None}, InputError, "lse is a NoneType"),
    "an lse of few digits": ({"lse": torch.zeros(1, 4, 6).half()}, InputError, "float16"),
    "other heads": ({"k": torch.randn(1, 3, 7, 8)}, InputError, "4"),
    "other widths": ({"k": torch.randn(1, 2, 7, 4)}, InputError, "differ in head_dim"),
    "another reduction": ({"reduce": "batch"}, InputError, "reduce='batch'"),
    "no varlen": ({"varlen": torch.tensor([0, 6])}, InputError, "varlen is a"),
    "an unknown option": ({"pages": None}, InputError, "unknown options pages"),
    "pages": ({"paging": object()}, UnsupportedError, "paging= with probabilities"),
    "a cache of 8 bits": ({"kv_scales": object()}, UnsupportedError, "kv_scales= with probabilities"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refused_in_words(wrong: str) -> None:
    changes, error, words = WRONG[wrong]
    for function in (fa4flex.key_mass, fa4flex.probabilities):
        tensors, options = call(**changes)
        with pytest.raises(error, match=words):
            function(*tensors, **options)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.tensor([0, 6]), "beyond the 6 rows"),
        (torch.tensor([-7]), "beyond the 6 rows"),
        (torch.tensor([0.0]), "rows torch.float32"),
        (torch.ones(6, dtype=torch.bool), "rows torch.bool"),
        (torch.zeros(2, 2, dtype=torch.int64), "rows torch.int64"),
        ([1, 2], "rows is a list"),
    ],
)
def test_rows_that_are_none(rows: Any, words: str) -> None:
    tensors, _ = call()
    with pytest.raises(InputError, match=words):
        fa4flex.probabilities(*tensors, rows)


def test_all_rows_of_long_sequences_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 4).expand(1, 8, 1 << 13, 4)
    with pytest.raises(UnsupportedError, match="at most 134217728"):
        fa4flex.probabilities(q, q, torch.zeros(1, 8, 1 << 13))


def test_calls_in_turn_with_attention(seed: int) -> None:
    """Launches that one Attention keeps between its calls stay when it is asked for sums in between."""
    attn = fa4flex.compile(mask=causal, layout="bshd")
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
    _, lse = attn(q, k, v, return_lse=True)
    recent = attn._caller.recent
    assert attn.key_mass(q, k, lse).shape == (1, 4, 7)
    assert attn.probabilities(q, k, lse, scale=0.5).shape == (1, 4, 6, 7)
    assert attn._caller.recent is recent
    with pytest.raises(UnsupportedError, match="paging= with probabilities"):
        attn.key_mass(q, k, lse, paging=object())


def test_jagged_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="NestedTensor"):
        fa4flex.key_mass(nested, nested, torch.zeros(2, 3))


def test_what_is_not_known_of_a_variant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field of variants, or of precisions, that a second pass was not made for."""
    from fa4flex.runtime import second_pass

    tensors, _ = call()
    for names, left_out, options in (
        ("_KNOWN", "scale", {"scale": 2.0}),
        ("_PRECISION", "compute", {"precision": fa4flex.Precision(compute="float64")}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(second_pass, names, getattr(second_pass, names) - {left_out})
            fa4flex.key_mass(*tensors)
            with pytest.raises(UnsupportedError, match=f"with {left_out}="):
                fa4flex.key_mass(*tensors, **options)
