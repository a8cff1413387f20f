"""Every variant through torch's flex_attention against the oracle, and its rows without keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import agree
from test_variants import DRAWS, HIDDEN, hide, oracle_takes
from variant_table import TABLE, Draw, Sizes

import fa4flex
from fa4flex import reference
from fa4flex.runtime import cpu

SIZES = Sizes(2, 4, 2, 14, 21)


@pytest.fixture(autouse=True)
def without_our_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our blockwise passes raise: torch's reference computes."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("our CPU executor was called")

    for name in ("forward", "backward", "forward_sequences", "backward_sequences", "single_queries"):
        monkeypatch.setattr(cpu, name, refused)


@pytest.mark.parametrize("draw", DRAWS)
def test_agrees_with_the_oracle(draw: Draw) -> None:
    """out, lse, and gradients to q, k, v and every learned tensor, in float64."""
    case = draw(SIZES)
    qkv, composition = case.sizes.qkv(), case.compose(*case.learned)
    found = fa4flex.compile(**composition, backend="flex")(*qkv, return_lse=True)
    agree(found, reference.attention(*qkv, **oracle_takes(composition)), [*qkv, *case.learned])


FEW = ("causal", "alibi", "document", "gpt_oss_sinks", "learned_bias")


@pytest.mark.parametrize("name", FEW)
def test_a_row_without_keys_is_zero(name: str) -> None:
    """Zeros, -inf (or the sink), and zero gradients whatever comes from above to that row."""
    case = TABLE[name][-1 if name != "gpt_oss_sinks" else 0](SIZES)
    qkv, composition = case.sizes.qkv(), hide(case)
    out, lse = fa4flex.compile(**composition, backend="flex")(*qkv, return_lse=True)
    has_sinks = "sinks" in composition
    empty = case.learned[0].expand(2, -1) if has_sinks else torch.full_like(lse[:, :, HIDDEN], -torch.inf)
    assert out[:, :, HIDDEN].eq(0).all() and torch.equal(lse[:, :, HIDDEN], empty)
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    dout[:, :, HIDDEN], dlse[:, :, HIDDEN] = 3, 5
    found = torch.autograd.grad([out, lse], [*qkv, *case.learned], [dout, dlse])
    assert all(g.eq(0).all() for g in found[: 3 if has_sinks else None])
    if has_sinks:
        assert found[3].eq(2 * 5).all(), "the lse of such a row is the sink, in both batch entries"
