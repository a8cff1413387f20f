"""A size of each pipeline that has a graph: it uses every stage of every ring again, and all barriers.

A fault of a stage that a size uses once shows nothing: 601 keys do not show those of Blackwell's forward that
2,100 keys show.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import decoding
import executed
import pytest
import test_decode_fp8 as fp8
import torch
from executed import Executed, Waited, comparing
from paged_pools import Size, drawn
from pairs import in_pairs
from test_forward_paged import chunks

import fa4flex
import ptxsim
from fa4flex.kernels.mixed_sm90.plan import MixedPlan
from fa4flex.kernels.plan import splitting
from fa4flex.variants import causal, sliding_window
from ptxsim.run.coverage import barriers, coverage

MASKED = fa4flex.compile(mask=causal)
Call = Callable[[], Any]


def attention(q_len: int, kv_len: int, attn: fa4flex.Attention = MASKED) -> Call:
    qkv = [torch.randn(1, 1, n, 128).bfloat16() for n in (q_len, kv_len, kv_len)]
    return lambda: attn(*qkv)


def gradients(q_len: int, kv_len: int, window: int | None = None) -> Call:
    """Gradients by the pipeline's own order of sums."""
    qkv = [torch.randn(1, 1, n, 128).bfloat16().requires_grad_() for n in (q_len, kv_len, kv_len)]
    attn = MASKED if window is None else fa4flex.compile(mask=causal & sliding_window(window))

    def call() -> None:
        with torch.enable_grad():
            attn(*qkv).sum().backward()

    return call


def both(*calls: Call) -> Call:
    return lambda: [call() for call in calls]


def pairs(call: Call) -> Call:
    def in_pairs_of_ctas() -> None:
        with in_pairs():
            call()

    return in_pairs_of_ctas


def decode(kv_len: int) -> Call:
    qkv = decoding.drawn(decoding.Size(8, 2, 2, kv_len, 128))
    return lambda: MASKED(*qkv)


def decode_fp8() -> Call:
    given = fp8.drawn(decoding.Size(kv_len=900, d=128), "token")
    return lambda: MASKED(given.q, given.k, given.v, kv_scales=given.scales)


def mixed() -> Call:
    """Tiles of few and of many rows in one launch, a sequence without keys, masked tiles at both ends of a
    row; then a sequence whose keys several blocks share.

    The graph is that of many rows, which has all rings. No graph has tiles of both kinds: what blocks do is
    compared with it in test_mixed.py, for one kind each.
    """
    attn = fa4flex.compile(mask=causal & sliding_window(600))
    given = (
        chunks(drawn(Size(4, 2, lengths=(1000, 600, 560, 133, 0))), (9, 400, 3, 1, 1)),
        chunks(drawn(Size(4, 2, lengths=(600, 150))), (1, 2)),
    )

    def call() -> None:
        uncompared = patch.object(executed, "differences", lambda *given: [])
        with patch.object(MixedPlan, "topology", MixedPlan.many), uncompared:
            for batch in given:
                batch(attn)

    return call


@dataclass(frozen=True)
class Case:
    """`missed` are barriers that no launch comes to, by opcode, `once` mbarriers of which one phase is waited
    for."""

    arch: str
    kernel: str
    make: Callable[[], Call]
    sms: int | None = 1
    missed: tuple[str, ...] = ()
    once: frozenset[str] = frozenset()


ONE_KEY_TILE = frozenset(("k full", "v full", "dk_full", "dv_full"))
"""A block has one tile of keys, and gives one dK and dV. As in the decode kernel, where it has one tile of
queries and one output, a larger size has more blocks, which use their barriers once each."""
AFTER_A_TRY = ("mbarrier.try_wait.parity.shared.b64",)
"""A wait for a phase that a try before it has not found over: here a try lasts until it is."""
CASES = {
    "forward, sm_90a": Case("sm_90a", "fwd_sm90", lambda: attention(300, 900)),
    "forward, sm_100a": Case("sm_100a", "fwd_sm100", lambda: attention(600, 2100)),
    "decode, sm_90a": Case("sm_90a", "decode_sm90", lambda: decode(900), None),
    "decode, sm_100a": Case(
        "sm_100a", "decode_sm100", lambda: decode(1500), None, once=frozenset(("Q full", "o_full"))
    ),
    "decode of 8-bit keys": Case("sm_90a", "decode_fp8_sm90", decode_fp8, None),
    "mixed, sm_90a": Case("sm_90a", "mixed_sm90", mixed),
    "backward, sm_90a": Case(
        "sm_90a",
        "bwd_sm90",
        lambda: both(gradients(700, 700, 350), gradients(200, 700, 100)),
        missed=4 * AFTER_A_TRY,
    ),
    "backward, sm_100a": Case("sm_100a", "bwd_sm100", lambda: gradients(900, 300), once=ONE_KEY_TILE),
    "backward of pairs": Case(
        "sm_100a",
        "two_cta",
        lambda: pairs(gradients(900, 600)),
        once=ONE_KEY_TILE | {"k_t full", "freed", "freed there", "dk_full there", "dv_full there"},
    ),
}


def waited_once(run: Executed) -> set[str]:
    """mbarriers of which not both parities are waited for."""
    names, parities = run.trace.names(run.topology), defaultdict(set)
    for events in run.trace.warps.values():
        for event in events:
            if isinstance(event, Waited):
                parities[names.get(event.key)].add(event.parity)
    return {name for name in names.values() if len(parities[name]) < 2}


LONG = ("mixed, sm_90a", "backward, sm_90a", "backward, sm_100a", "backward of pairs")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CASES]
)
def test_every_stage(name: str) -> None:
    case = CASES[name]
    call = case.make()
    one_part = patch.object(splitting, "_splits", lambda *given: (1, 1))
    with contextlib.ExitStack() as stack:
        compared = stack.enter_context(comparing(keep=True))
        for each in (torch.no_grad(), one_part):
            stack.enter_context(each)  # type: ignore[arg-type]
        gpu = stack.enter_context(ptxsim.device(case.arch, 1, "late", case.sms))
        call()
    assert not gpu.findings, gpu.report()
    runs = [run for run in compared.kept if case.kernel in run.launch.kernel]
    assert set.intersection(*map(waited_once, runs)) == case.once
    main = [result for result in gpu.results if case.kernel in result.kernel]
    missed = [instruction.opcode for each in coverage(main) for instruction in barriers(each.missed)]
    assert Counter(missed) <= Counter(case.missed)
