"""Calls of latent rows one after another, as on a GPU: each launches what it would alone, whatever its
lengths, and whatever the calls of the same attention before it brought."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from known_calls import differing
from launch_changes import by_name, calls_on_gpu
from torch import Tensor

import fa4flex
from fa4flex import InputError, Latent, Varlen
from fa4flex.runtime.launch import Caller
from fa4flex.variants import causal

ORDER = 0, 0, 1, 1, 1, 0, 1, 0, 2, 2, 0, 2


def drawn(width: int, length: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, 1, width).bfloat16(), torch.randn(batch, length, 1, width).bfloat16()


@pytest.mark.parametrize("width, value", [(576, 512), (128, 96)])
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_lengths_change(width: int, value: int, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a kernel for them reads, and narrow ones, which others read; and a call of plain keys."""
    recorder, scale = calls_on_gpu(monkeypatch), 0.1
    variant = fa4flex.compile(mask=causal, scale=scale, layout=layout).variant
    steps = [(*drawn(width, 200, 1), None), (*drawn(width, 333, 2), None)]
    used = Varlen(seqused_k=torch.tensor([50, 300], dtype=torch.int32))
    steps.append((*drawn(width, 333, 2), used))
    attn = fa4flex.Attention(variant, Caller())
    plain = [torch.randn(1, 4, 70, 64).bfloat16() for _ in range(3)]
    plain = plain if layout == "bhsd" else [x.transpose(1, 2).contiguous() for x in plain]
    for which in ORDER:
        q, rows, varlen = steps[which]
        q = q if layout == "bhsd" else q.transpose(1, 2).contiguous()
        launched = []
        with torch.no_grad():
            for one in (attn, fa4flex.Attention(variant, Caller())):
                one(q, Latent(rows, value, width - value), varlen=varlen)
                launched.append(by_name(recorder.launches[-1]))
            attn(*plain)
        now, alone = launched
        assert differing(now, alone) == []
        assert now["k"].data_ptr() == now["v"].data_ptr() == rows.data_ptr()
        assert now["v"].shape[-1] == value


def test_a_scale_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after calls that had one."""
    calls_on_gpu(monkeypatch)
    attn, (q, rows) = fa4flex.compile(mask=causal), drawn(576, 200, 1)
    with torch.no_grad():
        for _ in range(4):
            attn(q, Latent(rows), scale=0.1)
            with pytest.raises(InputError, match="without a scale"):
                attn(q, Latent(rows))
