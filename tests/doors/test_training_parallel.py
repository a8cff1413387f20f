"""Attention trained in parallel: DDP, FSDP2 and DTensors in 2 and 4 processes give what one process gives.

Also FLOPs as torch's counter sees them. The processes run tests/doors/parallel_worker.py, all its scenarios.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from scenarios import SECONDS, check, scenarios_of
from torch.utils.flop_counter import FlopCounterMode

import fa4flex
from fa4flex import Varlen
from fa4flex.runtime.sharding import indexed_by
from fa4flex.variants import causal

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("parallel_worker.py")
SCENARIOS = scenarios_of(WORKER)
UNCOMPILED = [name for name in SCENARIOS if "compiled" not in name]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("two")
    forked.run(WORKER, 2, results, SCENARIOS, SECONDS)
    return results


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("four")
    forked.run(WORKER, 4, results, UNCOMPILED, SECONDS)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes(two: Path, name: str) -> None:
    check(2, two, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNCOMPILED)
def test_four_processes(four: Path, name: str) -> None:
    check(4, four, name)


# --- what a program reads -----------------------------------------------------------------------------------


def test_how_programs_use_an_index() -> None:
    t, u = torch.randn(4, 4), torch.randn(4)

    def found(score: Any, index: str = "h", **more: Any) -> dict[int, int] | None:
        return indexed_by(fa4flex.compile(score, **more).prepared.program.text, index)

    assert found(lambda s, b, h, i, j: s * 2) == {}
    assert found(lambda s, b, h, i, j: s + u[h]) == {0: 0}
    assert found(lambda s, b, h, i, j: s + t[i % 4, h]) == {0: 1}
    assert found(lambda s, b, h, i, j: s + t[b, h]) == {0: 1}
    assert found(lambda s, b, h, i, j: s + t[b, h], "b") == {0: 0}
    assert found(lambda s, b, h, i, j: s + u[h], "b") == {}
    assert found(lambda s, b, h, i, j: s + t[h, 0] * u[h] + u[h].exp()) == {0: 0, 1: 0}
    for score in (
        lambda s, b, h, i, j: s * h,
        lambda s, b, h, i, j: s + u[h % 2],
        lambda s, b, h, i, j: s + u[h] + u[i % 4],
        lambda s, b, h, i, j: s + t[h, 0] + t[0, h],
        lambda s, b, h, i, j: s + t[h, h],
        lambda s, b, h, i, j: torch.where(h == 1, s, -s),
    ):
        assert found(score) is None
    assert found(lambda s, b, h, i, j, num_heads: s / num_heads) is None
    assert found(lambda s, b, h, i, j, num_heads: s / num_heads, "b") == {}
    assert found(None, mask=lambda b, h, i, j: j <= i + h) is None
    assert found(None, mask=lambda b, h, i, j: t[h, j % 4] > 0) == {0: 0}


# --- FLOPs --------------------------------------------------------------------------------------------------


def flops(call: Any, *tensors: torch.Tensor) -> tuple[int, int]:
    """FLOPs of a forward and of a backward pass."""
    with FlopCounterMode(display=False) as forward:
        out = call(*tensors)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flops_are_those_of_torchs_attention(kv_heads: int) -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    k = torch.randn(2, kv_heads, 10, 8, requires_grad=True)
    v = torch.randn(2, kv_heads, 10, 16, requires_grad=True)
    attn = fa4flex.compile(mask=causal, sinks=torch.zeros(4))
    shapes = q.shape, (2, 4, 10, 8), (2, 4, 10, 16)  # torch 2.11 counts no grouped heads
    grad_shape = (2, 4, 6, 16)
    wanted = sdpa_flop_count(*shapes), sdpa_backward_flop_count(grad_shape, *shapes)
    assert flops(attn, q, k, v) == wanted
    with FlopCounterMode(display=False) as both:
        attn(q, k, v).sum().backward()
    assert both.get_total_flops() == sum(wanted)
    out = attn(q, k, v)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == wanted[1]


def test_flops_of_sequences() -> None:
    """Each sequence by its lengths; the most that there can be where a tensor has no contents."""
    x = torch.randn(12, 4, 8, requires_grad=True)
    attn = fa4flex.compile(mask=causal)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    pairs = 4 * (25 + 49)
    packed = flops(lambda q: attn(q, q, q, varlen=Varlen(starts)), x)
    assert packed == (2 * pairs * 16, 2 * pairs * 40)
    used = torch.tensor([2, 3], dtype=torch.int32)
    y = torch.randn(2, 4, 6, 8, requires_grad=True)
    assert flops(lambda q: attn(q, q, q, varlen=Varlen(seqused_k=used)), y)[0] == 2 * 4 * (6 * 2 + 6 * 3) * 16


LATE = """
import sys, torch, fa4flex
attn = fa4flex.compile()
q = torch.randn(1, 1, 4, 8)
attn(q, q, q)
loaded = [m for m in ("torch.utils.flop_counter", "torch.distributed.tensor", "triton") if m in sys.modules]
from torch.utils.flop_counter import FlopCounterMode
for _ in range(2):
    with FlopCounterMode(display=False) as counter:
        attn(q, q, q)
    print(counter.get_total_flops(), end=" ")
print(loaded)
"""


def test_formulas_and_rules_load_nothing_and_are_in_time() -> None:
    """The counter that torch makes before the first call under it counts that call."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "512 512 []", done.stderr
