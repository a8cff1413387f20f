"""The source of keys and values that arguments of a call describe."""

from __future__ import annotations

from typing import Any

from fa4flex.primitives.kv_scales import NO_SCALES, KVScales, check_kind, is_eight_bit
from fa4flex.primitives.latent import Latent
from fa4flex.primitives.paging import Paging
from fa4flex.runtime.key_sources import Contiguous, EightBit, KeySource, Paged


def source_of(k: Any, v: Any, paging: Paging | None, scales: KVScales | None) -> KeySource:
    """The source that arguments of a call describe. Raises InputError for what does not describe one."""
    if type(k) is Latent:
        from fa4flex.runtime.latent_rows import latent_rows  # other calls do not wait for it

        return latent_rows(k, v, paging, scales)
    if scales is None and not is_eight_bit(k, v):
        return Contiguous(k, v) if paging is None else Paged(k, v, paging.page_table, paging.seqused_k)
    value, pages = check_kind(scales) or NO_SCALES, (None, None)
    if paging is not None:
        pages = paging.page_table, paging.seqused_k  # type: ignore[assignment]
    return EightBit(k, v, value.k, value.v, "", "", *pages)
