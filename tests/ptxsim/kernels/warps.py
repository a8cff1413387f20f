"""Communication of the lanes of a warp: shuffles, votes, matches, elections, reductions, matrices."""

from __future__ import annotations

from typing import Any

import torch
from cutlass import Int32, cute, range_constexpr
from cutlass.memory import SmemAllocator
from torch import Tensor

from kernels.launch import case, numbers, poison

ALL = 0xFFFFFFFF
LANES = torch.arange(32)

# --- shuffles -----------------------------------------------------------------------------------------------

CONTROLS = {"up": (0x0000, 0x1800, 0x1C02, 0x0005), "down": (0x001F, 0x181F, 0x1C02, 0x0013)}
CONTROLS |= {"bfly": (0x001F, 0x181F, 0x1801), "idx": (0x001F, 0x181F, 0x1003)}
"""Clamp in bits 0 to 4, and in bits 8 to 12 the lane bits that name the segment."""
SHUFFLES = [
    (kind, control, by) for kind in CONTROLS for control in CONTROLS[kind] for by in (1, 3, 8, 16, 31)
]


def _shuffle(kind: str, value: Any, by: Any, control: int, members: int = ALL) -> tuple[Any, Any]:
    """(value, 1 where the lane to read was in range)"""
    ptx = f"{{ .reg .pred p; shfl.sync.{kind}.b32 {{$w0}}|p, {{$r0}}, {{$r1}}, {control}, {members:#x}; "
    return cute.arch.inline_ptx(
        ptx + "selp.b32 {$w1}, 1, 0, p; }", write_only_types=[Int32, Int32], read_only_args=[value, by]
    )


@cute.jit
def shuffles(x: cute.Tensor, y: cute.Tensor) -> None:
    """The same distance in every lane."""
    lane = cute.arch.thread_idx()[0]
    for i in range_constexpr(len(SHUFFLES)):
        kind, control, by = SHUFFLES[i]
        y[i, 0, lane], y[i, 1, lane] = _shuffle(kind, x[lane], Int32(by), control)


def _shuffled(x: Tensor, kind: str, control: int, by: Tensor) -> Tensor:
    """[2, 32], after the PTX ISA's pseudocode of shfl.sync."""
    segment, clamp = control >> 8 & 31, control & 31
    last = LANES & segment | clamp & ~segment
    source = {
        "up": LANES - by,
        "down": LANES + by,
        "bfly": LANES ^ by,
        "idx": LANES & segment | by & ~segment,
    }
    inside = source[kind] >= last if kind == "up" else source[kind] <= last
    return torch.stack([x[torch.where(inside, source[kind], LANES)], inside.int()])


def _shuffles_expected(x: Tensor) -> Tensor:
    return torch.stack([_shuffled(x, kind, control, torch.full((32,), by)) for kind, control, by in SHUFFLES])


@cute.jit
def shuffles_by_lane(x: cute.Tensor, y: cute.Tensor) -> None:
    """Any lane's value by an index of each lane's own; and among half of a warp, the other half elsewhere."""
    lane = cute.arch.thread_idx()[0]
    y[0, 0, lane], y[0, 1, lane] = _shuffle("idx", x[0, lane], x[1, lane], 0x1F)
    y[1, 0, lane], y[1, 1, lane] = _shuffle("bfly", x[0, lane], x[1, lane] & 7, 0x181F)
    if lane < 16:
        y[2, 0, lane], y[2, 1, lane] = _shuffle("idx", x[0, lane], x[1, lane] & 15, 0x1F, 0xFFFF)
    else:
        y[2, 0, lane], y[2, 1, lane] = _shuffle("bfly", x[0, lane], Int32(5), 0x1F, 0xFFFF0000)
    if lane % 2 == 0:
        y[3, 0, lane] = cute.arch.shuffle_sync(x[0, lane], 2, mask=0x55555555)
    y[3, 1, lane] = cute.arch.shuffle_sync_down(x[0, lane], 4)


def _by_lane_expected(x: Tensor) -> Tensor:
    value, by = x[0], x[1].long()
    low, high = _shuffled(value, "idx", 0x1F, by & 15), _shuffled(value, "bfly", 0x1F, torch.full((32,), 5))
    even = torch.where(LANES % 2 == 0, value[2], -12345)
    down = _shuffled(value, "down", 0x1F, torch.full((32,), 4))[0]
    return torch.stack(
        [
            _shuffled(value, "idx", 0x1F, by),
            _shuffled(value, "bfly", 0x181F, by & 7),
            torch.where(LANES < 16, low, high),
            torch.stack([even, down]),
        ]
    ).int()


def _values_and_lanes() -> Tensor:
    return torch.stack([numbers(32)(), numbers(32, seed=1)() & 31])


# --- votes, matches, reductions -----------------------------------------------------------------------------

REDUCTIONS = (
    "add.s32",
    "min.s32",
    "max.s32",
    "add.u32",
    "min.u32",
    "max.u32",
    "and.b32",
    "or.b32",
    "xor.b32",
)


