"""Calls of planes: which tiles of keys a call reads, and the call over these.

A tile is left out by a block map of the call, so that whatever computes attention with maps computes it.
Where nothing reads the plane all keys are read, which keeps every tolerance. On a GPU nothing waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fa4flex import calls
from fa4flex.errors import EarlierError, Fa4flexError, InputError, UnsupportedError
from fa4flex.primitives.block_lists import PARTIAL
from fa4flex.primitives.blocks import BlockMap
from fa4flex.quantization.planes import Planes
from fa4flex.runtime import autocast, launch
from fa4flex.runtime.call import Call, Results, Statistics
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.planes import Masses, needed
from fa4flex.variant import Variant, changed

if TYPE_CHECKING:
    from fa4flex.codegen.analyze.facts import Facts
    from fa4flex.runtime.cpu.tiles import Inputs

NO_SLOPE = "the score mod has jumps, or may be of any slope: its scores have no bound"
OTHER_GPUS = "planes are read on CPUs, and by kernels for Hopper"
CAPTURING = "a CUDA graph is captured before a first call, which compiles the kernel that reads planes"
IN_GRAPHS = "something traces, transforms or intercepts operators, which see attention to k and v"
EXACT = "no tolerance: Precision(tolerance=0)"


@dataclass(frozen=True, eq=False, repr=False)
class Reads:
    """What a call of planes reads, as `attn.reads(q, planes)` finds it. T tiles of `planes.block` keys.

    visited  bool [B, Hkv, T]: tiles that have allowed keys
    tiles    bool [B, Hkv, T]: those of them whose keys and values of 16 bits are read
    looked   bool [B, Hkv]: heads whose plane is read
    reason   why nothing may be left out; "" where scores decide
    """

    planes: Planes
    visited: Tensor
    tiles: Tensor
    looked: Tensor
    reason: str = ""

    @property
    def share(self) -> Tensor:
        """Share of the visited keys that are left out, float32 [B, Hkv]; 0 where none is visited."""
        keys = self._keys
        visited, read = ((x * keys).sum(-1) for x in (self.visited, self.tiles))
        return (visited - read) / visited.clamp(min=1)

    @property
    def bytes(self) -> int:
        """Bytes of keys, values and planes that the call reads. Waits for the device."""
        keys, planes = self._keys, self.planes
        looked = (self.visited & self.looked[:, :, None]) * keys
        plane, exact = int(looked.sum()), int((self.tiles * keys).sum())
        numbers = 3 * 4 * int((looked > 0).sum()) if plane else 0  # scale, error and size of a tile
        return plane * planes.codes.shape[-1] + numbers + exact * self._key_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the keys and values that a call without planes would read. Waits for the device."""
        return int((self.visited * self._keys).sum()) * self._key_bytes

    @property
    def _keys(self) -> Tensor:
        """Keys of each tile, int64 [B, 1, T]."""
        starts = torch.arange(self.planes.tiles, device=self.visited.device) * self.planes.block
        used = self.planes.seqused_k.long()[:, None]
        return (used - starts).clamp(0, self.planes.block)[:, None]

    @property
    def _key_bytes(self) -> int:
        return sum(x.itemsize * x.shape[-1] for x in (self.planes.k, self.planes.v))

    def explain(self) -> str:
        """Tiles and bytes, as text. Waits for the device."""
        visited, read = int(self.visited.sum()), int(self.tiles.sum())
        looked, heads = int(self.looked.sum()), self.looked.numel()
        whole, found = self.whole_bytes, self.bytes
        lines = [
            f"tiles   {read} of {visited} of {self.planes.block} keys are read with"
            f" {8 * self.planes.k.itemsize} bits, {visited - read} by their plane alone",
            f"heads   {looked} of {heads} heads of keys look at their plane of 8 bits",
            f"bytes   {found} of {whole} without planes ({found / max(whole, 1):.2f})",
        ]
        return "\n".join([*lines, *([f"all tiles are read: {self.reason}"] if self.reason else [])])

    def __repr__(self) -> str:
        return f"Reads({self.planes!r})"


