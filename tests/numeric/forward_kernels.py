"""Records of forward kernels, and the cost of each: compiled for every target without a GPU.

A kernel is what a call of these sizes would launch: see kernel_programs.py.
"""

from __future__ import annotations

import importlib.metadata
import resource
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from kernel_programs import GYM, Kind, Width, launched_forward
from kernel_programs import KINDS as OF_BOTH_PASSES

from fa4flex import Precision
from fa4flex.codegen.emit import Source
from fa4flex.compiler.compile import build_object, without_collector
from fa4flex.compiler.inspect import Resources, inspect
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.fwd_sm100.plan import BlackwellPlan
from fa4flex.kernels.plan.pipeline import Plan
from fa4flex.kernels.plan.problem import Problem
from fa4flex.kernels.plan.target import SM90A, SM100A, Target

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Chip:
    """Target whose kernels are recorded. `widths`, of q and k and of v: every tile width, and multi-head
    latent attention's. `title` are the words with which its record begins."""

    target: Target
    widths: tuple[Width, ...]
    title: str

    @property
    def record(self) -> Path:
        return GOLDEN / f"forward_{self.target.family}_resources.txt"


_COMMON = ((64, 64), (96, 96), (128, 128), (192, 128))
CHIPS = {
    "sm_90a": Chip(
        SM90A,
        (*_COMMON, (160, 160), (192, 192), (256, 256)),
        "Forward kernels on sm_90a: registers per thread at launch, bytes spilled and of stack per thread,"
        " and bytes of\nshared memory per block.",
    ),
    "sm_100a": Chip(
        SM100A,
        (*_COMMON, (256, 256)),
        "Forward kernels on sm_100a: columns of tensor memory in use, registers per thread at launch, bytes"
        " spilled and\nof stack per thread, and bytes of shared memory per block.",
    ),
}

# --- cases --------------------------------------------------------------------------------------------------

KINDS = OF_BOTH_PASSES | {
    f"{name}, float32 out": Kind(
        OF_BOTH_PASSES[name].draw, options={"precision": Precision(output=torch.float32)}
    )
    for name in ("plain", "causal")
}
GYM_WIDTHS: dict[str, tuple[Width, ...]] = {"sm_90a": (), "sm_100a": ((128, 128),)}
"""Head widths of attention-gym's mods, compiled by `-m exhaustive` alone: variants have the same kinds of
code. On Hopper two of them spill (docs/notes/forward_sm90.md)."""

EVERY_WIDTH = ("plain", "causal")
"""Kinds compiled at every head width in each run; widths of the others take turns."""


@dataclass(frozen=True)
class Case:
    arch: str
    kind: str
    width: Width

    @property
    def name(self) -> str:
        return f"{self.arch} {self.kind} {self.heads}"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.arch]

    @property
    def key(self) -> tuple[str, str]:
        """Key of the case's line in the record."""
        return self.kind, self.heads

    @property
    def heads(self) -> str:
        return "/".join(map(str, dict.fromkeys(self.width)))


def _cases(arch: str) -> Iterator[Case]:
    for kinds, widths in ((KINDS, CHIPS[arch].widths), (GYM, GYM_WIDTHS[arch])):
        yield from (Case(arch, kind, width) for kind in kinds for width in widths)


CASES = tuple(case for arch in CHIPS for case in _cases(arch))


def representative(case: Case) -> bool:
    """True for each of KINDS once, at widths in turn, and for EVERY_WIDTH at all of them."""
    if case.kind in GYM:
        return False
    widths = case.chip.widths
    turn = list(KINDS).index(case.kind) % len(widths)
    return case.kind in EVERY_WIDTH or case.width == widths[turn]


