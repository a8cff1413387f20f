"""Statistics that calls return beside their output, against the definition, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.reference import sequence_ranges, unpage
from fa4flex.runtime.auxiliary import lse_alone

EVERY = ("lse", "max_scores", "max_logit", "entropy")
HEADS = 4


def banded(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Some rows see no key, and others some."""
    return (q_idx >= kv_idx - 5) & (q_idx % 7 != 3)


def tensors(
    shape_q: tuple[int, ...], shape_k: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in (shape_q, shape_k, shape_k)]


class Biased:
    """score * gain[h], with what it captured."""

    def __init__(self, heads: int, dtype: torch.dtype = torch.float32) -> None:
        self.gain = torch.randn(heads, dtype=dtype).add(1.5).requires_grad_()

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.gain[h]


def close(found: fa4flex.Aux, exact: dict[str, Tensor], lse: Tensor, factor: float = 1.0) -> None:
    for name, truth in {**exact, "lse": lse}.items():
        mine = getattr(found, name)
        assert mine.shape == truth.shape, name
        torch.testing.assert_close(mine.double(), truth, atol=2e-5 * factor, rtol=2e-5 * factor, msg=name)


def gradients(out: Tensor, lse: Tensor, entropy: Tensor, leaves: list[Tensor], seed: int) -> Any:
    """Gradients of a randomly weighted sum of what is differentiable, and finite."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse, entropy)]
    finite = torch.where(torch.isfinite(lse), lse, 0).double()
    loss = (out.double() * weights[0]).sum() + (finite * weights[1]).sum()
    return torch.autograd.grad(loss + (entropy.double() * weights[2]).sum(), leaves)


@pytest.mark.parametrize("kv_heads", [4, 1, 2])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("q_len", [37, 2])
def test_statistics_of_dense_tensors(kv_heads: int, with_sinks: bool, q_len: int, seed: int) -> None:
    torch.manual_seed(seed)
    qkv, mod = tensors((2, HEADS, q_len, 16), (2, kv_heads, 300, 16)), Biased(HEADS)
    sinks = torch.randn(HEADS, requires_grad=True) if with_sinks else None
    out, aux = fa4flex.compile(mod, banded, sinks=sinks)(*qkv, return_aux=EVERY)
    exact: dict[str, Tensor] = {}
    truth, lse = reference.attention(*qkv, mod, banded, sinks=sinks, statistics=exact)
    close(aux, exact, lse)
    torch.testing.assert_close(out.double(), truth, atol=2e-5, rtol=2e-5)
    leaves = [*qkv, mod.gain, *([] if sinks is None else [sinks])]
    found = gradients(out, aux.lse, aux.entropy, leaves, seed)
    wanted = gradients(truth, lse, exact["entropy"], leaves, seed)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert not aux.max_logit.requires_grad and not aux.max_scores.requires_grad


def test_the_entropy_alone_is_differentiated(seed: int) -> None:
    torch.manual_seed(seed)
    qkv = tensors((1, 2, 9, 8), (1, 2, 40, 8), torch.float64)

    def entropy(*qkv: Tensor) -> Tensor:
        made: Tensor = fa4flex.attention(*qkv, mask=banded, return_aux=("entropy",))[1].entropy
        return made

    assert torch.autograd.gradcheck(entropy, qkv)
    assert (torch.autograd.grad(entropy(*qkv).sum(), qkv[2])[0] == 0).all(), "values have no part in it"


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_statistics_of_packed_sequences(kv_heads: int, seed: int) -> None:
    """With tokens that no sequence uses, which hold what must not be read."""
    torch.manual_seed(seed)
    starts_q, starts_k = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 30, 30, 52], [0, 20, 31, 40, 90])
    )
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([7, 21, 0, 22], [20, 9, 0, 50]))
    qkv, sinks = tensors((52, HEADS, 16), (90, kv_heads, 16)), torch.randn(HEADS)
    ranges = sequence_ranges(starts_q, used_q), sequence_ranges(starts_k, used_k)
    with torch.no_grad():
        for x, rows in zip(qkv, (ranges[0], ranges[1], ranges[1]), strict=True):
            unused = torch.ones(x.shape[0], dtype=torch.bool)
            for first, last in rows:
                unused[first:last] = False
            x[unused] = torch.nan
    varlen = fa4flex.Varlen(starts_q, starts_k, used_q, used_k)
    out, aux = fa4flex.compile(mask=banded, sinks=sinks)(*qkv, varlen=varlen, return_aux=EVERY)
    exact: dict[str, Tensor] = {}
    truth, lse = reference.varlen(tuple(qkv), ranges, None, banded, sinks=sinks, statistics=exact)
    close(aux, exact, lse)
    found = gradients(out, aux.lse, aux.entropy, qkv, seed)
    wanted = gradients(truth, lse, exact["entropy"], qkv, seed)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.nan_to_num(), other.nan_to_num(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_statistics_of_padded_sequences(layout: Any, seed: int) -> None:
    torch.manual_seed(seed)
    qkv = [x.detach() for x in tensors((3, HEADS, 20, 8), (3, HEADS, 33, 8))]
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([20, 3, 0], [1, 33, 9]))
    for x, used in zip(qkv, (used_q, used_k, used_k), strict=True):
        for b, n in enumerate(used.tolist()):
            x[b, :, n:] = torch.nan
    given = [x.transpose(1, 2) if layout == "bshd" else x for x in qkv]
    attn = fa4flex.compile(mask=banded, layout=layout)
    _, aux = attn(*given, varlen=fa4flex.Varlen(seqused_q=used_q, seqused_k=used_k), return_aux=EVERY)
    of_heads = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for b, (n, m) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        one: dict[str, Tensor] = {}
        q, k, v = (x[b : b + 1, :, :end] for x, end in zip(qkv, (n, m, m), strict=True))
        reference.attention(q, k, v, None, banded, statistics=one)
        torch.testing.assert_close(aux.entropy[b, :, :n].double(), one["entropy"][0], atol=2e-5, rtol=2e-5)
        assert (aux.entropy[b, :, n:] == 0).all()
        of_heads = torch.maximum(of_heads, one["max_logit"])
    torch.testing.assert_close(aux.max_logit.double(), of_heads, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_statistics_over_pages(packed: bool, seed: int) -> None:
    torch.manual_seed(seed)
    pools = [torch.randn(12, 4, 2, 8) for _ in range(2)]
    table, used = torch.randperm(12).int().view(3, 4), torch.tensor([13, 1, 16], dtype=torch.int32)
    rows, ranges = unpage(pools[0], table, used)
    values = unpage(pools[1], table, used)[0]
    q = torch.randn(6, HEADS, 8)
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    attn, paging = fa4flex.compile(mask=banded, layout="bshd"), fa4flex.Paging(table, used)
    if packed:
        _, aux = attn(q, *pools, varlen=fa4flex.Varlen(starts), paging=paging, return_aux=EVERY)
    else:
        _, aux = attn(q.view(3, 2, HEADS, 8), *pools, paging=paging, return_aux=EVERY)
    exact: dict[str, Tensor] = {}
    _, lse = reference.varlen(
        (q, rows, values), (sequence_ranges(starts), ranges), None, banded, statistics=exact
    )
    if not packed:
        lse = lse.unflatten(1, (3, 2)).transpose(0, 1)
        for name in ("max_scores", "entropy"):
            exact[name] = exact[name].unflatten(1, (3, 2)).transpose(0, 1)
    close(aux, exact, lse)


def test_nested_tensors_give_nested_statistics(seed: int) -> None:
    torch.manual_seed(seed)
    offsets = torch.tensor([0, 5, 5, 17])
    values = [torch.randn(17, HEADS, 8) for _ in range(3)]
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in values]
    _, aux = fa4flex.attention(*nested, mask=banded, return_aux=EVERY)
    exact: dict[str, Tensor] = {}
    ranges = sequence_ranges(offsets)
    _, lse = reference.varlen(tuple(values), (ranges, ranges), None, banded, statistics=exact)
    flat = fa4flex.Aux(aux.lse.values(), aux.max_scores.values(), aux.max_logit, aux.entropy.values())
    close(flat, exact, lse)


def test_rows_without_keys_and_calls_without_rows() -> None:
    q, k = torch.randn(2, HEADS, 5, 8), torch.randn(2, HEADS, 0, 8)
    for sinks in (None, torch.zeros(HEADS)):
        _, aux = fa4flex.attention(q, k, k, sinks=sinks, return_aux=EVERY)
        assert (aux.entropy == 0).all() and (aux.max_logit == -torch.inf).all()
        _, aux = fa4flex.attention(q[:, :, :0], q, q, sinks=sinks, return_aux=EVERY)
        assert aux.entropy.shape == (2, HEADS, 0) and (aux.max_logit == -torch.inf).all()
        assert aux.max_logit.shape == (HEADS,)


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_scores_far_from_zero_keep_their_entropy(far: float) -> None:
    """log(total) - moment / total has no large numbers to cancel; uniform rows have log(keys)."""
    q = torch.zeros(1, 1, 3, 8)
    k = torch.zeros(1, 1, 64, 8)
    _, aux = fa4flex.attention(q, k, k, score_mod=lambda s, b, h, i, j: s + far, return_aux=EVERY)
    torch.testing.assert_close(aux.entropy, torch.full_like(aux.entropy, 64.0).log())
    assert (aux.max_logit == far).all()


def test_output_functions_leave_statistics_alone(seed: int) -> None:
    torch.manual_seed(seed)
    qkv = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    found = fa4flex.attention(*qkv, output_mod=lambda out, b, h, i, d: out * 3, return_aux=EVERY)[1]
    plain = fa4flex.attention(*qkv, return_aux=EVERY)[1]
    for mine, other in zip(found, plain, strict=True):
        assert torch.equal(mine, other)


# --- what is given, and how ---------------------------------------------------------------------------------


def test_only_what_is_asked_for_is_given() -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    for name in EVERY:
        _, aux = fa4flex.attention(q, q, q, return_aux=(name,))
        assert [x for x in EVERY if getattr(aux, x) is not None] == [name]
    out, aux = fa4flex.attention(q, q, q, return_aux=())
    assert out.shape == q.shape and aux == fa4flex.Aux()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("entropie",), "(?s)'entropie'.*lse, max_scores, max_logit, entropy"),
        ("lse", "tuple of names"),
        (7, "tuple of"),
    ],
)
def test_other_names_are_refused(wrong: Any, words: str) -> None:
    q = torch.randn(1, 2, 5, 8)
    module = fa4flex.nn.Attention()
    for attend in (fa4flex.compile(), fa4flex.attention, module):
        with pytest.raises(InputError, match=words):
            attend(q, q, q, return_aux=wrong)
        with pytest.raises(InputError, match="one of them"):
            attend(q, q, q, return_aux=("lse",), return_lse=True)


def test_the_module_and_the_drop_in_return_them(seed: int) -> None:
    torch.manual_seed(seed)
    q = torch.randn(1, 2, 5, 8)
    wanted = fa4flex.attention(q, q, q, return_aux=EVERY)[1]
    for attend in (fa4flex.nn.Attention(), fa4flex.flex_attention):
        found = attend(q, q, q, return_aux=EVERY)[1]
        assert isinstance(found, fa4flex.Aux)
        assert all(torch.equal(mine, other) for mine, other in zip(found, wanted, strict=True))


# --- parts of the keys --------------------------------------------------------------------------------------


def test_merged_parts_have_the_statistics_of_the_whole(seed: int) -> None:
    torch.manual_seed(seed)
    qkv = tensors((2, 3, 16, 8), (2, 3, 24, 8), torch.float64)
    parts = []
    for first, last in ((0, 5), (5, 6), (6, 24)):

        def shifted(b, h, q_idx, kv_idx, first=first):  # type: ignore[no-untyped-def]
            return kv_idx + first + 3 * h < q_idx

        q, k, v = qkv[0], *(x[:, :, first:last] for x in qkv[1:])
        parts.append(fa4flex.attention(q, k, v, mask=shifted, return_aux=EVERY))
    outs, aux = zip(*parts, strict=True)
    out, lse, found = fa4flex.merge(outs, [x.lse for x in aux], aux=aux)
    exact: dict[str, Tensor] = {}

    def past(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return kv_idx + 3 * h < q_idx

    truth, of_rows = reference.attention(*qkv, None, past, statistics=exact)
    assert torch.equal(found.lse, lse)
    for name in EVERY[1:]:
        torch.testing.assert_close(getattr(found, name), exact[name], atol=1e-12, rtol=0)
    mine = gradients(out, lse, found.entropy, qkv, seed)
    wanted = gradients(truth, of_rows, exact["entropy"], qkv, seed)
    for g, t in zip(mine, wanted, strict=True):
        torch.testing.assert_close(g, t, atol=1e-11, rtol=0)
    with pytest.raises(InputError, match="same statistics"):
        fa4flex.merge(outs, [x.lse for x in aux], aux=[*aux[:2], fa4flex.Aux(aux[2].lse)])


# --- what else takes derivatives, or computes ---------------------------------------------------------------


def test_other_derivatives_are_refused() -> None:
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="max_logit and entropy inside"):
        torch.func.grad(lambda x: fa4flex.attention(x, x, x, return_aux=EVERY[2:])[0].sum())(q)
    entropy = fa4flex.attention(q, q, q, return_aux=("entropy",))[1].entropy
    (first,) = torch.autograd.grad(entropy.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative through the entropy"):
        first.sum().backward()


def test_torchs_flex_attention_has_all_but_the_entropy(seed: int) -> None:
    torch.manual_seed(seed)
    qkv = [torch.randn(2, HEADS, 20, 16) for _ in range(3)]
    attn = fa4flex.compile(mask=banded, backend="flex")
    _, aux = attn(*qkv, return_aux=EVERY[:3])
    exact: dict[str, Tensor] = {}
    _, lse = reference.attention(*qkv, None, banded, statistics=exact)
    del exact["entropy"]
    close(aux, exact, lse)
    with pytest.raises(UnsupportedError, match="entropy with backend"):
        attn(*qkv, return_aux=("entropy",))


@pytest.mark.slow
def test_compiled_and_exported_calls_return_them(seed: int) -> None:
    torch.manual_seed(seed)
    qkv, mod = tensors((2, HEADS, 20, 16), (2, 2, 33, 16)), Biased(HEADS)
    attn = fa4flex.compile(mod, banded)

    def call(*qkv: Tensor) -> tuple[Tensor, fa4flex.Aux]:
        result: tuple[Tensor, fa4flex.Aux] = attn(*qkv, return_aux=EVERY)
        return result

    eager, compiled = call(*qkv), torch.compile(call, fullgraph=True)(*qkv)
    for mine, other in zip((compiled[0], *compiled[1]), (eager[0], *eager[1]), strict=True):
        torch.testing.assert_close(mine, other)
    leaves = [*qkv, mod.gain]
    found, wanted = (gradients(out, aux.lse, aux.entropy, leaves, seed) for out, aux in (compiled, eager))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            out, aux = attn(q, k, v, return_aux=EVERY)
            return out, *aux

    given = tuple([x.detach() for x in qkv])
    with torch.no_grad():
        exported = torch.export.export(Model(), given).module()(*given)
    for mine, other in zip(exported, (eager[0], *eager[1]), strict=True):
        torch.testing.assert_close(mine, other.detach())


@pytest.mark.parametrize(
    ("arch", "head_dim", "kernel"), [("sm_90a", 128, True), ("sm_90a", 256, False), ("sm_100a", 128, False)]
)
def test_explanations_tell_where_gradients_of_entropies_are_computed(
    arch: str, head_dim: int, kernel: bool
) -> None:
    text = str(fa4flex.compile().explain(arch=arch, head_dim=head_dim, statistics=("lse", "entropy")))
    assert ("backward: a kernel" in text) == kernel
    assert ("backward: PyTorch operations" in text) != kernel


def test_ranks_have_the_log_sum_exp_alone() -> None:
    assert lse_alone(("lse",), False, "here") == ("lse",)
    with pytest.raises(UnsupportedError, match="max_logit and entropy here"):
        lse_alone(EVERY[2:], False, "here")
