"""With fixed parts of keys, bits of a sequence's results do not depend on what else is in its batch, on
simulated GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Paging, Schedule, Varlen
from fa4flex.kernels.fwd_sm90 import packing
from fa4flex.variants import alibi, causal, sigmoid_attention, sliding_window

HEADS, KV_HEADS, PAGE, MOST_PADDED = 8, 2, 16, 150
FIXED = Schedule(split=64)


class Sequence(NamedTuple):
    """Queries [Tq, Hq, D], and keys and values [Tk, Hkv, D] of it."""

    q: Tensor
    k: Tensor
    v: Tensor


def drawn(q_len: int, kv_len: int, width: int = 64) -> Sequence:
    """Scores are large, so that maxima are raised often, and at different tiles in different rows."""
    sizes = (q_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS)
    return Sequence(*((torch.randn(*size, width) * 3).bfloat16() for size in sizes))


def packed(attn: Any, batch: list[Sequence]) -> list[Tensor]:
    lengths = [[len(one.q) for one in batch], [len(one.k) for one in batch]]
    ends = [torch.tensor([0, *x]).cumsum(0).int() for x in lengths]
    out = attn(*(torch.cat(x) for x in zip(*batch, strict=True)), varlen=Varlen(*ends))
    return list(out.split(lengths[0]))


def padded(attn: Any, batch: list[Sequence]) -> list[Tensor]:
    """Every batch has room for as many queries, which say whether a kernel is for few or for many."""
    used = [torch.tensor([len(one[i]) for one in batch], dtype=torch.int32) for i in (0, 1)]

    def rows(tensors: tuple[Tensor, ...], longest: int) -> Tensor:
        room = tensors[0].new_full((len(batch), longest, *tensors[0].shape[1:]), torch.nan)
        for row, x in zip(room, tensors, strict=True):
            row[: len(x)] = x
        return room.transpose(1, 2)

    q, k, v = zip(*batch, strict=True)
    longest = max(map(len, k)) + 5
    qkv = rows(q, MOST_PADDED), rows(k, longest), rows(v, longest)
    out = attn(*qkv, varlen=Varlen(seqused_q=used[0], seqused_k=used[1]))
    return [x[:, : len(one.q)].transpose(0, 1) for x, one in zip(out, batch, strict=True)]


def in_pages(batch: list[Sequence]) -> tuple[tuple[Tensor, Tensor], Paging]:
    """Caches of the keys and values of all sequences, in pages of any order."""
    count = [-(-len(one.k) // PAGE) for one in batch]
    numbers = torch.randperm(sum(count) + 3).int()
    caches = [torch.full((len(numbers), PAGE, *batch[0].k.shape[1:]), torch.nan).bfloat16() for _ in range(2)]
    table = torch.zeros(len(batch), max(count), dtype=torch.int32)
    for row, one, n in zip(table, batch, count, strict=True):
        row[:n], numbers = numbers[:n], numbers[n:]
        for cache, x in zip(caches, one[1:], strict=True):
            pages = torch.full((n * PAGE, *x.shape[1:]), torch.nan).bfloat16()
            pages[: len(x)] = x
            cache[row[:n].long()] = pages.unflatten(0, (n, PAGE))
    used = torch.tensor([len(one.k) for one in batch], dtype=torch.int32)
    return (caches[0], caches[1]), Paging(table, used)


def decoding_pages(attn: Any, batch: list[Sequence]) -> list[Tensor]:
    caches, paging = in_pages(batch)
    out = attn(torch.stack([one.q for one in batch]).transpose(1, 2), *caches, paging=paging)
    return list(out.transpose(1, 2))


def chunks_of_pages(attn: Any, batch: list[Sequence]) -> list[Tensor]:
    caches, paging = in_pages(batch)
    lengths = [len(one.q) for one in batch]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    out = attn(torch.cat([one.q for one in batch]), *caches, varlen=Varlen(ends), paging=paging)
    return list(out.split(lengths))


KINDS: dict[str, tuple[Callable[..., list[Tensor]], tuple[int, int]]] = {
    "packed": (packed, (2, 200)),
    "padded": (padded, (2, MOST_PADDED)),
    "decoding pages": (decoding_pages, (2, 2)),
    "chunks of pages": (chunks_of_pages, (2, 100)),
}
"""Ways of a call, and the queries that a sequence may have."""

MODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal},
    "ALiBi, window": {"score_mod": alibi, "mask": sliding_window(50)},
    "logistic weights": {"normalizer": sigmoid_attention(-33.0), "mask": causal},
}


@contextmanager
def simulated(arch: str) -> Iterator[None]:
    with torch.no_grad(), ptxsim.device(arch, random.randrange(99), "random", sms=2) as gpu:
        yield
    assert not gpu.findings, gpu.report()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("kind", KINDS)
def test_alone_and_among_others(
    kind: str, mods: str, arch: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few tokens are short sequences then, and so many are not, that these batches are of both sorts.
    monkeypatch.setattr(packing, "SHORT_SEQUENCES", 1)
    call, (least, most) = KINDS[kind]
    attn = fa4flex.compile(**MODS[mods], schedule=FIXED)

    def another(longest: int) -> Sequence:
        q_len = random.randint(least, max(longest, least))
        return drawn(q_len, q_len + random.randint(0, 200))

    mine = another(min(most, 60))
    others = [another(most) for _ in range(3)]
    if kind == "packed":
        others.append(drawn(400, 400))
    batches = [[mine], [mine, *others], [*others[:2], mine, *others[2:]]]
    found = []
    for batch in batches:
        with simulated(arch):
            found.append(call(attn, batch)[next(i for i, x in enumerate(batch) if x is mine)])
    assert found[0].isfinite().all()
    for other in found[1:]:
        assert torch.equal(found[0], other)
