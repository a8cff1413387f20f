"""Launching on a GPU: host time, CUDA graphs, streams, torch.compile, gradients. See test_cuda_forward.py
for what is computed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import on_gpus
import pytest
import torch
from torch import Tensor

import fa4flex
from fa4flex import Varlen
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.cuda.tables.upload import upload
from fa4flex.variants import alibi, causal, document, learned_bias, sliding_window, softcap

pytestmark = on_gpus.HOPPER


def inputs(s: int = 512, heads: int = 4, d: int = 64, dtype: Any = torch.bfloat16) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, n, s, d, dtype=dtype, device="cuda") for n in (heads, heads // 2, heads // 2))


def close(found: Tensor, exact: Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(found.cpu().double(), exact.cpu().double(), atol=tolerance, rtol=tolerance)


def exactly(attn: fa4flex.api.Attention, *qkv: Tensor, **options: Any) -> Any:
    """The CPU executor on the same numbers, in float64."""
    return attn(*(x.cpu().double() for x in qkv), **options)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_host_time_of_a_repeated_call(layout: str) -> None:
    """Hosts differ by a factor of three: torch's own attention is the measure."""
    attn = fa4flex.compile(score_mod=alibi, mask=sliding_window(128), layout=layout)
    qkv = inputs()
    given = tuple(x.transpose(1, 2) for x in qkv) if layout == "bshd" else qkv
    theirs = partial(torch.nn.functional.scaled_dot_product_attention, *qkv, enable_gqa=True)

    def median(call: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):  # fewer than the driver queues: the host never waits for the device
                call()
            times.append((time.perf_counter() - start) / 50)
        return sorted(times)[15]

    with torch.no_grad():
        ours, torchs = median(partial(attn, *given)), median(theirs)
    print(f"host time per call ({layout}): {ours * 1e6:.1f} us, torch's {torchs * 1e6:.1f} us")
    assert ours < torchs


def test_a_repeated_call_has_its_own_scale() -> None:
    attn, qkv = fa4flex.compile(mask=causal), inputs()
    with torch.no_grad():
        for scale in (None, None, None, 0.5, None, 0.25):
            close(attn(*qkv, scale=scale), exactly(attn, *qkv, scale=scale))


@pytest.mark.parametrize("mask", [causal, lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0])
def test_a_graph_replays_with_new_numbers(mask: Any) -> None:
    attn = fa4flex.compile(mask=mask)
    q, k, v = inputs()
    with torch.no_grad():
        attn(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attn(q, k, v)
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, attn(q, k, v))


