"""Selections: the best units of each row, all above a threshold, or the fewest that hold a share of weight.

A unit whose score is -inf or NaN is not selected. Of equal scores the lower unit comes first, as in a stable
sort of the scores in their own arithmetic. Units that are forced come before all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa4flex.contents import checked_here
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.exact import is_count
from fa4flex.primitives.base import check_device, kind_of
from fa4flex.primitives.block_lists import EMPTY
from fa4flex.primitives.blocks import BlockMap, trusted_map
from fa4flex.primitives.largest import in_runs, largest
from fa4flex.primitives.lists import ListedMap, Lists, listed_map
from fa4flex.select.scores import Scores
from ptxsim.active import simulating

Within = BlockMap | Lists | None


class _Forced(NamedTuple):
    """Numbers of units that are selected whatever their scores are: the first ones of the keys, those up to
    each query's own, and the last ones of the keys."""

    first: int = 0
    own: int = 0
    last: int = 0

    def check(self) -> _Forced:
        for name, value in self._asdict().items():
            if not is_count(value, 0):
                raise InputError(
                    f"{name}={value!r}", "an int of 0 or more: units", f"leave {name} out for none"
                )
        return self

    def most(self, scores: Scores) -> int:
        """Forced units of a row at most. Rows begin at any multiple of the common divisor of their queries
        and a unit's keys, behind the offset of q_len and kv_len: the latest place in a unit reaches farthest.
        """
        queries, keys = scores.queries, scores.keys
        step = math.gcd(queries, keys)
        latest = keys - step + (scores.kv_len - scores.q_len) % step
        own = self.own + (latest + queries - 1) // keys if self.own else 0
        return min(self.first + own + self.last, scores.values.shape[3])

    def of(self, scores: Scores) -> Tensor:
        """bool [R, C]: units that are forced, own ones of every query of a row."""
        runs, shape = self.runs(scores), scores.values.shape[2:]
        if runs is None:
            return torch.zeros((), dtype=torch.bool, device=scores.values.device).expand(shape)
        return in_runs(runs, shape[1])

    def runs(self, scores: Scores) -> Tensor | None:
        """int32 [R, 4]: a, b, c and d of units [0, a), [b, c) and [d, C), which are forced; None for none."""
        if not any(self):
            return None
        starts, units = scores._starts()[0].squeeze(1), scores.values.shape[3]
        if self.own:
            low = torch.div(starts.clamp(min=0), scores.keys, rounding_mode="floor") - (self.own - 1)
            ends = (starts + (scores.queries + scores.keys - 1)).clamp(max=scores.kv_len + scores.keys - 1)
            high = torch.div(ends, scores.keys, rounding_mode="floor")
        else:
            low = high = torch.zeros_like(starts)
        first, last = torch.full_like(low, self.first), torch.full_like(low, max(units - self.last, 0))
        return torch.stack((first, low, high, last), 1).to(torch.int32)


def topk(
    scores: Scores, k: int, *, first: int = 0, own: int = 0, last: int = 0, within: Within = None
) -> Lists:
    """The k best units of each row, forced ones among them.

    first, own, last   units that are selected whatever their scores are: the first ones of the keys, as many
                       up to the query's own unit (bottom-right; of all queries of a row), the last ones
    within             a selection of rows and units as large, or whole multiples: no other unit is selected

    Returns Lists of min(k, units) entries, ascending, with -1 behind what was selected, and their counts.
    Raises InputError for more forced units than k.
    """
    _check_scores(scores)
    rule = _Forced(first, own, last).check()
    if not is_count(k):
        raise InputError(f"k={k!r}", "a positive int", "pass the number of units of a row")
    units = scores.values.shape[3]
    forced = rule.most(scores)
    k = min(k, units)
    if forced > k:
        raise InputError(
            f"k={k} with first={first}, own={own}, last={last}: up to {forced} units of a row",
            "at most k forced units, which count among the k",
            f"pass k={forced} or more",
        )
    values = scores.values.detach()
    if within is None and (values.is_cuda or simulating()):
        ids, counts = torch.ops.fa4flex.topk(values, k, rule.runs(scores))
    else:
        chosen = _Chosen.of(scores, rule, within)
        ids, counts = largest(chosen.ranked(), k, chosen.forced)
    sizes = {"kv_len": scores.kv_len, "q_len": scores.q_len}
    return Lists(ids, counts, unit=scores.keys, queries=scores.queries, **sizes)


def threshold(
    scores: Scores,
    least: float | Tensor,
    *,
    first: int = 0,
    own: int = 0,
    last: int = 0,
    within: Within = None,
) -> BlockMap:
    """All units whose scores are at least `least`, a number or a tensor that broadcasts with [B, H, R, C],
    and forced ones: see topk. Returns a map with partial blocks."""
    chosen = _Chosen.of(scores, _Forced(first, own, last), within)
    _check_limit("least", least, scores.values.shape, scores.values.device)
    return chosen.map((scores.values >= least) & scores.selectable)


def mass(
    scores: Scores,
    share: float | Tensor,
    *,
    first: int = 0,
    own: int = 0,
    last: int = 0,
    within: Within = None,
) -> BlockMap:
    """The fewest units whose softmax over a row's units adds up to at least `share`, and forced ones: topk.

    share  0 to 1, a number or a tensor that broadcasts with [B, H, R, 1]. The best unit is always selected.
    Scores that are probabilities already are given by their logarithms. Returns a map with partial blocks.
    """
    chosen = _Chosen.of(scores, _Forced(first, own, last), within)
    _check_limit("share", share, (*scores.values.shape[:3], 1), scores.values.device)
    _check_share(share)
    values = chosen.ranked()
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    largest = torch.finfo(ordered.dtype).max  # units of +inf share all of the weight
    weights = ordered.clamp(max=largest).softmax(-1).nan_to_num(0.0)  # rows without units
    before = weights.cumsum(-1) - weights  # rounded: the sum may be 1 before the last unit
    wanted = ((before < share) | (share >= 1)) & (ordered > -math.inf)
    wanted[..., :1] = ordered[..., :1] > -math.inf
    return chosen.map(torch.zeros_like(wanted).scatter(-1, order, wanted))


