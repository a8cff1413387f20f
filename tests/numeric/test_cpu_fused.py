"""Large calls on a CPU by PyTorch's fused kernel, against the fp64 oracle and the walk over tiles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_cases import CASES, PLAIN, Sizes, uniform
from helpers import DRAWS, close, no_worse, worst
from largest import largest_tensor
from test_cpu_forward import oracle, plainly
from test_cpu_scattered import SIZES, drawn_map
from torch import Tensor

import fa4flex
from fa4flex import reference
from fa4flex.codegen.evaluate import Captured
from fa4flex.runtime.cpu import Inputs, forward, fused, gathered, tiles
from fa4flex.variants import causal, document, sliding_window

F32 = torch.float32


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any size are large."""
    monkeypatch.setattr(fused, "LEAST_PRODUCTS", 1)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Shapes of q in the kernel's runs, and whether each was causal."""
    found: list[tuple[Any, ...]] = []
    kernel = fused.fused_kernel
    assert kernel is not None

    def watched(q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool, **more: Any) -> Any:
        found.append((tuple(q.shape), is_causal))
        return kernel(q, k, v, dropout, is_causal, **more)

    monkeypatch.setattr(fused, "fused_kernel", watched)
    monkeypatch.setattr(gathered, "fused_kernel", watched)
    yield found