def attend(
    variant: Variant, caller: launch.Caller | None, q: Tensor, planes: Planes, statistics: Statistics
) -> Results:
    """The results of `variant` for queries of planes. See fa4flex.api.Attention."""
    plain = _exact(variant)
    with autocast.off(q):
        q = q.to(planes.k.dtype) if autocast.active(q) else q
        blocks = None if _checked(variant, q, planes) else _chosen(variant, q, planes)
        if blocks is not None:
            plain = changed(plain, blocks=blocks)
        inner = None if caller is None or torch.compiler.is_dynamo_compiling() else caller.of_codes()
        return calls.run(plain, inner, (q, planes.k, planes.v), planes.varlen, None, statistics)


def reads(variant: Variant, q: Tensor, planes: Planes) -> Reads:
    """What the next call reads. Leaves the planes as they are."""
    reason = _checked(variant, q, planes)
    if reason and reason != EXACT:
        return _all(planes, reason)
    now: launch.Calling | None = None
    try:
        now = launch.calling(_exact(variant), None)
        return _found(now, q, planes, variant.precision.tolerance)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise


def _exact(variant: Variant) -> Variant:
    return changed(variant, precision=replace(variant.precision, tolerance=0.0))


def _checked(variant: Variant, q: Tensor, planes: Planes) -> str:
    """Why nothing may be left out, whatever scores are; "" where they decide. Raises what `_check` does, and
    UnsupportedError for gradients, also of what functions captured."""
    if torch.compiler.is_dynamo_compiling():  # which knows no repr of a variant
        _check(variant, q, planes)
        return IN_GRAPHS
    try:
        _check(variant, q, planes)
        if variant.precision.tolerance and torch.is_grad_enabled():
            now = launch.calling(_exact(variant), None)
            if any(x is not None and x.requires_grad for x in (q, now.sinks, *now.operands())):
                raise _no_gradients(variant.precision.tolerance)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, None)
        raise
    return _may(variant, q, planes)


def _chosen(variant: Variant, q: Tensor, planes: Planes) -> BlockMap | None:
    """Tiles that this step reads, as a map; None for all of them. Counts the step."""
    waits = not launch.by_kernels(variant, q)
    found = None if waits and not bool(planes.looks().any()) else reads(variant, q, planes)
    planes.step.add_(1)
    if found is None:
        return None
    if found.reason:
        planes.share.zero_()
        return None
    planes.share.copy_(torch.where(found.looked, found.share, planes.share))
    return _map(found, q, variant)


def _found(now: launch.Calling, q: Tensor, planes: Planes, tolerance: float) -> Reads:
    from fa4flex.runtime import blockwise  # calls without planes do not wait for the executor

    kv, varlen = Contiguous(planes.k, planes.v), planes.varlen
    kv.fits(q, varlen)
    call = launch.call_of(now, q, kv, varlen, ())
    launch.check_call(now, q, kv, varlen, call.operands)
    call, program = call.turned(), now.prepared.program
    inputs, looked = blockwise.inputs_of_call(program, call), planes.looks()
    if launch.by_kernels(now.variant, q):
        masses: Masses | str = _by_kernel(program.facts, inputs, planes, call) if tolerance else EXACT
        if isinstance(masses, str):
            return _all(planes, masses)
    else:
        from fa4flex.runtime.cpu import planes as by_plane

        slope = by_plane.slope_of(program.facts, inputs)
        sequences = blockwise.sequences_of_call(call)
        masses = by_plane.masses(program.facts, inputs, planes, sequences, slope or 0.0)
        if slope is None or not tolerance:
            reason = NO_SLOPE if tolerance else EXACT
            return Reads(planes, masses.visited, masses.visited, torch.zeros_like(looked), reason)
    tiles = needed(masses, call.sinks, tolerance) | (masses.visited & ~looked[:, :, None])
    return Reads(planes, masses.visited, tiles, looked)


