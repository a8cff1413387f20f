"""Calls whose query heads share tiles, of changing ratios and lengths: a kernel is made for each ratio, and
serves all lengths of it. Kernels are left out; CPU tensors stand for those of a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from launch_changes import calls_on_gpu
from torch import Tensor

import fa4flex
from fa4flex import Varlen
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.fwd_sm90.plan import HopperPlan
from fa4flex.kernels.plan.few_rows import MOST_ROWS, MOST_SLICED
from fa4flex.lower import Lowered
from fa4flex.runtime import launch
from fa4flex.variants import causal

RATIOS = {(8, 8): 1, (8, 4): 2, (8, 2): 4, (16, 4): 4, (8, 1): 8, (6, 2): 1}
"""Query heads that share tiles, by heads of queries and of keys."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Plans whose kernels are launched."""
    calls_on_gpu(monkeypatch)
    found: list[Any] = []

    def compiled(lowered: Lowered, signature: Signature) -> Any:
        launch = staticmethod(lambda *given: found.append(lowered.plan))
        return type("Kernel", (), {"launch": launch, "key": lowered.source.key})

    monkeypatch.setattr(Lowered, "compile", compiled)
    return found


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Queries of the calls that no path of repeated calls served."""
    found: list[Tensor] = []
    run = launch.run

    def counted(now: Any, q: Tensor, *given: Any) -> Any:
        found.append(q)
        return run(now, q, *given)

    monkeypatch.setattr(launch, "run", counted)
    return found


def qkv(heads: tuple[int, int], q_len: int, kv_len: int, layout: str) -> list[Tensor]:
    sizes = (heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len)
    found = [torch.zeros(2, *size, 64, dtype=torch.bfloat16) for size in sizes]
    return found if layout == "bhsd" else [x.transpose(1, 2).contiguous() for x in found]


@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_each_call_has_the_kernel_of_its_ratio(
    launched: list[Any], looked_for: list[Tensor], layout: Any, seed: int
) -> None:
    """Whichever way it takes: most are served by those of repeated calls."""
    draw, attn, kernels = random.Random(seed), fa4flex.compile(layout=layout), set()
    for _ in range(60):
        heads = draw.choice([*RATIOS])
        least = max(MOST_ROWS * heads[1] // heads[0], MOST_SLICED) + 1
        for _ in range(draw.randint(1, 4)):
            given = qkv(heads, draw.choice((least, 65, 256, 257, 400)), draw.randint(1, 300), layout)
            for _ in range(draw.randint(1, 3)):
                attn(*given)
                assert launched[-1].packed_heads == RATIOS[heads], (heads, [x.shape for x in given])
        kernels.add(heads)
    assert len(kernels) == len(RATIOS) and len(looked_for) < len(launched) / 2


def test_few_rows_and_many_take_turns(launched: list[Any]) -> None:
    attn = fa4flex.compile()
    for _ in range(5):
        for q_len in (16, 17, 33, 16, 300, 32, 1):
            few = q_len <= MOST_SLICED
            attn(*qkv((8, 2), q_len, 50, "bhsd"))
            module = "decode_sm90" if few else "fwd_sm90"
            assert launched[-1].module.endswith(module)
            assert launched[-1].packed_heads == (1 if few else 4)


def test_short_sequences_and_long_ones_take_turns(
    launched: list[Any], looked_for: list[Tensor], seed: int
) -> None:
    """Each call of packed sequences has the kernel that its average length asks for: of heads of 64, 4 of
    which share one of keys, up to 1,056 of 3/2 of the power of two that the batch has."""
    draw, attn = random.Random(seed), fa4flex.compile(mask=causal)
    for _ in range(40):
        batch = draw.randint(1, 6)
        most = 1056 * {1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4}[batch] * 3 // 2
        tokens = draw.choice((most, most + 1, draw.randint(batch, 2 * most)))
        ends = sorted(draw.choices(range(tokens + 1), k=batch - 1))
        cu = torch.tensor([0, *ends, tokens], dtype=torch.int32)
        q, kv = torch.zeros(tokens, 8, 64).bfloat16(), torch.zeros(tokens, 2, 64).bfloat16()
        for _ in range(draw.randint(1, 3)):
            attn(q, kv, kv, varlen=Varlen(cu, cu))
            assert launched[-1].packed_heads == (4 if tokens <= most else 1), (batch, tokens)
    assert {plan.packed_heads for plan in launched if isinstance(plan, HopperPlan)} == {1, 4}
    assert len(looked_for) < len(launched)
