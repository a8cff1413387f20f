"""Attention-sink tokens with a causal window: the first `sinks` keys stay visible for ever.

    allowed(q, kv) = kv <= p and (kv < sinks or kv > p - window),   p = q + (kv_len - q_len)

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453, section 3.2.
"""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Picture, member, show
from fa4flex.variants._common import aligned, whole


@mask_family
def streaming_llm(sinks: int = 4, window: int = 1020) -> MaskMod:
    """`sinks` leading keys and the last `window` keys (the query's own included), aligned bottom-right.

    Keys keep their positions in the text; the paper re-numbers positions inside the cache, which is a matter
    of the position encoding. Raises InputError unless sinks >= 0 and window >= 1.
    """
    sinks = whole("streaming_llm", "sinks", sinks, least=0)
    window = whole("streaming_llm", "window", window)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, q_len: Any, kv_len: Any) -> Any:
        position = aligned(q_idx, q_len, kv_len)
        return (kv_idx <= position) & ((kv_idx < sinks) | (kv_idx > position - window))

    return mod


def definition(q: int, kv: int, sinks: int, window: int, q_len: int, kv_len: int) -> bool:
    seen = list(range(kv_len - q_len + q + 1))
    return kv in seen[:sinks] or kv in seen[-window:]


CASES = (
    Case(lambda s: member(s, streaming_llm, definition, s.some(4, least=0), s.of(100))),
    Case(lambda s: member(s, streaming_llm, definition, 0, s.of(100)), compiled=False),
)
PICTURE = Picture("streaming_llm(sinks=8, window=32)")


if __name__ == "__main__":
    show(CASES)
