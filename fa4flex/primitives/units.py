"""Rows of neighbouring queries over units of neighbouring keys: which units lie in the future of a row, and
which are selected whatever their scores are. Rows are aligned bottom-right."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fa4flex.primitives.kept import kept, steps

Seen = Literal["all", "causal", "whole"]
SEEN: tuple[Seen, ...] = "all", "causal", "whole"


class Rule(NamedTuple):
    """Numbers that selections of rows know besides scores.

    queries, keys   tokens of a row, and of a unit; q_len, kv_len: tokens in all
    first, own      units that are selected always: the first ones, those up to each query's own
    last            and the last ones
    seen            number in SEEN: all units may be selected; those that do not lie in the future of all
                    queries of a row; or those without a key in the future of one of them
    """

    queries: int
    keys: int
    q_len: int
    kv_len: int
    first: int = 0
    own: int = 0
    last: int = 0
    seen: int = 0

    @property
    def rows(self) -> int:
        return -(-self.q_len // self.queries)

    @property
    def units(self) -> int:
        return -(-self.kv_len // self.keys)

    @property
    def forces(self) -> bool:
        """True if some units are selected always."""
        return bool(self.first or self.own or self.last)

    @property
    def most(self) -> int:
        """Most units of a row that are selected always. Rows begin at any multiple of the common divisor of
        their queries and a unit's keys, behind the offset of q_len and kv_len: the latest place in a unit
        reaches farthest."""
        step = math.gcd(self.queries, self.keys)
        latest = self.keys - step + (self.kv_len - self.q_len) % step
        own = self.own + (latest + self.queries - 1) // self.keys if self.own else 0
        return min(self.first + own + self.last, self.units)

    def mask(self, device: torch.device) -> Tensor | None:
        """bool [R, C]: units that may be selected; None for all."""
        return None if not self.seen else kept(("seen", self), device, lambda: self._seen(device))

    def _seen(self, device: torch.device) -> Tensor:
        offset = self.kv_len - self.q_len
        if SEEN[self.seen] == "causal":  # behind the row's last query, which is no later than the last key
            ends = steps(offset + self.queries, self.rows, self.queries, device)
            return steps(0, self.units, self.keys, device) < ends.unsqueeze(1)
        begins = steps(offset + 1, self.rows, self.queries, device)
        units = kept(
            ("ends", self.keys, self.kv_len),
            device,
            lambda: steps(self.keys, self.units, self.keys, device).clamp(max=self.kv_len),
        )
        return units <= begins.unsqueeze(1)

    def forced(self, device: torch.device) -> Tensor | None:
        """bool [R, C]: units that are selected always, own ones of every query of a row; None for none."""
        return kept(("forced", self), device, lambda: self._forced(device)) if self.forces else None

    def _forced(self, device: torch.device) -> Tensor:
        at = steps(0, self.units, 1, device)
        found = ((at < self.first) | (at >= self.units - self.last)).expand(self.rows, -1)
        if not self.own:
            return found
        starts = steps(self.kv_len - self.q_len, self.rows, self.queries, device).unsqueeze(1)
        low = torch.div(starts.clamp(min=0), self.keys, rounding_mode="floor") - (self.own - 1)
        ends = (starts + (self.queries - 1)).clamp(max=self.kv_len - 1)
        return found | ((at >= low) & (at <= torch.div(ends, self.keys, rounding_mode="floor")))
