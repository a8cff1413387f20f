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
from fa4flex.kernels.planes.config import READ
from fa4flex.primitives.block_lists import PARTIAL
from fa4flex.primitives.blocks import BlockMap
from fa4flex.primitives.mask import as_mask
from fa4flex.primitives.paging import Paging
from fa4flex.quantization.planes import Planes, refuse_stale
from fa4flex.runtime import autocast, launch
from fa4flex.runtime.call import Results, Statistics
from fa4flex.runtime.key_sources import Contiguous
from fa4flex.runtime.planes import needed
from fa4flex.variant import Variant, changed

if TYPE_CHECKING:
    from fa4flex.runtime.cuda.planes import Pages, Rows

NO_SLOPE = "the score mod has jumps, or may be of any slope: its scores have no bound"
OTHER_GPUS = "planes are read on CPUs, and by kernels for Hopper"
CAPTURING = "a CUDA graph is captured before a first call, which compiles the kernel that reads planes"
IN_GRAPHS = "something traces, transforms or intercepts operators, which see attention to k and v"
EXACT = "no tolerance: Precision(tolerance=0)"


@dataclass(frozen=True, eq=False, repr=False)
class Reads:
    """Tiles and bytes that a call of planes reads, as `attn.reads(q, planes)` finds them. T tiles of
    `planes.block` keys.

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
        keys = self.keys
        visited, read = ((x * keys).sum(-1) for x in (self.visited, self.tiles))
        return (visited - read) / visited.clamp(min=1)

    @property
    def bytes(self) -> int:
        """Bytes of keys, values and planes that the call reads. Waits for the device."""
        keys, planes = self.keys, self.planes
        looked = (self.visited & self.looked[:, :, None]) * keys
        plane, exact = int(looked.sum()), int((self.tiles * keys).sum())
        numbers = 3 * 4 * int((looked > 0).sum()) if plane else 0  # scale, error and size of a tile
        return plane * planes.codes.shape[-1] + numbers + exact * self._key_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the keys and values that a call without planes would read. Waits for the device."""
        return int((self.visited * self.keys).sum()) * self._key_bytes

    @property
    def keys(self) -> Tensor:
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
        found = None if _checked(variant, q, planes) else _chosen(variant, q, planes, statistics)
        inner = None if caller is None or torch.compiler.is_dynamo_compiling() else caller.of_codes()
        if isinstance(found, Reads):
            plain = changed(plain, blocks=_map(found, q, variant))
        elif found is not None:
            return _of_pages(plain, inner, (q, planes, found), statistics)
        return calls.run(plain, inner, (q, planes.k, planes.v), planes.varlen, None, statistics)


def reads(variant: Variant, q: Tensor, planes: Planes) -> Reads:
    """Tiles that the next call reads. Leaves the planes as they are."""
    reason = _checked(variant, q, planes)
    if reason and reason != EXACT:
        return _all(planes, reason)
    found = _found(variant, q, planes, planes.share.clone())
    if isinstance(found, (str, Reads)):
        return _all(planes, found) if isinstance(found, str) else found
    return Reads(planes, found.classes > 0, found.classes == READ, planes.looks())


def _exact(variant: Variant) -> Variant:
    return changed(variant, precision=replace(variant.precision, tolerance=0.0))


def _checked(variant: Variant, q: Tensor, planes: Planes) -> str:
    """Reason that nothing may be left out, whatever scores are; "" where these decide. Raises what
    `_check` does, and UnsupportedError for gradients, also of what functions captured."""
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


def _chosen(variant: Variant, q: Tensor, planes: Planes, statistics: Statistics) -> Reads | Pages | None:
    """Tiles that this step reads, as pages where kernels compute; None for all. Counts the step, and keeps
    what is left out."""
    kernels = launch.by_kernels(variant, q)
    if kernels and "max_logit" in statistics:  # of heads of all sequences, which are sequences of their own
        return None
    found = _found(variant, q, planes, planes.share) if kernels or bool(planes.looks().any()) else None
    planes.step.add_(1)
    if not isinstance(found, Reads) or not found.reason:
        return None if isinstance(found, str) else found
    planes.share.zero_()
    return None