def _by_kernel(facts: Facts, inputs: Inputs, planes: Planes, call: Call) -> Masses | str:
    """Masses by a kernel, or why there are none."""
    from fa4flex.runtime.cpu.tiles import fitted_call
    from fa4flex.runtime.cuda import planes as kernels

    facts, inputs = fitted_call(facts, inputs, call.extents())
    reason = kernels.refusal(facts, inputs.q, planes)
    rows = kernels.Rows(inputs.q, inputs.scale, inputs.captured, facts)
    return reason or kernels.masses(rows, planes, planes.looks()) or CAPTURING


def _all(planes: Planes, reason: str) -> Reads:
    """All tiles that hold keys: which of them a mask hides is not asked."""
    starts = torch.arange(planes.tiles, device=planes.seqused_k.device) * planes.block
    held = (starts < planes.seqused_k.long()[:, None])[:, None].expand(-1, planes.share.shape[1], -1)
    return Reads(planes, held, held, torch.zeros_like(planes.share, dtype=torch.bool), reason)


def _map(found: Reads, q: Tensor, variant: Variant) -> BlockMap:
    """The tiles that are read as a map for all queries, in which the mask decides."""
    rows = 2 if variant.layout == "bhsd" else 1
    heads, q_len, kv_len = q.shape[3 - rows], q.shape[rows], found.planes.k.shape[rows]
    each = heads // found.tiles.shape[1]
    classes = found.tiles.repeat_interleave(each, 1).unsqueeze(2).to(torch.uint8) * PARTIAL
    return BlockMap(classes, (q_len, found.planes.block), q_len, kv_len)


def alone(planes: Planes, **others: Any) -> None:
    """Raise for arguments of a call that planes already say, or which are not supported beside them."""
    for name, value in others.items():
        if value is not None:
            raise InputError(
                f"{name}= beside {planes!r}",
                "q and planes alone: attn(q, planes)",
                f"leave {name} out: planes have keys, values and their lengths",
            )


def _may(variant: Variant, q: Tensor, planes: Planes) -> str:
    """Why nothing may be left out, whatever scores are; "" where they decide."""
    if launch.observed(q, planes.k, planes.v):
        return IN_GRAPHS
    if q.device.type != "cpu" and not launch.by_kernels(variant, q):
        return OTHER_GPUS
    return "" if variant.precision.tolerance else EXACT


def _check(variant: Variant, q: Tensor, planes: Planes) -> None:
    """Raise InputError or UnsupportedError for calls that do not fit planes, or whose errors no bound has."""
    if not isinstance(q, Tensor) or q.is_nested or q.ndim != 4 or variant.layout != planes.layout:
        shape = list(q.shape) if isinstance(q, Tensor) and not q.is_nested else type(q).__name__
        raise InputError(
            f"q {shape} in an attention of layout {variant.layout!r}, beside {planes!r}",
            "dense queries [B, Hq, Sq, D] and planes, in the layout of the attention",
            f"fa4flex.planes(k, v, layout={variant.layout!r})",
        )
    precision = variant.precision
    if precision.qk != "bfloat16":
        raise InputError(
            f"{precision!r} with planes",
            "Precision(tolerance=x), the error that leaving out tiles of keys may cause",
            "leave qk and pv out: planes have codes of their keys, and nothing else is rounded",
        )
    if not precision.tolerance:
        return
    others = {
        "a normaliser": variant.normalizer, "dropout": variant.dropout, "a block map": variant.blocks,
        "an output function": variant.output_mod, "skip": precision.skip or None,
    }  # fmt: skip
    for name, one in others.items():
        if one is not None:
            raise UnsupportedError(
                f"Precision(tolerance={precision.tolerance:g}) over planes with {name}",
                "the softmax with any mask, score mod and sinks: no bound is known of anything else",
                _INSTEAD.get(name, f"leave out {name}, or the tolerance: then all keys are read"),
            )


def _no_gradients(tolerance: float) -> UnsupportedError:
    return UnsupportedError(
        f"gradients of Precision(tolerance={tolerance:g}) over planes",
        "calls without gradients, as decoding is",
        "call inside torch.no_grad(), or with tolerance=0: then all keys are read",
    )


_INSTEAD = {
    "a block map": "give it as a mask: mask=blocks.mask()",
    "skip": "leave out skip: a tolerance leaves out what it would, and before keys are read",
}
