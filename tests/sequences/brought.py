"""Block maps and lengths that calls bring, and what their tensors may hold."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fa4flex

from .oracle import Blocks, Sequences
from .values import Function

if TYPE_CHECKING:
    from .pool import World


@dataclass(eq=False)
class Map:
    """A BlockMap, or torch's BlockMask, that calls bring: `tensors` are what its blocks are read from."""

    given: Any
    size: tuple[int, int]
    lengths: tuple[int, int]
    shape: tuple[int, int, int, int]
    own: Function | None = None
    copied: bool = False
    """True if compile() was given a BlockMask, whose map it makes once."""

    @property
    def tensors(self) -> list[Tensor]:
        if isinstance(self.given, BlockMask):
            return [x for x in (getattr(self.given, name) for name in LISTS) if x is not None]
        return [self.given.classes]

    def blocks(self) -> Blocks:
        """The classes that its tensors hold now."""
        if not isinstance(self.given, BlockMask):
            return Blocks(self.given.classes, self.size)
        given, device = self.given, self.given.kv_num_blocks.device
        partial = _listed(given.kv_num_blocks, given.kv_indices, self.shape, device)
        full = _listed(given.full_kv_num_blocks, given.full_kv_indices, self.shape, device)
        return Blocks(torch.where(full, 2, partial.to(torch.uint8)).to(torch.uint8), self.size)

    def contents(self, classes: Tensor) -> list[Tensor]:
        """Lists that `tensors` hold for these classes."""
        if not isinstance(self.given, BlockMask):
            return [classes]
        lists = lists_of(classes)
        found = [lists[name] for name in LISTS if getattr(self.given, name) is not None]
        return [x.to(y.dtype) for x, y in zip(found, self.tensors)]


LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def _listed(
    counts: Tensor | None, indices: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    if counts is None or indices is None:
        return torch.zeros(shape, dtype=torch.bool, device=device)
    taken = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    found = torch.zeros(*indices.shape[:-1], shape[-1], dtype=torch.int32, device=indices.device)
    return found.scatter_add(-1, indices.long(), taken.int()) > 0


def lists_of(classes: Tensor) -> dict[str, Tensor]:
    """torch's lists of blocks of classes [B, H, R, C], as wide as the map."""
    found = {}
    for prefix, wanted in (("", 1), ("full_", 2)):
        for side, hits in (("kv", classes == wanted), ("q", (classes == wanted).mT)):
            found[f"{prefix}{side}_num_blocks"] = hits.sum(-1).to(torch.int32)
            order = torch.argsort(hits.to(torch.int8), dim=-1, descending=True, stable=True)
            found[f"{prefix}{side}_indices"] = order.to(torch.int32).contiguous()
    return found


def draw_classes(rng: random.Random, shape: tuple[int, ...], device: torch.device) -> Tensor:
    classes = torch.randint(0, 3, shape, dtype=torch.uint8, device=device)
    if rng.random() < 0.3:
        classes = torch.where(torch.rand(shape, device=device) < 0.6, 0, classes).to(torch.uint8)
    return classes


@dataclass(eq=False)
class Ragged:
    """Lengths that calls bring, with pages where `table` is there."""

    kind: str
    given: dict[str, Any]
    sequences: Sequences
    batch: int
    q_len: int
    kv_len: int
    pages: int = 0
    page_size: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in vars(self.sequences).values() if x is not None]


def draw_lengths(ragged: Ragged, rng: random.Random) -> list[Tensor]:
    """Other contents of its tensors, in their order."""
    found: dict[str, Tensor] = {}
    s = ragged.sequences
    for side, length in (("q", ragged.q_len), ("k", ragged.kv_len)):
        cu, used = getattr(s, f"cu_{side}"), getattr(s, f"used_{side}")
        each = torch.full((ragged.batch,), length)
        if ragged.kind == "packed" or (ragged.kind == "paged" and side == "q"):
            if side == "k" and cu is None and "cu_q" in found:
                cu_now = found["cu_q"]
            else:
                cuts = sorted(rng.randint(0, length) for _ in range(ragged.batch - 1))
                cu_now = torch.tensor([0, *cuts, length])
            found[f"cu_{side}"] = cu_now
            each = cu_now[1:] - cu_now[:-1]
        if used is not None:
            found[f"used_{side}"] = torch.tensor([rng.randint(0, int(n)) for n in each])
    if s.table is not None:
        found["table"] = torch.stack(
            [torch.randperm(ragged.pages)[: s.table.shape[1]] for _ in range(ragged.batch)]
        )
    return [found[name] for name, x in vars(s).items() if x is not None]


