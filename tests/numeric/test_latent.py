"""Latent rows as keys and values on a CPU, and blockwise as on a GPU without a kernel for them: mods, masks
and statistics against the oracle, in every arrangement, with gradients; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import InputError, Latent, Paging, UnsupportedError, Varlen, reference
from fa4flex.variants import alibi, causal, sliding_window, softcap

B, H, SQ, S = 2, 4, 3, 45
VALUE, ROPE = 16, 8
WIDTH, SCALE = VALUE + ROPE, 12**-0.5
FORMS = {"values before the rotated part": WIDTH, "values with it": VALUE}


def drawn(width: int = WIDTH, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Queries [B, H, SQ, width] and rows [B, S, 1, width]."""
    return torch.randn(B, H, SQ, width).to(dtype), torch.randn(B, S, 1, width).to(dtype)


def latent(cache: Tensor) -> Latent:
    return Latent(cache, VALUE, ROPE)


def exact(q: Tensor, cache: Tensor, *mods: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The formula over keys and values of their own."""
    rows = cache.double().transpose(1, 2)
    k, v = rows.clone(), rows[..., :VALUE].clone()
    return reference.attention(q, k, v, *mods, scale=options.pop("scale", SCALE), **options)


def striped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx + q_idx * h) % 3 > 0


MODS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "alibi, causal": (alibi, causal),
    "softcap, window": (softcap(5.0), causal & sliding_window(20)),
    "no intervals": (None, striped),
}


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODS)
def test_mods_and_masks(name: str, form: str, layout: Any) -> None:
    (q, cache), (score_mod, mask) = drawn(FORMS[form]), MODS[name]
    attn = fa4flex.compile(score_mod, mask, scale=SCALE, layout=layout)
    given = q if layout == "bhsd" else q.transpose(1, 2)
    out, lse = attn(given, latent(cache), return_lse=True)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    truth, truth_lse = exact(q, cache, score_mod, mask)
    assert out.shape == (B, H, SQ, VALUE)
    torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, truth_lse, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Errors are at most twice those of the same maths in PyTorch: the worst element's, on the average of
    many draws, as one's is large by chance."""
    seen, errors = torch.arange(S) <= torch.arange(SQ)[:, None] + S - SQ, []
    for _ in range(32):
        q, cache = drawn(dtype=dtype)
        out = fa4flex.attention(q, latent(cache), mask=causal, scale=SCALE)
        truth, _ = exact(q, cache, None, causal)
        k = cache.transpose(1, 2)
        same = torch.nn.functional.scaled_dot_product_attention(
            q, k.expand(B, H, S, WIDTH), k[..., :VALUE].expand(B, H, S, VALUE), seen, scale=SCALE
        )
        assert out.dtype == dtype
        errors.append([(x.double() - truth).abs().max().item() for x in (out, same)])
    mine, pytorchs = map(sum, zip(*errors, strict=True))
    assert mine <= 2 * pytorchs


def test_statistics_sinks_and_output_functions() -> None:
    q, cache = drawn()
    sinks = torch.randn(H).double()
    attn = fa4flex.compile(mask=causal, sinks=sinks, scale=SCALE, output_mod=_halved)
    out, aux = attn(q, latent(cache), return_aux=("lse", "max_scores", "max_logit", "entropy"))
    statistics: dict[str, Tensor] = {}
    truth, lse = exact(q, cache, None, causal, sinks=sinks, statistics=statistics)
    torch.testing.assert_close(out, truth / 2, atol=1e-12, rtol=0)
    torch.testing.assert_close(aux.lse, lse, atol=1e-12, rtol=0)
    for name in ("max_scores", "max_logit", "entropy"):
        torch.testing.assert_close(getattr(aux, name), statistics[name], atol=1e-11, rtol=0)


def _halved(out: Any, b: Any, h: Any, q_idx: Any, d_idx: Any) -> Any:
    return out / 2


# --- arrangements -----------------------------------------------------------------------------------------


def in_pages(cache: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """A pool of pages in any order, with slots of NaN behind each sequence, and the table."""
    columns = -(-S // page)
    table = torch.randperm(B * columns + 3)[: B * columns].view(B, columns)
    pool = torch.full((B * columns + 3, page, 1, cache.shape[-1]), torch.nan, dtype=cache.dtype)
    rows = torch.full((B, columns * page, *cache.shape[2:]), torch.nan, dtype=cache.dtype)
    rows[:, :S] = cache
    pool[table] = rows.unflatten(1, (columns, page))
    return pool, table


@pytest.mark.parametrize("page", (1, 7, 16, 64))
@pytest.mark.parametrize("packed", (False, True))
def test_pages(page: int, packed: bool) -> None:
    q, cache = drawn()
    (pool, table), used = in_pages(cache, page), torch.tensor([S, 11])
    attn = fa4flex.compile(alibi, causal, scale=SCALE)
    paging = Paging(table, used)
    if packed:
        cu = torch.arange(B + 1) * SQ
        out = attn(q.transpose(1, 2).flatten(0, 1), latent(pool), paging=paging, varlen=Varlen(cu))
        out = out.unflatten(0, (B, SQ)).transpose(1, 2)
    else:
        out = attn(q, latent(pool), paging=paging)
    for b, n in enumerate(used.tolist()):
        truth, _ = exact(q[b : b + 1], cache[b : b + 1, :n], alibi, causal)
        torch.testing.assert_close(out[b : b + 1], truth, atol=1e-12, rtol=0)


def test_used_and_packed_lengths() -> None:
    (q, cache), used = drawn(), torch.tensor([S, 20])
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    padded = attn(q, latent(cache), varlen=Varlen(seqused_k=used))
    cu_k = torch.tensor([0, S, S + 20])
    rows = torch.cat((cache[0], cache[1, :20]))
    packed = attn(
        q.transpose(1, 2).flatten(0, 1), latent(rows), varlen=Varlen(torch.arange(B + 1) * SQ, cu_k)
    )
    torch.testing.assert_close(packed.unflatten(0, (B, SQ)).transpose(1, 2), padded)
    for b, n in enumerate(used.tolist()):
        truth, _ = exact(q[b : b + 1], cache[b : b + 1, :n], None, causal)
        torch.testing.assert_close(padded[b : b + 1], truth, atol=1e-12, rtol=0)


def test_block_maps() -> None:
    q, cache = drawn()
    classes = torch.tensor([[0, 2, 1]], dtype=torch.uint8)
    blocks = fa4flex.BlockMap.from_dense(classes.expand(1, 1, 1, 3).clone(), (SQ, 15))
    out = fa4flex.attention(q, latent(cache), mask=striped, blocks=blocks, scale=SCALE)

    def allowed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        block = kv_idx // 15
        return (block == 1) | ((block == 2) & striped(b, h, q_idx, kv_idx))

    torch.testing.assert_close(out, exact(q, cache, None, allowed)[0], atol=1e-12, rtol=0)


def test_nothing_is_copied() -> None:
    """Rows of a strided cache, whose memory is all that is read: values are a view."""
    from fa4flex.runtime.sources import source_of

    _, cache = drawn()
    kv = source_of(latent(cache), None, None, None)
    assert kv.k.data_ptr() == kv.v.data_ptr() == cache.data_ptr() and kv.v.stride() == cache.stride()


# --- gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", (False, True))
def test_gradients_reach_queries_and_rows(paged: bool) -> None:
    """A row's gradient is that of the key and of the value that it is."""
    (q, cache), used = drawn(), torch.tensor([S, 11])
    q, cache = q.requires_grad_(), cache.requires_grad_()
    attn = fa4flex.compile(softcap(3.0), causal, scale=SCALE)
    if paged:
        table = torch.randperm(B * 9).view(B, 9)
        pool = torch.zeros(B * 9, 5, 1, WIDTH, dtype=cache.dtype)
        pool = pool.index_put((table.flatten(),), cache.reshape(B * 9, 5, 1, WIDTH))
        out, lse = attn(q, latent(pool), paging=Paging(table, used), return_lse=True)
    else:
        out, lse = attn(q, latent(cache), varlen=Varlen(seqused_k=used), return_lse=True)
    found = torch.autograd.grad(out.sin().sum() + lse.square().sum(), (q, cache))
    parts = [
        exact(q[b : b + 1], cache[b : b + 1, :n], softcap(3.0), causal) for b, n in enumerate(used.tolist())
    ]
    wanted = sum(out.sin().sum() + lse.square().sum() for out, lse in parts)
    expected = torch.autograd.grad(wanted, (q, cache))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-11, rtol=0)


def test_autocast() -> None:
    q, cache = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = fa4flex.attention(q, latent(cache), scale=SCALE)
    assert torch.equal(out, fa4flex.attention(q.bfloat16(), latent(cache.bfloat16()), scale=SCALE))


# --- doors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize("grad", (False, True))
def test_compiled_graphs(paged: bool, grad: bool) -> None:
    (q, cache), attn = drawn(), fa4flex.compile(alibi, causal, scale=SCALE)
    q = q.requires_grad_(grad)
    (pool, table), used = in_pages(cache, 16), torch.tensor([S, 11])
    pool = pool.nan_to_num()

    def attend(q: Tensor, rows: Tensor) -> Tensor:
        paging = Paging(table, used) if paged else None
        return attn(q, Latent(rows, VALUE, ROPE), paging=paging)

    rows = pool if paged else cache
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = compiled(q, rows)
    torch.testing.assert_close(found, attend(q, rows))
    if grad:
        got, want = (torch.autograd.grad(x.sin().sum(), q)[0] for x in (found, attend(q, rows)))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize("chip", ("sm_100a", pytest.param("sm_90a", marks=pytest.mark.slow)))
def test_without_a_kernel_a_gpu_computes_blockwise(chip: str, paged: bool, trains: bool) -> None:
    """Rows as wide as those of models, and more queries than the kernel for them takes: on Hopper, that for
    wide heads computes the forward pass."""
    import ptxsim

    q = torch.randn(1, 2, 70, 576).bfloat16().requires_grad_(trains)
    cache = torch.randn(1, 96, 1, 576).bfloat16().requires_grad_(trains)
    attn = fa4flex.compile(softcap(20.0), causal, scale=192**-0.5)
    given: Any = cache
    options: dict[str, Any] = {}
    if paged:
        given, options = (
            cache.view(6, 16, 1, 576),
            {"paging": Paging(torch.arange(6)[None], torch.tensor([96]))},
        )
    with ptxsim.device(chip) as gpu:
        out = attn(q, Latent(given), **options)
        if trains:
            found = torch.autograd.grad(out.float().sum(), (q, cache))
    ours = [result.kernel for result in gpu.results if "mla" in result.kernel or "fwd" in result.kernel]
    assert ["fwd_wide_sm90" in kernel for kernel in ours] == [True] * (chip == "sm_90a")
    wide = [x.detach().double().requires_grad_(trains) for x in (q, cache)]
    truth = attn(wide[0], Latent(wide[1]))
    assert out.shape == (1, 2, 70, 512)
    assert (out.double() - truth).abs().max() <= 2 * 2**-8 * truth.abs().max()
    if trains:
        for x, y in zip(found, torch.autograd.grad(truth.sum(), wide), strict=True):
            assert (x.double() - y).abs().max() <= 4 * 2**-8 * y.abs().max()


def test_explain_says_what_a_gpu_does() -> None:
    attn = fa4flex.compile(mask=causal, scale=SCALE)
    wide: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "heads": 128, "kv_heads": 1, "latent": True}
    told = str(attn.explain(65, 4096, arch="sm_100a", **wide))
    assert "no kernel" in told and "PyTorch operations on the device" in told
    told = str(attn.explain(65, 4096, arch="sm_90a", **wide))
    assert "heads of 576 and 512 (v)" in told and "read as keys, and again as values" in told
    for arch in ("sm_90a", "sm_100a"):
        told = " ".join(str(attn.explain(64, 4096, arch=arch, **wide)).split())
        assert "few queries over latent rows" in told and "no kernel" not in told


# --- refused ----------------------------------------------------------------------------------------------


def test_the_scale_is_required() -> None:
    q, cache = drawn()
    with pytest.raises(InputError, match=r"(?s)without a scale.*before absorption"):
        fa4flex.attention(q, latent(cache))


def test_what_does_not_fit() -> None:
    q, cache = drawn()
    attn = fa4flex.compile(scale=SCALE)
    with pytest.raises(InputError, match="v beside Latent"):
        attn(q, latent(cache), cache)
    with pytest.raises(UnsupportedError, match="kv_scales= beside Latent"):
        attn(q, latent(cache), kv_scales=fa4flex.KVScales())
    with pytest.raises(InputError, match="q of 16 columns, latent rows of 24"):
        attn(q[..., :16], latent(cache))
    with pytest.raises(InputError, match="mixed dtypes"):
        attn(q.float(), latent(cache))
    for wrong, told in (
        (lambda: Latent(cache.expand(B, S, 2, WIDTH)), "one KV head"),
        (lambda: Latent(cache[..., :20], VALUE, ROPE), "latent rows of 20 columns"),
        (lambda: Latent(cache, 16.0, ROPE), "whole numbers of columns"),  # type: ignore[arg-type]
        (lambda: Latent([1.0]), "a latent cache of"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=told):
            wrong()
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        latent(cache.to(torch.float8_e4m3fn))


def test_other_doors_refuse_it_in_words() -> None:
    (q, cache), attn = drawn(), fa4flex.compile(scale=SCALE)
    rows, lse = latent(cache), torch.zeros(B, H, SQ, dtype=torch.float64)
    paging = Paging(torch.tensor([[0]]), torch.tensor([0]))
    for call in (
        lambda: fa4flex.flex_attention(q, rows, rows),  # type: ignore[arg-type]
        lambda: attn.key_mass(q, rows, lse),  # type: ignore[arg-type]
        lambda: attn.probabilities(q, rows, lse),  # type: ignore[arg-type]
        lambda: attn.skipped(q, rows, rows),  # type: ignore[arg-type]
        lambda: fa4flex.append(q, rows, cache, cache, paging),  # type: ignore[arg-type]
        lambda: fa4flex.append(q, q, rows, rows, paging),  # type: ignore[arg-type]
        lambda: fa4flex.quantize(q, rows, rows),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedError, match=r"fa4flex\.Latent"):
            call()
