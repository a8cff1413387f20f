"""Calls whose keys lie in pages or are an 8-bit cache, where a kernel reads them as they are.

Tables and lengths are read by the kernel alone, which corrects them and says what was wrong: they may change
at every call, and between replays of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from fa4flex.codegen.analyze.prove import proving
from fa4flex.codegen.evaluate import PastTheEnd
from fa4flex.codegen.plan.problem import WIDEST, KeyDtype
from fa4flex.errors import UnsupportedError
from fa4flex.runtime.cuda import faults
from fa4flex.runtime.cuda.call import Call, name_of
from fa4flex.runtime.cuda.conversions import tma_able
from fa4flex.runtime.cuda.device import require_not_capturing, target_of
from fa4flex.runtime.cuda.engine import Engine, make_ready
from fa4flex.runtime.cuda.ready import Results

MOST_KEYS = (1 << 31) - 256
"""Slots of a row of the table: their numbers, and those of a tile past them, have 32 bits."""

_CACHES = tuple(dtype for dtype in get_args(KeyDtype) if dtype)

_UNSEEN: Any = object()


def attend(engine: Engine, call: Call, check: Callable[[], None]) -> Results | None:
    """The results of a call; None where no kernel reads its keys in place. `check` raises InputError for
    tensors that do not fit; it is called for those of a look that is new."""
    faults.check()
    found = engine.look(call)
    ready = _UNSEEN if found is None else engine.ready.find(*found, _UNSEEN)
    if ready is _UNSEEN:
        check()
        if not _small_enough(call):
            return None
        ready = _made(engine, call)
        found = engine.look(call)
        if found is not None:
            engine.ready.keep(*found, ready)
    return None if ready is None else ready(call)


def _small_enough(call: Call) -> bool:
    """Whether the kernel for few query rows may take such a call. The others are not kept: calls with many
    queries have other lengths each time."""
    shape, kv_heads = call.extents(), call.k.shape[1 if call.heads_first else 2]
    target = target_of(call.q.device)
    few = shape.q_len * (shape.heads // kv_heads) <= target.few_rows
    half = all(name_of(x.dtype) in ("bfloat16", "float16", *_CACHES) for x in (call.q, call.k, call.v))
    widths = all(x.shape[-1] % 8 == 0 and x.shape[-1] <= WIDEST for x in (call.q, call.v))
    readable = tma_able(call.k) and tma_able(call.v)
    return few and half and widths and readable and shape.kv_len <= MOST_KEYS


def _made(engine: Engine, call: Call) -> Any:
    """A launch, or None where no kernel takes such a call, for its mask or the width of its pages."""
    require_not_capturing()
    try:
        with proving():
            return make_ready(engine, call)
    except (UnsupportedError, PastTheEnd):
        return None
