"""Kernels for few query rows, compiled for sm_100a: each costs what the record says; none spills.

By default a few are compiled; `-m exhaustive` compiles the others.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forward_kernels import compiler
from kernel_programs import KINDS, Kind, Width, launched_forward

from fa4flex.compiler.inspect import inspect
from fa4flex.kernels.decode_sm100.plan import BlackwellDecodePlan
from fa4flex.kernels.plan.target import SM100A

RECORD = Path(__file__).parents[1] / "golden" / "decode_sm100_resources.txt"
HEADER = """\
Kernels for few query rows on sm_100a: rows of a tile, columns of tensor memory that are allocated, registers
per thread, bytes spilled and of stack per thread, and bytes of shared memory per block. Rewritten by
    pytest tests/numeric/test_decode_resources_blackwell.py -m "" --update-golden
compiler: nvidia-cutlass-dsl {version}

kernel                     | heads   | rows | columns | registers | spilled | stack | shared"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl, which exists for Linux"
)

COMMON = ("plain", "alibi", "softcap", "learned_bias")
"""Kinds that are compiled at every width."""


Case = tuple[str, Width, int]
"""Kind, widths, and queries of 8 heads that share keys."""

OTHERS: tuple[Width, ...] = ((64, 64), (96, 96), (192, 128), (256, 256))
CASES: tuple[Case, ...] = (
    *((kind, (128, 128), 2) for kind in KINDS),
    *((kind, width, 2) for kind in COMMON for width in OTHERS),
    *((kind, width, 8) for kind in COMMON for width in ((64, 64), (128, 128), (256, 256))),
)
USUAL: tuple[Case, ...] = (
    ("alibi", (64, 64), 8),
    ("softcap", (192, 128), 2),
    ("learned_bias", (256, 256), 8),
)


def few(kind: Kind, q_len: int) -> Kind:
    sizes = replace(kind.sizes, heads=8, kv_heads=1, q_len=q_len, kv_len=600)
    return replace(kind, sizes=sizes)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case[0]} {'/'.join(map(str, case[1]))} {8 * case[2]} rows",
            marks=() if case in USUAL else pytest.mark.exhaustive,
        )
        for case in CASES
    ],
)
def test_decode_kernel(case: Case, pytestconfig: pytest.Config) -> None:
    kind, width, q_len = case
    torch.set_num_threads(1)
    plan, (source, problem, signature) = launched_forward(few(KINDS[kind], q_len), width, SM100A)
    if not isinstance(plan, BlackwellDecodePlan):
        assert problem.mask_form == "tables", "another kernel takes it"
        pytest.skip("no kernel for few rows takes it")
    found = inspect(source, problem, signature, "sm_100a", entry="decode").resources
    assert found.spill_bytes == 0 and found.stack_bytes == 0 and not found.ignored
    assert found.registers <= plan.registers and found.shared_bytes == plan.memory.total
    heads = "/".join(map(str, dict.fromkeys(width)))
    numbers = (plan.tile[0], plan.config().memory.allocated, found.registers, 0, 0, found.shared_bytes)
    row = f"{kind:<26} | {heads:<7} | " + " | ".join(
        f"{number:>{len(name)}}" for number, name in zip(numbers, NAMES, strict=True)
    )
    recorded = read()
    if pytestconfig.getoption("--update-golden"):
        write(recorded | {row[:43]: row})
    else:
        assert row == recorded.get(row[:43]), f"{row}; nvidia-cutlass-dsl is {compiler()}: --update-golden?"


NAMES = ("rows", "columns", "registers", "spilled", "stack", "shared")


def read() -> dict[str, str]:
    """Lines of the record by kernel, heads and rows."""
    if not RECORD.exists():
        return {}
    table = RECORD.read_text().split("| shared\n", 1)[1].splitlines()
    return {line[:43]: line for line in table}


def write(rows: dict[str, str]) -> None:
    RECORD.write_text("\n".join([HEADER.format(version=compiler()), *sorted(rows.values())]) + "\n")
