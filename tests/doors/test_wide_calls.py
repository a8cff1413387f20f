"""Calls of wide heads on a GPU, by kernels or not: right in either case, and explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Latent, Paging, Schedule, UnsupportedError, reference
from fa4flex.variants import causal

WIDTH = 264


def drawn(width: int = WIDTH, q_len: int = 9, kv_len: int = 20) -> list[Tensor]:
    return [torch.randn(1, h, n, width).bfloat16() for h, n in ((4, q_len), (2, kv_len), (2, kv_len))]


def near(found: Tensor, truth: Tensor) -> None:
    assert (found.double() - truth).abs().max() <= 2 * 2**-8 * truth.abs().max()


def names(gpu: Any) -> list[str]:
    return [result.kernel for result in gpu.results]


@pytest.mark.slow
def test_gradients_are_computed_blockwise() -> None:
    """The forward pass is a kernel's."""
    qkv, attn = [x.requires_grad_() for x in drawn()], fa4flex.compile(mask=causal)
    with ptxsim.device("sm_90a", sms=2) as gpu:
        out = attn(*qkv)
        found = torch.autograd.grad(out, qkv, torch.ones_like(out))
    wide = [x.detach().double().requires_grad_() for x in qkv]
    truth, _ = reference.attention(*wide, None, causal)
    near(out, truth)
    for x, y in zip(found, torch.autograd.grad(truth.sum(), wide), strict=True):
        assert (x.double() - y).abs().max() <= 4 * 2**-8 * y.abs().max()
    assert len(names(gpu)) == 1 and "fwd_wide_sm90" in names(gpu)[0] and not gpu.findings


@pytest.mark.parametrize("chip, width", [("sm_90a", 584), ("sm_100a", WIDTH)])
def test_what_no_kernel_is_for_is_computed_blockwise(chip: str, width: int) -> None:
    qkv, attn = drawn(width), fa4flex.compile(mask=causal)
    with torch.no_grad(), ptxsim.device(chip) as gpu:
        out, lse = attn(*qkv, return_lse=True)
    truth, truth_lse = reference.attention(*[x.double() for x in qkv], None, causal)
    near(out, truth)
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-4, rtol=0)
    assert not names(gpu)
    told = str(attn.explain(head_dim=width, arch=chip))
    assert "no kernel" in told and "tile by tile in PyTorch operations" in told


def test_statistics_and_dropout_are_computed_blockwise() -> None:
    qkv = drawn()
    for options in ({"dropout": 0.5}, {}):
        attn = fa4flex.compile(mask=causal, **options)
        with torch.no_grad(), ptxsim.device("sm_90a") as gpu:
            out = attn(*qkv, **({} if options else {"return_aux": ("max_logit",)}))
        assert not names(gpu)
        if not options:
            near(out[0], reference.attention(*[x.double() for x in qkv], None, causal)[0])


def test_tiles_that_do_not_fit_are_refused() -> None:
    """Nothing else is computed in their place."""
    attn = fa4flex.compile(mask=causal, schedule=Schedule(tile=(128, 128)))
    with (
        torch.no_grad(),
        ptxsim.device("sm_90a"),
        pytest.raises(UnsupportedError, match=r"tile=\(128, 128\).*\(64, 64\)|\(64, 64\)"),
    ):
        attn(*drawn())


@pytest.mark.slow
def test_output_functions_are_applied_after_it() -> None:
    attn = fa4flex.compile(mask=causal, output_mod=lambda out, b, h, q_idx, d: out * 2)
    qkv = drawn()
    with torch.no_grad(), ptxsim.device("sm_90a", sms=2) as gpu:
        out = attn(*qkv)
    near(out, 2 * reference.attention(*[x.double() for x in qkv], None, causal)[0])
    assert ["fwd_wide_sm90" in x for x in names(gpu)] == [True, False] and not gpu.findings


@pytest.mark.slow
def test_pages_are_gathered_first() -> None:
    q, k, v = drawn(kv_len=40)
    table, used = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    pools = [torch.full((3, 16, 2, WIDTH), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    for pool, x in zip(pools, (k, v), strict=True):
        for i, page in enumerate((2, 0, 1)):
            rows = x[0, :, 16 * i : 16 * (i + 1)].transpose(0, 1)
            pool[page, : rows.shape[0]] = rows
    attn = fa4flex.compile(mask=causal)
    with torch.no_grad(), ptxsim.device("sm_90a", sms=2) as gpu:
        out = attn(q, *pools, paging=Paging(table, used))
    near(out, reference.attention(*[x.double() for x in (q, k, v)], None, causal)[0])
    assert any("fwd_wide_sm90" in x for x in names(gpu)) and not gpu.findings


@pytest.mark.slow
@pytest.mark.parametrize("q_len, kernel", [(70, "fwd_wide_sm90"), (2, "mla_decode_sm90")])
def test_latent_rows_of_many_queries_are_keys_and_values(q_len: int, kernel: str) -> None:
    q, rows = torch.randn(1, 4, q_len, 576).bfloat16(), torch.randn(1, 90, 1, 576).bfloat16()
    attn = fa4flex.compile(mask=causal, scale=192**-0.5)
    with torch.no_grad(), ptxsim.device("sm_90a", sms=2) as gpu:
        out = attn(q, Latent(rows))
    k = rows.double().transpose(1, 2)
    near(out, reference.attention(q.double(), k, k[..., :512].clone(), None, causal, scale=192**-0.5)[0])
    assert kernel in names(gpu)[0] and not gpu.findings
