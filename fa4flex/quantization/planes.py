"""Planes: keys and values of a cache, and beside them keys of 8 bits that tell which of them matter.

Keys are rounded as `quantize` rounds them: minus an offset, rotated, one scale for each tile. Of each tile
the largest error of a key is kept, so that scores of 8 bits bound those of 16 (runtime/cpu/planes.py). The
offset may be any vector, as it is added back to all scores: it is the mean of the keys that there were first.

All is written in place, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fa4flex import later
from fa4flex.contents import checked_here, version_of
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.kernels.planes.config import EVERY, LARGEST
from fa4flex.primitives.base import check_device, check_integers, kind_of
from fa4flex.primitives.latent import refuse_latent
from fa4flex.primitives.varlen import Varlen
from fa4flex.quantization.rotation import Rotation

BLOCKS = (64, 128)
"""Keys of a tile: those of the tiles of kernels."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False, repr=False)
class Planes:
    """Keys and values, a plane of 8 bits of the keys, and what bounds its errors; as `fa4flex.planes` makes
    them. `attn(q, planes)` attends to them. T tiles of `block` keys hold a sequence.

    k, v       [B, Hkv, S, D] and [B, Hkv, S, Dv], or as the layout has it: the tensors that were given
    seqused_k  int32 [B]: number of keys of each sequence
    codes      int8 [B, Hkv, T block, D]: offset + codes scale is about k, rotated; 0 past the end
    scale      float32 [B, Hkv, T]
    error      float32 [B, Hkv, T]: largest 2-norm of what rounding did to a key of the tile
    size       float32 [B, Hkv, T]: largest 2-norm of a key of the tile minus the offset
    offset     float32 [B, Hkv, D]: rotated, never changed
    share      float32 [B, Hkv]: share of the visited keys that the last step which looked left out
    step       int64 [1]: steps so far
    """

    k: Tensor
    v: Tensor
    seqused_k: Tensor
    codes: Tensor
    scale: Tensor
    error: Tensor
    size: Tensor
    offset: Tensor
    share: Tensor
    step: Tensor
    block: int
    layout: Literal["bhsd", "bshd"]
    full: bool = field(default=False)
    """True if there is no room for more keys."""
    version: list[int] = field(default_factory=list)
    """Version of k that the plane was made of, as torch counts writes in place; empty where it does not."""

    @property
    def varlen(self) -> Varlen | None:
        """Lengths of the sequences, for calls of k and v; None where all have all tokens."""
        return None if self.full else Varlen(seqused_k=self.seqused_k)

    @property
    def rotation(self) -> Rotation:
        """Rotation of the keys and of queries that meet codes."""
        return Rotation(self.offset.shape[-1])

    def turned(self, x: Tensor) -> Tensor:
        """x rotated as the keys are, in float32, by sums alone: matrix products may be told to round."""
        return rotated(x, self.rotation)

    @property
    def tiles(self) -> int:
        """Tiles of a sequence."""
        return self.scale.shape[2]

    @property
    def stale(self) -> bool:
        """True if torch knows that keys were written to since their plane was made."""
        return self.version != [] and self.version != _version(self.k)

    @property
    def pages(self) -> tuple[Tensor, Tensor] | None:
        """k and v as [B Hkv T, block, 1, D], the tiles of all heads one after another; None where they lie
        otherwise in memory."""
        whole = self.layout == "bhsd" and self.k.shape[2] == self.tiles * self.block
        if not whole or not (self.k.is_contiguous() and self.v.is_contiguous()):
            return None
        k, v = (x.view(-1, self.block, 1, x.shape[3]) for x in (self.k, self.v))
        return k, v

    @cached_property
    def norms(self) -> Tensor:
        """2-norms of the offsets [B, Hkv]."""
        return self.offset.norm(dim=-1)

    @property
    def worth(self) -> float:
        """Share of the keys that has to be left out to pay for the plane: its bytes over those of k and v."""
        return self.codes.shape[-1] / (
            self.k.itemsize * self.k.shape[-1] + self.v.itemsize * self.v.shape[-1]
        )

    def looks(self) -> Tensor:
        """Heads whose plane is read at this step, bool [B, Hkv]: those that it was worth its bytes for at the
        last look, and all of them at every 32nd step."""
        return (self.share >= self.worth) | (self.step % EVERY == 0)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Write further keys and values behind those of each sequence, and round the tiles they are in again.

        k [B, Hkv, n, D], v [B, Hkv, n, Dv], or as the layout has it. Raises InputError for shapes that do not
        fit, and for tokens past the room of k and v: on a GPU at a later call, and nothing is written there.
        """
        refuse_stale(self)
        to, new = [self._heads_first(x) for x in (self.k, self.v)], [self._heads_first(x) for x in (k, v)]
        _check_new(to, new)
        count, room = new[0].shape[2], to[0].shape[2]
        if not count or not new[0].numel():
            return
        before = self.seqused_k.long()
        fits = before + count <= room
        if checked_here(fits):
            if not bool(fits.all()):
                raise InputError(
                    f"{count} more tokens of sequences of {before.tolist()}, in room for {room}",
                    "keys and values with room for what is appended",
                    "make them longer, and say with seqused_k= how many tokens of them there are",
                )
        else:
            later.require_at_each_replay(fits, "tokens past the room of planes")
        at = before[:, None] + torch.arange(count, device=before.device)
        batch, written = torch.arange(len(before), device=before.device)[:, None], at < room
        at = at % room  # no two tokens meet: what does not fit rewrites what is there
        for x, own in zip(to, new, strict=True):
            rows, old = own.transpose(1, 2).to(x.dtype), x.transpose(1, 2)
            old[batch, at] = torch.where(written[:, :, None, None], rows, old[batch, at])
        self.seqused_k.copy_((before + count).clamp(max=room))
        touched = min((count + self.block - 2) // self.block + 1, self.tiles)
        first = before // self.block
        self._round((first[:, None] + torch.arange(touched, device=first.device)) % self.tiles)
        self.version[:] = _version(self.k)

    def _heads_first(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.layout == "bshd" else x

    def _round(self, tiles: Tensor) -> None:
        """Round tiles [B, W] of each sequence, no two of them alike, by the keys that they hold now."""
        k, (batch, wide) = self._heads_first(self.k), tiles.shape
        tokens = (tiles[:, :, None] * self.block + torch.arange(self.block, device=tiles.device)).flatten(1)
        used = tokens < self.seqused_k.long()[:, None]
        index = torch.arange(batch, device=tiles.device)[:, None]
        found = k.transpose(1, 2)[index, tokens.clamp(max=k.shape[2] - 1)]  # [B, W block, H, D]
        centred = self.turned(found) - self.offset[:, None]
        centred = centred.masked_fill(~used[:, :, None, None], 0.0).unflatten(1, (wide, self.block))
        scale = centred.abs().amax((2, 4)) / LARGEST
        scale = scale.masked_fill(scale == 0, 1.0)
        by = scale[:, :, None, :, None]
        codes = (centred / by).round().clamp(-LARGEST, LARGEST)
        error, size = ((x.norm(dim=-1)).amax(2) for x in (codes * by - centred, centred))  # NaN stays NaN
        self.codes.transpose(1, 2)[index, tokens] = codes.nan_to_num(0.0).to(torch.int8).flatten(1, 2)
        for whole, part in ((self.scale, scale), (self.error, error), (self.size, size)):
            whole.transpose(1, 2)[index, tiles] = part

    def __repr__(self) -> str:
        return f"Planes({list(self.k.shape)}, {self.k.dtype}, block={self.block}, layout={self.layout!r})"


@torch.no_grad()
def planes(
    k: Tensor,
    v: Tensor,
    *,
    seqused_k: Tensor | None = None,
    block: int = 128,
    layout: Literal["bhsd", "bshd"] = "bhsd",
) -> Planes:
    """Keys and values with a plane of 8 bits of the keys, for `attn(q, planes)`: tiles of keys that are
    proved to matter less than `Precision(tolerance=x)` are left out.

    k [B, Hkv, S, D], v [B, Hkv, S, Dv] of bfloat16, float16 or float32 ("bshd" swaps dimensions 1 and 2);
    they are kept, not copied. seqused_k: how many of the S tokens of each sequence there are, integers [B],
    which are copied; None for all of them, without room for more. block: keys of a tile, 64 or 128.

    The plane takes a quarter of the bytes that k and v of 16 bits do where these are equally wide. Nothing
    waits for the device. Raises InputError for shapes, dtypes and lengths that do not fit, UnsupportedError
    for tensors that require gradients.
    """
    heads_first = _check(k, v, seqused_k, block, layout)
    batch, heads, room, width = heads_first.shape
    tiles, device = -(-room // block), k.device
    if seqused_k is None:
        used = torch.full((batch,), room, dtype=torch.int32, device=device)
    else:
        used = seqused_k.to(torch.int32, copy=True)
    there = torch.arange(room, device=device) < used[:, None]
    total = torch.where(there[:, None, :, None], heads_first, 0).sum(2, dtype=torch.float32)
    mean = total / used.clamp(min=1)[:, None, None]

    def floats(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    made = Planes(
        k=k,
        v=v,
        seqused_k=used,
        codes=torch.zeros(batch, heads, tiles * block, width, dtype=torch.int8, device=device),
        scale=floats(batch, heads, tiles),
        error=floats(batch, heads, tiles),
        size=floats(batch, heads, tiles),
        # An offset that is no number would spoil all tiles for the keys of one.
        offset=rotated(torch.where(mean.isfinite(), mean, 0), Rotation(width)),
        share=floats(batch, heads) + 1,
        step=torch.zeros(1, dtype=torch.int64, device=device),
        block=block,
        layout=layout,
        full=seqused_k is None,
        version=_version(k),
    )
    for first in range(0, tiles, TILES):
        some = torch.arange(first, min(first + TILES, tiles), device=device)
        made._round(some.expand(batch, -1))
    return made


def _version(x: Tensor) -> list[int]:
    version = -1 if torch.compiler.is_compiling() else version_of(x)
    return [] if version < 0 else [version]


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """`rotation.of(x)` by sums and differences of pairs: the Hadamard transform, step by step."""
    block = rotation.block
    x, pairs = (x.float() * rotation.signs(x.device)).unflatten(-1, (-1, block)), 1
    while pairs < block:
        a, b = x.unflatten(-1, (-1, 2, pairs)).unbind(-2)
        x, pairs = torch.stack([a + b, a - b], -2).flatten(-3), 2 * pairs
    return x.flatten(-2) * block**-0.5


TILES = 64
"""Tiles of each sequence that are rounded at a time: they are float32 meanwhile."""


# --- checks -------------------------------------------------------------------------------------------------


def _check(k: Tensor, v: Tensor, seqused_k: Tensor | None, block: int, layout: str) -> Tensor:
    """k with heads first. Raises for anything that does not fit."""
    for name, x in (("k", k), ("v", v)):
        refuse_latent(name, x)
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            raise InputError(f"{name} is a {kind_of(x)}", "a dense torch.Tensor", "pass keys and values")
    told = ", ".join(f"{n} {x.dtype} {list(x.shape)} on {x.device}" for n, x in (("k", k), ("v", v)))
    if layout not in ("bhsd", "bshd") or block not in BLOCKS:
        raise InputError(
            f"planes of block={block!r}, layout={layout!r}",
            f"tiles of {' or '.join(map(str, BLOCKS))} keys, in the layout 'bhsd' or 'bshd'",
            "leave them out for tiles of 128 keys of [B, Hkv, S, D]",
        )
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.device != v.device or not k.shape[3]:
        raise InputError(
            told,
            "k [B, Hkv, S, D] and v [B, Hkv, S, Dv] of as many sequences, heads and tokens, on one device",
            "planes hold dense or padded caches: pad packed tokens, gather pages",
        )
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        raise InputError(
            told, "bfloat16, float16 or float32, both alike", "keep caches of 8 bits without planes"
        )
    if k.requires_grad or v.requires_grad:
        raise UnsupportedError(
            f"{told}, which require gradients",
            "keys and values of a cache, to which no gradients pass",
            "detach them, or attend to k and v without planes",
        )
    heads_first = k.transpose(1, 2) if layout == "bshd" else k
    if seqused_k is not None:
        check_integers("seqused_k", seqused_k)
        check_device("seqused_k", seqused_k, "k", k.device, "move it with .to(k.device)")
        Varlen(seqused_k=seqused_k).check_padded(*(heads_first.shape[n] for n in (0, 2, 2)))
    return heads_first


def refuse_stale(planes: Planes) -> None:
    """Raise InputError where keys are no longer what their plane was made of."""
    if planes.stale:
        raise InputError(
            "keys that were written to since their plane was made",
            "planes of the keys as they are: their bounds hold for no others",
            "write new tokens with planes.append(k, v), or make planes again: fa4flex.planes(k, v)",
        )


def _check_new(to: list[Tensor], new: list[Tensor]) -> None:
    """Raise InputError unless new keys and values fit those that there are, all with heads first."""
    for name, x, own in zip("kv", to, new, strict=True):
        same = own.ndim == 4 and own.shape[:2] == x.shape[:2] and own.shape[3] == x.shape[3]
        if not same or own.shape[2] != new[0].shape[2] or own.shape[2] > x.shape[2] or own.device != x.device:
            raise InputError(
                f"{name} of {list(own.shape)} on {own.device}, with heads first, appended to planes of"
                f" {list(x.shape)} on {x.device}",
                "as many sequences and heads, the same width, as many new keys as values, and room for them",
                "append the tokens of all sequences of a step at once",
            )