@pytest.mark.parametrize("d", [64, 128])
def test_a_graph_follows_documents_in_order_and_in_none(d: int) -> None:
    """Replays compare ends of rows where ids are sorted, by batch entry, and ask pairs where they are not."""
    in_order = torch.randint(0, 9, (2, 512), dtype=torch.int32).sort(-1).values
    in_none = in_order[:, torch.randperm(512)]
    turns = [in_none, in_order, in_order.flip(-1), torch.stack((in_order[0], in_none[1])), in_order // 2]
    ids = in_order.cuda()
    attn = fa4flex.compile(mask=causal & document(ids))
    q, k, v = inputs(d=d)
    with torch.no_grad():
        attn(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attn(q, k, v)
        for now in turns:
            ids.copy_(now)
            graph.replay()
            exact = exactly(fa4flex.compile(mask=causal & document(now)), q, k, v)
            close(out, exact)
            close(attn(q, k, v), exact)


def test_a_first_call_inside_a_capture_is_refused() -> None:
    attn = fa4flex.compile(mask=sliding_window(77))
    q, k, v = inputs(s=333)
    refused, graph = pytest.raises(UnsupportedError, match="captured"), torch.cuda.CUDAGraph()
    with torch.no_grad(), refused, torch.cuda.graph(graph):
        attn(q, k, v)
    attn(q, k, v)


def test_the_current_stream_is_used() -> None:
    attn = fa4flex.compile(mask=causal)
    q, k, v = inputs(s=2048)
    with torch.no_grad():
        expected = attn(q, k, v)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            late = q.clone()
            out = attn(late, k, v)
        stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("default_device", [False, True])
def test_captured_tensors_and_updates(default_device: bool) -> None:
    ids = (torch.arange(512, device="cuda") // 100).to(torch.int32)
    attn = fa4flex.compile(mask=causal & document(ids))
    q, k, v = inputs()
    device = torch.device("cuda" if default_device else "cpu")
    with torch.no_grad(), device:
        for _ in range(2):
            ids.copy_((torch.arange(512, device="cuda") // 37).to(torch.int32))
            out = attn(q, k, v)
            with torch.device("cpu"):
                there = fa4flex.compile(mask=causal & document(ids.cpu()))
                close(out, exactly(there, q, k, v))


def test_nothing_waits_for_a_changed_table() -> None:
    """Several programs capture it, in both passes."""
    ids = torch.zeros(2, 512, dtype=torch.int32, device="cuda")
    bias = torch.zeros(4, 127, device="cuda", requires_grad=True)
    first = fa4flex.compile(score_mod=learned_bias(bias) >> softcap(9.0), mask=causal & document(ids))
    second = fa4flex.compile(mask=causal & document(ids) & sliding_window(64))
    qkv = [x.requires_grad_() for x in inputs()]
    weights = torch.randn_like(qkv[0])
    drawn = [torch.randint(0, 9, (2, 512), dtype=torch.int32).sort(-1).values for _ in range(4)]
    for x in drawn:
        ids.copy_(x)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for attn in (first, second, first):
                out = attn(*qkv)
                gradients = torch.autograd.grad(out, qkv, weights)
            torch.cuda.set_sync_debug_mode("default")
        if x is not drawn[0]:  # compiles
            waits = [str(one.message) for one in found if "synchronizing" in str(one.message)]
            assert not waits, waits
        there = [y.detach().cpu().double().requires_grad_() for y in (*qkv, bias)]
        mask = causal & document(x)
        exact = fa4flex.compile(score_mod=learned_bias(there[3]) >> softcap(9.0), mask=mask)(*there[:3])
        close(out.detach(), exact.detach())
        for a, b in zip(
            gradients, torch.autograd.grad(exact, there[:3], weights.cpu().double()), strict=True
        ):
            close(a / float(b.abs().max()), b / float(b.abs().max()))


def test_copies_of_tables_wait_for_nothing() -> None:
    numbers = [torch.arange(n, dtype=torch.int32).view(shape) for n, shape in ((35, (5, 7)), (3, (3,)))]
    upload(numbers, torch.device("cuda", 0))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    start = time.perf_counter()
    there = upload(numbers, torch.device("cuda", 0))
    seconds, waits = time.perf_counter() - start, not torch.cuda.current_stream().query()
    assert waits and seconds < 0.1
    assert all(
        torch.equal(x.cpu(), y) and x.data_ptr() % 128 == 0 for x, y in zip(there, numbers, strict=True)
    )


def test_torch_compile_gives_the_same() -> None:
    attn = fa4flex.compile(score_mod=softcap(20.0), mask=causal)
    q, k, v = inputs()
    with torch.no_grad():
        expected = attn(q, k, v)
        found = torch.compile(lambda *x: attn(*x) * 2, fullgraph=True)(q, k, v)
    assert torch.equal(found, expected * 2)


@pytest.mark.parametrize("ragged", [False, True])
def test_gradients(ragged: bool) -> None:
    bias = torch.randn(4, 1023, device="cuda", requires_grad=True)
    mod = lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx + 511]  # noqa: E731
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    qkv = inputs()
    options: dict[str, Any] = {}
    if ragged:
        qkv = tuple(x[0].transpose(0, 1).contiguous() for x in qkv)
        options = {"varlen": Varlen(torch.tensor([0, 100, 100, 512], dtype=torch.int32, device="cuda"))}
    for x in qkv:
        x.requires_grad_()
    out, lse = fa4flex.compile(score_mod=mod, mask=causal, sinks=sinks)(*qkv, return_lse=True, **options)
    weights = torch.randn_like(out), torch.randn_like(lse)
    loss = (out.double() * weights[0]).sum() + (lse.double() * weights[1]).sum()
    found = torch.autograd.grad(loss, (*qkv, bias, sinks))

    there = [x.detach().cpu().double().requires_grad_() for x in (*qkv, bias, sinks)]
    mod = lambda score, b, h, q_idx, kv_idx: score + there[3][h, q_idx - kv_idx + 511]  # noqa: E731
    if ragged:
        options = {"varlen": Varlen(torch.tensor([0, 100, 100, 512], dtype=torch.int32))}
    attn = fa4flex.compile(score_mod=mod, mask=causal, sinks=there[4])
    out, lse = attn(*there[:3], return_lse=True, **options)
    loss = (out * weights[0].cpu().double()).sum() + (lse * weights[1].cpu().double()).sum()
    for a, b in zip(found, torch.autograd.grad(loss, there), strict=True):
        scale = float(b.abs().max())
        close(a / scale, b / scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_without_a_kernel_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match="bfloat16 or float16"):
        fa4flex.attention(*inputs(dtype=dtype))
