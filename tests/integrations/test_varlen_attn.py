"""torch's varlen_attn: arguments, meanings and results, beside the oracle."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from helpers import cumulative, leaf
from torch import Tensor

from fa4flex import InputError, reference
from fa4flex.integrations.varlen import varlen_attn

Q_LENGTHS, K_LENGTHS = (3, 0, 6, 1), (5, 2, 4, 9)
HEADS, KV_HEADS, WIDTH = 4, 2, 8


class Aux(NamedTuple):
    lse: bool = False


@pytest.fixture
def finite_masks() -> None:
    """No model is under test."""


def packed() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        leaf(sum(Q_LENGTHS), HEADS, WIDTH),
        leaf(sum(K_LENGTHS), KV_HEADS, WIDTH),
        leaf(sum(K_LENGTHS), KV_HEADS, WIDTH),
        cumulative(Q_LENGTHS),
        cumulative(K_LENGTHS),
    )


def allowed(left: int, right: int, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
    """FlashAttention's definition of a window, for one pair."""
    distance = kv - (q + kv_len - q_len)
    return ((left < 0) | (-distance <= left)) & ((right < 0) | (distance <= right))


def oracle(qkv: tuple[Tensor, ...], cu: tuple[Tensor, Tensor], window: tuple[int, int], **how: Any) -> Any:
    used = how.pop("used", None)
    ranges = reference.sequence_ranges(cu[0]), reference.sequence_ranges(cu[1], used)

    def mask(b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        return allowed(*window, b, h, q, kv, q_len, kv_len)

    return reference.varlen(qkv, ranges, None, mask, **how)


WINDOWS = [(-1, -1), (-1, 0), (2, 0), (1, 1), (-1, 2), (3, -1), (0, 0)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_with_gradients(window: tuple[int, int]) -> None:
    *qkv, cu_q, cu_k = packed()
    options = {"window_size": window, "enable_gqa": True, "scale": 0.7}
    out, lse = varlen_attn(*qkv, cu_q, cu_k, 6, 9, return_aux=Aux(lse=True), **options)
    expected, expected_lse = oracle(qkv, (cu_q, cu_k), window, scale=0.7)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    weights = torch.randn_like(expected)
    got, want = (torch.autograd.grad((x * weights).sum(), qkv) for x in (out, expected))
    torch.testing.assert_close(got, want)
    assert torch.equal(varlen_attn(*qkv, cu_q, cu_k, 6, 9, **options), out)


def test_causal_of_older_versions_by_position() -> None:
    *qkv, cu_q, cu_k = packed()
    out = varlen_attn(*qkv, cu_q, cu_k, 6, 9, True, enable_gqa=True)
    torch.testing.assert_close(out, oracle(qkv, (cu_q, cu_k), (-1, 0))[0])
    out = varlen_attn(*qkv, cu_q, cu_k, 6, 9, is_causal=True, window_size=(2, 0), enable_gqa=True)
    torch.testing.assert_close(out, oracle(qkv, (cu_q, cu_k), (2, 0))[0])


def test_used_lengths_and_pages() -> None:
    *qkv, cu_q, cu_k = packed()
    used = torch.tensor([2, 0, 4, 7], dtype=torch.int32)
    options = {"window_size": (-1, 0), "enable_gqa": True, "num_splits": 1}
    out = varlen_attn(*qkv, cu_q, cu_k, 6, 9, seqused_k=used, **options)
    expected, expected_lse = oracle(qkv, (cu_q, cu_k), (-1, 0), used=used)
    torch.testing.assert_close(out, expected)

    size = 3
    table = torch.randperm(16).view(4, 4)[:, :3].to(torch.int32)
    pools = []
    for x in qkv[1:]:
        pool = torch.randn(16, size, KV_HEADS, WIDTH, dtype=torch.float64)
        for n, (start, stop) in enumerate(reference.sequence_ranges(cu_k)):
            for t in range(stop - start):
                pool[table[n, t // size], t % size] = x[start + t].detach()
        pools.append(pool)
    with torch.no_grad():
        paged = varlen_attn(
            qkv[0],
            *pools,
            cu_q,
            None,
            6,
            9,
            seqused_k=used,
            block_table=table,
            return_aux=Aux(True),
            **options,
        )
    torch.testing.assert_close(paged, (expected.detach(), expected_lse.detach()))


def test_in_a_compiled_function() -> None:
    *qkv, cu_q, cu_k = packed()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def block(*x: Tensor) -> Tensor:
        return varlen_attn(*x, 6, 9, window_size=(2, 0), enable_gqa=True) * 2

    torch.testing.assert_close(block(*qkv, cu_q, cu_k), oracle(qkv, (cu_q, cu_k), (2, 0))[0] * 2)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, cu_q, cu_k = packed()
    with pytest.raises(ValueError, match="enable_gqa=True"):
        varlen_attn(q, k, v, cu_q, cu_k, 6, 9)
    options = {"enable_gqa": True}
    with pytest.raises(InputError, match="cu_seq_k=None without block_table"):
        varlen_attn(q, k, v, cu_q, None, 6, 9, **options)
    with pytest.raises(InputError, match="block_table without seqused_k"):
        varlen_attn(q, k, v, cu_q, None, 6, 9, block_table=torch.zeros(4, 3, dtype=torch.int32), **options)
    with pytest.raises(InputError, match="window_size"):
        varlen_attn(q, k, v, cu_q, cu_k, 6, 9, window_size=(1,), **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        varlen_attn(q, k, v, cu_q, cu_k, 6, 9, dropout_p=0.5, **options)
    with pytest.raises(InputError, match="max_seqlen_k=3"):
        varlen_attn(q, k, v, cu_q, cu_k, 6, 3, **options)


def test_it_takes_the_arguments_of_the_installed_torch() -> None:
    own = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    *qkv, cu_q, cu_k = packed()
    parameters = inspect.signature(own).parameters
    ours = list(inspect.signature(varlen_attn).parameters)
    by_position = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ours[: len(by_position)] == by_position
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    out = varlen_attn(*qkv, cu_q, cu_k, 6, 9, **defaults | {"enable_gqa": True})
    torch.testing.assert_close(out, oracle(qkv, (cu_q, cu_k), (-1, -1))[0])
