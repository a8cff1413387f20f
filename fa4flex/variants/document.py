"""Document mask: tokens of several documents in one row attend only within their own document.

    allowed(q, kv) = ids[q] == ids[kv]

Source: Krell et al., Efficient Sequence Packing without Cross-contamination, arXiv:2107.02027, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._cases import Case, Drawn, Picture, Sizes, masked, masked_by_batch, show
from fa4flex.variants._common import INTEGERS, offsets_to_ids, table
from fa4flex.variants.causal import causal

_SHAPE = "[S] or [B, S]"


@mask_family
def document(
    ids: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q_ids: Tensor | None = None,
    kv_ids: Tensor | None = None,
) -> MaskMod:
    """Same document only; combine with `causal`. Indices are absolute: query i is token i of the ids.

    ids                  document of each token, integer [S] or [B, S], in any order
    offsets, cu_seqlens  (two names for one thing) cumulative document lengths [N + 1], starting at 0
    q_ids, kv_ids        where queries and keys are different tokens, both [S] or both [B, S]

    Give one of them. Raises InputError for none, several, or a wrong shape or dtype.
    """
    offered = {"ids": ids, "offsets": offsets, "cu_seqlens": cu_seqlens, "q_ids": q_ids, "kv_ids": kv_ids}
    arguments = [name for name, value in offered.items() if value is not None]
    if arguments not in (["ids"], ["offsets"], ["cu_seqlens"], ["q_ids", "kv_ids"]):
        raise InputError(
            f"document() with {' and '.join(arguments) or 'nothing'}",
            "one of ids, offsets, cu_seqlens, or q_ids with kv_ids",
            "e.g. document(ids) with the document number of each token",
        )
    if offsets is not None or cu_seqlens is not None:
        ids = offsets_to_ids("document", arguments[0], offsets if cu_seqlens is None else cu_seqlens)
    if ids is not None:
        of_q = of_kv = table("document", "ids", ids, INTEGERS, (1, 2), _SHAPE)
    else:
        of_q = table("document", "q_ids", q_ids, INTEGERS, (1, 2), _SHAPE)
        of_kv = table("document", "kv_ids", kv_ids, INTEGERS, (of_q.ndim,), "of the rank of q_ids")
    if of_q.ndim == 2:

        def mod_per_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return of_q[b, q_idx] == of_kv[b, kv_idx]

        return mod_per_batch

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return of_q[q_idx] == of_kv[kv_idx]

    return mod


def definition(q: int, kv: int, q_ids: Sequence[Any] | Tensor, kv_ids: Sequence[Any] | Tensor) -> bool:
    return int(q_ids[q]) == int(kv_ids[kv])


def _same_and_causal(q: int, kv: int, tokens: list[int]) -> bool:
    return kv <= q and definition(q, kv, tokens, tokens)


def _one_row(s: Sizes) -> Drawn:
    ids = s.ids(max(s.q_len, s.kv_len))
    return masked(s, document(ids), definition, ids, ids)


def _rows(s: Sizes) -> Drawn:
    q_ids, kv_ids = s.ids(s.batch, s.q_len), s.ids(s.batch, s.kv_len)
    mask = document(q_ids=q_ids, kv_ids=kv_ids)
    return masked_by_batch(s, mask, lambda b, q, kv: definition(q, kv, q_ids[b], kv_ids[b]))


def _offsets(s: Sizes) -> Drawn:
    ends = s.offsets()
    tokens = [number for number, end in enumerate(ends[1:]) for _ in range(ends[number], end)]
    named = {"offsets" if s.some(2) == 2 else "cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
    return masked(s.square(len(tokens)), causal & document(**named), _same_and_causal, tokens)


def _in_any_order(s: Sizes) -> Drawn:
    ids = torch.randint(0, 4, (s.batch, max(s.q_len, s.kv_len)))
    return masked_by_batch(s, document(ids), lambda b, q, kv: definition(q, kv, ids[b], ids[b]))


CASES = (Case(_one_row), Case(_rows), Case(_offsets), Case(_in_any_order, compiled=False))
PICTURE = Picture("causal & document(torch.arange(128) // 43)")


if __name__ == "__main__":
    show(CASES)
