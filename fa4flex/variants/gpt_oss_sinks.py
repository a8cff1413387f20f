"""gpt-oss attention sinks: a learned logit per head joins the softmax and takes weight, without a value.

    p[q, kv] = exp(s[q, kv]) / (exp(sink[h]) + sum_k exp(s[q, k]))

Source: gpt-oss model card, arXiv:2508.10925, section 2; Miller, "Attention Is Off By One" (2023): sink 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fa4flex.primitives.sinks import Sinks
from fa4flex.variants._cases import Case, Drawn, Sizes, show_table
from fa4flex.variants._common import whole
from fa4flex.variants.alibi import alibi
from fa4flex.variants.sliding_window import sliding_window


def gpt_oss_sinks(logits: Tensor | int) -> Sinks:
    """Sinks from learned logits [Hq] (floating, receives gradients), or from a number of heads: logits of 0.

    Raises InputError. gpt-oss itself alternates `sliding_window(128)` and `causal` layers.
    """
    if isinstance(logits, Tensor):
        return Sinks(logits)
    return Sinks(torch.zeros(whole("gpt_oss_sinks", "logits", logits), dtype=torch.float32))


def definition(scores: list[float], sink: float) -> list[float]:
    """The weights of one row: softmax over scores and sink, and the sink's share dropped."""
    exponentials = [math.exp(x) for x in (*scores, sink)]
    return [e / sum(exponentials) for e in exponentials[:-1]]


def main() -> None:
    logits = gpt_oss_sinks(torch.tensor([-4.0, 0.0, 4.0])).now()
    scores = [0.5, -1.0, 2.0]
    print(f"weights of scores {scores} by sink logit; the rest goes to the sink")
    for sink in logits.tolist():
        row = definition(scores, sink)
        by_lse = [math.exp(s - math.log(sum(map(math.exp, scores)) + math.exp(sink))) for s in scores]
        if not all(map(math.isclose, row, by_lse)):
            raise AssertionError(f"sink {sink}: {row} by definition, {by_lse} through the LSE")
        show_table([("sink", sink, *row, 1.0 - sum(row))])


def _of(s: Sizes, factor: float, shift: float, **rest: Any) -> Drawn:
    logits = s.learned(torch.randn(s.heads) * factor + shift)
    return Drawn(lambda logits: {"sinks": gpt_oss_sinks(logits), **rest}, None, s.q_len, s.kv_len, (logits,))


CASES = (
    Case(lambda s: _of(s, 3, 0, mask=sliding_window(s.of(100)))),
    Case(lambda s: _of(s, 1, 4, score_mod=alibi)),
    Case(lambda s: _of(s, 1, 0), compiled=False),
)
PICTURE = None


if __name__ == "__main__":
    main()
