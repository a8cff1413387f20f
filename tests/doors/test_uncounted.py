"""Results follow every change of contents, counted by torch or not, on a CPU and by flex."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from uncounted import WRITES

import fa4flex
from fa4flex import BlockMap, Schedule, Varlen, contents
from fa4flex.codegen.analyze import rows
from fa4flex.contents import Alike
from fa4flex.parallel.plan import plan
from fa4flex.primitives import block_lists, blocks

N, D, BLOCK = 512, 16, 128
place = torch.arange(N)
COUNTED = Schedule(contents="counted")


def qkv() -> list[Tensor]:
    return [torch.randn(1, 2, N, D) for _ in range(3)]


def dense(given: list[Tensor], allowed: Tensor) -> Tensor:
    """The formula in float64; rows that see no key are 0."""
    q, k, v = (x.double() for x in given)
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v


def documents(dtype: torch.dtype) -> Callable[[], Tensor]:
    def drawn() -> Tensor:
        found = torch.randint(0, 5, (N,)).sort().values
        return (found / 2).to(dtype) if dtype.is_floating_point else found.to(dtype)

    return drawn


def everything(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv >= 0


def case(name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """(tensor, new contents, call, what is exact)."""
    given = qkv()

    def by(composed: Any, allowed: Callable[[], Tensor], **call: Any) -> tuple[Any, Any]:
        return lambda: composed(*given, return_lse=True, **call)[0], lambda: dense(given, allowed())

    if name in ("documents", "documents of int32", "float documents"):
        dtype = {"documents": torch.int64, "documents of int32": torch.int32}.get(name, torch.float32)
        drawn = documents(dtype)
        ids = drawn()
        masked = fa4flex.compile(mask=lambda b, h, q, kv: ids[q] == ids[kv], **options)
        return ids, drawn, *by(masked, lambda: ids[:, None] == ids)
    if name == "causal documents":
        drawn = documents(torch.int64)
        ids = drawn()
        masked = fa4flex.compile(mask=fa4flex.variants.causal & fa4flex.variants.document(ids), **options)
        return ids, drawn, *by(masked, lambda: (ids[:, None] == ids) & (place[:, None] >= place))
    if name == "map":
        classes = torch.randint(0, 2, (1, 1, 4, 4), dtype=torch.uint8)
        masked = fa4flex.compile(mask=everything, blocks=BlockMap.from_dense(classes, BLOCK), **options)
        drawn = lambda: torch.randint(0, 2, (1, 1, 4, 4), dtype=torch.uint8)  # noqa: E731
        return classes, drawn, *by(masked, lambda: classes[0, 0][place // BLOCK][:, place // BLOCK] > 0)
    if name == "BlockMask":
        counts = torch.randint(0, 5, (1, 1, 4), dtype=torch.int32)
        listed = torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4).contiguous()
        made = BlockMask.from_kv_blocks(
            counts, listed, BLOCK_SIZE=BLOCK, mask_mod=lambda b, h, q, kv: kv >= 0
        )
        masked = fa4flex.compile(mask=lambda b, h, q, kv: kv >= 0, **options)
        drawn = lambda: torch.randint(0, 5, (1, 1, 4), dtype=torch.int32)  # noqa: E731
        allowed = lambda: counts[0, 0][place // BLOCK][:, None] > place // BLOCK  # noqa: E731
        found = lambda: masked(*given, return_lse=True, blocks=made)[0]  # noqa: E731
        return counts, drawn, found, lambda: dense(given, allowed())
    if name == "lengths used":
        used = torch.tensor([400], dtype=torch.int32)
        masked = fa4flex.compile(mask=fa4flex.variants.causal, **options)
        drawn = lambda: torch.randint(1, N, (1,), dtype=torch.int32)  # noqa: E731
        allowed = lambda: (used > place) & (place[:, None] + used - N >= place)  # noqa: E731
        return used, drawn, *by(masked, allowed, varlen=Varlen(seqused_k=used))
    assert name == "packed"
    starts = torch.tensor([0, 100, N], dtype=torch.int32)
    masked = fa4flex.compile(**options)
    packed = [x[0].transpose(0, 1).contiguous() for x in given]

    def drawn() -> Tensor:
        return torch.tensor([0, int(torch.randint(1, N, ())), N], dtype=torch.int32)

    def found() -> Tensor:
        return masked(*packed, return_lse=True, varlen=Varlen(starts))[0].transpose(0, 1)[None]

    return starts, drawn, found, lambda: dense(given, (place >= starts[1])[:, None] == (place >= starts[1]))


CASES = (
    "documents", "documents of int32", "float documents", "causal documents", "map", "BlockMask",
    "lengths used", "packed",
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("name", CASES)
def test_results_follow_every_change(name: str, backend: str, write: str) -> None:
    x, drawn, found, exact = case(name, {"backend": backend})
    if write == "average" and not x.is_floating_point():
        pytest.skip("averages are of floating numbers")
    for _ in range(3):
        for _ in range(2):
            torch.testing.assert_close(found().double(), exact(), rtol=0, atol=1e-5)
        new = drawn()
        if write == "average":
            new = new * 4
        WRITES[write](x, new)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("write", [name for name in WRITES if name != "average"])
def test_maps_of_lists_on_a_device_are_made_anew(
    write: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a CPU stand for them. Entries that do not fit are left out where the count told nothing."""
    monkeypatch.setattr(block_lists, "checked_here", lambda x: False)
    monkeypatch.setattr(blocks._maps, "made", lambda key, tensors, make, how: make())
    drawn = lambda: torch.randint(0, 4, (1, 2, 4), dtype=torch.int32)  # noqa: E731
    rows = [torch.tensor([*torch.randperm(3), 3], dtype=torch.int32) for _ in range(8)]
    lists = [drawn(), torch.stack(rows).view(1, 2, 4, 4)]
    more = [torch.randint(0, 2, (1, 2, 4), dtype=torch.int32), lists[1].flip(3)] if full else []
    made = BlockMask.from_kv_blocks(*lists, *more, BLOCK_SIZE=BLOCK)
    for _ in range(4):
        found, _ = BlockMap.from_torch(made)
        assert found is not None
        exact = BlockMap.from_counts(*lists, BLOCK, N, N, *more)
        assert torch.equal(found.classes, exact.classes) and repr(found) == repr(exact)
        WRITES[write](lists[0], drawn())
        if full:
            WRITES[write](more[0], torch.randint(0, 2, (1, 2, 4), dtype=torch.int32))
    if write in ("data", "numpy"):
        BlockMap.from_torch(made)
        WRITES[write](lists[1], torch.full_like(lists[1], 7))
        WRITES[write](lists[0], torch.full_like(lists[0], 9))
        found, _ = BlockMap.from_torch(made)
        assert found is not None and not (found.classes == blocks.PARTIAL).any()


