"""TMA with tensor maps: where loads put what in shared memory, what stores and reductions do elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver as cuda
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from torch import Tensor

from kernels.case import BOTH, Case, compile_for, generator
from kernels.launch import ELEMENTS, fake

THREADS = 64
SWIZZLES = {0: None, 32: (1, 4, 3), 64: (2, 4, 3), 128: (3, 4, 3)}
"""Bytes of a swizzled row, and (bits, lowest bit, distance) of the exclusive or on addresses."""


@dataclass(frozen=True)
class Transfer:
    """Boxes of `box` elements of a tensor `sizes`, both slowest first, that begin `at` places, which may lie
    outside: for loads anywhere, else past the end. `kind` is load, store, or a reduction: add, min, max, and,
    or, xor, inc, dec."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[tuple[int, ...], ...]
    swizzle: int = 0
    kind: str = "load"

    @property
    def words(self) -> int:
        """4-byte words of a box."""
        return math.prod(self.box) * self.dtype.itemsize // 4


class Mover:
    """A CTA for each place: a load's box goes to shared memory and that, as it lies there, to its row of the
    images; a store's image goes to shared memory and then to the tensor."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    @cute.jit
    def __call__(
        self, places: cute.Tensor, source: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        images, tensor = (target, source) if self.transfer.kind == "load" else (source, target)
        moved = cpasync.make_tiled_tma_atom(self.operation(), tensor, self.layout(), self.transfer.box)
        blocks = len(self.transfer.at)
        self.device(images, places, moved).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    def operation(self) -> Any:
        if self.transfer.kind == "load":
            return cpasync.CopyBulkTensorTileG2SOp()
        if self.transfer.kind == "store":
            return cpasync.CopyBulkTensorTileS2GOp()
        return cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind[self.transfer.kind.upper()])

    def layout(self) -> Any:
        """The box in shared memory, its last mode contiguous before the swizzle."""
        box = self.transfer.box
        plain = cute.make_ordered_layout(box, order=tuple(reversed(range(len(box)))))
        swizzle = SWIZZLES[self.transfer.swizzle]
        return plain if swizzle is None else cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, plain)

    @cute.kernel
    def device(self, images: cute.Tensor, places: cute.Tensor, moved: cpasync.TmaInfo) -> None:
        allocator = SmemAllocator()
        landed = allocator.allocate_array(Int64, 1)
        words = allocator.allocate_tensor(Int32, cute.make_layout(self.transfer.words), byte_alignment=1024)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, outside = self.views(words, moved, places, block)
        if const_expr(self.transfer.kind == "load"):
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_init(landed, 1)
                    cute.arch.mbarrier_init_fence()
                    cute.arch.mbarrier_arrive_and_expect_tx(landed, self.transfer.words * 4)
                cute.copy(moved.atom, outside, shared, tma_bar_ptr=landed)
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(landed, 0)
            for i in range(thread, self.transfer.words, THREADS):
                images[block, i] = words[i]
        else:
            for i in range(thread, self.transfer.words, THREADS):
                words[i] = images[block, i]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            if warp == 0:
                if const_expr(self.transfer.kind == "store"):
                    with cute.arch.elect_one():
                        cute.copy(moved.atom, shared, outside)
                else:
                    cute.copy(moved.atom, shared, outside)  # elects a lane itself
                # which lane that was is not known here: the others commit and wait for nothing
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)

    def views(self, words: Any, moved: Any, places: Any, block: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """(the box in shared memory, the box of a place)"""
        layout, rank = self.layout(), len(self.transfer.box)
        kind = ELEMENTS[self.transfer.dtype]
        if self.transfer.swizzle:
            start = cute.recast_ptr(words.iterator, layout.inner, dtype=kind)
            shared = cute.make_tensor(start, layout.outer)
        else:
            shared = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=kind), layout)
        place = tuple(places[block, i] for i in range(rank))
        box = cute.local_tile(cute.domain_offset(place, moved.tma_tensor), self.transfer.box, (0,) * rank)
        return cpasync.tma_partition(
            moved.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, rank),
            cute.group_modes(box, 0, rank),
        )


# --- what should happen -------------------------------------------------------------------------------------


def swizzled(words: Tensor, swizzle: int) -> Tensor:
    """[n] words of a dense box at a multiple of 1024 to where they lie: in the number of a 16-byte chunk, the
    lowest bits are xored with those three above."""
    if not swizzle:
        return words
    chunk = torch.arange(len(words) // 4)
    moved = chunk ^ (chunk >> 3 & swizzle // 16 - 1)
    result = torch.empty_like(words).view(-1, 4)
    result[moved] = words.view(-1, 4)
    return result.view(-1)


def unswizzled(words: Tensor, swizzle: int) -> Tensor:
    """The inverse, which is the same: the bits xored with do not change."""
    return swizzled(words, swizzle)


def _inside(transfer: Transfer, place: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """(of the tensor, of the box): the part of a box that lies within the tensor."""
    spans = [(max(p, 0), max(min(p + b, n), 0)) for p, b, n in zip(place, transfer.box, transfer.sizes)]
    return (
        tuple(slice(low, max(high, low)) for low, high in spans),
        tuple(slice(low - p, max(high, low) - p) for (low, high), p in zip(spans, place)),
    )


def loaded(transfer: Transfer, tensor: Tensor) -> Tensor:
    """The images, [places, words]: what lies outside is zero."""
    images = []
    for place in transfer.at:
        box = torch.zeros(transfer.box, dtype=transfer.dtype)
        source, target = _inside(transfer, place)
        box[target] = tensor[source]
        images.append(swizzled(box.view(-1).view(torch.int32), transfer.swizzle))
    return torch.stack(images)


def stored(transfer: Transfer, images: Tensor, tensor: Tensor) -> Tensor:
    """The tensor after every image was stored, or reduced into it, in any order."""
    tensor = tensor.clone()
    for image, place in zip(images, transfer.at):
        box = unswizzled(image, transfer.swizzle).view(transfer.dtype).view(transfer.box)
        target, source = _inside(transfer, place)
        new, old = box[source], tensor[target]
        tensor[target] = {
            "store": lambda new=new, old=old: new,
            "add": lambda new=new, old=old: old + new,
            "min": lambda new=new, old=old: torch.minimum(old, new),
            "max": lambda new=new, old=old: torch.maximum(old, new),
            "and": lambda new=new, old=old: old & new,
            "or": lambda new=new, old=old: old | new,
            "xor": lambda new=new, old=old: old ^ new,
        }[transfer.kind]()
    return tensor


# --- cases --------------------------------------------------------------------------------------------------


def _elements(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Whole numbers from -30 to 30 but zero, or from 1 if integers: sums of a few are exact in every type."""
    drawn = torch.randint(1, 31, shape, generator=generator(seed))
    signs = torch.randint(2, shape, generator=generator(seed + 1)) * 2 - 1
    return (drawn * signs if dtype.is_floating_point else drawn).to(dtype)


