"""The backward pass of the last call, for a next one that looks like it: see fast_path.py, family_path.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa4flex.runtime.call import NO_LENGTHS, Call
from fa4flex.runtime.cuda.calls.conversions import tma_able
from fa4flex.runtime.cuda.calls.looks import ALIGNMENT
from fa4flex.runtime.cuda.launches.ready_backward import ReadyBackward, Saved
from fa4flex.runtime.cuda.repeats.family_path import NOTHING, Dense
from fa4flex.runtime.cuda.repeats.fast_path import guard_of
from ptxsim import active as simulated

MOST_TRIES = 4
Asked = tuple[tuple[int, ...], bool, tuple[tuple[int, int], ...]]
"""Slots of captured tensors whose gradients are wanted, whether sums are ordered, and Engine.bits."""


class FastBackward:
    """One launch of a backward pass, and what calls and saved tensors look like that it serves. It holds none
    of them.

    exact    compares with all of the tensors that it was made with
    looks    leaves out what the launch reads itself, where it serves other extents: all of its tensors can be
             read as they are; `dense` tells extents
    """

    __slots__ = ("alike", "asked", "dense", "exact", "looks", "ready", "scalars")

    def __init__(
        self,
        call: Call,
        asked: Asked,
        ready: ReadyBackward,
        exact: Callable[..., bool],
        looks: Callable[..., bool] | None,
    ) -> None:
        self.ready, self.asked, self.exact, self.looks = ready, asked, exact, looks
        self.scalars, self.alike, self.dense = call.scalars, _alike(call), Dense(call)

    @staticmethod
    def of(call: Call, saved: Saved, asked: Asked, ready: ReadyBackward) -> FastBackward | None:
        """None for tensors that torch cannot compare at once."""
        tensors = _tensors(call, saved)
        if not _aligned(tensors):
            return None
        exact, looks = guard_of(tensors), None
        if all(map(tma_able, _of_heads(call, saved))):
            looks = guard_of(tensors, *_free(tensors, 2 if call.heads_first else 1))
        return None if exact is None else FastBackward(call, asked, ready, exact, looks)

    def fits(self, call: Call, saved: Saved, asked: Asked) -> bool:
        if call.lengths is not NO_LENGTHS or saved.dlse is not None or asked != self.asked:
            return False
        if call.scalars is not self.scalars or _alike(call) != self.alike:
            return False
        tensors = _tensors(call, saved)
        if not _aligned(tensors):
            return False
        if self.exact(*tensors):
            return True
        if self.looks is None or not self.looks(*tensors):
            return False
        steps = 0
        for x in _of_heads(call, saved):
            a, b, c, _ = x.stride()
            steps |= (a | b | c) * x.element_size()
        extents = self.dense.extents((call.q, call.kv.k, call.kv.v), NOTHING)
        return steps % ALIGNMENT == 0 and extents is not None and self.ready.reach.holds(extents)


class RecentBackward:
    """The last backward pass of a program, and what serves one like it, if two in a row were alike.

    `tries` counts how often that was made: for calls that change again and again in what it compares, it is
    given up.
    """

    __slots__ = ("made", "ready", "shapes", "tries")

    def __init__(self) -> None:
        self.made: FastBackward | None = None
        self.ready: ReadyBackward | None = None
        self.shapes: Any = None
        self.tries = 0

    def find(self, call: Call, saved: Saved, asked: Asked) -> ReadyBackward | None:
        made = self.made
        return made.ready if made is not None and made.fits(call, saved, asked) else None

    def remember(self, call: Call, saved: Saved, asked: Asked, ready: ReadyBackward) -> None:
        """`ready`, proved without contents of tensors, has just served this call."""
        seen, before = self.ready is ready, self.shapes
        self.ready, self.shapes = ready, (call.q.shape, call.kv.k.shape)
        if not seen or self.tries >= MOST_TRIES or call.lengths is not NO_LENGTHS or saved.dlse is not None:
            return
        if self.shapes == before or all(map(tma_able, _of_heads(call, saved))):
            self.tries += 1
            self.made = FastBackward.of(call, saved, asked, ready)


def _of_heads(call: Call, saved: Saved) -> tuple[Tensor, ...]:
    return call.q, call.kv.k, call.kv.v, saved.out, saved.dout


def _free(tensors: tuple[Tensor, ...], rows: int) -> tuple[list[Any], list[Any]]:
    """Shapes and strides that a launch does not read itself, of all tensors, None for those that it does."""
    shapes: list[Any] = [list(x.shape) for x in tensors]
    strides: list[Any] = [list(x.stride()) for x in tensors]
    for shape, stride, length in zip(shapes[:6], strides, (*[rows] * 4, 2, rows), strict=False):
        shape[0] = shape[length] = None
        stride[:-1] = [None] * (len(stride) - 1)
    return shapes, strides


def _tensors(call: Call, saved: Saved) -> tuple[Tensor, ...]:
    q, kv, operands, sinks, *_ = call
    arguments = q, kv.k, kv.v, saved.out, saved.lse, saved.dout, *operands
    return arguments if sinks is None else (*arguments, sinks)


def _alike(call: Call) -> tuple[Any, ...]:
    """Properties that decide a launch and no tensor tells."""
    return call.scale > 0, call.heads_first, call.statistics, call.sinks is None, simulated.gpu()


def _aligned(tensors: tuple[Tensor, ...]) -> bool:
    places = 0
    for x in tensors:
        places |= x.data_ptr()
    return places % ALIGNMENT == 0
