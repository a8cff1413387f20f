"""The instruction descriptor of tcgen05.mma: 32 bits with the shape, types and majorness of one
multiply-accumulate.

PTX ISA "Instruction Descriptor" (tables of kinds tf32, f16, f8f6f4, i8) and "Matrix Shape" (which M and N
are legal).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fa4flex.simulator.units.descriptors import Major
from fa4flex.simulator.units.errors import invalid, unmodelled

INPUT_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
OUTPUT_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {1: "f32"},
    "i8": {2: "s32"},
}
PADDED = {3: "e2m3", 4: "e3m2", 5: "e2m1"}
"""Types of kind::f8f6f4 that are not modelled."""
DEPTH = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
"""K of a dense instruction: 32 bytes of each row."""


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

    @property
    def k(self) -> int:
        return DEPTH[self.kind]


@lru_cache(maxsize=1024)
def decode(bits: int, kind: str, cta_group: int) -> InstructionDescriptor:
    """What the bits say for .kind::`kind`. Raises InputError for what the ISA forbids, UnsupportedError for
    inputs of 4 and 6 bits, sparse and block-scaled MMAs and for the maximum shift of .ws."""
    if kind not in DEPTH:
        raise unmodelled(f"tcgen05.mma.kind::{kind}", "kinds " + ", ".join(DEPTH))
    if bits & 7:
        raise unmodelled(f"sparse tcgen05.mma (instruction descriptor {bits:#x})", "dense MMAs")
    if bits >> 30:
        raise unmodelled(
            f"the maximum shift of tcgen05.mma.ws (instruction descriptor {bits:#x})", "no shift"
        )
    if bits & (1 << 6 | 1 << 23 | 1 << 29):
        raise invalid(f"instruction descriptor {bits:#x}", "0 in the reserved bits 6, 23 and 29")
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
        d_type=_type(bits, 4, 2, OUTPUT_TYPES[kind], kind),
        a_major="MN" if bits & (1 << 15) else "K",
        b_major="MN" if bits & (1 << 16) else "K",
        **flags,
    )
    _check(result, bits, cta_group)
    return result


def _type(bits: int, at: int, width: int, types: dict[int, str], kind: str) -> str:
    code = (bits >> at) & ((1 << width) - 1)
    if kind == "f8f6f4" and code in PADDED:
        raise unmodelled(
            f"{PADDED[code]} in tcgen05.mma.kind::f8f6f4, padded in shared memory", "e4m3 and e5m2"
        )
    if code not in types:
        raise invalid(
            f"type {code} in bits {at}-{at + width - 1} of instruction descriptor {bits:#x}",
            f"kind::{kind}: {types}",
        )
    return types[code]


def _check(descriptor: InstructionDescriptor, bits: int, cta_group: int) -> None:
    m, n = descriptor.m, descriptor.n
    step = 8 * cta_group
    legal_n = range(step, 257, step)
    if descriptor.kind == "i8":
        # N in steps of 32 for pairs of CTAs; alone of 8 up to 32 (but not 40) and of 16 beyond
        legal_n = range(32, 257, 32) if cta_group == 2 else [8, 16, 24, *range(32, 257, 16)]  # type: ignore[assignment]
    legal_m = (64, 128) if cta_group == 1 else (128, 256)
    if m not in legal_m or n not in legal_n:
        kind = f"tcgen05.mma.cta_group::{cta_group}.kind::{descriptor.kind}"
        raise invalid(
            f"{kind} of M={m}, N={n} (instruction descriptor {bits:#x})",
            f"M of {legal_m}, N of {list(legal_n)}",
        )
    if descriptor.d_type == "f16" and (descriptor.a_type, descriptor.b_type) != ("f16", "f16"):
        raise invalid(
            f"D of f16 from A {descriptor.a_type} and B {descriptor.b_type}", "f16 inputs, or D of f32"
        )
