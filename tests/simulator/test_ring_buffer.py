"""A source of keys that nobody has thought of, read in place by kernels: one class, its rows, a loader."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from cutlass import Int32, Int64
from paged_pools import guarded
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex.kernels.common.key_loader import Wanted
from fa4flex.kernels.plan.keys import KeyRow, Keys
from fa4flex.kernels.plan.looks import Given
from fa4flex.primitives.varlen import Varlen
from fa4flex.runtime import launch
from fa4flex.runtime.call import Results
from fa4flex.runtime.key_sources import Contiguous, Copied, KeySource
from fa4flex.variant import Variant
from fa4flex.variants import alibi, causal

# --- the source ---------------------------------------------------------------------------------------------


class RingLoader(NamedTuple):
    """Key j of sequence b is in slot (first + j) % slots of its ring."""

    b: Int32
    first: Int32
    slots: Int32
    pages: Int32

    @property
    def entry(self) -> Any:
        return Int32

    @staticmethod
    def capacity(arguments: Any) -> Int64:
        return Int64(arguments.k.shape[1])

    @staticmethod
    def of(arguments: Any, wanted: Wanted) -> RingLoader:
        rings, slots = arguments.k.shape[:2]
        return RingLoader(wanted.b, Int32(arguments.first[wanted.b]), Int32(slots), Int32(rings))

    def entry_of(self, key: Int32) -> tuple[Int32, Int32]:
        return self.b, (self.first + key) % self.slots

    def place(self, entry: Int32, slot: Int32) -> tuple[Int32, Int32]:
        return entry, slot


class _Ring(NamedTuple):
    k: Tensor
    v: Tensor
    first: Tensor
    used: Tensor


class RingBuffer(_Ring, KeySource):
    """k, v [B, slots, H, D]: a ring for each sequence, whose oldest key is in slot `first` [B], and its
    number of keys `used` [B]. In place beside queries with heads first they are [B, H, slots, D]."""

    __slots__ = ()

    @property
    def seqused_k(self) -> Tensor:
        return self.used

    def keys(self, rows: int) -> Keys:
        return Keys(f"{__name__}:RingLoader", 1, (KeyRow("first", Given("first", ("sequences",))),))

    def in_place(self, q: Tensor, varlen: Varlen | None, variant: Variant) -> KeySource | None:
        k, v = (x.transpose(1, 2) if varlen is None else x for x in (self.k, self.v))
        return RingBuffer(k, v, self.first, self.used)

    def fits(self, q: Tensor, varlen: Varlen | None) -> None:
        assert varlen is not None or q.shape[0] == self.k.shape[0]

    def stand_in(self, q: Tensor, heads_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        if q.ndim == 3:
            k, v = (x[0, :1].expand(q.shape[0], -1, -1) for x in (self.k, self.v))
            return q, k, v
        return q, self.k.transpose(1, 2), self.v.transpose(1, 2)

    def copied(
        self, q: Tensor, varlen: Varlen | None, variant: Variant, *, kernels: bool, eager: bool
    ) -> Copied | None:
        assert not kernels, "kernels read it in place"
        slots = (self.first[:, None] + torch.arange(self.k.shape[1])) % self.k.shape[1]
        k, v = (x[torch.arange(len(x))[:, None], slots].transpose(1, 2) for x in (self.k, self.v))
        return Copied(q, Contiguous(k, v), Varlen(seqused_k=self.used), lambda results: results)


# --- calls --------------------------------------------------------------------------------------------------

HEADS = 2
ATTN = fa4flex.compile(score_mod=alibi, mask=causal)


def rings() -> RingBuffer:
    """Memory ends behind each tensor, and slots without a key are poisoned."""
    first, used, slots = (150, 7), (170, 33), 177
    k, v = torch.full((2, len(used), slots, HEADS, 64), torch.nan, dtype=torch.bfloat16)
    for b, (start, count) in enumerate(zip(first, used, strict=True)):
        held = (start + torch.arange(count)) % slots
        for cache in (k, v):
            cache[b, held] = torch.randn(count, HEADS, 64).bfloat16()
    starts, counts = torch.tensor(first, dtype=torch.int32), torch.tensor(used, dtype=torch.int32)
    return RingBuffer(*map(guarded, (k, v, starts, counts)))


def compare(out: Tensor, q: Tensor, kv: RingBuffer, b: int) -> None:
    """Attention of queries [Hq, Sq, D] of a sequence, beside that over its keys in order, in float64."""
    k, v = (x[b].roll(-int(kv.first[b]), 0)[: int(kv.used[b])].transpose(0, 1) for x in (kv.k, kv.v))
    exact = ATTN(*(x[None].double() for x in (q, k, v)))[0]
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.01)


def attend(chip: str, q: Tensor, kv: RingBuffer, varlen: Varlen | None = None) -> tuple[Results, list[str]]:
    """Results from a simulated GPU, and the kernels that ran there."""
    with torch.no_grad(), ptxsim.device(chip) as gpu:
        results = launch.attend(ATTN.variant, q, kv, varlen, ("lse",))
    assert not gpu.findings, gpu.report()
    return results, [result.kernel for result in gpu.results]


def test_the_cpu_executor_gathers_it() -> None:
    kv, q = rings(), torch.randn(2, 2 * HEADS, 3, 64).bfloat16()
    kv = kv._replace(k=kv.k.nan_to_num(), v=kv.v.nan_to_num())
    out, *_ = launch.attend(ATTN.variant, q, kv, None, ())
    for b in range(2):
        compare(out[b], q[b], kv, b)


KERNELS = [
    ("sm_90a", "decode_sm90", 3),
    ("sm_100a", "decode_sm100", 3),
    ("sm_90a", "fwd_sm90", 70),
    pytest.param("sm_100a", "fwd_sm100", 70, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("chip, kernel, q_len", KERNELS)
def test_kernels_read_it_by_its_loader(chip: str, kernel: str, q_len: int) -> None:
    kv, q = rings(), torch.randn(2, 2 * HEADS, q_len, 64).bfloat16()
    (out, *_), kernels = attend(chip, q, kv)
    assert any(kernel in name for name in kernels)
    for b in range(2):
        compare(out[b], q[b], kv, b)


@pytest.mark.slow
def test_packed_queries_of_few_rows_and_of_many() -> None:
    kv, q = rings(), torch.randn(72, 4 * HEADS, 64).bfloat16()
    (out, *_), kernels = attend("sm_90a", q, kv, Varlen(torch.tensor([0, 70, 72], dtype=torch.int32)))
    assert any("mixed_sm90" in name for name in kernels)
    for b, rows in enumerate((slice(0, 70), slice(70, 72))):
        compare(out[rows].transpose(0, 1), q[rows].transpose(0, 1), kv, b)


def test_a_length_past_the_ring_is_told() -> None:
    kv, q = rings(), torch.randn(2, 2 * HEADS, 3, 64).bfloat16()
    kv.used[1] = 5000
    attend("sm_90a", q, kv)
    with pytest.raises(fa4flex.InputError, match="seqused_k of 5000"):
        fa4flex.synchronize()
