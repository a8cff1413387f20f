"""The launch of the last call, for a next one that looks just like it: most do.

Host time counts in microseconds here. Finding a launch by its key takes a Python call for each of a tensor's
properties; torch compares all of them in one, with the guard that its compiler puts in front of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa4flex.codegen.analyze.extents import extents_of
from fa4flex.codegen.trace.paths import Reader
from fa4flex.exact import exactly
from fa4flex.kernels.plan.arguments import FORWARD
from fa4flex.kernels.plan.splitting import Splits
from fa4flex.runtime.call import NO_LENGTHS, Call, Results
from fa4flex.runtime.cuda.calls.arguments import launch_function
from fa4flex.runtime.cuda.calls.looks import ALIGNMENT
from fa4flex.runtime.cuda.calls.prepared import prepared
from fa4flex.runtime.cuda.device.counters import counters
from fa4flex.runtime.cuda.launches.ready import Ready
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.torch_internals import TensorGuards, forward_ad
from fa4flex.variant import Variant, default_scale

PARAMETERS = "q", "k", "v", "out", "lse", "max_scores", "tables", "counters", "workspace"
"""Parameters of the launch function of a repeated call."""


class FastPath:
    """One launch, with all of its arguments but q, k, v and what it computes.

    `matches` tells whether a variant has captured by now what it had then, `statistics` are those that such
    calls ask for; where gradients are wanted, the launch has the log-sum-exp besides.
    """

    __slots__ = (
        "alignment",
        "alignments",
        "default_scale",
        "launch",
        "layouts",
        "looks",
        "lse",
        "matches",
        "others",
        "plain",
        "ready",
        "requires_grad",
        "rest",
        "scale",
        "shape",
        "sinks",
        "statistics",
        "trains",
        "workspace",
    )

    def __init__(
        self,
        call: Call,
        ready: Ready,
        looks: Callable[..., bool],
        reader: Reader,
        statistics: tuple[str, ...],
    ) -> None:
        self.ready, self.looks = ready, looks
        self.matches = reader.matching(call.operands, call.scalars)
        self.statistics, self.scale = statistics, call.scale
        self.default_scale = default_scale(call.q.shape[-1])
        self.sinks, self.shape = call.sinks, call.extents()
        self.others = call.operands if call.sinks is None else (*call.operands, call.sinks)
        self.rest = call[2:]
        qkv = call.q, call.kv.k, call.kv.v
        self.requires_grad = any(x.requires_grad for x in (*qkv, *self.others))
        self.trains = self.requires_grad and torch.is_grad_enabled()
        q, k, v = qkv
        self.alignment = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT
        self.alignments = [x.data_ptr() % ALIGNMENT for x in self.others]
        self.layouts, splits = ready.layouts(call), _splits(call, ready)
        self.plain = self.layouts.like_q and not ready.statistics
        self.lse = None
        if self.layouts.like_q and ready.statistics == ("lse",):
            self.lse = call.q.new_empty(1, dtype=torch.float32).expand(self.layouts.rows)
        self.workspace = None if splits is None else _workspace(call, splits.floats)
        constants = _constants(call, ready, splits)
        self.launch = launch_function(FORWARD, ready.kernel, PARAMETERS, constants, {})

    @staticmethod
    def of(call: Call, ready: Ready, reader: Reader, statistics: tuple[str, ...]) -> FastPath | None:
        """None where a call does more than launch, or where torch cannot compare its tensors at once."""
        plain = call.lengths is NO_LENGTHS and type(call.kv) is Contiguous
        if not plain or ready.converts or ready.gaps:
            return None
        tensors = call.q, call.kv.k, call.kv.v, *call.operands
        looks = guard_of(tensors if call.sinks is None else (*tensors, call.sinks))
        return None if looks is None else FastPath(call, ready, looks, reader, statistics)

    def serves(self, variant: Variant) -> bool:
        """True if `variant`, for inputs that fit, has the scale, sinks and captured values of this launch.
        Raises StateError or InputError for a block map that does not fit."""
        scale, sinks = variant.scale, variant.sinks
        scale = self.default_scale if scale is None else scale
        if scale != self.scale or (not scale and exactly(scale) != exactly(self.scale)):
            return False
        if (None if sinks is None else sinks.now()) is not self.sinks:
            return False
        if self.matches(variant.score_mod, variant.allowed) is not True:
            return False
        if variant.blocks is not None:  # of the same blocks, perhaps for other lengths
            shape = self.shape
            variant.blocks.fits(shape.q_len, shape.kv_len, shape.batch, shape.heads)
        return True

    def fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """True if a call with these tensors is this launch.

        `looks` compares types, dtypes, devices, shapes, strides, requires_grad, and whatever takes part in
        dispatch: modes, transforms, inference mode. What it does not see follows.
        """
        if not self.looks(q, k, v, *self.others):
            return False
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT != self.alignment:
            return False
        if self.others and [x.data_ptr() % ALIGNMENT for x in self.others] != self.alignments:
            return False
        trains = not self.requires_grad or torch.is_grad_enabled() == self.trains
        return trains and forward_ad._current_level < 0

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Call:
        """The call that these inputs make."""
        return Call(q, Contiguous(k, v), *self.rest)

    def of_call(self, call: Call) -> Results:
        return self(call.q, call.kv.k, call.kv.v)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Results:
        ready = self.ready
        tables = None
        if ready.tables is not None or ready.watch is not None:
            call = self.call(q, k, v)
            tables = None if ready.tables is None else ready.tables(call)
            if ready.watch is not None:
                ready.watch(call)
        out, lse, largest = self._results(q)
        taken = counters(q.get_device()) if ready.counted else None
        parts = None if self.workspace is None else torch.empty_like(self.workspace)
        self.launch(q, k, v, out, lse, largest, tables, taken, parts)
        return out, lse, largest

    def _results(self, q: Tensor) -> Results:
        """Memory for the results. What is like another tensor takes half the host time of q.new_empty."""
        if self.plain:
            return torch.empty_like(q), None, None
        if self.lse is None:
            return self.ready.results(q, self.layouts)
        lse = torch.empty_like(self.lse, memory_format=torch.contiguous_format)
        return torch.empty_like(q), lse, None


def _workspace(call: Call, floats: int) -> Tensor:
    """Tensor like the memory for results of splits that takes none."""
    # What is like an empty tensor of stride 0 has that stride, too.
    like = call.q.new_empty(min(floats, 1), dtype=torch.float32)
    return like.expand(floats) if floats else like


def _splits(call: Call, ready: Ready) -> Splits | None:
    return None if ready.splitting is None else ready.splits(call, extents_of(call.extents()))


def _constants(call: Call, ready: Ready, splits: Splits | None) -> dict[str, Any]:
    """All arguments but PARAMETERS, as such calls have them. Tuples that no call changes are prepared once,
    as the calling convention would do at each launch."""
    results = {row.name: getattr(call, row.name) for row in FORWARD.found_in("call")}
    results |= {row.name: None for row in FORWARD.found_in("call.lengths")} | {"faults": None}
    results |= ready.constants
    results |= {"scalars": prepared(results["scalars"]), "operands": call.operands or None}
    most, even = (None, None) if splits is None else splits[:2]
    results |= {"order": None, "max_q_len": ready.layouts(call).length}
    return results | {"splits": most, "even_splits": even}


def guard_of(
    tensors: tuple[Tensor, ...],
    shapes: Any = None,
    strides: Any = None,
) -> Callable[..., bool] | None:
    """A function that tells whether tensors look like these; in place of their own shapes and strides, it
    compares with those that are given, where None stands for any. None where this torch has none that works,
    or where a tensor is given twice, which it does not allow."""
    if TensorGuards is None:
        return None
    shapes = [list(x.shape) for x in tensors] if shapes is None else shapes
    strides = [list(x.stride()) for x in tensors] if strides is None else strides
    try:
        guard = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        looks: Callable[..., bool] = guard.check
        return looks if looks(*tensors) else None
    except (TypeError, RuntimeError):
        return None
