"""Document mask: tokens of several documents in one row attend only within their own document.

    allowed(q, kv) = ids[q] == ids[kv]

Source: Krell et al., Efficient Sequence Packing without Cross-contamination, arXiv:2107.02027, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.variants._alone import show_mask
from fa4flex.variants._check import INTEGERS, offsets_to_ids, table

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
    given = [name for name, value in offered.items() if value is not None]
    if given not in (["ids"], ["offsets"], ["cu_seqlens"], ["q_ids", "kv_ids"]):
        raise InputError(
            f"document() with {' and '.join(given) or 'nothing'}",
            "one of ids, offsets, cu_seqlens, or q_ids with kv_ids",
            "e.g. document(ids) with the document number of each token",
        )
    if offsets is not None or cu_seqlens is not None:
        ids = offsets_to_ids("document", given[0], offsets if cu_seqlens is None else cu_seqlens)
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


def definition(q: int, kv: int, lengths: list[int]) -> bool:
    tokens = [number for number, length in enumerate(lengths) for _ in range(length)]
    return tokens[q] == tokens[kv]


def main() -> None:
    show_mask(
        document(torch.tensor([0] * 3 + [1] * 5 + [2] * 4)), lambda q, kv: definition(q, kv, [3, 5, 4]), 12
    )
    show_mask(document(offsets=torch.tensor([0, 4, 4, 9])), lambda q, kv: definition(q, kv, [4, 0, 5]), 9)


if __name__ == "__main__":
    main()
