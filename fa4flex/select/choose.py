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
from fa4flex.primitives.kept import where_seen
from fa4flex.primitives.largest import largest
from fa4flex.primitives.lists import ListedMap, Lists, listed_map
from fa4flex.primitives.units import Rule
from fa4flex.select.scores import Scores
from ptxsim.active import simulating

Within = BlockMap | Lists | None


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
    rule = _rule(scores, first, own, last)
    if not is_count(k):
        raise InputError(f"k={k!r}", "a positive int", "pass the number of units of a row")
    k = min(k, rule.units)
    if rule.most > k:
        raise InputError(
            f"k={k} with first={first}, own={own}, last={last}: up to {rule.most} units of a row",
            "at most k forced units, which count among the k",
            f"pass k={rule.most} or more",
        )
    ids, counts = _largest(scores, rule, k, _inside(scores, within))
    sizes = {"kv_len": scores.kv_len, "q_len": scores.q_len}
    return Lists(ids, counts, unit=scores.keys, queries=scores.queries, **sizes)


def _largest(scores: Scores, rule: Rule, k: int, inside: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and counts of the k best units, by an operator where a GPU has one launch for it."""
    values = scores._unmasked[0].detach()
    if (values.is_cuda or simulating()) and (inside is None or not rule.forces):
        if inside is not None:
            values = where_seen(values, inside)
        return torch.ops.fa4flex.topk(values, k, list(rule) if rule.forces or rule.seen else [])
    chosen = _Chosen.of(scores, rule, inside)
    return largest(chosen.ranked(), k, chosen.forced)


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
    chosen = _Chosen.of(scores, _rule(scores, first, own, last), _inside(scores, within))
    values = chosen.values
    _check_limit("least", least, values.shape, values.device)
    above = values >= least
    if isinstance(least, Tensor) or least == -math.inf:  # else no score of -inf is as large
        above = above & (values > -math.inf)
    return chosen.map(above)


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
    chosen = _Chosen.of(scores, _rule(scores, first, own, last), _inside(scores, within))
    _check_limit("share", share, (*chosen.values.shape[:3], 1), chosen.values.device)
    _check_share(share)
    ordered, order = chosen.ranked().sort(dim=-1, descending=True, stable=True)
    largest = torch.finfo(ordered.dtype).max  # units of +inf share all of the weight
    weights = ordered.clamp(max=largest).softmax(-1)  # NaN of rows without units, of which none is wanted
    before = weights.cumsum(-1).sub_(weights)
    wanted = (before < _positive(share, before)) & (ordered > -math.inf)
    return chosen.map(torch.empty_like(wanted).scatter_(-1, order, wanted))


def _positive(share: float | Tensor, before: Tensor) -> float | Tensor:
    """A share that the best unit, before which there is no weight, lies below, and every unit if it is 1 or
    more: sums are rounded, and may be 1 before the last unit."""
    tiny = torch.finfo(before.dtype).tiny
    if not isinstance(share, Tensor):
        return math.inf if share >= 1 else max(share, tiny)
    return torch.where(share >= 1, math.inf, share.clamp(min=tiny))


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


def _rule(scores: Any, first: int, own: int, last: int) -> Rule:
    """The rule of a selection. Raises InputError."""
    _check_scores(scores)
    for name, value in (("first", first), ("own", own), ("last", last)):
        if not is_count(value, 0):
            raise InputError(f"{name}={value!r}", "an int of 0 or more: units", f"leave {name} out for none")
    return scores._rule(first, own, last)


class _Chosen(NamedTuple):
    """Units that a selection may choose from.

    values  scores [B, H, R, C], of which units that may not be selected have any
    open    bool: units that may be selected for their scores, if these are above -inf; None: all
    forced  bool: units that are selected whatever these are; None: none
    """

    scores: Scores
    values: Tensor
    open: Tensor | None
    forced: Tensor | None

    @staticmethod
    def of(scores: Scores, rule: Rule, inside: Tensor | None) -> _Chosen:
        values = scores._unmasked[0].detach()
        open, forced = rule.mask(values.device), rule.forced(values.device)
        if inside is not None:
            open = inside if open is None else open & inside
            forced = None if forced is None else forced & inside
            values = values.expand(torch.broadcast_shapes(values.shape, inside.shape))
        return _Chosen(scores, values, open, forced)

    def ranked(self) -> Tensor:
        """Scores of open units, -inf where they are NaN, and elsewhere."""
        values = self.values.nan_to_num(-math.inf, math.inf, -math.inf)
        return values if self.open is None else where_seen(values, self.open)

    def map(self, wanted: Tensor) -> BlockMap:
        """The map of wanted units, as far as they are open, and of forced ones."""
        scores, size = self.scores, (self.scores.queries, self.scores.keys)
        if self.open is not None:
            wanted = wanted & self.open
        if self.forced is not None:
            wanted = wanted | self.forced
        classes = wanted.view(torch.uint8)
        if classes.shape[1] == 1:
            return trusted_map(classes, size, scores.q_len, scores.kv_len)
        return listed_map(classes, size, (scores.q_len, scores.kv_len))


def _inside(scores: Scores, within: Within) -> Tensor | None:
    """bool [B, H, R, C]: units inside an earlier selection, whose blocks are as large or whole multiples.
    None without one."""
    if within is None:
        return None
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
    (batch, heads), (entries, own) = scores._unmasked[0].shape[:2], blocks.classes.shape[:2]
    if heads % own or (entries != batch and 1 not in (entries, batch)):
        raise InputError(
            f"within of {entries} entries of a batch and {own} heads, scores of {batch} and {heads}",
            f"{batch} or 1 entries, and a divisor of {heads} heads",
            "share one, or select from scores of as many",
        )
    check_device("within", blocks.classes, "scores", scores._unmasked[0].device, "move it: within.to(device)")
    listed = blocks.classes != EMPTY
    spread = listed.repeat_interleave(rows // scores.queries, 2).repeat_interleave(columns // scores.keys, 3)
    spread = spread[:, :, : scores._rule().rows, : scores._rule().units]
    return spread.repeat_interleave(heads // own, 1) if own > 1 else spread