@cute.jit
def votes(x: cute.Tensor, y: cute.Tensor) -> None:
    """Rows of x are predicates: mixed, all, none. Then the same among the lower 12 lanes."""
    lane = cute.arch.thread_idx()[0]
    for row in range_constexpr(3):
        holds = x[row, lane] != 0
        y[row, 0, lane] = cute.arch.vote_ballot_sync(holds)
        y[row, 1, lane] = Int32(cute.arch.vote_any_sync(holds))
        y[row, 2, lane] = Int32(cute.arch.vote_all_sync(holds))
        y[row, 3, lane] = Int32(cute.arch.vote_uni_sync(holds))
        if lane < 12:
            y[row + 3, 0, lane] = cute.arch.vote_ballot_sync(holds, mask=0xFFF)
            y[row + 3, 1, lane] = Int32(cute.arch.vote_any_sync(holds, mask=0xFFF))
            y[row + 3, 2, lane] = Int32(cute.arch.vote_all_sync(holds, mask=0xFFF))
            y[row + 3, 3, lane] = Int32(cute.arch.vote_uni_sync(holds, mask=0xFFF))


def _votes_expected(x: Tensor) -> Tensor:
    rows = []
    for lanes in (32, 12):
        for row in x[:, :lanes] != 0:
            ballot = int((row.long() << LANES[:lanes]).sum())
            results = (ballot, int(row.any()), int(row.all()), int(row.all() or not row.any()))
            rows.append(torch.where(lanes > LANES, torch.tensor(results)[:, None], -12345))
    return torch.stack(rows).to(torch.int64).bitwise_and(ALL).to(torch.uint32).view(torch.int32)


def _predicates() -> Tensor:
    return torch.stack([numbers(32)() & 1, numbers(32)() | 1, torch.zeros(32, dtype=torch.int32)])


@cute.jit
def matches(x: cute.Tensor, y: cute.Tensor) -> None:
    """match.any and match.all of 32 and 64 bits, an elected lane, and the mask of a divergent branch."""
    lane = cute.arch.thread_idx()[0]
    value, wide = x[0, lane], x[0, lane].to(cute.Int64) << 32
    asked = "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;"
    y[0, lane] = cute.arch.inline_ptx(asked, write_only_types=[Int32], read_only_args=[value])
    asked = "match.any.sync.b64 {$w0}, {$r0}, 0xffffffff;"
    y[1, lane] = cute.arch.inline_ptx(asked, write_only_types=[Int32], read_only_args=[wide])
    for row in range_constexpr(2):
        all_asked = (
            "{ .reg .pred p; match.all.sync.b32 {$w0}|p, {$r0}, 0xffffffff; selp.b32 {$w1}, 1, 0, p; }"
        )
        y[2 + 2 * row, lane], y[3 + 2 * row, lane] = cute.arch.inline_ptx(
            all_asked, write_only_types=[Int32, Int32], read_only_args=[x[row, lane]]
        )
    elected = "{ .reg .pred p; elect.sync {$w0}|p, 0xffffffff; selp.b32 {$w1}, 1, 0, p; }"
    y[6, lane], y[7, lane] = cute.arch.inline_ptx(elected, write_only_types=[Int32, Int32])
    with cute.arch.elect_one():
        y[8, 0] = x[0, lane]


def _matches_expected(x: Tensor) -> Tensor:
    equal = x[0][:, None] == x[0][None, :]
    found = (equal.long() << LANES).sum(1).to(torch.uint32).view(torch.int32)
    nothing, one = torch.zeros(32, dtype=torch.int32), torch.ones(32, dtype=torch.int32)
    y = torch.stack([found, found, nothing, nothing, -one, one, nothing, (LANES == 0).int(), -12345 * one])
    y[8, 0] = x[0, 0]
    return y


def _few_values() -> Tensor:
    return torch.stack([numbers(32)() & 3, torch.full((32,), 7, dtype=torch.int32)])


@cute.jit
def reductions(x: cute.Tensor, y: cute.Tensor) -> None:
    """Reductions over all lanes, and over the upper 20."""
    lane = cute.arch.thread_idx()[0]
    for i in range_constexpr(len(REDUCTIONS)):
        asked = f"redux.sync.{REDUCTIONS[i]} {{$w0}}, {{$r0}}, "
        y[i, 0, lane] = cute.arch.inline_ptx(
            asked + "0xffffffff;", write_only_types=[Int32], read_only_args=[x[lane]]
        )
        if lane >= 12:
            y[i, 1, lane] = cute.arch.inline_ptx(
                asked + "0xfffff000;", write_only_types=[Int32], read_only_args=[x[lane]]
            )


def _reduced(x: Tensor, name: str) -> Tensor:
    operation, kind = name.split(".")
    values = x.tolist() if kind == "s32" else [v & ALL for v in x.tolist()]
    result = values[0]
    for value in values[1:]:
        result = {
            "add": result + value,
            "min": min(result, value),
            "max": max(result, value),
            "and": result & value,
            "or": result | value,
            "xor": result ^ value,
        }[operation]
    return torch.tensor(result & ALL).to(torch.uint32).view(torch.int32)


