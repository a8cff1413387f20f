"""The PTX front reads what the compiler writes, with its inline assembly and source lines."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from ptx_text import assert_round_trip

from ptxsim.ptx import parse
from ptxsim.ptx.flow import blocks

pytest.importorskip("cutlass", reason="CuTe DSL exists for Linux only")

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator


@cute.kernel
def waits(out: cute.Tensor) -> None:
    i = cute.arch.thread_idx()[0]
    bars = SmemAllocator().allocate_array(cutlass.Int64, 2)
    for n in cutlass.range_constexpr(2):
        if i == 0:
            cute.arch.mbarrier_init(bars + n, 1)
            cute.arch.mbarrier_arrive(bars + n)
    cute.arch.sync_threads()
    for n in cutlass.range_constexpr(2):
        cute.arch.mbarrier_wait(bars + n, 0)
    for n in cutlass.range(out[i].to(cutlass.Int32)):
        out[i] = cute.math.tanh(out[i] + n)


@cute.jit
def launch(out: cute.Tensor) -> None:
    waits(out).launch(grid=[1, 1, 1], block=[64, 1, 1])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiled_kernel(arch: str, tmp_path: Path) -> None:
    tensor: Any = make_fake_tensor(cutlass.Float32, (cute.sym_int32(),), (1,))
    options = f"--gpu-arch {arch} --keep-ptx --generate-line-info --dump-dir={tmp_path}"
    text = cute.compile(launch, tensor, options=options).__ptx__
    module = parse(text)
    (kernel,) = module.kernels.values()
    assert module.target == arch and kernel.threads == (64, 1, 1)
    lines = text.split("\n")
    for found in kernel.body:
        assert re.match(rf"\s*(@!?[%\w]+ )?{re.escape(found.opcode)}[\s;]", lines[found.line - 1])
    statements = [line for line in lines if re.match(r"\s*(@!?[%\w]+ )?[a-z][\w.:]*(\s.*)?;\s*$", line)]
    assert len(statements) == len(kernel.body)
    waiting = [i.operands[0] for i in kernel.body if i.opcode.startswith("mbarrier.try_wait")]
    assert [getattr(reg, "name", "") for reg in waiting] == ["P1", "P1$2"]
    sources = {i.source for i in kernel.body}
    first = inspect.getsourcelines(waits)[1]
    assert any(f"{__file__}:{first + n}" in sources for n in range(14))
    assert_round_trip(module)
    assert all(b.start < b.stop for b in blocks(kernel)) and blocks(kernel)[-1].stop == len(kernel.body)