def check(name: str, sizes: Sizes, sinks: bool = False) -> None:
    case = PLAIN[name]
    qkv, tables = sizes.qkv(F32), case.tables(sizes)
    sink = uniform(sizes.heads) * 3 if sinks else None
    found = fused.attend(case.facts, Inputs(*qkv, Captured(tuple(tables)), 0.25, sink))
    assert found is not None
    out, lse = oracle(case, qkv, tables, sink)
    assert close(found[0].double(), out, 1e-5) and close(found[1].double(), lse, 1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_masks(name: str, sinks: bool, every_size: None) -> None:
    check(name, Sizes(), sinks)
    check(name, Sizes(2, 3, 3, 300, 300), sinks)
    check(name, Sizes(1, 6, 1, 257, 130, 24, 24), sinks)


@pytest.mark.parametrize("name", PLAIN)
def test_blocks_in_pieces(name: str, every_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of at most one tile at once, put together by their log-sum-exps."""
    monkeypatch.setattr(fused, "SCORES", 128 * 128)
    check(name, Sizes(1, 4, 2, 200, 500), True)


def test_a_square_is_one_run_if_causal(runs: list[Any], every_size: None) -> None:
    check("causal", Sizes(2, 3, 3, 300, 300))
    assert runs == [((2, 3, 300, 16), True)]
    runs.clear()
    check("dense", Sizes(2, 3, 3, 300, 200))
    assert runs == [((2, 3, 300, 16), False)]
    runs.clear()
    check("causal", Sizes(2, 3, 3, 300, 301))
    check("bottom-right", Sizes(2, 3, 3, 300, 301))
    check("window", Sizes(2, 3, 3, 300, 300))
    assert runs and not any(is_causal for _, is_causal in runs)


def test_masks_of_blocks_are_told_apart(every_size: None, runs: list[Any]) -> None:
    """Blocks whose tiles lie alike, with documents that end elsewhere; and keys before the query alone."""
    ids = torch.randint(0, 12, (900,)).sort().values
    q, k, v = Sizes(1, 2, 2, 900, 900).qkv(F32)
    before = lambda b, h, q_idx, kv_idx: kv_idx < q_idx  # noqa: E731
    for mask in (document(ids), causal & document(ids), before):
        out, lse = reference.attention(q, k, v, None, mask)
        found = fa4flex.compile(mask=mask)(q, k, v, return_lse=True)
        assert runs and close(found[0].double(), out, 1e-5) and close(found[1].double(), lse, 1e-5)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "causal", "window"])
def test_precision(name: str, dtype: torch.dtype, every_size: None) -> None:
    """At most twice plain PyTorch's error in the same dtype, in the worst element and row."""
    case, sizes = PLAIN[name], Sizes(1, 4, 2, 300, 300, 64, 64)
    ours, plain = [], []
    for _ in range(DRAWS):
        qkv = sizes.qkv(dtype)
        found, (out, lse) = fused.attend(case.facts, Inputs(*qkv, scale=0.25)), oracle(case, qkv, [])
        assert found is not None and found[0].dtype == dtype and found[1].dtype == F32
        plain_out, plain_lse = plainly(case, qkv, [])
        ours.append([*worst(found[0], out), worst(found[1], lse)[0]])
        plain.append([*worst(plain_out, out), worst(plain_lse, lse)[0]])
    no_worse(ours, plain)


@pytest.mark.parametrize("mask", [None, causal], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_small_blocks_are_gathered(
    whole: bool,
    size: tuple[int, int],
    mask: Any,
    every_size: None,
    runs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered, "BUFFER", random.choice((1, 1 << 12, 1 << 20)))
    heads, kv_heads = random.choice([(4, 4), (4, 2), (3, 1)])
    maps = random.choice([(1, 1), (2, 1), (1, heads), (2, heads)])
    lengths = (6 * size[0], 6 * size[1]) if whole else (random.randint(2 * size[0], 300), 300)
    blocks = drawn_map(size, lengths, maps)
    q, k, v = (torch.randn(2, h, n, 16) for h, n in ((heads, lengths[0]), *2 * ((kv_heads, lengths[1]),)))
    sinks = torch.randn(heads) if random.random() < 0.5 else None
    out, lse = reference.attention(q, k, v, None, blocks.mask(mask), sinks=sinks)
    found = fa4flex.compile(mask=mask, blocks=blocks, sinks=sinks)(q, k, v, return_lse=True)
    assert runs and close(found[0].double(), out, 1e-5) and close(found[1].double(), lse, 1e-5)


def test_calls_that_are_left_to_others(every_size: None) -> None:
    qkv = Sizes(1, 2, 2, 40, 50).qkv(F32)
    facts, inputs = PLAIN["causal"].facts, Inputs(*qkv)
    assert fused.attend(facts, inputs) is not None
    q, k, v = qkv
    others = (
        replace(inputs, tile=(16, 16)),
        replace(inputs, compute=torch.float64),
        replace(inputs, v=v[..., :8]),
        replace(inputs, k=k[:, :, :0], v=v[:, :, :0]),
        replace(inputs, q=q[:, :, :0]),
        Inputs(*(x.double() for x in qkv)),
    )
    assert all(fused.attend(facts, other) is None for other in others)
    assert fused.attend(CASES["soft cap"].facts, inputs) is None


def test_large_calls_alone(runs: list[Any]) -> None:
    """From a number of multiplications on, without gradients, at the first call as at the second."""
    attn = fa4flex.compile(mask=causal)
    heads = fused.LEAST_PRODUCTS // (256 * 256 * 128)
    large = [torch.randn(1, heads, 256, 64) for _ in range(3)]
    first = attn(*large)
    assert len(runs) == 1 and torch.equal(first, attn(*large)) and len(runs) == 2
    small = [x[:, :, :-1] for x in large]
    attn(*small)
    attn(*(x.clone().requires_grad_() for x in large)).sum().backward()
    assert len(runs) == 2
    with torch.device("meta"):  # the library's own tensors lie on the host
        assert torch.equal(attn(*large), first) and len(runs) == 3


def test_numbers_that_are_none(every_size: None) -> None:
    """NaN and infinities reach the same results as tile by tile."""
    for name in ("causal", "window", "dense"):
        case, qkv = PLAIN[name], Sizes(1, 2, 2, 300, 300).qkv(F32)
        for which, value in ((0, torch.nan), (1, torch.inf), (1, -torch.inf), (1, torch.nan), (2, torch.inf)):
            changed = [x.clone() for x in qkv]
            changed[which][:, :, 77, 3] = value
            inputs = Inputs(*changed, scale=0.25)
            attn = fa4flex.compile(mask=case.mask_mod and _without_tables(case.mask_mod), scale=0.25)
            tile = forward(case.facts, inputs)
            out, lse = attn(*changed, return_lse=True)
            torch.testing.assert_close(out, tile.out, equal_nan=True)
            torch.testing.assert_close(lse, tile.lse, equal_nan=True)


def _without_tables(mod: Any) -> Any:
    return lambda b, h, q_idx, kv_idx: mod([], b, h, q_idx, kv_idx)


def test_rows_whose_scores_are_all_infinite(every_size: None) -> None:
    q, k, v = torch.ones(1, 1, 40, 8), torch.full((1, 1, 40, 8), -torch.inf), torch.randn(1, 1, 40, 8)
    out, lse = fa4flex.compile(mask=causal)(q, k, v, return_lse=True)
    assert bool((lse == -torch.inf).all()) and bool((out == 0).all())


def test_contents_that_change(every_size: None, runs: list[Any]) -> None:
    """Documents, a window's size and sinks are read at each call."""
    ids, sinks, size = torch.zeros(300, dtype=torch.int64), torch.zeros(2), [30]
    window = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size[0]  # noqa: E731
    attn = fa4flex.compile(mask=causal & document(ids) & window, sinks=sinks)
    q, k, v = Sizes(1, 2, 2, 300, 300).qkv(F32)
    for _ in range(3):
        ids.copy_(torch.randint(0, 6, (300,)).sort().values)
        sinks.copy_(torch.randn(2))
        size[0] = random.randint(5, 100)
        mask = causal & document(ids) & sliding_window(size[0])
        out, lse = reference.attention(q, k, v, None, mask, sinks=sinks)
        found = attn(q, k, v, return_lse=True)
        assert close(found[0].double(), out, 1e-5) and close(found[1].double(), lse, 1e-5)
    assert runs


@pytest.mark.parametrize("name", ["dense", "causal", "window", "window per head"])
def test_strides_do_not_matter(name: str, every_size: None) -> None:
    case = CASES[name]
    q, k, v = (torch.randn(2, 90, 4, 16).transpose(1, 2) for _ in range(3))
    wide = torch.randn(2, 4, 90, 32)[..., ::2]
    tables = case.tables(Sizes(2, 4, 4, 90, 90))
    for qkv in ([q, k, v], [wide, k[:, :1].expand(2, 4, 90, 16), v], [q, k[:, :2], v[:, :2]]):
        found = fused.attend(case.facts, Inputs(*qkv, Captured(tuple(tables)), 0.25))
        out, lse = oracle(case, qkv, tables)
        assert found is not None and close(found[0].double(), out, 1e-5)
        assert close(found[1].double(), lse, 1e-5)
        assert found[0].stride() == torch.empty_like(qkv[0]).stride() or qkv[0] is wide


def test_packed_sequences(every_size: None, runs: list[Any]) -> None:
    ends = torch.tensor([0, 130, 137, 400])
    q, k, v = (torch.randn(400, 2, 16) for _ in range(3))
    attn = fa4flex.compile(mask=causal)
    out, lse = attn(q, k, v, varlen=fa4flex.Varlen(ends, ends), return_lse=True)
    assert len(runs) == 3
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        one = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        exact, exact_lse = reference.attention(*one, None, causal)
        assert close(out[start:stop].transpose(0, 1)[None].double(), exact, 1e-5)
        assert close(lse[None, :, start:stop].double(), exact_lse, 1e-5)


def test_without_the_kernel(every_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torch that lack it take one tile after the other."""
    monkeypatch.setattr(fused, "fused_kernel", None)
    q, k, v = Sizes(1, 2, 2, 300, 300).qkv(F32)
    out, lse = fa4flex.compile(mask=causal)(q, k, v, return_lse=True)
    exact, exact_lse = reference.attention(q, k, v, None, causal)
    assert close(out.double(), exact, 1e-5) and close(lse.double(), exact_lse, 1e-5)


def test_memory_is_bounded() -> None:
    """No tensor is larger than the score buffer (8 MiB) or the inputs; all scores would be 32 MiB."""
    for mask in (None, causal, sliding_window(300), document(torch.arange(2900) // 500)):
        q, k, v = (torch.randn(1, 1, 2900, 16) for _ in range(3))
        with largest_tensor() as largest:
            fa4flex.compile(mask=mask)(q, k, v)
        assert largest.nbytes <= 4 * tiles.SCORES