def _reductions_expected(x: Tensor) -> Tensor:
    y = torch.full((len(REDUCTIONS), 2, 32), -12345, dtype=torch.int32)
    for i, name in enumerate(REDUCTIONS):
        y[i, 0], y[i, 1, 12:] = _reduced(x, name), _reduced(x[12:], name)
    return y


# --- matrices -----------------------------------------------------------------------------------------------

MATRICES = [(count, transposed) for count in (1, 2, 4) for transposed in (False, True)]


def _matrix_opcode(name: str, count: int, transposed: bool) -> str:
    return f"{name}.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"


@cute.jit
def load_matrices(x: cute.Tensor, y: cute.Tensor) -> None:
    """ldmatrix of rows whose order in shared memory is x[32:], each 16 bytes."""
    lane = cute.arch.thread_idx()[0]
    shared = SmemAllocator().allocate_tensor(Int32, cute.make_layout(128), byte_alignment=128)
    for i in range_constexpr(4):
        shared[lane + 32 * i] = x[lane + 32 * i]
    cute.arch.sync_warp()
    row = shared.iterator.toint() + x[128 + lane] * 16
    for i in range_constexpr(len(MATRICES)):
        count, transposed = MATRICES[i]
        names = ", ".join(f"{{$w{j}}}" for j in range(count))
        found = cute.arch.inline_ptx(
            f"{_matrix_opcode('ldmatrix', count, transposed)} {{{names}}}, [{{$r0}}];",
            write_only_types=[Int32] * count,
            read_only_args=[row],
        )
        found = found if count > 1 else (found,)
        for j in range_constexpr(count):
            y[i, j, lane] = found[j]


def _matrices_in(x: Tensor) -> Tensor:
    """[4, 8, 8] int16: the matrices that the lanes' addresses name."""
    rows = x[:128].view(torch.int16).view(32, 8)
    return rows[x[128:].long()].view(4, 8, 8)


def _fragments(matrices: Tensor, transposed: bool) -> Tensor:
    """Lane t holds elements 2 t and 2 t + 1 of a matrix, [matrix, 32]."""
    matrices = matrices.transpose(1, 2) if transposed else matrices
    return matrices.reshape(len(matrices), 64).contiguous().view(torch.int32)


def _load_expected(x: Tensor) -> Tensor:
    y = torch.full((len(MATRICES), 4, 32), -12345, dtype=torch.int32)
    for i, (count, transposed) in enumerate(MATRICES):
        y[i, :count] = _fragments(_matrices_in(x)[:count], transposed)
    return y


@cute.jit
def store_matrices(x: cute.Tensor, y: cute.Tensor) -> None:
    """stmatrix of x's first words to rows in the order of its last 32, then shared memory as it is."""
    lane = cute.arch.thread_idx()[0]
    layout = cute.make_layout((len(MATRICES), 128), stride=(128, 1))
    shared = SmemAllocator().allocate_tensor(Int32, layout, byte_alignment=128)
    for i in range_constexpr(len(MATRICES)):
        for j in range_constexpr(4):
            shared[i, lane + 32 * j] = -12345
    cute.arch.sync_warp()
    for i in range_constexpr(len(MATRICES)):
        count, transposed = MATRICES[i]
        names = ", ".join(f"{{$r{j + 1}}}" for j in range(count))
        row = shared.iterator.toint() + i * 512 + x[128 + lane] * 16
        cute.arch.inline_ptx(
            f"{_matrix_opcode('stmatrix', count, transposed)} [{{$r0}}], {{{names}}};",
            read_only_args=[row, *(x[lane + 32 * j] for j in range(count))],
        )
    cute.arch.sync_warp()
    for i in range_constexpr(len(MATRICES)):
        for j in range_constexpr(4):
            y[i, lane + 32 * j] = shared[i, lane + 32 * j]


def _store_expected(x: Tensor) -> Tensor:
    y = torch.full((len(MATRICES), 128), -12345, dtype=torch.int32)
    for i, (count, transposed) in enumerate(MATRICES):
        matrices = x[: 32 * count].view(torch.int16).view(count, 8, 8)
        matrices = matrices.transpose(1, 2) if transposed else matrices
        rows = y[i].view(torch.int16).view(32, 8)
        rows[x[128 : 128 + 8 * count].long()] = matrices.reshape(8 * count, 8)
    return y


def _words_and_rows() -> Tensor:
    """128 words, then the numbers of 32 rows in any order."""
    return torch.cat([numbers(128)(), torch.randperm(32, generator=torch.Generator().manual_seed(3)).int()])


CASES = (
    case(shuffles, numbers(32), poison(len(SHUFFLES), 2, 32), _shuffles_expected),
    case(shuffles_by_lane, _values_and_lanes, poison(4, 2, 32), _by_lane_expected),
    case(votes, _predicates, poison(6, 4, 32), _votes_expected),
    case(matches, _few_values, poison(9, 32), _matches_expected),
    case(reductions, numbers(32), poison(len(REDUCTIONS), 2, 32), _reductions_expected),
    case(load_matrices, _words_and_rows, poison(len(MATRICES), 4, 32), _load_expected),
    case(store_matrices, _words_and_rows, poison(len(MATRICES), 128), _store_expected),
)
