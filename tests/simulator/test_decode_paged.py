"""Keys in pages, read in place by the kernels for few query rows, on the simulated GPU: right against the
oracle, whatever the parts of the pool hold that no sequence uses, and nothing outside it is touched. All of
it on Blackwell is exhaustive; some is in test_decode_blackwell.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import SIMULATED, split_in
from decoding_pages import attend, check
from paged_pools import WRONG, Drawn, Size, compare, drawn, guarded
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import InputError, Paging, Sinks, Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap
from ptxsim.state.memory import BadAccess, HostMemory

TABLE = torch.randn(8, 700) / 2


def relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + TABLE[h, q_idx - kv_idx + 600]


pytestmark = pytest.mark.usefixtures("chip")


def test_reads_past_a_table_are_found() -> None:
    """Premise of these tests."""
    table = guarded(torch.zeros(3, dtype=torch.int32))
    memory, end = HostMemory(), table.data_ptr() + table.nbytes
    assert memory.load(np.array([end - 4]), 4).size == 1
    with pytest.raises(BadAccess):
        memory.load(np.array([end]), 4)


PAGES = {
    "1": Size(page_size=1, lengths=(70, 1)),
    "3": Size(page_size=3, lengths=(70, 33), d=128, dv=128),
    "1, d 96, dv 40": Size(page_size=1, d=96, dv=40, lengths=(65, 9)),
    "8": Size(page_size=8, lengths=(64, 17), heads=8),
    "16, 8 heads, 5 queries": Size(heads=8, q_len=5, d=128, dv=128),
    "48": Size(page_size=48, lengths=(144, 49), heads=8, kv_heads=2),
    "64": Size(page_size=64, lengths=(129, 64), d=128, dv=128),
    "128": Size(page_size=128, lengths=(257, 128)),
    "256": Size(page_size=256, lengths=(256, 300, 1), d=128, dv=128),
    "own heads": Size(heads=2, kv_heads=2, lengths=(65,)),
    "d 96, dv 64": Size(page_size=2, d=96, lengths=(65,)),
    "d 192, dv 128": Size(d=192, dv=128, lengths=(65, 200)),
    "d 256": Size(d=256, dv=256, lengths=(65,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, random.choice([1, 2, 3]))
    check(fa4flex.compile(mask=causal), drawn(PAGES[name]))


MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "alibi, causal": {"score_mod": alibi, "mask": causal},
    "softcap, window": {"score_mod": softcap(20.0), "mask": causal & sliding_window(90)},
    "relative": {"score_mod": relative},
    "sinks": {"mask": causal, "sinks": Sinks(torch.tensor([0.5, 3.0, -torch.inf, 1.0]))},
}


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", MODS)
def test_variant(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of sequences without keys, and with one."""
    split_in(monkeypatch, splits)
    check(fa4flex.compile(**MODS[name]), drawn(Size(lengths=(301, 0, 1))))


def test_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, 2)
    check(fa4flex.compile(mask=causal), drawn(Size(), dtype=torch.float16))


@pytest.mark.slow
def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of one tensor; heads in front of slots; queries in front of heads; tables of int64."""
    split_in(monkeypatch, 2)
    attn = fa4flex.compile(mask=causal)
    given = drawn(Size(kv_heads=2))
    both = torch.stack((given.k, given.v), 1)
    check(attn, Drawn(given.q, both[:, 0], both[:, 1], given.paging))
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (given.k, given.v)]
    wide = Paging(given.paging.page_table.long(), given.paging.seqused_k.long())
    check(attn, Drawn(given.q, *by_head, wide))
    attn = fa4flex.compile(mask=causal, layout="bshd")
    turned = Drawn(given.q.transpose(1, 2).contiguous(), given.k, given.v, given.paging)
    out, _ = attend(attn, turned)
    exact = turned(attn, exactly=True)
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()


def test_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences that begin alike."""
    split_in(monkeypatch, 2)
    given = drawn(Size(lengths=(150, 150)))
    given.paging.page_table[1, :4] = given.paging.page_table[0, :4]
    check(fa4flex.compile(mask=causal), given)


def test_a_window_reads_its_pages_alone() -> None:
    """Entries before it may be no page at all: neither read nor told of."""
    given = drawn(Size(q_len=1, lengths=(300,)))
    attn = fa4flex.compile(mask=causal & sliding_window(40))
    clean = given.paging.page_table.clone()
    given.paging.page_table[0, :8] = -5  # the first of three tiles
    out, lse = attend(attn, given)
    given.paging.page_table.copy_(clean)
    compare(attn, given, out, lse)


