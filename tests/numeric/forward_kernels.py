"""Which forward kernels are recorded, and what each costs: compiled for sm_90a without a GPU.

A kernel is what a call of these sizes would launch: the runtime itself proves, plans and emits it.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cuda_cases
import torch
from cuda_cases import FEW, VARIANTS, Draw, Sizes

import fa4flex
from fa4flex.codegen.emit import Source
from fa4flex.codegen.plan import SM90A, Plan, Problem
from fa4flex.runtime.cuda import engine
from fa4flex.runtime.cuda.call import NO_LENGTHS, Call, Lengths, Signature
from fa4flex.runtime.cuda.inspect import Resources, inspect

RECORD = Path(__file__).parents[1] / "golden" / "forward_sm90_resources.txt"
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
"""Of q and k, and of v: every tile width, and multi-head latent attention's."""

# --- cases --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A composition and how it is called. `lengths` is "dense", "packed" or "used"."""

    draw: Draw
    lengths: str = "dense"
    sizes: Sizes = Sizes()


_CAUSAL = VARIANTS["causal"][0]
KINDS: dict[str, Kind] = {
    "plain": Kind(FEW["dense"]),
    **{name: Kind(draws[0]) for name, draws in VARIANTS.items()},
    "causal, packed": Kind(_CAUSAL, "packed"),
    "causal, used lengths": Kind(_CAUSAL, "used"),
    "causal, float16": Kind(_CAUSAL, sizes=Sizes(dtype=torch.float16)),
}
"""By name: the first composition of every variant, and what else changes the code around the hooks."""

EVERY_WIDTH = ("plain", "causal")
"""Recorded at every width in each run; the others take turns."""


@dataclass(frozen=True)
class Case:
    kind: str
    width: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.heads}"

    @property
    def heads(self) -> str:
        return "/".join(map(str, dict.fromkeys(self.width)))


CASES = tuple(Case(kind, width) for kind in KINDS for width in WIDTHS)


def representative(case: Case) -> bool:
    """Every kind once, at widths in turn, and EVERY_WIDTH at all of them."""
    turn = list(KINDS).index(case.kind) % len(WIDTHS)
    return case.kind in EVERY_WIDTH or case.width == WIDTHS[turn]


# --- compiling ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the record; see fa4flex.runtime.cuda.inspect.Resources for the numbers."""

    kernel: str
    heads: str
    mask: str
    tile: str
    stages: str
    registers: str
    spilled: str
    stack: str
    shared: str

    @property
    def key(self) -> tuple[str, str]:
        return self.kernel, self.heads


@dataclass(frozen=True)
class Built:
    """A compiled kernel: its line in the record, what the compiler said and what the plan had laid out."""

    row: Row
    resources: Resources
    planned_bytes: int


def build(case: Case) -> Built:
    """Compile the kernel of `case`. For a worker process: two compilations at once in one process end it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # what is proved may depend on the contents of tables
    with patch.object(cuda_cases, "DEVICE", torch.device("cpu")):
        plan, (source, problem, signature) = _launched(KINDS[case.kind], case.width)
    found = inspect(source, problem, signature).resources
    row = Row(
        case.kind,
        case.heads,
        problem.mask_form,
        f"{plan.tiles.tile_m} x {plan.tiles.tile_n}",
        str(plan.kv_stages),
        *map(str, (found.registers, found.spill_bytes, found.stack_bytes, found.shared_bytes)),
    )
    return Built(row, found, plan.memory.total)


def _launched(kind: Kind, width: tuple[int, int]) -> tuple[Plan, tuple[Source, Problem, Signature]]:
    """The plan that a call makes, and what it has compiled."""
    sizes = kind.draw.sizes(kind.sizes).wide(*width)
    prepared = fa4flex.compile(**kind.draw.make(sizes)).prepared
    planned, asked = [], []

    def program(*given: Any) -> Any:
        planned.append(engine_program(*given))
        return planned[-1]

    def compile_forward(*given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(launch=None)

    engine_program = engine.program
    with (
        patch.object(engine, "program", program),
        patch.object(engine, "compile_forward", compile_forward),
        patch.object(engine, "target_of", lambda device: SM90A),
    ):
        engine.make_ready(prepared.engine, _call(prepared, sizes, kind.lengths))
    ((plan, _),), (given,) = planned, asked
    return plan, given


def _call(prepared: Any, sizes: Sizes, lengths: str) -> Call:
    qkv = sizes.qkv()
    given: Lengths = NO_LENGTHS
    if lengths == "packed":
        cu_q, cu_k = (torch.tensor([0, 100, n], dtype=torch.int32) for n in (sizes.q_len, sizes.kv_len))
        given = cu_q, cu_k, None, None
        qkv = tuple(x[0].transpose(0, 1).contiguous() for x in qkv)  # type: ignore[assignment]
    elif lengths == "used":
        given = None, None, None, torch.tensor([sizes.kv_len, 1], dtype=torch.int32)
    operands, scalars = prepared.program.tensors(), prepared.scalars
    scale = prepared.scale(qkv[0])
    return Call(*qkv, operands, prepared.sinks, given, scalars, scale, True, ("lse",))


# --- the record ---------------------------------------------------------------------------------------------

_HEADER = """\
Forward kernels on sm_90a: registers per thread at launch, bytes spilled and of stack per thread, and bytes of
shared memory per block. Rewritten by
    pytest tests/numeric/test_forward_resources.py -m "" --update-golden
compiler: nvidia-cutlass-dsl {version}
"""
COLUMNS = tuple(f.name for f in fields(Row))


def compiler() -> str:
    return importlib.metadata.version("nvidia-cutlass-dsl")


def read() -> dict[tuple[str, str], Row]:
    """The lines of the record by kernel and head widths; none where there is no record."""
    if not RECORD.exists():
        return {}
    table = RECORD.read_text().split("\n\n", 1)[1].splitlines()[1:]
    rows = (Row(*(cell.strip() for cell in line.split("|"))) for line in table)
    return {row.key: row for row in rows}


def write(rows: dict[tuple[str, str], Row]) -> None:
    """The record in the order of CASES, without lines of kernels that are no longer."""
    kept = [rows[key] for case in CASES if (key := (case.kind, case.heads)) in rows]
    cells = [COLUMNS, *(tuple(getattr(row, name) for name in COLUMNS) for row in kept)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    words = ("kernel", "heads", "mask")

    def line(row: tuple[str, ...]) -> str:
        aligned = (
            f"{cell:<{width}}" if name in words else f"{cell:>{width}}"
            for cell, width, name in zip(row, widths, COLUMNS)
        )
        return " | ".join(aligned)

    RECORD.write_text("\n".join([_HEADER.format(version=compiler()), *map(line, cells)]) + "\n")