def case(name: str, transfer: Transfer) -> Case:
    """Called as (places, tensor, images) for a load, else as (places, images, tensor)."""
    places = torch.tensor(transfer.at, dtype=torch.int32)
    tensor = _elements(transfer.sizes, transfer.dtype, 7)
    images = torch.full((len(transfer.at), transfer.words), -12345, dtype=torch.int32)
    if transfer.kind == "load":
        source, target = tensor, images
    else:
        boxes = _elements((len(transfer.at), *transfer.box), transfer.dtype, 9)
        source, target = boxes.flatten(1).view(torch.int32), tensor

    def expected(places: Tensor, source: Tensor) -> tuple[Tensor]:
        if transfer.kind == "load":
            return (loaded(transfer, source),)
        return (stored(transfer, source, tensor),)

    return Case(
        name=name,
        archs=BOTH,
        build=lambda arch: compile_for(arch, Mover(transfer), fake(places), fake(source), fake(target)),
        inputs=lambda: (places.clone(), source.clone()),
        outputs=lambda: (target.clone(),),
        expected=expected,
    )


BF16, F16, F32, I32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8
EDGES = ((0, 0), (16, 64), (30, 40), (-5, -24), (60, 200), (-40, 8))
"""Coordinates of boxes in a tensor [40, 136]: within, over each end, and wholly outside. The last
coordinate is always a multiple of 16 bytes."""
PAST = ((0, 0), (16, 64), (30, 40), (30, 120), (60, 200), (60, 8), (0, 200))
"""Origins at which boxes may also be written, which must not begin before the tensor."""
APART = ((0, 0), (16, 64), (0, 120), (34, 8), (34, 104), (60, 200), (60, 0))
"""The same, no two of which overlap."""

CASES = (
    *(
        case(f"tma_load_{name}_{swizzle}", Transfer(dtype, (40, 136), (16, columns), EDGES, swizzle))
        for name, dtype, columns, swizzle in (
            ("bf16", BF16, 64, 128),
            ("bf16", BF16, 32, 64),
            ("bf16", BF16, 16, 32),
            ("bf16", BF16, 64, 0),
            ("f16", F16, 8, 0),
            ("f32", F32, 32, 128),
            ("f32", F32, 16, 64),
            ("s32", I32, 8, 32),
        )
    ),
    case("tma_load_u8_128", Transfer(U8, (40, 144), (16, 128), ((0, 0), (8, 16), (35, 96), (-3, -16)), 128)),
    case("tma_load_1d", Transfer(F32, (200,), (64,), ((0,), (64,), (168,), (-12,), (300,)))),
    case(
        "tma_load_3d",
        Transfer(BF16, (5, 20, 72), (2, 8, 64), ((0, 0, 0), (1, 4, 8), (4, 18, 32), (-1, -2, -8)), 128),
    ),
    case(
        "tma_load_5d",
        Transfer(
            F32, (3, 4, 5, 6, 24), (2, 2, 2, 2, 8), ((0, 0, 0, 0, 0), (1, 2, 3, 4, 8), (-1, 3, -1, 5, 20))
        ),
    ),
    *(
        case(
            f"tma_store_{name}_{swizzle}", Transfer(dtype, (40, 136), (16, columns), APART, swizzle, "store")
        )
        for name, dtype, columns, swizzle in (
            ("bf16", BF16, 64, 128),
            ("f16", F16, 32, 64),
            ("bf16", BF16, 16, 32),
            ("f32", F32, 32, 128),
            ("f32", F32, 32, 0),
        )
    ),
    case(
        "tma_store_4d",
        Transfer(BF16, (2, 3, 20, 64), (1, 2, 8, 64), ((0, 0, 0, 0), (1, 2, 15, 0)), 128, "store"),
    ),
    *(
        case(f"tma_{kind}_{name}", Transfer(dtype, (40, 136), (16, columns), PAST, swizzle, kind))
        for name, dtype, columns, swizzle, kinds in (
            ("f32", F32, 32, 128, ("add",)),
            ("f32_plain", F32, 32, 0, ("add",)),
            ("f16", F16, 64, 128, ("add", "min", "max")),
            ("bf16", BF16, 64, 128, ("add", "min", "max")),
            ("s32", I32, 32, 128, ("add", "min", "max", "and", "or", "xor")),
        )
        for kind in kinds
    ),
)
