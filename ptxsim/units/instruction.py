"""The instruction descriptor of tcgen05.mma: 32 bits with the shape, types and majorness of one
multiply-accumulate.

PTX ISA "Instruction Descriptor" (tables of kinds tf32, f16, f8f6f4, i8, and of those with block scaling) and
"Matrix Shape" (which M and N are legal).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ptxsim.units.descriptors import Major
from ptxsim.units.errors import invalid, unmodelled

SMALL_TYPES = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
INPUT_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": SMALL_TYPES,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": SMALL_TYPES,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
OUTPUT_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
DEPTH = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
"""K of a dense instruction: 32 bytes of each row."""
ROW_BYTES = 32
BLOCKS: dict[str, dict[int, tuple[str, ...]]] = {
    "mxf8f6f4": {32: ("ue8m0",)},
    "mxf4": {32: ("ue8m0",)},
    "mxf4nvf4": {32: ("ue8m0",), 16: ("ue4m3", "ue8m0")},
}
"""Elements that share a scale factor, and types of these, by kind."""
SCALES = {0: "ue4m3", 1: "ue8m0"}


@dataclass(frozen=True)
class Scaling:
    """Block scaling: a factor of `type` for every `block` elements of a row; those of A and B begin at these
    bytes of their columns of tensor memory (the scale factor IDs)."""

    block: int
    type: str
    a_byte: int
    b_byte: int


@dataclass(frozen=True)
class InstructionDescriptor:
    """Shapes are of the whole MMA: with cta_group::2 each CTA has half of the m rows. A is m x k, B^T n x
    k."""

    kind: str
    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_major: Major
    b_major: Major
    negate_a: bool = False
    negate_b: bool = False
    saturate: bool = False
    ws: bool = False
    """tcgen05.mma.ws, which has other shapes and keeps D elsewhere."""
    scaling: Scaling | None = None

    @property
    def k(self) -> int:
        return DEPTH[self.kind]


@lru_cache(maxsize=1024)
def decode(bits: int, kind: str, cta_group: int, ws: bool = False, block: int = 0) -> InstructionDescriptor:
    """Instruction descriptor for .kind::`kind`, with a scale factor for every `block` elements where that is
    not 0. Raises InputError for what the ISA forbids, UnsupportedError for sparse MMAs, the maximum shift of
    .ws and a depth that only later chips have."""
    if kind not in DEPTH:
        raise unmodelled(f"tcgen05.mma.kind::{kind}", "kinds " + ", ".join(DEPTH))
    if bits & 7:
        raise unmodelled(f"sparse tcgen05.mma (instruction descriptor {bits:#x})", "dense MMAs")
    scaling = _scaling(bits, kind, block) if kind in BLOCKS else None
    if scaling is None:
        _check_plain(bits, kind, ws)
    flags = {
        name: bool((bits >> at) & 1) for name, at in (("saturate", 3), ("negate_a", 13), ("negate_b", 14))
    }
    allowed = {"saturate"} if kind == "i8" else {"negate_a", "negate_b"}
    if wrong := [name for name, on in flags.items() if on and name not in allowed]:
        raise invalid(f"instruction descriptor {bits:#x} with {', '.join(wrong)}", f"not for kind::{kind}")
    result = InstructionDescriptor(
        kind,
        m=((bits >> 24) & 31) * 16,
        n=((bits >> 17) & 63) * 8,
        a_type=_type(bits, 7, 3, INPUT_TYPES[kind], kind),
        b_type=_type(bits, 10, 3, INPUT_TYPES[kind], kind),
        d_type="f32" if scaling else _type(bits, 4, 2, OUTPUT_TYPES[kind], kind),
        a_major="MN" if bits & (1 << 15) else "K",
        b_major="MN" if bits & (1 << 16) else "K",
        **flags,
        ws=ws,
        scaling=scaling,
    )
    _check(result, bits, cta_group)
    return result


def _check_plain(bits: int, kind: str, ws: bool) -> None:
    """Fields that descriptors without scale factors have to leave at 0."""
    if bits >> 30 and not ws:
        raise invalid(f"instruction descriptor {bits:#x}", "no maximum shift without .ws")
    if bits >> 30:
        raise unmodelled(
            f"the maximum shift of tcgen05.mma.ws (instruction descriptor {bits:#x})", "no shift"
        )
    if bits & (1 << 6 | 1 << 23 | 1 << 29):
        raise invalid(f"instruction descriptor {bits:#x}", "0 in the reserved bits 6, 23 and 29")


def _scaling(bits: int, kind: str, block: int) -> Scaling:
    if bits >> 31:
        raise unmodelled(
            f"K of 96 in tcgen05.mma.kind::{kind} (instruction descriptor {bits:#x})", "K of sm_100a"
        )
    if bits & (1 << 3 | 1 << 6):
        raise invalid(f"instruction descriptor {bits:#x}", "0 in the reserved bits 3 and 6")
    types = BLOCKS[kind].get(block)
    if types is None:
        raise invalid(f"blocks of {block} in tcgen05.mma.kind::{kind}", f"one of {list(BLOCKS[kind])}")
    result = Scaling(block, SCALES[(bits >> 23) & 1], (bits >> 29) & 3, (bits >> 4) & 3)
    if result.type not in types:
        raise invalid(f"scale factors of {result.type} in tcgen05.mma.kind::{kind}", ", ".join(types))
    count = DEPTH[kind] // block
    if result.a_byte % count or result.b_byte % count:
        raise invalid(
            f"scale factor IDs {result.a_byte} and {result.b_byte} with {count} factors a row",
            f"multiples of {count}",
        )
    return result


def _type(bits: int, at: int, width: int, types: dict[int, str], kind: str) -> str:
    code = (bits >> at) & ((1 << width) - 1)
    if code not in types:
        raise invalid(
            f"type {code} in bits {at}-{at + width - 1} of instruction descriptor {bits:#x}",
            f"kind::{kind}: {types}",
        )
    return types[code]


def _check(descriptor: InstructionDescriptor, bits: int, cta_group: int) -> None:
    m, n = descriptor.m, descriptor.n
    legal_m, legal_n = _shapes(descriptor, cta_group)
    if m not in legal_m or n not in legal_n:
        kind = f"tcgen05.mma{'.ws' * descriptor.ws}.cta_group::{cta_group}.kind::{descriptor.kind}"
        raise invalid(
            f"{kind} of M={m}, N={n} (instruction descriptor {bits:#x})",
            f"M of {legal_m}, N of {list(legal_n)}",
        )
    halves = descriptor.kind == "f8f6f4" or (descriptor.a_type, descriptor.b_type) == ("f16", "f16")
    if descriptor.d_type == "f16" and not halves:
        raise invalid(
            f"D of f16 from A {descriptor.a_type} and B {descriptor.b_type}", "f16 inputs, or D of f32"
        )
    for name, type, major in (
        ("A", descriptor.a_type, descriptor.a_major),
        ("B", descriptor.b_type, descriptor.b_major),
    ):
        if major == "MN" and type in ("e2m3", "e3m2", "e2m1"):
            raise invalid(f"{name} of {type} in MN-major (instruction descriptor {bits:#x})", "K-major")


def _shapes(descriptor: InstructionDescriptor, cta_group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Legal M and N."""
    if descriptor.ws:
        return (32, 64, 128), (64, 128, 256)
    step = 8 * cta_group
    legal_n = tuple(range(step, 257, step))
    if descriptor.kind == "i8":
        # N in steps of 32 for pairs of CTAs; alone of 8 up to 32 (but not 40) and of 16 beyond
        legal_n = tuple(range(32, 257, 32)) if cta_group == 2 else (8, 16, 24, *range(32, 257, 16))
    if cta_group == 2:
        return (128, 256), legal_n
    return ((128,) if descriptor.scaling else (64, 128)), legal_n
