"""Communication of the warps and CTAs of a grid: named barriers, mbarriers, atomics, flags in global
memory."""

from __future__ import annotations

from typing import Any

import torch
from cutlass import Int32, Int64, const_expr, cute, range_constexpr
from cutlass.memory import SmemAllocator
from torch import Tensor

from kernels.case import Case, generator
from kernels.launch import Grid, case, numbers, poison

# --- named barriers -----------------------------------------------------------------------------------------

ROUNDS = 6
FULL, EMPTY = 1, 3
"""Named barriers FULL + s, EMPTY + s of slot s."""


@cute.jit
def named_barriers(x: cute.Tensor, y: cute.Tensor) -> None:
    """Two warps hand x, row by row, to two others through two slots in shared memory."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = SmemAllocator().allocate_tensor(
        Int32, cute.make_layout((2, 64), stride=(64, 1)), byte_alignment=128
    )
    if warp < 2:
        for i in range(ROUNDS):
            slot = i % 2
            if i >= 2:
                cute.arch.barrier(barrier_id=EMPTY + slot, number_of_threads=128)
            shared[slot, thread] = x[i, thread]
            cute.arch.barrier_arrive(barrier_id=FULL + slot, number_of_threads=128)
    else:
        for i in range(ROUNDS):
            slot = i % 2
            cute.arch.barrier(barrier_id=FULL + slot, number_of_threads=128)
            y[i, thread - 64] = shared[slot, 127 - thread]
            if i + 2 < ROUNDS:
                cute.arch.barrier_arrive(barrier_id=EMPTY + slot, number_of_threads=128)


@cute.jit
def mbarriers(x: cute.Tensor, y: cute.Tensor) -> None:
    """The same through mbarriers: every thread arrives on the full one, a lane of each warp on the empty."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    allocator = SmemAllocator()
    full = allocator.allocate_array(Int64, 2)
    empty = allocator.allocate_array(Int64, 2)
    shared = allocator.allocate_tensor(Int32, cute.make_layout((2, 64), stride=(64, 1)), byte_alignment=128)
    if thread == 0:
        for slot in range_constexpr(2):
            cute.arch.mbarrier_init(full + slot, 64)
            cute.arch.mbarrier_init(empty + slot, 2)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    phase = Int32(0)
    for i in range(ROUNDS):
        slot = i % 2
        if warp < 2:
            cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
            shared[slot, thread] = x[i, thread]
            cute.arch.mbarrier_arrive(full + slot)
        else:
            cute.arch.mbarrier_wait(full + slot, phase)
            y[i, thread - 64] = shared[slot, 127 - thread]
            cute.arch.sync_warp()
            if thread % 32 == 0:
                cute.arch.mbarrier_arrive(empty + slot)
        if slot == 1:
            phase ^= 1


def _reversed(x: Tensor) -> Tensor:
    return x.flip(1)


# --- flags in global memory ---------------------------------------------------------------------------------


@cute.jit
def message(x: cute.Tensor, y: cute.Tensor) -> None:
    """Two CTAs: one writes x to y[0] and raises the flag y[2, 0]; the other waits and copies to y[1]."""
    thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    flag = y.iterator + 2 * 64
    if block == 0:
        y[0, thread] = x[thread]
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.atomic_add(flag, Int32(1), sem="release", scope="gpu")
    else:
        if thread == 0:
            raised = Int32(0)
            while raised == 0:
                raised = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_threads()
        y[1, thread] = y[0, 63 - thread]


def _unsent() -> Tensor:
    y = poison(3, 64)()
    y[2, 0] = 0
    return y


def _message_expected(x: Tensor) -> Tensor:
    y = _unsent()
    y[0], y[1], y[2, 0] = x, x.flip(0), 1
    return y