def test_other_tables_and_lengths_are_the_same_launch() -> None:
    """Nothing is proved or compiled anew, and a longer table or a larger pool is the same kernel."""
    attn = fa4flex.compile(mask=causal)
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"]) as gpu:
        for lengths, spare in (((40, 20), 1), ((7, 90), 4), ((64, 0), 0)):
            drawn(Size(lengths=lengths), spare)(attn)
    kernels = {result.kernel for result in gpu.results if "decode" in result.kernel}
    assert len(kernels) == 1 and not gpu.findings


def test_contents_are_read_when_the_kernel_runs() -> None:
    """The same tensors with other contents, as replays of a CUDA graph have them."""
    attn, given = fa4flex.compile(mask=causal), drawn(Size())
    attend(attn, given)
    given.paging.page_table[1, :3] = given.paging.page_table[0, 2:5].clone()
    given.paging.seqused_k.copy_(torch.tensor([97, 48]))
    check(attn, given)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_told_by_the_next_call(
    name: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing outside is touched, and sequences without a fault are right."""
    split_in(monkeypatch, splits)
    plant, message = WRONG[name]
    attn, given = fa4flex.compile(mask=causal), drawn(Size(lengths=(40, 33)), spare=0)
    exact = given(attn, exactly=True)
    plant(given.paging)
    out, _ = attend(attn, given)
    with (
        torch.no_grad(),
        ptxsim.device(SIMULATED["chip"]) as gpu,
        pytest.raises(InputError, match=message),
    ):
        given(attn)
    assert not gpu.results
    right = 0 if name == "length past the table" else 1
    assert (out[right].double() - exact[right]).abs().max().item() <= 2**-7 * exact.abs().max().item()


def test_validation_refuses_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa4flex.contents.VALIDATE", True)
    attn, given = fa4flex.compile(mask=causal), drawn(Size(lengths=(40, 33)))
    given.paging.page_table[0, 1] = -7
    with (
        torch.no_grad(),
        ptxsim.device(SIMULATED["chip"]) as gpu,
        pytest.raises(InputError, match="page -7 in"),
    ):
        given(attn)
    assert not gpu.results


def test_pages_of_64_bits_are_not_cut() -> None:
    """Numbers with the bits of a page below others are no page."""
    attn, given = fa4flex.compile(mask=causal), drawn(Size(lengths=(16,)))
    wide = Paging(given.paging.page_table.long() + (1 << 32), given.paging.seqused_k.long())
    out, _ = attend(attn, Drawn(given.q, given.k, given.v, wide))
    assert not out.any(), "keys and values of zeros"
    with pytest.raises(InputError, match="page 429496"):
        fa4flex.synchronize()


@pytest.mark.slow
def test_calls_with_gradients_gather() -> None:
    attn, given = fa4flex.compile(mask=causal), drawn(Size(lengths=(40,)))
    given.q.requires_grad_()
    with ptxsim.device(SIMULATED["chip"]) as gpu:
        given(attn).sum().backward()
    assert not any("decode" in result.kernel for result in gpu.results)
    assert given.q.grad is not None and given.q.grad.isfinite().all()


def test_sequences_without_keys_in_pages_that_are_gathered() -> None:
    """Nothing is gathered, and nothing launched."""
    given = drawn(Size(q_len=70, lengths=(0, 0)))
    attn = fa4flex.compile(mask=causal, schedule=fa4flex.Schedule(order="longest_first"))
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"]) as gpu:
        out, lse = given(attn, return_lse=True)
    assert not gpu.results and not out.any() and (lse == -torch.inf).all()


UNFIT: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any], str]] = {
    "heads": (lambda q: q[..., :3, :, :], {}, "3 query heads with 2"),
    "width": (lambda q: q[..., :32], {}, "q and k differ in head_dim"),
    "dtype": (lambda q: q.half(), {}, "mixed dtypes"),
    "sinks": (lambda q: q, {"sinks": Sinks(torch.randn(3))}, "3 sinks for 4 query heads"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_do_not_fit_are_refused(name: str, packed: bool) -> None:
    change, mods, message = UNFIT[name]
    given = drawn(Size(kv_heads=2))
    given = replace(given, q=change(given.q))
    if packed:
        rows = given.q.transpose(1, 2).flatten(0, 1)
        given = replace(given, q=rows, varlen=Varlen(torch.tensor([0, 2, 4], dtype=torch.int32)))
    attn = fa4flex.compile(mask=causal, **mods)
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"]) as gpu:
        with pytest.raises(InputError, match=message):
            given(attn)
        assert not gpu.results
