"""Batches whose lengths the device alone knows: keys are split as if the host knew them where sequences are
about as long as each other, and into more parts where they are not. Blocks that have no part then end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding import SIMULATED, check, split_in
from decoding import Size as Padded
from decoding import attend as attend_padded
from decoding import drawn as drawn_padded
from decoding_pages import attend
from paged_pools import Size, compare, drawn
from torch import Tensor

import fa4flex
import ptxsim
from fa4flex import Sinks, Varlen
from fa4flex.kernels.combine import kernel as combine
from fa4flex.variants import causal

E4M3 = torch.float8_e4m3fn

LENGTHS = {
    "the same": ((180, 180), True),
    "the longest is 17/16 of the mean": ((204, 180, 192), True),
    "it is one key longer": ((205, 179, 192), False),
    "one of many is short": ((*[130] * 20, 2), True),
    "the last of many is long": ((*[40] * 33, 190), False),
}


CHIPS = pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
FEW = 3
"""Sequences, at most, of batches that are simulated for both chips: the same function decides for both."""


def sinks_of(heads: int) -> Sinks:
    return Sinks(torch.linspace(-1, 1, heads))


def parts(found: list[tuple[Tensor, Tensor]], even: bool) -> None:
    """found: results with splits as the device decides, in one part, and in three."""
    decided, one, three = found
    assert not torch.equal(one[0], three[0]), "premise: parts show in the bits"
    for mine, wanted in zip(decided, one if even else three, strict=True):
        assert torch.equal(mine, wanted)


SPLITS = (3, 1), (1, 1), (3, 3)


def on(chip: str, name: str) -> Any:
    many = len(LENGTHS[name][0]) > FEW
    return pytest.param(chip, name, marks=pytest.mark.slow if many else ())


ON_CHIPS = [on("sm_90a", name) for name in LENGTHS]
ON_CHIPS += [on("sm_100a", name) for name, (lengths, _) in LENGTHS.items() if len(lengths) <= FEW]


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "name"), ON_CHIPS)
def test_pages(chip: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIMULATED, "chip", chip)
    lengths, even = LENGTHS[name]
    given = drawn(Size(lengths=lengths, d=128, dv=128, q_len=1))
    attn = fa4flex.compile(mask=causal, sinks=sinks_of(4))
    found = []
    for most, fewest in SPLITS:
        split_in(monkeypatch, most, fewest)
        found.append(attend(attn, given))
    compare(attn, given, *found[0])
    parts(found, even)


@pytest.mark.slow
@CHIPS
def test_used_lengths(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the sequences of a padded batch have fewer queries."""
    monkeypatch.setitem(SIMULATED, "chip", chip)
    q, k, v = drawn_padded(Padded(q_len=2, kv_len=210, batch=3, d=128))
    attn = fa4flex.compile(mask=causal)
    for used, even in (((204, 180, 192), True), ((205, 179, 192), False)):
        queries = torch.tensor([2, 1, 2], dtype=torch.int32)
        varlen = Varlen(seqused_q=queries, seqused_k=torch.tensor(used, dtype=torch.int32))
        found = []
        for most, fewest in SPLITS:
            split_in(monkeypatch, most, fewest)
            found.append(attend_padded(attn, q, k, v, varlen=varlen))
        exact, lse = attn(q.double(), k.double(), v.double(), varlen=varlen, return_lse=True)
        assert (found[0][0].double() - exact).abs().max().item() <= 2 * 2**-8 * exact.abs().max().item()
        torch.testing.assert_close(found[0][1].double(), lse, atol=1e-4, rtol=0)
        parts(found, even)


@pytest.mark.slow
def test_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = fa4flex.compile(mask=causal, sinks=sinks_of(4))
    for lengths, even in (((600, 640), True), ((600, 200), False)):
        given = drawn(Size(lengths=lengths, d=128, dv=128, q_len=1))
        small: dict[str, Any] = {"paging": given.paging, "return_lse": True}
        k, v = given.k.nan_to_num().to(E4M3), given.v.nan_to_num().to(E4M3)
        found = []
        for most, fewest in SPLITS:
            split_in(monkeypatch, most, fewest)
            with torch.no_grad(), ptxsim.device("sm_90a", 1, "late") as gpu:
                found.append(attn(given.q, k, v, **small))
            assert any("fp8" in result.kernel for result in gpu.results) and not gpu.findings
        parts(found, even)


@pytest.mark.slow
def test_merging_blocks_have_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    split_in(monkeypatch, 2)
    size = Padded(heads=33, kv_heads=33, q_len=64, kv_len=130)
    assert size.heads * size.q_len > combine.BLOCKS
    check(fa4flex.compile(mask=causal, sinks=sinks_of(33)), drawn_padded(size))