def _found(variant: Variant, q: Tensor, planes: Planes, shares: Tensor) -> Reads | Pages | str:
    """Tiles that a call reads; where kernels compute, as pages, or the reason that all are read. shares
    [B, Hkv] is written: what heads that look leave out."""
    now: launch.Calling | None = None
    try:
        now = launch.calling(_exact(variant), None)
        return _found_by(now, q, planes, variant.precision.tolerance, shares)
    except EarlierError:  # it is none of this variant's
        raise
    except Fa4flexError as error:
        launch.dress(error, variant, now)
        raise


def _found_by(
    now: launch.Calling, q: Tensor, planes: Planes, tolerance: float, shares: Tensor
) -> Reads | Pages | str:
    # Calls without planes wait for neither.
    from fa4flex.runtime import blockwise
    from fa4flex.runtime.cpu import planes as by_plane
    from fa4flex.runtime.cpu.tiles import fitted_call
    from fa4flex.runtime.cuda.planes import Rows

    kv, varlen = Contiguous(planes.k, planes.v), planes.varlen
    kv.fits(q, varlen)
    call = launch.call_of(now, q, kv, varlen, ())
    launch.check_call(now, q, kv, varlen, call.operands)
    call, program = call.turned(), now.prepared.program
    inputs = blockwise.inputs_of_call(program, call)
    if launch.by_kernels(now.variant, q):
        facts, inputs = fitted_call(program.facts, inputs, call.extents())
        rows = Rows(inputs.q, inputs.scale, inputs.captured, facts, call.sinks is not None)
        return _by_kernels(rows, planes, tolerance, shares)
    slope = by_plane.slope_of(program.facts, inputs)
    sequences = blockwise.sequences_of_call(call)
    masses = by_plane.masses(program.facts, inputs, planes, sequences, slope or 0.0)
    looked = planes.looks()
    if slope is None or not tolerance:
        reason = NO_SLOPE if tolerance else EXACT
        return Reads(planes, masses.visited, masses.visited, torch.zeros_like(looked), reason)
    tiles = needed(masses, call.sinks, tolerance) | (masses.visited & ~looked[:, :, None])
    reads = Reads(planes, masses.visited, tiles, looked)
    shares.copy_(torch.where(looked, reads.share, shares))
    return reads


def _by_kernels(rows: Rows, planes: Planes, tolerance: float, shares: Tensor) -> Pages | str:
    from fa4flex.runtime.cuda.planes import bounded, chosen, refusal

    reason = refusal(rows, planes) if tolerance else EXACT
    if reason:
        return reason
    masses = bounded(rows, planes)
    return (None if masses is None else chosen(masses, planes, tolerance, shares)) or CAPTURING


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


def _of_pages(
    plain: Variant,
    caller: launch.Caller | None,
    given: tuple[Tensor, Planes, Pages],
    statistics: Statistics,
) -> Results:
    """Results over the tiles that are read, as pages of sequences: those of each head of keys are one. A
    key's place among them takes that of its index, so the mask is what rows may see of these."""
    q, planes, pages = given
    assert planes.pages is not None
    (batch, heads, q_len, width), kv_heads = q.shape, pages.table.shape[1]
    each = heads // kv_heads
    first, end = (
        x[:, :, : each * q_len].unflatten(2, (each, q_len)).flatten(0, 1) for x in pages.places.unbind(-1)
    )

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= first[b, h, q_idx]) & (kv_idx < end[b, h, q_idx])

    variant = plain if plain.mask is None else changed(plain, mask=as_mask(seen))
    rows = q.reshape(batch * kv_heads, each, q_len, width)
    paging = Paging(pages.table.flatten(0, 1), pages.counts.flatten())
    out, *more = calls.run(variant, caller, (rows, *planes.pages), None, paging, statistics)
    return (
        out.reshape(batch, heads, q_len, out.shape[3]),
        *(x if x is None or not x.numel() else x.reshape(batch, heads, q_len) for x in more),
    )


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
    """Reason that nothing may be left out, whatever scores are; "" where these decide."""
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
    if not torch.compiler.is_dynamo_compiling():
        refuse_stale(planes)
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
