"""Every variant through torch's flex_attention against the oracle, and its rows without keys."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import agree
from test_variants import DRAWS, check_a_row_without_keys, oracle_takes
from variant_table import TABLE, Draw, Sizes

import fa4flex
from fa4flex import reference
from fa4flex.errors import UnsupportedError
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
    normalizer = composition.get("normalizer")
    if normalizer is not None and normalizer.kind != "softmax":
        with pytest.raises(UnsupportedError, match="softmax alone"):
            fa4flex.compile(**composition, backend="flex")
        return
    found = fa4flex.compile(**composition, backend="flex")(*qkv, return_lse=True)
    agree(found, reference.attention(*qkv, **oracle_takes(composition)), [*qkv, *case.learned])


FEW = ("causal", "alibi", "document", "gpt_oss_sinks", "learned_bias")


@pytest.mark.parametrize("name", FEW)
def test_a_row_without_keys_is_zero(name: str) -> None:
    case = TABLE[name][-1 if name != "gpt_oss_sinks" else 0](SIZES)
    check_a_row_without_keys(case, backend="flex")
