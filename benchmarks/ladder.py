"""The Blackwell forward kernel, one idea at a time: what each step executes, and how long it would take.

    python benchmarks/ladder.py                       (a few minutes; no GPU)

Every step is the same kernel with one field of its Config changed, so each can be read, run and changed by
itself. Sizes: heads of 128, bf16, 16 tiles of keys; every tile of queries visits all of them.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")  # before cutlass is imported, which looks at it then

from dataclasses import dataclass, replace
from typing import Any

import torch
from cutlass import cute

from fa4flex.compiler.entry import entry_point, fake_arguments
from fa4flex.compiler.signature import Signature
from fa4flex.kernels.common.hooks import Hooks
from fa4flex.kernels.fwd_sm100.config import Config, Exponential, TensorMemory
from fa4flex.kernels.fwd_sm100.kernel import Forward
from fa4flex.kernels.plan.problem import Problem
from ptxsim import device, model
from ptxsim.run.counts import cycles

WIDTH, KEYS = 128, 16 * 128
FIRST = Config(
    WIDTH,
    WIDTH,
    TensorMemory((0,), (64,), (256,)),
    q_tiles=1,
    kv_stages=(1, 1),
    early_keys=128,
    exponential=Exponential(count=0),
    rescale_threshold=0.0,
    persistent=False,
)


@dataclass(frozen=True)
class Step:
    name: str
    config: Config


def ladder() -> list[Step]:
    """Each step keeps what those before it changed."""
    steps = [Step("one query tile, one softmax warpgroup", FIRST)]

    def climb(name: str, **changes: Any) -> None:
        steps.append(Step(name, replace(steps[-1].config, **changes)))

    climb("K and V two tiles deep", kv_stages=(2, 2))
    climb(
        "two query tiles take turns",
        q_tiles=2,
        memory=TensorMemory((0, 128), (64, 192), (256, 384)),
    )
    climb("the output is rescaled only where it must be", rescale_threshold=8.0)
    climb("P is handed over in two parts", early_keys=96)
    climb("some exponentials on FMA units", exponential=Exponential())
    climb("pairs of CTAs", ctas=2, kv_stages=(4, 4))
    return steps


def run(config: Config) -> tuple[Any, Any]:
    """(prediction, clocks by unit) of one launch: one tile of queries per CTA."""
    problem, signature = Problem(WIDTH, WIDTH), Signature()
    q = torch.randn(1, 1, config.tile_m, WIDTH).bfloat16()
    k, v = (torch.randn(1, 1, KEYS, WIDTH).bfloat16() for _ in range(2))
    out, lse = torch.full_like(q, torch.nan), torch.empty(1, 1, config.tile_m)
    given = q, k, v, out, lse, *[None] * 9, WIDTH**-0.5, config.tile_m, None, None

    def kernel() -> Any:
        forward = Forward(config, Hooks())
        arguments = fake_arguments(forward, problem, signature)
        entry = entry_point(forward, problem, signature)
        return cute.compile(entry, *arguments, options="--gpu-arch sm_100a --enable-tvm-ffi")

    with model.recording("sm_100a") as recorder:
        kernel()(*given)
    with device("sm_100a", timing="eager") as gpu:
        kernel()(*given)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert not gpu.findings and (out.double() - exact).abs().max() < 2**-6, gpu.report()
    return model.predict(recorder.traces[-1]), cycles(gpu.results[0])


def main() -> None:
    print("clocks of one CTA's multiprocessor per 128 x 128 tile; busy and TFLOP/s by the model of time\n")
    columns = f"{'MMA':>6}{'smem':>6}{'ex2':>6}{'fp32':>6}{'modelled':>10}{'MMA busy':>10}{'TFLOP/s':>9}"
    print(f"{'step':<46}{columns}")
    for step in ladder():
        config = step.config
        predicted, clocks = run(config)
        tiles = config.q_tiles * config.ctas * KEYS // config.tile_n
        units = "mma", "shared memory", "special functions", "fp32"
        each = [clocks[unit] / tiles for unit in units]
        counts = "".join(f"{x:>6.0f}" for x in each)
        own = predicted.cycles_per_step / config.q_tiles
        busy = predicted.utilisation["tensor core"]
        predicted_rate = f"{busy:>10.0%}{predicted.steady_tflops:>9.0f}"
        print(f"{step.name:<46}{counts}{own:>10.0f}{predicted_rate}", flush=True)


if __name__ == "__main__":
    main()
