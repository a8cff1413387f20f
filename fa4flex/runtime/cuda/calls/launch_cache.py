"""Launches by keys of calls: how their tensors look, whatever their lengths.

A launch reads extents and strides from the tensors it is given. So its key says of a tensor what a kernel is
compiled for and how it is converted, and leaves out batch, lengths and strides. Which of these a launch
serves, it knows itself: `Reach`. One that was made with tables for the extents of one call serves only these.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from fa4flex.codegen.analyze.extents import Extents, Reach
from fa4flex.compiler.background import Awaited
from fa4flex.contents import VersionedCache, capturing
from fa4flex.kernels.plan.arguments import FORWARD
from fa4flex.kernels.plan.sizes import Answers
from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.arguments import key_function, key_function_of
from fa4flex.runtime.cuda.calls.looks import ALIGNMENT, heads_look
from fa4flex.runtime.key_sources import Contiguous
from ptxsim import active as simulated

MOST_REACHES = 32
"""Launches of one key, each for a range of extents; the oldest is forgotten first. Were it fewer than random
lengths need, some 20 at most where nothing captured ends with them, launches would be made over and over."""

MOST_ANSWERS = 8
"""Answers of calls of one key that are kept."""

MISSING: Any = object()
"""Entry of calls that look like none before: None is kept for those that nothing launches."""

Key = tuple[Any, ...]


# --- keys -------------------------------------------------------------------------------------------------


def key_of(call: Call) -> tuple[Key, Extents] | None:
    """All that the launch of a call depends on besides its extents, and these; None where q, k and v do not
    have the dimensions that calls have."""
    lengths, kind, of_keys = call.lengths, type(call.kv), None
    if kind is not Contiguous:
        of_keys = kind, *key_function_of(kind)(call)
    if of_keys is not None and call.kv.seqused_k is not None:
        heads = _loaded(call)
    else:
        heads = _dense(call) if lengths.cu_seqlens_q is None else _packed(call)
    if heads is None:
        return None
    looks, extents = heads
    of_lengths = None if lengths is NO_LENGTHS else _key_of_lengths(call)
    return (looks, _key_of_captured(call), of_lengths, of_keys, call.statistics, simulated.gpu()), extents


_key_of_captured, _key_of_lengths = key_function(FORWARD, "call"), key_function(FORWARD, "call.lengths")


def _dense(call: Call) -> tuple[Key, Extents] | None:
    """Keys of q, k and v, whether their extents agree, and these."""
    q, k, v = call.q, call.kv.k, call.kv.v
    if not q.dim() == k.dim() == v.dim() == 4:
        return None
    if call.heads_first:
        (b, heads, length, width), (kb, k_heads, keys, k_width) = q.shape, k.shape
        vb, v_heads, values, v_width = v.shape
    else:
        (b, length, heads, width), (kb, keys, k_heads, k_width) = q.shape, k.shape
        vb, values, v_heads, v_width = v.shape
    agree = b == kb == vb and keys == values
    sizes = heads, k_heads, v_heads, width, k_width, v_width
    return (call.heads_first, agree, sizes, *_looks(q, k, v)), (b, length, keys)


def _looks(q: Tensor, k: Tensor, v: Tensor) -> Key:
    """Results of `heads_look` for each, together where all of them can be read as they are: most can."""
    (a, b, c, q_unit), (d, e, f, k_unit), (g, h, i, v_unit) = q.stride(), k.stride(), v.stride()
    places = (
        q.data_ptr() | k.data_ptr() | v.data_ptr() | (a | b | c | d | e | f | g | h | i) * q.element_size()
    )
    dtype, device = q.dtype, q.get_device()
    alike = dtype is k.dtype is v.dtype and device == k.get_device() == v.get_device()
    if places % ALIGNMENT or not alike or not q_unit == k_unit == v_unit == 1:
        return heads_look(q), heads_look(k), heads_look(v)
    one = dtype, device, True
    return one, one, one


def _packed(call: Call) -> tuple[Key, Extents] | None:
    q, k, v, cu = call.q, call.kv.k, call.kv.v, call.lengths.cu_seqlens_q
    if not q.dim() == k.dim() == v.dim() == 3 or cu is None or not cu.dim():
        return None
    (length, *sizes), (keys, *k_sizes), (values, *v_sizes) = q.shape, k.shape, v.shape
    looks = keys == values, (*sizes, *k_sizes, *v_sizes), heads_look(q), heads_look(k), heads_look(v)
    return looks, (cu.shape[0] - 1, length, keys)


def _loaded(call: Call) -> tuple[Key, Extents] | None:
    """Key of a call whose source knows the numbers of keys, with the slots of a page: these are a part of
    what a kernel is compiled for."""
    q, kv, cu = call.q, call.kv, call.lengths.cu_seqlens_q
    k, v, used = kv.k, kv.v, kv.seqused_k
    if not k.dim() == v.dim() == 4 or q.dim() != (4 if cu is None else 3) or used is None:
        return None
    heads, rows = (1, 2) if call.heads_first else (2, 1)
    if cu is None:
        batch, q_heads, length, looks = q.shape[0], q.shape[heads], q.shape[rows], _looks(q, k, v)
    else:
        batch, q_heads, length = cu.shape[0] - 1, q.shape[1], q.shape[0]
        looks = heads_look(q), heads_look(k), heads_look(v)
    pools = k.shape[0] == v.shape[0] and k.shape[rows] == v.shape[rows]
    agree = kv.sequences == used.shape[0] == batch and pools
    sizes = q_heads, k.shape[heads], v.shape[heads], q.shape[-1], k.shape[3], v.shape[3], k.shape[rows]
    return (call.heads_first, agree, sizes, *looks), (batch, length, kv.longest(rows))


# --- launches ---------------------------------------------------------------------------------------------


class Reaching(Protocol):
    """A launch: extents that it serves, answers by which others may have it, and what is to replace it."""

    @property
    def reach(self) -> Reach: ...

    @property
    def answers(self) -> Answers: ...

    @property
    def until(self) -> Awaited | None: ...


Ready = TypeVar("Ready", bound=Reaching)


def serves(ready: Reaching) -> bool:
    """False once a launch is to be replaced by one whose kernels are there; while a CUDA graph is captured,
    in which none is made, it goes on."""
    return ready.until is None or not ready.until.over or capturing()


class LaunchCache(Generic[Ready]):
    """Launches by keys of calls and their extents. `None` is kept for calls that nothing launches."""

    def __init__(self, most: int) -> None:
        self._kept: VersionedCache[Any] = VersionedCache(most)
        self._answers: VersionedCache[tuple[Answers, ...]] = VersionedCache(most)

    def find(self, key: Key, extents: Extents) -> Any:
        """Entry kept for calls of this key and these extents, else MISSING."""
        for ready in self._kept.get(key, (), ()):
            if ready.reach.holds(extents) and serves(ready):
                return ready
        ready = self._kept.get((key, extents), (), MISSING)
        return ready if ready is None or ready is MISSING or serves(ready) else MISSING

    def answers(self, key: Key) -> tuple[Answers, ...]:
        """Answers to questions about speed that calls of this key got, the last ones first."""
        return self._answers.get(key, (), ())

    def keep(self, key: Key, extents: Extents, ready: Ready | None) -> None:
        if ready is not None and ready.until is None:
            others = [one for one in self.answers(key) if one != ready.answers]
            self._answers.keep(key, (), (ready.answers, *others)[:MOST_ANSWERS])
        if ready is None or ready.reach.exact:
            self._kept.keep((key, extents), (), ready)
        else:
            known = [one for one in self._kept.get(key, (), ()) if one.until is None or not one.until.over]
            self._kept.keep(key, (), (ready, *known)[:MOST_REACHES])

    def __len__(self) -> int:
        """Number of keys with launches, and of extents that have a launch of their own."""
        return len(self._kept)
