"""A source of keys that nobody has thought of: one class, and every door takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from launch_changes import calls_on_gpu
from torch import Tensor

import fa4flex
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import graphs, launch
from fa4flex.runtime.key_sources import Contiguous, Copied, KeySource, Paged
from fa4flex.variant import Variant
from fa4flex.variants import causal

PAGE, PAGES, HEADS = 4, 3, 2


class _Ring(NamedTuple):
    k: Tensor
    v: Tensor
    first: Tensor
    used: Tensor


class RingBuffer(_Ring, KeySource):
    """k, v [B, pages, page_size, H, D]: a ring for each sequence, whose oldest key is the first one of page
    `first` [B], and its number of keys `used` [B]."""

    __slots__ = ()

    def _pages(self) -> Tensor:
        """int32 [B, pages]: pages of each sequence in order, among those of all sequences."""
        batch, pages = self.k.shape[:2]
        ring = (self.first[:, None] + torch.arange(pages)) % pages
        return (ring + torch.arange(batch)[:, None] * pages).int()

    def in_place(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        pools = self.k.flatten(0, 1), self.v.flatten(0, 1)
        return Paged(*pools, self._pages(), self.used).in_place(q, varlen, variant)

    def fits(self, q: Tensor, varlen: Varlen | None) -> None:
        assert q.shape[0] == self.k.shape[0]

    def stand_in(self, q: Tensor, heads_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (x.flatten(1, 2).transpose(1, 2) for x in (self.k, self.v))
        return q if heads_first else q.transpose(1, 2), k, v

    def copied(
        self, q: Tensor, varlen: Varlen | None, variant: Variant, *, kernels: bool, eager: bool
    ) -> Copied | None:
        k, v = (x.flatten(0, 1)[self._pages().long()].flatten(1, 2) for x in (self.k, self.v))
        if variant.layout == "bhsd":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        return Copied(q, Contiguous(k, v), Varlen(seqused_k=self.used), lambda found: found)


def drawn(dtype: torch.dtype = torch.float64, dim: int = 8) -> tuple[Tensor, RingBuffer]:
    q = torch.randn(2, 2 * HEADS, 3, dim, dtype=dtype)
    k, v = torch.randn(2, 2, PAGES, PAGE, HEADS, dim, dtype=dtype)
    first, used = torch.tensor([2, 1]), torch.tensor([PAGES * PAGE, 6], dtype=torch.int32)
    return q, RingBuffer(k, v, first, used)


def exact(q: Tensor, ring: RingBuffer) -> Tensor:
    """Causal attention of each sequence, aligned at the end, in float64."""
    rows = []
    for b, (first, used) in enumerate(zip(ring.first.tolist(), ring.used.tolist(), strict=True)):
        k, v = (
            x[b].roll(-first, 0).flatten(0, 1)[:used].transpose(0, 1).repeat_interleave(2, 0)
            for x in (ring.k, ring.v)
        )
        scores = q[b] @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        seen = torch.arange(used) <= torch.arange(q.shape[2])[:, None] + used - q.shape[2]
        rows.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v)
    return torch.stack(rows)


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
@pytest.mark.parametrize("backend", ("auto", "flex"))
def test_eager_calls_and_gradients(backend: Any, layout: Any) -> None:
    variant, (q, ring) = fa4flex.compile(mask=causal, backend=backend, layout=layout).variant, drawn()
    q, ring = q.requires_grad_(), ring._replace(k=ring.k.requires_grad_())
    given = q if layout == "bhsd" else q.transpose(1, 2)
    out = launch.attend(variant, given, ring, None, ())[0]
    out = out if layout == "bhsd" else out.transpose(1, 2)
    truth = exact(q, ring)
    torch.testing.assert_close(out, truth)
    found = torch.autograd.grad(out.square().sum(), (q, ring.k))
    for x, y in zip(found, torch.autograd.grad(truth.square().sum(), (q, ring.k)), strict=True):
        torch.testing.assert_close(x, y)


def test_graphs() -> None:
    variant, (q, ring) = fa4flex.compile(mask=causal).variant, drawn()

    def attend(q: Tensor, *tensors: Tensor) -> Tensor:
        return graphs.run(variant, q, RingBuffer(*tensors), None, ("lse",))[0]

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, *ring), exact(q, ring))


def test_kernels_read_it_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys as pages, for which kernels have a loader."""
    recorder = calls_on_gpu(monkeypatch)
    variant, (q, ring) = fa4flex.compile(mask=causal).variant, drawn(torch.bfloat16, 64)
    with torch.no_grad():
        launch.attend(variant, q, ring, None, ())
    pool, table = recorder.launches[-1][1], recorder.launches[-1][-3]
    assert pool.data_ptr() == ring.k.data_ptr()
    assert table.tolist() == [[2, 0, 1], [4, 5, 3]]
