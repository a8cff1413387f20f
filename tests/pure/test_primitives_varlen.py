"""Ragged sequences and pages: which tokens they mean, and what they refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.paging import Paging
from fa4flex.primitives.varlen import Varlen


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_bounds(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    q_sizes, k_sizes = ([rng.randint(0, 9) for _ in range(5)] for _ in range(2))
    cu_q, cu_k = ([sum(sizes[:i]) for i in range(6)] for sizes in (q_sizes, k_sizes))
    used_q, used_k = ([rng.randint(0, size) for size in sizes] for sizes in (q_sizes, k_sizes))
    both = Varlen(ints(*cu_q, dtype=dtype), ints(*cu_k, dtype=dtype))
    assert both.bounds() == [(cu_q[i], cu_q[i + 1], cu_k[i], cu_k[i + 1]) for i in range(5)]
    used = Varlen(ints(*cu_q), ints(*cu_k), ints(*used_q), ints(*used_k))
    assert used.bounds() == [(cu_q[i], cu_q[i] + used_q[i], cu_k[i], cu_k[i] + used_k[i]) for i in range(5)]
    alone = Varlen(ints(*cu_q))
    assert alone.bounds() == [(cu_q[i], cu_q[i + 1]) * 2 for i in range(5)]
    assert both.packed and both.sequences == 5 and alone.cu_k is alone.cu_seqlens_q
    both.check(cu_q[-1], cu_k[-1])
    both.check(cu_q[-1])


def test_padded_bounds() -> None:
    padded = Varlen(seqused_q=ints(3, 0), seqused_k=ints(5, 7))
    assert not padded.packed and padded.sequences == 2
    assert padded.bounds() == [(0, 3, 0, 5), (0, 0, 0, 7)]
    assert Varlen(seqused_k=ints(5, 7)).bounds(q_len=4) == [(0, 4, 0, 5), (0, 4, 0, 7)]
    padded.check_padded(2, 3, 7)


def test_repr_evaluates_back() -> None:
    for given in (
        Varlen(ints(0, 2, 5), seqused_k=ints(1, 3), max_seqlen_q=4),
        Paging(ints(0, 1).view(1, 2), ints(3)),
    ):
        again = eval(repr(given), {"Varlen": Varlen, "Paging": Paging, "torch": torch})
        assert repr(again) == repr(given)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_gather_reads_each_key_through_the_page_table(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    used = [rng.randint(0, 3 * page_size) for _ in range(4)] + [1]
    table = torch.full((5, 4), -(10**6), dtype=torch.int32)
    for b, length in enumerate(used):
        for page in range(-(-length // page_size)):
            table[b, page] = rng.randrange(8)  # pages may repeat and may be shared
    cache = torch.randn(8, page_size, 2, 3, dtype=torch.float64, requires_grad=True)
    paging = Paging(table, ints(*used))
    paging.check(cache, cache)
    packed, cu_seqlens = paging.gather(cache)
    rows = [cache[table[b, t // page_size], t % page_size] for b, n in enumerate(used) for t in range(n)]
    assert torch.equal(packed, torch.stack(rows))
    assert cu_seqlens.tolist() == [sum(used[:i]) for i in range(6)] and cu_seqlens.dtype == torch.int32
    weight = torch.randn_like(packed)
    (got,) = torch.autograd.grad((packed * weight).sum(), cache)
    (expected,) = torch.autograd.grad((torch.stack(rows) * weight).sum(), cache)
    torch.testing.assert_close(got, expected)


def test_gather_reads_a_strided_cache() -> None:
    pool = torch.randn(2, 4, 5, 2, 3)  # keys and values interleaved per page, as some servers store them
    paging = Paging(ints(3, 1).view(1, 2), ints(7))
    packed, _ = paging.gather(pool[1])
    assert torch.equal(packed, torch.cat((pool[1, 3], pool[1, 1]))[:7])
    head_major = torch.randn(4, 2, 5, 3).transpose(1, 2)
    assert torch.equal(paging.gather(head_major)[0], torch.cat((head_major[3], head_major[1]))[:7])


CU = ints(0, 2, 5)
TABLE = ints(0, 1, 2, 99).view(2, 2)
CACHE = torch.zeros(3, 4, 2, 8)
ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Varlen(), "Varlen.. without lengths"),
    (lambda: Varlen(cu_seqlens_k=CU), "cu_seqlens_k without cu_seqlens_q"),
    (lambda: Varlen(ints(1, 2)), "cu_seqlens_q starts at 1\n  expected: 0 first\n  to fix:   prepend 0"),
    (
        lambda: Varlen(ints(0, 4, 3)),
        "cu_seqlens_q decreases after entry 1: 4 to 3.*\n.*\n.*cumulative lengths, not",
    ),
    (lambda: Varlen(ints(0)), r"cu_seqlens_q of shape \[1\]\n  expected: \[N \+ 1\]"),
    (lambda: Varlen(CU.float()), "cu_seqlens_q of torch.float32\n  expected: an int32 or int64"),
    (lambda: Varlen([0, 2]), "cu_seqlens_q of list"),
    (lambda: Varlen(CU[None]), r"cu_seqlens_q of shape \[1, 3\]"),
    (lambda: Varlen(CU, ints(0, 2)), "cu_seqlens_q has 2 sequences, cu_seqlens_k has 1 sequences"),
    (lambda: Varlen(CU, seqused_k=ints(1)), "seqused_k has 1 sequences"),
    (lambda: Varlen(CU, CU.to("meta")), "cu_seqlens_k on meta\n  expected: one device"),
    (lambda: Varlen(CU, seqused_k=ints(2, 4)), r"seqused_k\[1\] = 4, sequence 1 has 3 tokens"),
    (lambda: Varlen(CU, ints(0, 9, 9), ints(3, 0)), r"seqused_q\[0\] = 3, sequence 0 has 2 tokens"),
    (lambda: Varlen(CU, seqused_k=ints(-1, 1)), "seqused_k of -1"),
    (
        lambda: Varlen(CU, max_seqlen_q=2),
        "max_seqlen_q=2 with a longest sequence of 3\n  expected: an int >= 3",
    ),
    (lambda: Varlen(CU, max_seqlen_k=2.5), "max_seqlen_k=2.5"),
    (lambda: Varlen(CU).check(6, 5), "cu_seqlens_q ends at 5, q has 6 tokens"),
    (
        lambda: Varlen(CU).check(5, 6),
        "cu_seqlens_k ends at 5, k has 6 tokens.*\n.*\n.*pass cu_seqlens_k where",
    ),
    (
        lambda: Varlen(CU, ints(0, 1, 2)).check(5, 6),
        "cu_seqlens_k ends at 2, k has 6 tokens.*\n.*\n.*pass seqused",
    ),
    (lambda: Varlen(seqused_k=ints(1)).check(6, 5), "has only seqused"),
    (lambda: Varlen(seqused_k=ints(1)).bounds(), "padded batch without q_len"),
    (lambda: Varlen(CU).check_padded(2, 3, 3), "padded batch with cu_seqlens"),
    (lambda: Varlen(seqused_k=ints(1, 2)).check_padded(3, 3, 3), "lengths of 2 sequences for a batch of 3"),
    (lambda: Varlen(seqused_k=ints(1, 9)).check_padded(2, 3, 8), "seqused_k up to 9 for a length of 8"),
    (lambda: Paging(TABLE.float(), ints(1, 1)), "page_table of torch.float32"),
    (lambda: Paging(TABLE, ints(1, 1).to(torch.int16)), "seqused_k of torch.int16"),
    (lambda: Paging(TABLE[0], ints(1, 1)), r"page_table of shape \[2\]"),
    (lambda: Paging(TABLE, ints(1)), "page_table has 2 sequences, seqused_k 1"),
    (lambda: Paging(TABLE, ints(1, 1).to("meta")), "seqused_k on meta"),
    (lambda: Paging(TABLE, ints(1, -2)), "seqused_k of -2"),
    (lambda: Paging(TABLE, ints(8, 5)).check(CACHE, CACHE), "page 99 in the page table\n  expected: 0 to 2"),
    (lambda: Paging(-TABLE, ints(8, 4)).check(CACHE, CACHE), "page -2 in the page table"),
    (
        lambda: Paging(TABLE, ints(9, 4)).check(CACHE, CACHE),
        r"seqused_k of 9 tokens\n.*max_pages \* page_size = 2 \* 4 = 8",
    ),
    (lambda: Paging(TABLE, ints(8, 4)).check(CACHE[0], CACHE), r"k cache of shape \[4, 2, 8\]"),
    (lambda: Paging(TABLE, ints(8, 4)).check(CACHE, CACHE[:, :2]), r"v cache torch.float32 \[3, 2, 2, 8\]"),
    (lambda: Paging(TABLE, ints(8, 4)).check(CACHE, CACHE.half()), "v cache torch.float16"),
    (lambda: Paging(TABLE, ints(8, 4)).check(CACHE.to("meta"), CACHE), "k cache on meta"),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_error_says_what_was_given_and_what_to_do(number: int) -> None:
    make, text = ERRORS[number]
    with pytest.raises(InputError, match=text) as raised:
        make()
    assert "to fix:" in str(raised.value)


def test_dead_pages_may_hold_anything() -> None:
    Paging(TABLE, ints(8, 4)).check(CACHE, CACHE)
    Paging(TABLE, ints(0, 0)).check(CACHE, CACHE[..., :5])
