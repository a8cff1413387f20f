"""The k largest scores of rows, by operations of torch: of equal ones lower units come first."""

from __future__ import annotations

import math

from torch import Tensor

from fa4flex.primitives.block_parts import ascending
from fa4flex.primitives.kept import where_seen


def largest(scores: Tensor, k: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids int32 [..., k], ascending with -1 behind them, counts int32 [...]) of the k largest scores of rows
    [..., C], of which none is -inf or NaN. forced: bool, units that are selected whatever their scores are,
    k of a row at most."""
    selectable = scores > -math.inf  # not so NaN
    if forced is None:
        values = where_seen(scores, selectable)
        counts, ids = ascending(_best(values, values.topk(k, -1).values[..., -1:], k), k)
        return ids, counts
    room = k - forced.expand(scores.shape).sum(-1, keepdim=True)
    values = where_seen(scores, selectable & ~forced)
    least = values.topk(k, -1).values.gather(-1, (room - 1).clamp(min=0))
    counts, ids = ascending((_best(values, least, room) & (room > 0)) | forced, k)
    return ids, counts


def _best(values: Tensor, least: Tensor, room: int | Tensor) -> Tensor:
    """bool: values above the least one that is chosen, and so many of those that have it that `room` are."""
    above, equal = values > least, values == least
    lowest = equal.cumsum(-1) <= room - above.sum(-1, keepdim=True)
    return (above | (equal & lowest)) & (values > -math.inf)
