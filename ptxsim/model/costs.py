"""Cost of each PTX instruction on a multiprocessor: a table from PTX to the machine instruction that ptxas
makes of it.

PTX is not machine code. What ptxas folds away costs nothing here (moves, packing of register pairs,
conversions of addresses, a shift that feeds an addition), what runs on the uniform datapath costs an issue
slot only. docs/model.md compares the counts with a disassembly.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxsim.errors import UnsupportedError
from ptxsim.model.chip import SUBCORES, Chip
from ptxsim.model.flow import loads_constant
from ptxsim.ptx.nodes import WIDTHS, Instruction
from ptxsim.state.registers import LANES

SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "popc", "clz", "brev", "bfind"}
FREE = {"mov", "cvta", "mapa", "setmaxnreg", "griddepcontrol", "prefetch", "isspacep", "nanosleep"}
"""Folded into operands, or done by nobody that the loop waits for."""
FLOATS = ("f32", "f16", "bf16", "f16x2", "bf16x2", "f64")
PACKED = ("f32x2", "f16x2", "bf16x2")
ARITHMETIC = {"add", "sub", "mul", "fma", "mad", "neg", "abs", "div"}
BITS = {
    "and",
    "or",
    "xor",
    "not",
    "shl",
    "shr",
    "lop3",
    "prmt",
    "shf",
    "bfe",
    "bfi",
    "selp",
    "setp",
    "set",
    "sad",
}
BITS |= {"min", "max", "slct", "dp4a", "testp", "copysign", "szext", "bmsk", "activemask", "cnot", "rem"}


@dataclass(frozen=True)
class Cost:
    """`unit` is a pipe of a sub-core ("" for none), held for `hold` clocks; its result can be used
    `latency` clocks after issue. `issues` is how many issue slots it takes. `port` and `bytes`: of which
    unit of the multiprocessor it moves how many bytes ("shared", "tensor load", "tensor store").
    `ordered`: it stays in its place among others that are."""

    name: str
    unit: str = ""
    hold: float = 0.0
    latency: int = 0
    issues: int = 1
    port: str = ""
    bytes: int = 0
    ordered: bool = False


FREE_COST = Cost("free", issues=0)


def cost(instruction: Instruction, chip: Chip, uniform: bool) -> Cost:
    """`uniform` says that all operands are known to be the same in all lanes."""
    name, parts = instruction.name, instruction.modifiers
    if name in FREE or loads_constant(instruction):
        return FREE_COST
    if name in SPECIAL:
        return _lanes("MUFU", "xu", chip.special, chip.special_latency)
    if name in ARITHMETIC:
        return _arithmetic(name, parts, chip, uniform)
    if name in BITS:
        return _alu(chip, uniform and not any(p in FLOATS for p in parts))
    if name == "cvt":
        return _conversion(parts, chip, uniform)
    if name in ("bra", "ret", "exit", "trap", "brkpt"):
        return Cost("branch", latency=chip.alu_latency, ordered=True)
    if name == "pmevent":
        return Cost("event", ordered=True)
    if name in ("vote", "elect", "match", "redux"):
        return _lanes(name, "alu", chip.alu, 3 * chip.alu_latency)
    if name == "shfl":
        return _lanes("SHFL", "lsu", LANES, chip.shared_latency)
    if name in ("ld", "st", "ldmatrix", "stmatrix", "atom", "red"):
        return _memory(instruction, chip)
    return _asynchronous(instruction, chip)


def _lanes(name: str, unit: str, rate: float, latency: int) -> Cost:
    """A warp instruction on a pipe of which all sub-cores together do `rate` lanes a clock."""
    return Cost(name, unit, LANES * SUBCORES / rate, latency)


def _alu(chip: Chip, uniform: bool) -> Cost:
    if uniform:
        return Cost("uniform", latency=chip.uniform_latency)
    return _lanes("ALU", "alu", chip.alu, chip.alu_latency)


def multiply(chip: Chip) -> Cost:
    """An IMAD, which a shift and an addition become as well."""
    return _lanes("IMAD", "fma", chip.integer_multiply, chip.alu_latency)


def _arithmetic(name: str, parts: tuple[str, ...], chip: Chip, uniform: bool) -> Cost:
    if "f64" in parts:
        return _lanes("FP64", "fp64", 2, 16 * chip.alu_latency)
    if any(p in PACKED for p in parts):
        return _lanes("FFMA2", "fma", chip.packed_fma, chip.alu_latency)
    if any(p in FLOATS for p in parts):
        return _lanes("FFMA", "fma", chip.fma, chip.alu_latency)
    if uniform:
        return Cost("uniform", latency=chip.uniform_latency)
    if name in ("mul", "mad", "div"):
        return multiply(chip)
    return _lanes("ALU", "alu", chip.alu, chip.alu_latency)


def _conversion(parts: tuple[str, ...], chip: Chip, uniform: bool) -> Cost:
    target, source = [p for p in parts if p in WIDTHS or p.startswith("e")][-2:]
    floats = [kind for kind in (target, source) if not kind.startswith(("u", "s", "b3", "b6", "b8"))]
    if not floats:
        # Widening and narrowing of indices: a register is read as the other width.
        return FREE_COST if uniform else _alu(chip, False)
    if len(floats) == 2:
        return _lanes("F2FP", "alu", chip.alu, chip.alu_latency)
    return _lanes("F2I", "xu", chip.special, chip.special_latency)


def _memory(instruction: Instruction, chip: Chip) -> Cost:
    parts = instruction.modifiers
    shared = instruction.name.endswith("matrix") or any(p.startswith("shared") for p in parts)
    count = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8", "x2", "x4")), 1)
    width = max([WIDTHS[p] // 8 for p in parts if p in WIDTHS] or [4])
    size = LANES * count * (4 if instruction.name.endswith("matrix") else width)
    if shared:
        return Cost("LDS", "lsu", 1.0, chip.shared_latency, 1, "shared", size, True)
    return Cost("LDG", "lsu", 1.0, chip.global_latency, 1, "", 0, True)


def _asynchronous(instruction: Instruction, chip: Chip) -> Cost:
    """Barriers, copies and tensor cores: what happens after issue is the machine's part."""
    name, parts = instruction.name, instruction.modifiers
    two = ".".join(instruction.parts[:2])
    if name == "tcgen05" and parts[0] in ("ld", "st"):
        columns = next(int(p[1:]) for p in parts if p[0] == "x" and p[1:].isdigit())
        shape = next(p for p in parts if p[:2] in ("16", "32"))
        words = columns * {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1}[shape]
        loads = parts[0] == "ld"
        port = "tensor load" if loads else "tensor store"
        latency = chip.tensor_load_latency if loads else 0
        return Cost(port, "tmem", 1.0, latency, 1, port, words * LANES * 4, True)
    if two == "bar.warp":
        return Cost("warp sync", latency=chip.alu_latency, ordered=True)
    if name in ("mbarrier", "bar", "barrier") or two in ("tcgen05.commit", "fence.mbarrier_init"):
        return _ordered(_lanes("sync", "sync", chip.sync, chip.alu_latency))
    if name in ("fence", "membar") or two.startswith(("tcgen05.wait", "tcgen05.fence")):
        return Cost("fence", latency=chip.alu_latency, ordered=True)
    if name in ("cp", "tcgen05", "createpolicy", "clusterlaunchcontrol", "discard", "applypriority"):
        return Cost(two, "uniform", 1.0, chip.uniform_latency, ordered=True)
    raise UnsupportedError(
        f"{instruction} in a model of time",
        "an instruction whose cost is known (ptxsim/model/costs.py)",
        "add a row there, with its source",
    )


def _ordered(plain: Cost) -> Cost:
    return Cost(plain.name, plain.unit, plain.hold, plain.latency, ordered=True)
