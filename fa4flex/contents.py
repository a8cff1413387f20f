"""Facts that follow from tensors' contents, kept between calls.

They are found again by a comparison with what the tensors held (`Alike`), which notices every change, whoever
wrote. torch's count of changes in place misses what is written through `.data`, in numpy's memory, by FSDP2,
by a replayed CUDA graph or by a kernel of the user's own: values are recognised by it (`VersionedCache`) only
where the user says that nobody writes so, by `Schedule(contents="counted")`. `Followed` does as a schedule
says. Tensors are referred to weakly: nothing here keeps one alive.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fa4flex.torch_internals import COUNTS_CHANGES, transform_level

Value = TypeVar("Value")

VALIDATE = os.environ.get("FA4FLEX_VALIDATE", "0") not in ("", "0")
"""True if contents are checked on the host before each launch, which waits for the device; else kernels find
faults, and the next call tells of them."""

MOST_BYTES = 256 << 20
"""Bytes of copies that one kind of values is recognised by; the oldest are forgotten first."""


class Guard(NamedTuple):
    """A tensor as it was: the object, where its memory was, how often torch had changed it in place (-1 for
    inference tensors, whose changes torch does not count), shape and strides, which `x.data = ...` may change
    without being counted."""

    tensor: weakref.ref[Tensor]
    place: int
    version: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Guards = tuple[Guard, ...]


def guards_of(
    tensors: Iterable[Tensor], gone: Callable[[weakref.ref[Tensor]], object] | None = None
) -> Guards:
    """`gone` is called when a tensor is gone, as long as there is its guard."""
    return tuple([_guard_of(x, weakref.ref(x, gone)) for x in tensors])


def version_of(x: Tensor) -> int:
    """Number of times that torch has changed x in place; -1 where torch does not count."""
    return -1 if x.is_inference() or not COUNTS_CHANGES else x._version


def _guard_of(x: Tensor, to_it: weakref.ref[Tensor]) -> Guard:
    place = x.data_ptr() if COUNTS_CHANGES else -1  # no tensor's: nothing holds
    return Guard(to_it, place, version_of(x), tuple(x.shape), x.stride())


def hold(guards: Guards, tensors: Sequence[Tensor]) -> bool:
    """True if these are the very tensors that the guards were made of, unchanged."""
    for (tensor, place, version, shape, strides), x in zip(guards, tensors, strict=True):
        if tensor() is not x or x.data_ptr() != place or (version >= 0 and x._version != version):
            return False
        if x.shape != shape or x.stride() != strides:
            return False
    return True


class VersionedCache(Generic[Value]):
    """Values that follow from a key and from tensors as they are now.

    There are at most `most`, and what `weigh` says of them adds up to at most `room`. The oldest are
    forgotten first, and before them those of tensors that are gone.
    """

    def __init__(self, most: int, room: int = 0, weigh: Callable[[Value], int] = lambda _: 0) -> None:
        self._most, self._room, self._weigh = most, room, weigh
        self._found: OrderedDict[Any, tuple[Guards, Value, int]] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()
        self._gone: deque[Any] = deque()
        """Keys of entries whose tensors may be gone. They are forgotten at the next `keep`: a tensor may go
        at any time, also while the dictionary is changed."""

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable, tensors: Sequence[Tensor], default: Any = None) -> Any:
        """Value kept for this key and these tensors, else `default`."""
        result = self._found.get((key, *map(id, tensors)))
        return result[1] if result is not None and (not tensors or hold(result[0], tensors)) else default

    def keep(self, key: Hashable, tensors: Sequence[Tensor], value: Value) -> Value:
        """The value. It is not kept for inference tensors: a change would not be seen. Nor is it within
        torch.func's transforms: tensors that are made there have no memory afterwards."""
        weight = self._weigh(value)
        if any(x.is_inference() for x in tensors) or weight > self._room:
            return value
        if transform_level() is not None:
            return value
        whole = (key, *map(id, tensors))
        gone = self._gone
        guards = guards_of(tensors, lambda _: gone.append(whole)) if tensors else ()
        with self._lock:
            self._forget(whole)  # what the tensors were before a change, and then the youngest comes last
            self._forget_gone()
            self._found[whole] = guards, value, weight
            self._total += weight
            while len(self._found) > self._most or self._total > self._room:
                _, (_, _, old) = self._found.popitem(last=False)
                self._total -= old
        return value

    def made(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Value]) -> Value:
        """Value that was kept, or that `make` makes now."""
        result = self.get(key, tensors, _NOTHING)
        return self.keep(key, tensors, make()) if result is _NOTHING else result

    def _forget(self, whole: Any) -> None:
        result = self._found.pop(whole, None)
        if result is not None:
            self._total -= result[2]

    def _forget_gone(self) -> None:
        while self._gone:
            whole = self._gone.popleft()
            # Other tensors with the same ids may have an entry by now.
            result = self._found.get(whole)
            if result is not None and any(guard.tensor() is None for guard in result[0]):
                self._forget(whole)


