"""Listings of programs for users, as files short enough to read: the traced operations and the facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fa4flex
from fa4flex.variants import (
    alibi,
    block_diffusion,
    causal,
    chunked_local,
    document,
    learned_bias,
    natten,
    prefix_lm,
    sliding_window,
    softcap,
    streaming_llm,
    t5_bias,
)

COMPOSITIONS: dict[str, dict[str, Any]] = {
    "softcap causal": {"score_mod": softcap(30.0), "mask": causal},
    "alibi window": {"score_mod": alibi, "mask": sliding_window(1024)},
    "causal document": {"mask": causal & document(torch.arange(8, dtype=torch.int32) // 3)},
    "streaming or prefix": {"mask": streaming_llm(4, 100) | prefix_lm(16)},
    "chunked": {"mask": chunked_local(512)},
    "block diffusion": {"mask": block_diffusion(64, 8)},
    "neighbourhood": {"mask": natten((8, 8), (3, 5))},
    "t5": {"score_mod": t5_bias(torch.zeros(32, 4))},
    "relative bias": {"score_mod": learned_bias(torch.zeros(4, 15)), "mask": ~causal},
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_program(name: str, golden: Callable[[str], None]) -> None:
    attn = fa4flex.compile(**COMPOSITIONS[name])
    golden(f"{repr_line(attn)}\n\n{without_lines(attn.source('trace'))}\n\n{facts(attn)}")


def repr_line(attn: fa4flex.Attention) -> str:
    variant = attn.variant
    return f"score_mod {variant.score_mod!r}, mask {variant.mask!r}"


def without_lines(listing: str) -> str:
    """Listing without line numbers, which move with every edit of a variant's file."""
    return re.sub(r"(\.py):\d+", r"\1", listing)


def facts(attn: fa4flex.Attention) -> str:
    """Facts without the identity, a hash."""
    return "\n".join(line for line in attn.source("facts").splitlines() if not line.startswith("identity"))
