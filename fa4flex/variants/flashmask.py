"""FlashMask: for each key, intervals of queries that do not see it, in memory of O(keys).

    allowed(q, kv) = not (lower_start[kv] <= q < lower_end[kv]) and not (upper_start[kv] <= q < upper_end[kv])

Source: Wang et al., FlashMask: Efficient and Rich Mask Extension of FlashAttention, arXiv:2410.01359,
section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, masked_by_batch, show
from fa4flex.variants._common import INTEGERS, table

Interval = tuple[Any, Any]


@mask_family
def flashmask(
    lower_start: Tensor,
    lower_end: Tensor | None = None,
    upper_start: Tensor | None = None,
    upper_end: Tensor | None = None,
) -> MaskMod:
    """Integer tensors, all [S] or all [B, H, S], of S keys; indices are absolute.

    lower_end    None: all queries from lower_start on are hidden, as causal document masks have it with the
                 end of each key's document: causal & flashmask(ends)
    upper_start  None beside upper_end: all queries before upper_end are hidden

    Raises InputError.
    """
    given = {
        "lower_start": lower_start,
        "lower_end": lower_end,
        "upper_start": upper_start,
        "upper_end": upper_end,
    }
    tables = {
        n: table("flashmask", n, x, INTEGERS, (1, 3), "[S] or [B, H, S]")
        for n, x in given.items()
        if x is not None
    }
    if upper_start is not None and upper_end is None:
        raise InputError("flashmask(upper_start=...) without upper_end", "both", "pass upper_end as well")
    if len({x.ndim for x in tables.values()}) > 1:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in tables.items())
        raise InputError(f"flashmask({shapes})", "all [S], or all [B, H, S]", "expand the shorter ones")
    flat = lower_start.ndim == 1

    def at(x: Tensor, b: Any, h: Any, kv_idx: Any) -> Any:
        return x[kv_idx] if flat else x[b, h, kv_idx]

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        hidden = q_idx >= at(lower_start, b, h, kv_idx)
        if lower_end is not None:
            hidden = hidden & (q_idx < at(lower_end, b, h, kv_idx))
        if upper_end is not None:
            above = q_idx < at(upper_end, b, h, kv_idx)
            if upper_start is not None:
                above = above & (q_idx >= at(upper_start, b, h, kv_idx))
            hidden = hidden | above
        return hidden ^ True

    return mod


def definition(q: int, kv: int, intervals: list[list[Interval]]) -> bool:
    return not any(q in range(first, last) for first, last in intervals[kv])


def _ends_of_documents(s: Sizes) -> Drawn:
    ends = s.offsets()
    each = torch.repeat_interleave(torch.tensor(ends[1:]), torch.tensor(ends).diff()).to(torch.int32)
    at = s.square(len(each))
    intervals = [[(int(end), at.q_len)] for end in each]
    return masked(at, flashmask(each), definition, intervals)


def _two_intervals(s: Sizes) -> Drawn:
    starts = torch.randint(0, s.q_len + 1, (2, s.kv_len), dtype=torch.int32)
    ends = starts + torch.randint(0, s.q_len + 1, (2, s.kv_len), dtype=torch.int32)
    mask = flashmask(starts[0], ends[0], starts[1], ends[1])
    lower, upper = ([(int(a), int(z)) for a, z in zip(starts[n], ends[n], strict=True)] for n in (0, 1))
    return masked(s, mask, definition, list(map(list, zip(lower, upper, strict=True))))


def _by_head(s: Sizes) -> Drawn:
    """Queries before a key's own end, and few after its start, of each entry of the batch."""
    first = torch.randint(0, s.q_len + 1, (s.batch, 1, s.kv_len), dtype=torch.int32)
    last = torch.randint(0, s.q_len + 1, (s.batch, 1, s.kv_len), dtype=torch.int32)
    mask = flashmask(first.expand(-1, s.heads, -1), upper_end=last.expand(-1, s.heads, -1))

    def allowed(b: int, q: int, kv: int) -> bool:
        return int(last[b, 0, kv]) <= q < int(first[b, 0, kv])

    return masked_by_batch(s, mask, allowed)


CASES = (Case(_ends_of_documents), Case(_two_intervals, compiled=False), Case(_by_head, compiled=False))
PICTURE = Picture("causal & flashmask((torch.arange(128) // 43 + 1) * 43)")


if __name__ == "__main__":
    show(CASES)