_NOTHING: Any = object()


class Alike(Generic[Value]):
    """Values that follow from a key and from the elements of tensors on the host.

    They are found by comparing all bits with a copy, which takes as long as reading both. For other tensors,
    whose comparison would wait for a device, nothing is kept, nor is it within torch.func's transforms. There
    are at most `keys` keys, the least recently made go first, at most `each` values per key, and copies of at
    most `room` bytes.
    """

    def __init__(self, keys: int, each: int, room: int = MOST_BYTES) -> None:
        self._keys, self._each, self._room = keys, each, room
        self._found: OrderedDict[Hashable, tuple[tuple[tuple[Tensor, ...], Value], ...]] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()

    def made(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Value]) -> Value:
        """Value that was kept, or that `make` makes now."""
        if any(type(x) not in _PLAIN or not x.is_cpu for x in tensors):
            return make()
        if tensors and transform_level() is not None:
            return make()
        bits = tuple([_bits_of(x) for x in tensors])
        like = key, *[(x.shape, x.dtype) for x in tensors]
        for copies, value in self._found.get(like, ()):
            if all(map(torch.equal, copies, bits)):
                return value
        # Copies come first: what another thread writes meanwhile makes them differ, never the value.
        copies, value = tuple([x.clone() for x in bits]), make()
        self._keep(like, copies, value)
        return value

    def _keep(self, like: Hashable, copies: tuple[Tensor, ...], value: Value) -> None:
        weight = sum(x.nbytes for x in copies)  # the same for all values of a key
        if weight > self._room:
            return
        with self._lock:
            known = self._found.pop(like, ())
            self._found[like] = kept = ((copies, value), *known)[: self._each]
            self._total += weight * (len(kept) - len(known))
            while len(self._found) > self._keys or self._total > self._room:
                _, gone = self._found.popitem(last=False)
                self._total -= sum(x.nbytes for copies, _ in gone for x in copies)


_PLAIN = (Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits_of(x: Tensor) -> Tensor:
    """The same memory as integers: NaNs are equal to themselves there, and zeros of either sign are not."""
    return x.detach().resolve_neg().view(_INTEGERS[x.element_size()]) if x.is_floating_point() else x


class Followed(Generic[Value]):
    """Values that follow from a key and from tensors' contents, which are compared or counted as a schedule
    says. Limits are those of `Alike`; as many values are counted."""

    def __init__(self, keys: int, each: int) -> None:
        self._compared: Alike[Value] = Alike(keys, each)
        self._counted: VersionedCache[Value] = VersionedCache(keys * each)

    def made(
        self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Value], how: str = "compared"
    ) -> Value:
        """Value that was kept, or that `make` makes now."""
        if how == "compared":
            return self._compared.made(key, tensors, make)
        return self._counted.made((key, _stream_of(tensors)), tensors, make)


def _stream_of(tensors: Sequence[Tensor]) -> int:
    """Handle of the stream on which what follows from the tensors is computed: it may not be there yet on
    another one. 0 on a CPU."""
    device = next((x.device for x in tensors if x.is_cuda), None)
    return 0 if device is None else torch.cuda.current_stream(device).cuda_stream


def capturing() -> bool:
    """True while a CUDA graph is captured on the current stream: nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def validating() -> bool:
    """True if the host checks contents before it launches, as FA4FLEX_VALIDATE=1 asks for. A graph that is
    captured cannot wait for them."""
    return VALIDATE and not capturing()


def checked_here(x: Tensor) -> bool:
    """True if the host checks contents of x, as it can without waiting on a CPU."""
    return x.is_cpu or validating()


def on_host(x: Tensor) -> Tensor:
    """x as it is now where the host computes, without gradients; to be read only. Each call copies what lies
    on a device, and waits for all that this still has to do: whether it changed, only its contents tell."""
    return x.detach().cpu() if torch.compiler.is_compiling() or not _elsewhere(x) else _copied(x)


def _elsewhere(x: Tensor) -> bool:
    return not x.is_cpu


def _copied(x: Tensor) -> Tensor:
    return x.detach().cpu()
