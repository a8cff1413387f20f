"""Keys in pages, read in place by the forward kernels of both chips, for many query rows and for chunks of
queries of different lengths, on the simulated GPU: right against the oracle, whatever the parts of the pool
hold that no sequence uses, and nothing outside it is touched."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from decoding import ALWAYS_ON_BOTH, SIMULATED
from helpers import drawn_timing
from paged_pools import WRONG, Drawn, Size, compare, drawn, guarded
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import InputError, Paging, Schedule, Sinks, Varlen
from fa4flex.runtime import launch
from fa4flex.runtime.sources import source_of
from fa4flex.variants import alibi, causal, document, sliding_window, softcap
from ptxsim.watch.findings import Finding

pytestmark = pytest.mark.usefixtures("chip")

KERNELS = {"sm_90a": ("fwd_sm90", "mixed_sm90"), "sm_100a": ("fwd_sm100",)}
"""Names of the kernels for many rows."""

TABLE = torch.randn(8, 1200) / 2
CAUSAL = fa4flex.compile(mask=causal)


def relative(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score + TABLE[h, q_idx - kv_idx + 600]


def chunks(given: Drawn, lengths: tuple[int, ...], used: tuple[int, ...] | None = None) -> Drawn:
    """The same pages, with so many packed queries of each sequence, of which the first `used` take part."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q = torch.randn(int(ends[-1]), given.q.shape[1], given.q.shape[3]).to(given.q.dtype)
    part = None if used is None else torch.tensor(used, dtype=torch.int32)
    return replace(given, q=q, varlen=Varlen(ends, seqused_q=part))


def expected(finding: Finding) -> bool:
    """True where warpgroups clear the same values past the end of a sequence, each for itself."""
    parts = (finding.instruction, finding.other)
    return finding.kind == "race" and all(x and x.opcode == "st.shared.b16" for x in parts)


SMS = 2
"""Multiprocessors: each block takes several tiles of queries, and its rings go round."""


def attend(attn: fa4flex.Attention, given: Drawn) -> tuple[Tensor, Tensor]:
    """Results from the simulated GPU, under a random timing; nothing may be found, and nothing is
    gathered."""
    timing, seed = drawn_timing()
    with (
        torch.no_grad(),
        patch.object(Paging, "gather", side_effect=AssertionError("pages were gathered")),
        ptxsim.device(SIMULATED["chip"], seed, timing, sms=SMS) as gpu,
    ):
        out, lse = given(attn, return_lse=True)
    others = "sequences", "combine", "list_tiles", "read_contents"
    kernels = [result.kernel for result in gpu.results if not any(x in result.kernel for x in others)]
    assert len(kernels) == 1 and any(x in kernels[0] for x in KERNELS[SIMULATED["chip"]]), kernels
    found = [finding for finding in gpu.findings if not expected(finding)]
    assert not found, f"{timing} {seed}: {gpu.report()}"
    return out, lse


def check(attn: fa4flex.Attention, given: Drawn) -> None:
    compare(attn, given, *attend(attn, given))


MANY = Size(heads=2, q_len=70, lengths=(300, 33))


def test_many_queries() -> None:
    """Pages of more tiles of keys than are looked up at once."""
    check(CAUSAL, drawn(replace(MANY, lengths=(600, 33))))


@pytest.mark.exhaustive
def test_few_queries_of_an_order() -> None:
    """Calls that ask for an order get the kernel for many rows."""
    attn = fa4flex.compile(mask=causal, schedule=Schedule(order="row_major"))
    check(attn, drawn(replace(MANY, q_len=3)))


@pytest.mark.slow
def test_chunks_of_any_lengths_draw() -> None:
    """Chunked prefill: other queries, keys and pages at each call, longer and shorter than each other, none
    at all, and the same kernel."""
    choices = 0, 1, 16, 63, 64, 127, 128, 129, 200
    for used in (False, True, False):
        lengths = tuple(random.choices((*choices, 290, 513), k=3))
        queries = tuple(max(random.choice(choices), i == 0) for i in range(3))
        taken = tuple(random.randint(0, n) for n in queries) if used else None
        check(CAUSAL, chunks(drawn(replace(MANY, lengths=lengths)), queries, taken))


MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "alibi, window": {"score_mod": alibi, "mask": causal & sliding_window(90)},
    "softcap, sinks": {
        "score_mod": softcap(20.0),
        "mask": causal,
        "sinks": Sinks(torch.tensor([0.5, 3.0, -torch.inf, 1.0])),
    },
    "relative": {"score_mod": relative},
}


