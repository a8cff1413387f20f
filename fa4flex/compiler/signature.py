"""What the arguments of a launch look like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """What the arguments of a launch look like, besides what the problem says.

    heads_first   q, k, v and out come as [B, H, S, D] rather than [B, S, H, D]; packed ones are [T, H, D]
    used_q, used_k   seqused_q and seqused_k are given
    scalars       the kind of each run-time number, "int", "bool" or "float"
    unit_strides  per captured tensor, whether its last stride is 1
    dlse          of backward passes: the log-sum-exp has a gradient
    even_rows     per captured tensor, whether its address and all strides but the last are even in elements
    ordered       of a ragged batch: tiles come in a given order
    """

    heads_first: bool = True
    used_q: bool = False
    used_k: bool = False
    scalars: tuple[str, ...] = ()
    unit_strides: tuple[bool, ...] = ()
    even_rows: tuple[bool, ...] = ()
    dlse: bool = False
    ordered: bool = False