@pytest.mark.parametrize("write", ["data", "behind the count", "numpy", "memory used again"])
def test_plans_of_many_ranks_follow_every_change(write: str) -> None:
    ids = torch.zeros(4096, dtype=torch.int64)
    attn = fa4flex.compile(mask=fa4flex.variants.causal & fa4flex.variants.document(ids))
    whole = plan(attn, 4096, 4)
    assert plan(attn, 4096, 4) is whole
    WRITES[write](ids, torch.arange(4096) // 64)
    parted = plan(attn, 4096, 4)
    assert parted is not whole and parted.digest != whole.digest
    WRITES[write](ids, torch.zeros(4096, dtype=torch.int64))
    assert plan(attn, 4096, 4).digest == whole.digest


@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("write", ["data", "behind the count", "numpy"])
def test_lengths_that_have_become_wrong_are_refused(write: str, backend: str) -> None:
    attn = fa4flex.compile(backend=backend)
    packed = [torch.randn(N, 2, D) for _ in range(3)]
    starts = torch.tensor([0, 100, N], dtype=torch.int32)
    varlen = Varlen(starts)
    attn(*packed, varlen=varlen, return_lse=True)
    for wrong in ([0, 600, N], [1, 100, N], [0, -5, N]):
        WRITES[write](starts, torch.tensor(wrong, dtype=torch.int32))
        with pytest.raises(fa4flex.errors.InputError, match="cu_seqlens_q"):
            attn(*packed, varlen=varlen, return_lse=True)
    used = torch.tensor([100], dtype=torch.int32)
    padded, varlen = qkv(), Varlen(seqused_k=used)
    attn(*padded, varlen=varlen, return_lse=True)
    for wrong in ([-1], [N + 1]):
        WRITES[write](used, torch.tensor(wrong, dtype=torch.int32))
        with pytest.raises(fa4flex.errors.InputError, match="seqused_k"):
            attn(*padded, varlen=varlen, return_lse=True)


# --- the user's word --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("documents", "map", "BlockMask"))
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_contents_are_counted_where_a_schedule_says_so(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that serves a call is compared then; changes that torch counts are seen."""
    x, drawn, found, exact = case(name, {"backend": backend, "schedule": COUNTED})
    found()
    made = Alike.made

    def uncalled(kept: Alike[Any], *given: Any) -> Any:
        assert kept is rows._runs, "what is classified anew reads its tables anyhow"
        return made(kept, *given)

    monkeypatch.setattr(Alike, "made", uncalled)
    for _ in range(3):
        torch.testing.assert_close(found().double(), exact(), rtol=0, atol=1e-5)
        x.copy_(drawn())


def test_counted_contents_are_not_read() -> None:
    """A change that torch does not count is not seen: the caller has said that there is none."""
    ids = torch.zeros(4096, dtype=torch.int64)
    attn = fa4flex.compile(mask=fa4flex.variants.document(ids), schedule=COUNTED)
    whole = plan(attn, 4096, 4)
    ids.data.copy_(torch.arange(4096) // 64)
    assert plan(attn, 4096, 4) is whole
    ids.add_(0)
    assert plan(attn, 4096, 4) is not whole


# --- the mechanism ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_values_are_found_by_all_bits(dtype: torch.dtype) -> None:
    kept: Alike[int] = Alike(4, 4)
    made: list[int] = []

    def value() -> int:
        made.append(len(made))
        return made[-1]

    x = torch.zeros(3, 5).to(dtype)
    assert [kept.made("key", [x], value) for _ in range(2)] == [0, 0]
    assert kept.made("key", [x.t().contiguous().t()], value) == 0, "strides do not matter"
    assert kept.made("key", [x.clone()], value) == 0, "nor does which tensor it is"
    assert kept.made("key", [x.t()], value) == 1 and kept.made("other", [x], value) == 2
    x.view(-1)[7] = 1
    assert kept.made("key", [x], value) == 3
    if dtype.is_floating_point:
        x.fill_(-0.0)
        assert kept.made("key", [x], value) == 4, "zeros of either sign differ"
        x.fill_(math.nan)
        assert [kept.made("key", [x], value) for _ in range(2)] == [5, 5], "NaN is itself"
    assert kept.made("key", [torch.zeros(3, 5).to(dtype)], value) == 0


def test_what_is_compared_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Alike[int] = Alike(9, 2, room=100)
    for n in range(9):
        kept.made(n, [torch.full((5,), n)], lambda n=n: n)
        assert (
            kept._total == sum(x.nbytes for held in kept._found.values() for xs, _ in held for x in xs) <= 100
        )
    assert [*kept._found] == [(n, (torch.Size([5]), torch.int64)) for n in (7, 8)]
    for n in range(4):
        kept.made(8, [torch.full((5,), n)], lambda n=n: n)
    assert len(kept._found[8, (torch.Size([5]), torch.int64)]) == 2 and kept._total <= 100
    kept.made("large", [torch.zeros(99)], lambda: 1)
    assert "large" not in {key for key, *_ in kept._found}
    assert contents.MOST_BYTES >= 1 << 20