@pytest.mark.slow
@ALWAYS_ON_BOTH
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "alibi, window" else pytest.mark.exhaustive) for n in MODS]
)
def test_variant(name: str) -> None:
    """Some sequences have no keys, or one."""
    d = 128 if name == "alibi, window" else 64
    given = drawn(Size(heads=4, kv_heads=2, lengths=(301, 0, 1, 150), d=d, dv=d))
    check(fa4flex.compile(**MODS[name]), chunks(given, (70, 5, 9, 129)))


PAGES = {
    "8": Size(page_size=8, d=128, dv=128),
    "24": Size(page_size=24),
    "64": Size(page_size=64, d=128, dv=128),
    "128": Size(page_size=128, lengths=(257, 128)),
    "256, own heads": Size(page_size=256, heads=2, kv_heads=2, d=128, dv=128),
    "d 96": Size(page_size=16, d=96, dv=96),
    "d 160": Size(page_size=32, d=160, dv=160),
    "d 192, dv 128": Size(page_size=16, d=192, dv=128),
    "d 192: 7 boxes": Size(page_size=16, d=192, dv=192, lengths=(700, 33)),
    "d 256: 10 boxes": Size(page_size=8, d=256, dv=256, lengths=(700, 33)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", PAGES)
def test_pages(name: str, packed: bool, chip: str) -> None:
    if chip == "sm_100a" and PAGES[name].dv > 128:
        pytest.skip("values wider than 128 have no kernel on Blackwell")
    given = drawn(replace(PAGES[name], q_len=70))
    check(CAUSAL, chunks(given, (131, 40)) if packed else given)


SMALL = {
    "1": Size(page_size=1, d=128, dv=128),
    "3, d 64": Size(page_size=3, d=64, dv=64, lengths=(301, 33)),
    "4, own heads": Size(page_size=4, heads=2, kv_heads=2, d=128, dv=128),
    "1, d 96, dv 40": Size(page_size=1, d=96, dv=40),
    "2, d 192": Size(page_size=2, d=192, dv=192, lengths=(300, 33)),
    "1, d 256": Size(page_size=1, d=256, dv=256, lengths=(200, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_small_pages(name: str, packed: bool, chip: str) -> None:
    """Four warps copy rows."""
    size = SMALL[name]
    if chip == "sm_100a" and (size.dv > 128 or size.d == 96):
        pytest.skip("values wider than 128, and single rows of half a line, are gathered on Blackwell")
    given = drawn(replace(size, q_len=70))
    check(CAUSAL, chunks(given, (131, 40)) if packed else given)


@pytest.mark.exhaustive
def test_float16() -> None:
    check(CAUSAL, drawn(replace(MANY, q_len=70), dtype=torch.float16))


def test_layouts() -> None:
    """Keys and values of one tensor, and a table whose entries do not lie together."""
    given = drawn(replace(MANY, kv_heads=2))
    both = torch.stack((given.k, given.v), 1)
    table = guarded(given.paging.page_table.t().contiguous()).t()
    check(CAUSAL, replace(given, k=both[:, 0], v=both[:, 1], paging=Paging(table, given.paging.seqused_k)))


@pytest.mark.exhaustive
def test_heads_before_slots_and_tables_of_64_bits() -> None:
    given = drawn(replace(MANY, kv_heads=2))
    by_head = {x: getattr(given, x).transpose(1, 2).contiguous().transpose(1, 2) for x in ("k", "v")}
    wide = Paging(given.paging.page_table.long(), given.paging.seqused_k.long())
    check(CAUSAL, chunks(replace(given, **by_head, paging=wide), (70, 130)))


@ALWAYS_ON_BOTH
def test_other_contents_are_the_same_launch() -> None:
    """Nothing is proved or compiled anew; the same tensors with other contents are read anew."""
    given = chunks(drawn(MANY), (70, 130))
    check(CAUSAL, given)
    given.paging.page_table[1, :3] = given.paging.page_table[0, 2:5].clone()
    given.paging.seqused_k.copy_(torch.tensor([97, 48]))
    assert given.varlen is not None and given.varlen.cu_seqlens_q is not None
    given.varlen.cu_seqlens_q[1] = 129
    with patch.object(fa4flex.runtime.cuda.in_place, "make_ready", side_effect=AssertionError("made anew")):
        check(CAUSAL, given)


@ALWAYS_ON_BOTH
@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_told_by_the_next_call(name: str) -> None:
    """Nothing outside is touched, and sequences without a fault are right."""
    plant, message = WRONG[name]
    given = chunks(drawn(replace(MANY, lengths=(40, 33)), spare=0), (70, 129))
    exact = given(CAUSAL, exactly=True)
    plant(given.paging)
    out, _ = attend(CAUSAL, given)
    with (
        torch.no_grad(),
        ptxsim.device(SIMULATED["chip"]) as gpu,
        pytest.raises(InputError, match=message),
    ):
        given(CAUSAL)
    assert not gpu.results
    right = slice(0, 70) if name == "length past the table" else slice(70, None)
    assert (out[right].double() - exact[right]).abs().max().item() <= 2**-7 * exact.abs().max().item()


@ALWAYS_ON_BOTH
def test_wrong_lengths_of_queries_are_told_by_the_next_call() -> None:
    given = chunks(drawn(MANY), (70, 129))
    assert given.varlen is not None and given.varlen.cu_seqlens_q is not None
    given.varlen.cu_seqlens_q[2] = 5000
    attend(CAUSAL, given)
    with pytest.raises(InputError, match="cu_seqlens_q ends at 5000, q has 199 tokens"):
        fa4flex.synchronize()


@ALWAYS_ON_BOTH
def test_validation_refuses_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa4flex.contents.VALIDATE", True)
    given = chunks(drawn(MANY), (70, 129))
    assert given.varlen is not None and given.varlen.cu_seqlens_q is not None
    given.varlen.cu_seqlens_q[2] = 5000
    with (
        torch.no_grad(),
        ptxsim.device(SIMULATED["chip"]) as gpu,
        pytest.raises(InputError, match="ends at 5000"),
    ):
        given(CAUSAL)
    given.varlen.cu_seqlens_q[2] = 199
    given.paging.page_table[0, 1] = -7
    with (
        torch.no_grad(),
        ptxsim.device(SIMULATED["chip"]) as gpu,
        pytest.raises(InputError, match="page -7 in"),
    ):
        given(CAUSAL)
    assert not gpu.results


@pytest.mark.parametrize("few", [True, False])
def test_largest_scores_are_read_in_place(few: bool) -> None:
    """No public call asks for them over pages; whoever does has the kernel for many queries."""
    given = drawn(Size(heads=2, q_len=2, lengths=(150, 0)))
    given = given if few else chunks(given, (40, 3))
    more, wide = (given.varlen, ("lse", "max_scores")), [x.double() for x in (given.q, given.k, given.v)]
    kv = source_of(*wide[1:], given.paging, None)
    exact = launch.run(CAUSAL._calling(), wide[0], kv, *more)[2]
    with torch.no_grad(), ptxsim.device(SIMULATED["chip"], sms=SMS) as gpu:
        kv = source_of(given.k, given.v, given.paging, None)
        found = launch.run(CAUSAL._calling(), given.q, kv, *more)[2]
    forward = KERNELS[SIMULATED["chip"]][0]
    assert all(forward in r.kernel or "sequences" in r.kernel for r in gpu.results) and gpu.results
    assert exact is not None and found is not None
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)


IDS = torch.randint(0, 4, (4, 700)).sort(-1).values.roll(100, -1)
MASKS: dict[str, Any] = {
    "documents": causal & document(IDS),
    "by head": lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % 3 != 0,
}


@pytest.mark.slow
@ALWAYS_ON_BOTH
@pytest.mark.parametrize("name", MASKS)
def test_any_mask(name: str) -> None:
    """Block tables say which keys count, of single queries beside many, too."""
    attn = fa4flex.compile(mask=MASKS[name])
    check(attn, drawn(Size(heads=2, q_len=150, lengths=(300, 0, 33))))
    given = drawn(Size(heads=4, kv_heads=2, lengths=(301, 400, 150, 64), page_size=random.choice((1, 16))))
    check(attn, chunks(given, (70, 5, 1, 129)))


@pytest.mark.slow
def test_trees_of_many_rows() -> None:
    """64 drafted tokens, whose rows of four heads are four tiles, see their prefix and their ancestors."""
    given = drawn(Size(heads=4, kv_heads=1, q_len=64, lengths=(300, 64)))
    start, tree = given.paging.seqused_k - 64, torch.rand(2, 64, 64) < 0.3
    tree |= torch.eye(64, dtype=torch.bool)
    attn = fa4flex.compile(
        mask=lambda b, h, q, kv: (kv < start[b]) | tree[b, q, (kv - start[b]).clamp(0, 63)]
    )
    check(attn, given)


def test_sorted_tiles_gather() -> None:
    """Tiles are not sorted by their work beside pages, which are gathered."""
    attn = fa4flex.compile(mask=causal, schedule=Schedule(order="longest_first"))
    given = drawn(replace(MANY, lengths=(40,)))
    gathered = patch.object(Paging, "gather", autospec=True, side_effect=Paging.gather)
    with torch.no_grad(), gathered as counted, ptxsim.device(SIMULATED["chip"]):
        out = given(attn)
    assert counted.call_count == 2
    exact = given(attn, exactly=True)
    assert (out.double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
