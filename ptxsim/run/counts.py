"""Cost of a launch on a multiprocessor, from the instructions that were executed.

Rates are per clock and multiprocessor, as in the FlashAttention-4 paper's tables (Zadouri et al. 2026,
"Roofline analysis"): dense 16-bit MMA 8192 multiply-adds on Blackwell (4096 on Hopper, its ratio of peak
rates), 128 bytes of shared memory, 16 special functions, 128 fp32 multiply-adds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ptxsim.ptx.nodes import Instruction
from ptxsim.run.launch import Result
from ptxsim.state.registers import LANES

MMA = {"sm_100a": 4096, "sm_90a": 2048}
"""Multiply-adds of 16-bit numbers per clock and multiprocessor."""
SHARED_BYTES = 128
SPECIAL = 16
FMA = 128
SPECIAL_FUNCTIONS = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"}
ARITHMETIC = {"add", "sub", "mul", "fma", "mad", "min", "max", "neg", "abs"}
"""The category of other instructions is their name."""


def category(instruction: Instruction) -> str:
    """Category of an instruction's work."""
    name, parts = instruction.name, instruction.modifiers
    if name in SPECIAL_FUNCTIONS and ("approx" in parts):
        return "special functions"
    if name in ARITHMETIC:
        packed = any(p in ("f32x2", "f16x2", "bf16x2") for p in parts)
        kind = "float" if any(p.startswith(("f", "bf")) for p in parts) else "integer"
        return f"{kind} arithmetic{', packed' if packed else ''}"
    if name == "cvt":
        return "conversions"
    if name in ("ld", "st", "ldmatrix", "stmatrix") and any(p.startswith("shared") for p in parts):
        return "shared accesses"
    if name in ("ld", "st") and "global" in parts:
        return "global accesses"
    if name == "mbarrier":
        return "barrier waits" if "try_wait" in parts or "test_wait" in parts else "barrier signals"
    if name in ("bar", "barrier"):
        return "barrier waits"
    if name in ("wgmma", "tcgen05", "cp"):
        return ".".join(instruction.parts[:2])
    return "other"


@dataclass(frozen=True)
class Role:
    """Warps that did the same work. `counts` are instructions executed by category, summed over the warps."""

    name: str
    warps: tuple[int, ...]
    counts: Counter[str]


def by_warp(result: Result) -> dict[int, Counter[str]]:
    """Instructions executed, by warp of the CTA and category, summed over CTAs."""
    static: dict[int, Counter[str]] = {}
    body = result.program.kernel.body
    for start, block in result.program.blocks.items():
        static[start] = Counter(category(i) for i in body[block.start : block.stop])
    found: dict[int, Counter[str]] = {}
    for (warp, _, start), times in result.executed.items():
        mine = found.setdefault(warp, Counter())
        for kind, number in static[start].items():
            mine[kind] += number * times
    return found


def roles(result: Result) -> list[Role]:
    """Warps grouped by which parts of the program they executed."""
    parts: dict[int, set[int]] = {}
    for warp, _, start in result.executed:
        parts.setdefault(warp, set()).add(start)
    counts = by_warp(result)
    found: list[tuple[set[int], list[int]]] = []
    for warp in sorted(parts):
        mine = parts[warp]
        for blocks, warps in found:
            if len(mine & blocks) >= 0.8 * len(mine | blocks):
                warps.append(warp)
                break
        else:
            found.append((mine, [warp]))
    return [
        Role(_name(total), tuple(warps), total)
        for _, warps in found
        for total in [sum((counts[w] for w in warps), Counter())]
    ]


def _name(counts: Counter[str]) -> str:
    """Name of the role, as its instructions tell it."""
    if counts["tcgen05.mma"]:
        return "mma"
    if counts["special functions"] > 100:
        return "mma and softmax" if counts["wgmma.mma_async"] else "softmax"
    if counts["cp.async"] and not counts["wgmma.mma_async"]:
        return "copies"
    if counts["wgmma.mma_async"]:
        return "mma"
    return "correction" if counts["float arithmetic"] + counts["float arithmetic, packed"] > 500 else "other"


SOURCES = ("operands of MMAs", "loads", "stores", "updates", "copies in", "copies out", "copies between CTAs")


def shared_memory(result: Result) -> dict[str, float]:
    """Clocks that shared memory is busy, were all CTAs to run on one multiprocessor, by what moves through
    it. Of loads and stores it is the least that their addresses allow."""
    by_line: dict[int, str] = {}
    for instruction in result.program.kernel.body:
        # Inline assembly may have several instructions on a line, of which one moves something.
        if by_line.get(instruction.line, "updates") == "updates":
            by_line[instruction.line] = source(instruction)
    found = dict.fromkeys(SOURCES, 0.0)
    for line, size in result.shared.items():
        found[by_line[line]] += size / SHARED_BYTES
    return found


def source(instruction: Instruction) -> str:
    """Source of shared-memory traffic that an instruction is."""
    name = instruction.name
    if instruction.parts[:2] in (("tcgen05", "mma"), ("wgmma", "mma_async")):
        return "operands of MMAs"
    if name == "cp":
        spaces = [
            m for m in instruction.modifiers if m in ("global", "shared::cta", "shared::cluster", "shared")
        ]
        if "global" not in spaces:
            return "copies between CTAs"
        return "copies out" if spaces[0] == "global" else "copies in"
    if name in ("st", "stmatrix"):
        return "stores"
    return "loads" if name in ("ld", "ldmatrix") or instruction.has("cp") else "updates"


def cycles(result: Result) -> dict[str, float]:
    """Clocks that each unit of one multiprocessor is busy, were all CTAs to run on one: "mma", "shared
    memory", "special functions", "fp32"."""
    arch = result.arch
    total = sum(by_warp(result).values(), Counter())
    traffic = result.traffic
    fp32 = total["float arithmetic"] + total["float arithmetic, packed"]
    return {
        "mma": traffic["MMA multiply-adds"] / MMA.get(arch, MMA["sm_100a"]),
        "shared memory": sum(shared_memory(result).values()),
        "special functions": total["special functions"] * LANES / SPECIAL,
        "fp32": fp32 * LANES / FMA,
    }