@cute.jit
def locked(x: cute.Tensor, y: cute.Tensor) -> None:
    """A lane of each of eight warps of two CTAs changes y[0] in turn, holding the lock y[1]."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    with cute.arch.elect_one():
        taken = Int32(1)
        while taken != 0:
            taken = cute.arch.atomic_cas(
                y.iterator + 1, cmp=Int32(0), val=Int32(1), sem="acquire", scope="gpu"
            )
        before = cute.arch.load(y.iterator, Int32, sem="relaxed", scope="gpu")
        cute.arch.store(y.iterator, before + x[warp], sem="relaxed", scope="gpu")
        cute.arch.atomic_exch(y.iterator + 1, Int32(0), sem="release", scope="gpu")


# --- atomics ------------------------------------------------------------------------------------------------

COMMUTATIVE = (
    "add.u32",
    "add.s32",
    "min.s32",
    "max.s32",
    "min.u32",
    "max.u32",
    "and.b32",
    "or.b32",
    "xor.b32",
)
COMMUTATIVE += ("add.f32", "add.noftz.f16x2", "add.noftz.bf16x2")
NARROW = (*COMMUTATIVE, "exch.b32", "inc.u32", "dec.u32", "cas.b32")
COMMUTATIVE += (
    "add.u64",
    "min.s64",
    "max.s64",
    "min.u64",
    "max.u64",
    "and.b64",
    "or.b64",
    "xor.b64",
    "add.f64",
)
WIDE = (*COMMUTATIVE[-9:], "exch.b64", "cas.b64")
COLUMNS = 8
"""Words that 64 threads contend for."""


def atomics(space: str, opcodes: tuple[str, ...], element: type) -> Any:
    """x [3, operations, 64] holds words, operands and, for cas, what to compare with. y[0] gets what 64
    threads read, each of its own word, y[1] these words afterwards, y[2] COLUMNS words that all change."""

    @cute.jit
    def body(x: cute.Tensor, y: cute.Tensor) -> None:
        thread = cute.arch.thread_idx()[0]
        layout = cute.make_layout((2, len(opcodes), 64), stride=(64 * len(opcodes), 64, 1))
        if const_expr(space == "shared"):
            words = SmemAllocator().allocate_tensor(element, layout, byte_alignment=128)
        else:
            words = cute.make_tensor(y.iterator + 64 * len(opcodes), layout)
        for i in range_constexpr(len(opcodes)):
            words[0, i, thread] = x[0, i, thread]
            if thread < COLUMNS:
                words[1, i, thread] = x[0, i, thread]
        cute.arch.sync_threads()
        for i in range_constexpr(len(opcodes)):
            own = (words.iterator + (64 * i + thread)).toint()
            contended = (words.iterator + (64 * (len(opcodes) + i) + thread % COLUMNS)).toint()
            compared = [x[2, i, thread]] if opcodes[i].startswith("cas") else []
            operands = [*compared, x[1, i, thread]]
            names = ", ".join(f"{{$r{j + 1}}}" for j in range(len(operands)))
            y[0, i, thread] = cute.arch.inline_ptx(
                f"atom.{space}.{opcodes[i]} {{$w0}}, [{{$r0}}], {names};",
                write_only_types=[element],
                read_only_args=[own, *operands],
            )
            if const_expr(opcodes[i] in COMMUTATIVE):
                cute.arch.inline_ptx(
                    f"red.{space}.{opcodes[i]} [{{$r0}}], {names};", read_only_args=[contended, *operands]
                )
        cute.arch.sync_threads()
        if const_expr(space == "shared"):
            for i in range_constexpr(len(opcodes)):
                y[1, i, thread] = words[0, i, thread]
                if thread < COLUMNS:
                    y[2, i, thread] = words[1, i, thread]

    return body


def _operands(opcodes: tuple[str, ...]) -> Tensor:
    """[3, operations, 64]; small whole numbers where they are floating-point, whose sums are exact."""
    wide = opcodes[0].endswith("64")
    random = generator(5)
    rows = []
    for opcode in opcodes:
        kind = opcode.split(".")[-1]
        small = torch.randint(-9, 10, (3, 64, 2), generator=random)
        if kind in FLOATS:
            bits = small.to(FLOATS[kind]).view(torch.int64 if wide else torch.int32)
            rows.append(bits.view(3, 64, -1)[..., 0])
        else:
            dtype = torch.int64 if wide else torch.int32
            rows.append(
                torch.randint(-(2**31), 2**31, (3, 64, 2), generator=random).int().view(dtype)[..., 0]
            )
        if opcode.startswith(("inc", "dec")):
            rows[-1][:] = torch.randint(6, (3, 64), generator=random)
        if opcode.startswith("cas"):
            rows[-1][2, ::2] = rows[-1][0, ::2]
    return torch.stack(rows, 1)


FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16x2": torch.float16, "bf16x2": torch.bfloat16}


def _updated(opcode: str, word: Tensor, operand: Tensor, compared: Tensor) -> Tensor:
    """Value of each word after its operation."""
    name, kind = opcode.split(".")[0], opcode.split(".")[-1]
    if kind in FLOATS:
        dtype = FLOATS[kind]
        return (word.view(dtype) + operand.view(dtype)).view(word.dtype)
    least = torch.iinfo(word.dtype).min if kind.startswith("u") else 0
    below = (word ^ least) < (operand ^ least)  # unsigned order is signed order with the top bit flipped
    return {
        "add": lambda: word + operand,
        "min": lambda: torch.where(below, word, operand),
        "max": lambda: torch.where(below, operand, word),
        "and": lambda: word & operand,
        "or": lambda: word | operand,
        "xor": lambda: word ^ operand,
        "exch": lambda: operand,
        "inc": lambda: torch.where(word >= operand, 0, word + 1),
        "dec": lambda: torch.where((word == 0) | (word > operand), operand, word - 1),
        "cas": lambda: torch.where(word == compared, operand, word),
    }[name]().to(word.dtype)


def _atomics_case(space: str, opcodes: tuple[str, ...]) -> Case:
    element, dtype = (Int64, torch.int64) if opcodes is WIDE else (Int32, torch.int32)

    def expected(x: Tensor) -> Tensor:
        y = poison(3, len(opcodes), 64, dtype=dtype)()
        y[0] = x[0]
        for i, opcode in enumerate(opcodes):
            y[1, i] = _updated(opcode, x[0, i], x[1, i], x[2, i])
            words = x[0, i, :COLUMNS].clone()
            if opcode in COMMUTATIVE:
                for operands in x[1, i].view(-1, COLUMNS):
                    words = _updated(opcode, words, operands, words)
            y[2, i, :COLUMNS] = words
        return y

    return case(
        atomics(space, opcodes, element),
        lambda: _operands(opcodes),
        poison(3, len(opcodes), 64, dtype=dtype),
        expected,
        Grid(64),
        name=f"{space}_atomics_{element.width}",
    )


CASES = (
    case(named_barriers, numbers(ROUNDS, 64), poison(ROUNDS, 64), _reversed, Grid(128)),
    case(mbarriers, numbers(ROUNDS, 64), poison(ROUNDS, 64), _reversed, Grid(128)),
    case(message, numbers(64), _unsent, _message_expected, Grid(64, blocks=2)),
    case(
        locked,
        numbers(8),
        lambda: torch.zeros(2, dtype=torch.int32),
        lambda x: torch.stack([2 * x.sum().int(), torch.zeros((), dtype=torch.int32)]),
        Grid(256, blocks=2),
    ),
    *(_atomics_case(space, opcodes) for space in ("shared", "global") for opcodes in (NARROW, WIDE)),
)