def _check_share(share: float | Tensor) -> None:
    """Raise InputError for a share below 0 or above 1, where the host can tell."""
    if isinstance(share, Tensor):
        seen = not torch.compiler.is_compiling() and checked_here(share) and share.numel()
        worst = share.flatten()[(share.detach() - 0.5).abs().argmax()].item() if seen else 0.5
    else:
        worst = share
    if not 0 <= worst <= 1:
        raise InputError(f"share={worst!r}", "a number from 0 to 1", "e.g. share=0.9")


def _check_limit(name: str, given: Any, shape: Sequence[int], device: torch.device) -> None:
    """Raise InputError unless `given` is a number, or a tensor that broadcasts to `shape` on the device."""
    if isinstance(given, Tensor):
        sizes = zip(reversed(given.shape), reversed(shape), strict=False)
        if given.ndim > len(shape) or any(size not in (1, whole) for size, whole in sizes):
            raise InputError(
                f"{name} of shape {list(given.shape)}",
                f"a number, or a tensor that broadcasts to {list(shape)}",
                f"give {name} a size of 1, or that of the scores, along each axis",
            )
        check_device(name, given, "scores", device, f"move {name} to the scores")
    elif isinstance(given, bool) or not isinstance(given, (int, float)) or given != given:
        raise InputError(f"{name}={given!r}", "a number or a tensor", f"e.g. {name}=0.9")


def _check_scores(scores: Any) -> None:
    """Raise InputError for anything but Scores."""
    if not isinstance(scores, Scores):
        raise InputError(
            f"a selection of {kind_of(scores)}",
            "Scores, as select.score returns",
            "say what rows and columns stand for: Scores(values, queries, keys, q_len, kv_len)",
        )


class _Chosen(NamedTuple):
    """Units that a selection may choose from.

    open    bool [B, H, R, C]: units that may be selected for their scores
    forced  bool: units that are selected whatever these are
    """

    scores: Scores
    rule: _Forced
    open: Tensor
    forced: Tensor

    @staticmethod
    def of(scores: Scores, rule: _Forced, within: Within) -> _Chosen:
        _check_scores(scores)
        open, forced = scores.selectable, rule.check().of(scores)
        if within is not None:
            inside = _inside(scores, within)
            open, forced = open & inside, forced & inside
        return _Chosen(scores, rule, open, forced.expand(torch.broadcast_shapes(open.shape, forced.shape)))

    def ranked(self, among: Tensor | None = None) -> Tensor:
        """Scores of open units, `among` these, without gradients; -inf elsewhere."""
        open = self.open if among is None else self.open & among
        return self.scores.values.detach().expand(self.forced.shape).masked_fill(~open, -math.inf)

    def map(self, wanted: Tensor) -> BlockMap:
        """The map of wanted units, as far as they are open, and of forced ones."""
        scores, classes = self.scores, ((wanted & self.open) | self.forced).to(torch.uint8)
        size = scores.queries, scores.keys
        if classes.shape[1] == 1:
            return trusted_map(classes, size, scores.q_len, scores.kv_len)
        return listed_map(classes, size, (scores.q_len, scores.kv_len))


def _inside(scores: Scores, within: BlockMap | Lists) -> Tensor:
    """bool [B, H, R, C]: units inside an earlier selection, whose blocks are as large or whole multiples."""
    blocks = within.map() if isinstance(within, Lists) else within
    if not isinstance(blocks, BlockMap):
        raise InputError(f"within={kind_of(within)}", "a BlockMap or Lists", "pass an earlier selection")
    rows, columns = blocks.block_size
    same = (blocks.q_len, blocks.kv_len) == (scores.q_len, scores.kv_len)
    if not same or rows % scores.queries or columns % scores.keys:
        raise InputError(
            f"within blocks of {rows} x {columns}, q_len={blocks.q_len}, kv_len={blocks.kv_len}",
            f"q_len={scores.q_len}, kv_len={scores.kv_len}, and blocks of multiples of {scores.queries} x "
            f"{scores.keys}",
            "score units that divide those of the earlier selection",
        )
    if isinstance(blocks, ListedMap) and blocks.beside:
        raise UnsupportedError(
            f"within={blocks!r}, whose tail, window and sinks are keys, not units",
            "an earlier selection of units alone",
            "select within the units, and add these to the result: dataclasses.replace(chosen, window=...)",
        )
    (batch, heads), (entries, own) = scores.values.shape[:2], blocks.classes.shape[:2]
    if heads % own or (entries != batch and 1 not in (entries, batch)):
        raise InputError(
            f"within of {entries} entries of a batch and {own} heads, scores of {batch} and {heads}",
            f"{batch} or 1 entries, and a divisor of {heads} heads",
            "share one, or select from scores of as many",
        )
    check_device("within", blocks.classes, "scores", scores.values.device, "move it: within.to(device)")
    listed = blocks.classes != EMPTY
    spread = listed.repeat_interleave(rows // scores.queries, 2).repeat_interleave(columns // scores.keys, 3)
    spread = spread[:, :, : scores.values.shape[2], : scores.values.shape[3]]
    return spread.repeat_interleave(heads // own, 1) if own > 1 else spread