# --- compiling ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the record; see fa4flex.compiler.inspect.Resources for the numbers. `columns` of tensor
    memory are those that the plan lays out; "" where the chip has none."""

    kernel: str
    heads: str
    mask: str
    tile: str
    stages: str
    columns: str
    registers: str
    spilled: str
    stack: str
    shared: str

    @property
    def key(self) -> tuple[str, str]:
        return self.kernel, self.heads


@dataclass(frozen=True)
class Built:
    """A compiled kernel: its line in the record, what the compiler said, what the plan had laid out, and the
    processor time that this took, on a machine that may have had else to do."""

    row: Row
    resources: Resources
    planned_bytes: int
    seconds: float


def build(case: Case) -> Built:
    """Compile the kernel of `case`."""
    plan, (source, problem, signature) = _planned(case)
    inspected = inspect(source, problem, signature, case.arch)
    found = inspected.resources
    columns = ""
    if isinstance(plan, BlackwellPlan):
        columns, stages = str(max(r.end for r in plan.columns.ranges)), plan.tiles.kv_stages
    else:
        stages = plan.kv_stages  # type: ignore[attr-defined]
    row = Row(
        case.kind,
        case.heads,
        problem.mask_form,
        " x ".join(map(str, plan.tile)),
        str(stages).strip("()"),
        columns,
        *map(str, (found.registers, found.spill_bytes, found.stack_bytes, found.shared_bytes)),
    )
    return Built(row, found, plan.memory.total, inspected.seconds)


def seconds(case: Case, repeats: int = 5) -> float:
    """The least processor time, of several, from a plan to the code that a first call loads: what else a
    machine does makes its processors slower as well."""
    _, (source, problem, signature) = _planned(case)
    found = []
    for _ in range(repeats):
        start = _processor_time()
        with without_collector():
            build_object(source, problem, signature, case.arch)
        found.append(_processor_time() - start)
    return min(found)


def _planned(case: Case) -> tuple[Plan, tuple[Source, Problem, Signature]]:
    torch.set_num_threads(1)
    kind = KINDS.get(case.kind) or GYM[case.kind]
    plan, given = launched_forward(kind, case.width, case.chip.target)
    given[0].load()  # imports the compiler
    return plan, given


def _processor_time() -> float:
    """CPU seconds of this process and those it started: what others do meanwhile does not count."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in used)


# --- the record ---------------------------------------------------------------------------------------------

_HEADER = """\
{title} Rewritten by
    pytest tests/numeric/test_forward_resources.py -m "" --update-golden
compiler: nvidia-cutlass-dsl {version}
"""


def compiler() -> str:
    return importlib.metadata.version("nvidia-cutlass-dsl")


def _names(chip: Chip) -> tuple[str, ...]:
    """Names of the record's columns."""
    names = (f.name for f in fields(Row))
    return tuple(name for name in names if name != "columns" or chip.target.tensor_columns)


def read(chip: Chip) -> dict[tuple[str, str], Row]:
    """The lines of the record by kernel and head widths; none where there is no record."""
    if not chip.record.exists():
        return {}
    names, absent = _names(chip), {"columns": ""}
    table = chip.record.read_text().split("\n\n", 1)[1].splitlines()[1:]
    cells = ([cell.strip() for cell in line.split("|")] for line in table)
    rows = (Row(**(absent | dict(zip(names, line, strict=True)))) for line in cells)
    return {row.key: row for row in rows}


def write(chip: Chip, rows: dict[tuple[str, str], Row]) -> None:
    """The record in the order of CASES, without lines of kernels that are no longer."""
    names = _names(chip)
    kept = [rows[case.key] for case in CASES if case.chip is chip and case.key in rows]
    cells = [names, *(tuple(getattr(row, name) for name in names) for row in kept)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    words = ("kernel", "heads", "mask")

    def line(row: tuple[str, ...]) -> str:
        aligned = (
            f"{cell:<{width}}" if name in words else f"{cell:>{width}}"
            for cell, width, name in zip(row, widths, names)
        )
        return " | ".join(aligned)

    header = _HEADER.format(title=chip.title, version=compiler())
    chip.record.write_text("\n".join([header, *map(line, cells)]) + "\n")