def make_ragged(world: World, kind: str) -> Ragged:
    rng, sizes = world.rng, world.sizes
    batch, dtype = rng.randint(1, sizes.batch), rng.choice((torch.int32, torch.int32, torch.int64))
    q_len, kv_len = world.lengths()
    names = {"padded": ["used_k"], "packed": ["cu_q"], "paged": ["used_k", "table"]}[kind]
    pages = size = 0
    if kind == "padded" and rng.random() < 0.4:
        names = ["used_q", "used_k"]
    elif kind == "packed":
        names += ["cu_k"] if rng.random() < 0.5 else []
        names += ["used_k"] if rng.random() < 0.3 else []
        names += ["used_q"] if rng.random() < 0.3 else []
        kv_len = kv_len if "cu_k" in names else q_len
    elif kind == "paged":
        size = rng.choice((1, 4, 16)) if not world.on_gpu else rng.choice((16, 64))
        kv_len = max(kv_len // size, 1) * size
        pages = kv_len // size + rng.randint(0, 3)
        names += ["cu_q"] if rng.random() < 0.4 else []
    shapes = {"cu_q": (batch + 1,), "cu_k": (batch + 1,), "used_q": (batch,), "used_k": (batch,)}
    shapes["table"] = (batch, -(-kv_len // size) if size else 0)
    order = [name for name in ("cu_q", "cu_k", "used_q", "used_k", "table") if name in names]
    tensors = {name: torch.zeros(shapes[name], dtype=dtype, device=world.device) for name in order}
    ragged = Ragged(kind, {}, Sequences(**tensors), batch, q_len, kv_len, pages, size)
    for x, new in zip(ragged.tensors, draw_lengths(ragged, rng)):
        x.copy_(new)
    s = ragged.sequences
    if kind == "paged":
        ragged.given["paging"] = fa4flex.Paging(s.table, s.used_k)
        if s.cu_q is not None:
            ragged.given["varlen"] = fa4flex.Varlen(s.cu_q)
    else:
        ragged.given["varlen"] = fa4flex.Varlen(s.cu_q, s.cu_k, s.used_q, s.used_k)
    return ragged


def make_map(world: World, lengths: tuple[int, int], heads: int, batch: int, own: Function | None) -> Map:
    """A new map. `own` is the mask_mod of a BlockMask, which a map is half of the time."""
    rng, unit = world.rng, world.sizes.unit
    size = (unit * rng.choice((1, 2, 4)), unit * rng.choice((1, 2, 4))) if not world.on_gpu else (128, 128)
    shape = (
        rng.choice((1, batch)), rng.choice((1, heads)), -(-lengths[0] // size[0]), -(-lengths[1] // size[1])
    )  # fmt: skip
    classes = draw_classes(rng, shape, world.device)
    if own is None and rng.random() < 0.6:
        return Map(fa4flex.BlockMap.from_dense(classes, size, *lengths), size, lengths, shape)
    mask_mod = None if own is None else own.made
    if own is not None and rng.random() < 0.25:
        given = create_block_mask(
            own.made, shape[0], shape[1], *lengths, device=str(world.device), BLOCK_SIZE=size
        )
        return Map(given, size, lengths, shape, own)
    lists = lists_of(classes)
    full = (lists["full_kv_num_blocks"], lists["full_kv_indices"]) if rng.random() < 0.7 else (None, None)
    given = BlockMask.from_kv_blocks(
        lists["kv_num_blocks"], lists["kv_indices"], *full, BLOCK_SIZE=size, mask_mod=mask_mod,
        seq_lengths=lengths,
    )  # fmt: skip
    return Map(given, size, lengths, shape, own)
